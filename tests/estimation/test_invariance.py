"""The curvature does not depend on batches, memory layout, number of processes or the model's flags."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from estimation.nets import TextEncoder, Transformer, images, mlp, seeded, sentences, vectors
from kit import refused
from processes import python_twice
from torch import nn

import kfacpack as kp
from kfacpack._torch import DispatchMode
from kfacpack.estimation.estimate import begin_accumulation
from kfacpack.estimation.options import EstimateOptions
from kfacpack.models.functional import eval_mode

ROOT = Path(__file__).resolve().parents[2]


def assert_same(one, other, rtol=1e-9, atol=1e-12):
    assert one.parameters == other.parameters
    for ours, theirs in zip(one.blocks, other.blocks, strict=True):
        assert (ours.name, ours.operation, ours.join) == (theirs.name, theirs.operation, theirs.join)
        for (role, matrix), (_, expected) in zip(ours.structure.matrices(), theirs.structure.matrices(), strict=True):
            assert (matrix.form, matrix.examples, matrix.positions) == (
                expected.form, expected.examples, expected.positions,
            )  # fmt: skip
            dense = matrix.dense(torch.float64)
            torch.testing.assert_close(dense, expected.dense(torch.float64), rtol=rtol, atol=atol, msg=ours.name + role)


@pytest.mark.parametrize("make", [mlp, Transformer, lambda: Transformer(batch_first=False)])
@pytest.mark.parametrize(
    "options", [{}, {"sharing": "reduce"}, {"structure": "diagonal"}, {"fisher": "exact"}], ids=str
)
def test_the_batch_size_does_not_matter(make, options):
    model = seeded(make)
    x = images(33) if isinstance(model, Transformer) else vectors(5, 33)
    whole = kp.estimate(model, [x], **options)
    for size in (1, 7, 32):
        assert_same(kp.estimate(model, x.split(size), **options), whole)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_batch_first_and_sequence_first_give_the_same(sharing):
    first, second = seeded(lambda: Transformer(batch_first=True)), seeded(lambda: Transformer(batch_first=False))
    second.load_state_dict(first.state_dict())
    x = images(9)
    assert_same(kp.estimate(first, x.split(4), sharing=sharing), kp.estimate(second, x.split(4), sharing=sharing))


@pytest.mark.parametrize("examples", [2, 5, 6])
def test_inputs_with_the_sequence_first(examples):
    class SequenceFirst(nn.Module):
        def __init__(self, turn):
            super().__init__()
            self.turn = turn
            self.attn, self.norm, self.head = nn.MultiheadAttention(8, 2), nn.LayerNorm(8), nn.Linear(8, 3)
            self.position = nn.Parameter(torch.randn(5, 1, 8))
            self.double()

        def forward(self, x):
            x = (x.transpose(0, 1) if self.turn else x) + self.position
            x = self.norm(x + self.attn(x, x, x, need_weights=False)[0])
            return self.head(x.mean(0))

    x = vectors(8, examples * 5).reshape(5, examples, 8)
    theirs = seeded(lambda: SequenceFirst(True))
    for sharing in ("expand", "reduce"):
        ours = kp.estimate(seeded(lambda: SequenceFirst(False)), [x], sharing=sharing)
        assert_same(ours, kp.estimate(theirs, [x.transpose(0, 1)], sharing=sharing))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_padding_does_not_matter(sharing):
    """One padded batch gives the same as a batch per sentence without padding."""
    model, batch = seeded(TextEncoder), sentences()
    together = kp.estimate(model, [batch], fisher="exact", sharing=sharing)
    lengths = batch["attention_mask"].sum(1).tolist()
    assert len(set(lengths)) > 1
    alone = [{key: value[n : n + 1, :length] for key, value in batch.items()} for n, length in enumerate(lengths)]
    assert_same(together, kp.estimate(model, alone, fisher="exact", sharing=sharing))
    words = next(block for block in together.blocks if block.name == "words.weight")
    if sharing == "expand":
        assert dict(words.structure.matrices())["A"].positions == sum(lengths)


def test_a_decoder_of_the_same_length_keeps_all_of_its_positions():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.read, self.decoder = TextEncoder(), nn.Linear(8, 8), nn.Linear(8, 3)
            self.double()

        def forward(self, input_ids, attention_mask, other):
            return self.decoder(self.read(other).tanh()).mean(1) + self.encoder(input_ids, attention_mask)

    model, batch = seeded(Both), sentences()
    batch["other"] = vectors(8, 7 * 6).reshape(7, 6, 8)
    matrices = {block.name: dict(block.structure.matrices()) for block in kp.estimate(model, [batch]).blocks}
    a = batch["other"].flatten(0, 1)
    assert matrices["read.weight"]["A"].positions == len(a)
    torch.testing.assert_close(matrices["read.weight"]["A"].dense(torch.float64)[:8, :8], a.T @ a / len(a))
    assert matrices["encoder.layer.linear1.weight"]["A"].positions == int(batch["attention_mask"].sum())


def test_the_model_is_restored():
    model = seeded(TextEncoder)
    model.layer.eval()
    model.words.requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    training = [module.training for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    required = [parameter.requires_grad for parameter in model.parameters()]
    kp.estimate(model, [sentences()])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == training
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert [parameter.requires_grad for parameter in model.parameters()] == required
    assert not any(
        module._forward_hooks or module._backward_hooks or module._forward_pre_hooks for module in model.modules()
    )
    assert [p.grad is None for p in model.parameters()].count(False) == 1
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))


def test_the_model_is_restored_after_a_failure():
    model = seeded(mlp)
    model.train()
    with refused(kp.KfacpackError, "f contains NaN"):
        kp.estimate(model, [vectors(5), vectors(5) * float("nan")])
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_requires_grad_before_the_call_does_not_matter():
    model, x = seeded(Transformer), images()
    required = kp.estimate(model, [x])
    assert_same(kp.estimate(model.requires_grad_(False), [x]), required, rtol=0, atol=0)
    with torch.no_grad():
        assert_same(kp.estimate(model, [x]), required, rtol=0, atol=0)


def test_the_same_call_gives_the_same_bytes(tmp_path):
    model, x = seeded(Transformer), images()
    for name in ("one", "two"):
        kp.estimate(model, x.split(3), samples=2, seed=4).save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_models_of_other_dtypes_are_summed_in_float32(dtype):
    model, x = seeded(lambda: Transformer("split")), images()
    exact = kp.estimate(model, x.split(3))
    curvature = kp.estimate(model.to(dtype), [part.to(dtype) for part in x.split(3)])
    assert curvature.about.estimate.accumulation_dtype == "float32"
    assert curvature.about.estimate.model_dtype == str(dtype).removeprefix("torch.")
    for block, expected in zip(curvature.blocks, exact.blocks, strict=True):
        for (_, matrix), (_, other) in zip(block.structure.matrices(), expected.structure.matrices(), strict=True):
            assert matrix.dtype is torch.float32
            difference = matrix.dense(torch.float64) - other.dense(torch.float64)
            assert difference.norm() <= 12 * torch.finfo(dtype).eps * other.dense(torch.float64).norm() + 1e-7


def test_several_processes_give_the_same_as_one(tmp_path):
    script = tmp_path / "shared.py"
    script.write_text(
        "import sys, torch.distributed as dist\n"
        f"sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "from estimation.nets import Transformer, images, seeded\n"
        "import kfacpack as kp\n"
        "dist.init_process_group('gloo')\n"
        "curvature = kp.estimate(seeded(Transformer), images(17).split(4), samples=2)\n"
        "curvature.save(f'{sys.argv[1]}/{dist.get_rank()}.kfac')\n"
        "dist.destroy_process_group()\n"
    )
    results = python_twice(script, tmp_path)
    assert [result.returncode for result in results] == [0, 0], results
    assert (tmp_path / "0.kfac").read_bytes() == (tmp_path / "1.kfac").read_bytes()
    alone = kp.estimate(seeded(Transformer), images(17).split(4), samples=2)
    assert_same(kp.load(tmp_path / "0.kfac"), alone)


class NoMask(TextEncoder):
    """Ignores the attention mask of its batch, so f depends on masked positions."""

    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids, torch.ones_like(attention_mask))


@pytest.fixture
def asynchronous(monkeypatch):
    """As on a GPU: padded rows are set to zero instead of dropped."""
    monkeypatch.setattr("kfacpack.estimation.tracing.SYNCHRONOUS_DEVICES", ())


@pytest.mark.parametrize("make", [TextEncoder, NoMask])
@pytest.mark.parametrize("options", [{}, {"sharing": "reduce"}, {"fisher": "exact"}, {"samples": 2}], ids=str)
def test_padded_rows_may_be_zero_instead_of_dropped(make, options, request):
    model = seeded(make)
    batches = [sentences(), sentences(5, 4)]
    dropped = kp.estimate(model, batches, **options)
    request.getfixturevalue("asynchronous")
    assert_same(kp.estimate(model, batches, **options), dropped)
    positions = {
        block.name: dict(block.structure.matrices())["A"].positions
        for block in dropped.blocks
        if isinstance(block.structure, kp.Kronecker)
    }
    kept = sum(int(batch["attention_mask"].sum()) for batch in batches)
    every = sum(batch["attention_mask"].numel() for batch in batches)
    assert kept < every
    assert positions["layer.linear1.weight"] == (every if make is NoMask else kept)
    assert positions["head.weight"] == 12


class SyncCounter(DispatchMode):
    """Counts operations whose result, or its shape, must be copied from the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waiting = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "is_nonzero")
        self.count += func.overloadpacket.__name__ in waiting
        if func is torch.ops.aten.index.Tensor:
            self.count += any(index is not None and index.dtype == torch.bool for index in args[1])
        return func(*args, **(kwargs or {}))


class Deep(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(layers)])
        self.double()

    def forward(self, input_ids, attention_mask):
        h = self.words(input_ids)
        for layer in self.layers:
            h = layer(h).tanh()
        mask = attention_mask[..., None].double()
        return self.head((h * mask).sum(1) / mask.sum(1))


def count_syncs(layers, **options):
    """Returns how often adding a batch waits for the device."""
    model = seeded(lambda: Deep(layers))
    parameters = dict(model.named_parameters())
    with eval_mode(model, parameters):
        accumulator = begin_accumulation(model, sentences(), parameters, EstimateOptions(**options), None)
        with SyncCounter() as mode:
            accumulator.add_batch(sentences(), 100)
    return mode.count


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_masked_estimates_do_not_wait_for_the_device_in_every_block(sharing, request):
    assert count_syncs(4, sharing=sharing) > 4, "on the CPU, which has nothing to wait for"
    request.getfixturevalue("asynchronous")
    few = count_syncs(1, sharing=sharing)
    assert few <= 2, "f is checked once per batch"
    assert count_syncs(4, sharing=sharing) == count_syncs(4, sharing=sharing, fisher="exact") == few
