"""LoRA adapters of task vectors: PEFT loads them, and no error in the bundle exceeds that of a truncated SVD."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kfacpack_cli.main import app
from kit import MATRIX_FORMS, dense_block, of_task, random_psd, refused, small_curvature, warned
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import kfacpack as kp
from kfacpack._compat import make_torchvision_importable
from kfacpack.curvature.truncation import truncate, truncate_in_metric
from kfacpack.format.vector_manifest import AboutVector, TaskEntry
from kfacpack.vectors.storage import InMemoryVector

EVERY_FORM = pytest.mark.parametrize("stored_as", MATRIX_FORMS)


class Small(nn.Module):
    """A module with the parameters of `small_curvature`."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(6, 3)
        self.attn = nn.Module()
        self.attn.in_proj_weight = nn.Parameter(torch.zeros(4, 3))
        self.norm = nn.LayerNorm(3)
        self.proj, self.scale = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(()))
        self.token = nn.Parameter(torch.zeros(1, 4))


class Mixed(nn.Module):
    """Layers that PEFT handles differently: Linear, Conv1D, fused attention, a norm and a bare parameter."""

    def __init__(self, seed=0):
        super().__init__()
        make_torchvision_importable()
        from transformers.pytorch_utils import Conv1D

        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(8, 12), Conv1D(12, 12)
        self.attn = nn.MultiheadAttention(12, 2, batch_first=True)
        self.norm, self.out = nn.LayerNorm(12), nn.Linear(12, 4, bias=False)
        self.gain = nn.Parameter(torch.ones(12))

    def forward(self, x):
        hidden = self.second(self.first(x).tanh())
        hidden = hidden + self.attn(hidden, hidden, hidden, need_weights=False)[0]
        return self.out(self.norm(hidden * self.gain).mean(1))


def vector_of(module, changes, *, regime="full", **more):
    """Returns a vector that changes parameters of a module by these tensors."""
    about = AboutVector(
        base=kp.identify(module, list(changes), family="test", name="small"),
        function=kp.Function(output="embedding", normalized=True, width=4),
        regime=regime,
        tasks=(TaskEntry(source=kp.Source(task="toy")),),
    )
    return kp.TaskVector(changes, about, **more)


def random_changes(module, seed=1, names=None, scale=0.1):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: scale * torch.randn(p.shape, generator=generator)
        for name, p in module.named_parameters()
        if names is None or name in names
    }


def of_curvature(curvature, seed=3):
    """Returns a vector of the base model of `small_curvature`."""
    generator = torch.Generator().manual_seed(seed)
    changes = {p.name: torch.randn(p.shape, generator=generator) for p in curvature.about.base.parameters}
    about = AboutVector(
        base=curvature.about.base,
        function=curvature.about.function,
        regime="full",
        tasks=(TaskEntry(source=kp.Source(task="toy")),),
    )
    return kp.TaskVector(changes, about)


def with_peft(module, folder):
    make_torchvision_importable()
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        # A module with both Linear and Conv1D: PEFT corrects the setting of each layer, with a warning.
        warnings.filterwarnings("ignore", "fan_in_fan_out")
        return peft.PeftModel.from_pretrained(copy.deepcopy(module), folder).eval()


MATRICES = ("first.weight", "second.weight", "attn.in_proj_weight", "out.weight")


@pytest.mark.parametrize("rank", [2, 5, 100])
def test_peft_loads_the_adapter_onto_the_module(rank, tmp_path):
    module = Mixed().eval()
    vector = vector_of(module, random_changes(module, names=MATRICES))
    result = kp.export_lora(vector, tmp_path / "lora", rank=rank, model=module)
    assert [matrix.parameter for matrix in result.matrices] == list(vector)
    expected = copy.deepcopy(module)
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            if name in vector:
                u, s, v = torch.linalg.svd(vector[name].double(), full_matrices=False)
                parameter += ((u[:, :rank] * s[:rank]) @ v[:rank]).float()
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(with_peft(module, tmp_path / "lora")(x), expected(x), rtol=0, atol=1e-5)
    if rank == 100:
        assert result.error < 1e-6
        torch.testing.assert_close(with_peft(module, tmp_path / "lora")(x), vector.apply(module)(x), rtol=0, atol=1e-5)
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (result.rank, result.rank)
    assert sorted(path.name for path in (tmp_path / "lora").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


@pytest.mark.parametrize("name", ["attn.in_proj_weight", "second.weight"])
def test_a_single_weight(name, tmp_path):
    module = Mixed().eval()
    vector = vector_of(module, random_changes(module, names=[name]))
    kp.export_lora(vector, tmp_path / "lora", rank=12, model=module)
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(with_peft(module, tmp_path / "lora")(x), vector.apply(module)(x), rtol=0, atol=1e-5)


def test_the_output_of_fused_attention_is_reported_and_not_changed(tmp_path):
    """PEFT adds its factors twice, so the exported adapter has zeros there."""
    module = Mixed().eval()
    names = ["attn.in_proj_weight", "attn.out_proj.weight"]
    vector = vector_of(module, random_changes(module, names=names))
    result = kp.export_lora(vector, tmp_path / "lora", rank=12, model=module)
    assert [parameter.parameter for parameter in result.lost] == ["attn.out_proj.weight"]
    assert "twice" in result.lost[0].reason
    with torch.no_grad():
        expected = copy.deepcopy(module)
        expected.attn.in_proj_weight += vector["attn.in_proj_weight"]
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(with_peft(module, tmp_path / "lora")(x), expected(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["tiny", "timm", "bert"])
def test_stock_models(family, tmp_path):
    make_torchvision_importable()
    if family == "bert":
        from transformers import BertConfig, BertModel

        shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        module = BertModel(BertConfig(vocab_size=20, max_position_embeddings=32, **shape)).eval()
        inputs, forward = torch.arange(6)[None], lambda model, x: model(x).last_hidden_state
        names, options = [n for n, p in module.named_parameters() if "encoder" in n and p.dim() == 2], {"model": module}
        base = kp.identify(module, names, family="hf", name="bert")
    else:
        spec = "tiny" if family == "tiny" else "timm:test_vit"
        model = kp.load_model(spec, **({} if family == "tiny" else {"weights": "random", "image_size": 32}))
        module, size = model.module, 28 if family == "tiny" else 32
        inputs = torch.rand(2, 3, size, size)
        forward = lambda wrapped, x: (  # noqa: E731
            wrapped.encode_image(x) if family == "tiny" else wrapped.forward_features(x)
        )
        ends = ("mlp.c_fc.weight", "in_proj_weight", "qkv.weight", "fc1.weight")
        names = [n for n, _ in module.named_parameters() if n.endswith(ends) and not n.startswith("transformer.")]
        base, options = model.base(names), {}
    about = AboutVector(
        base=base,
        function=kp.Function(output="embedding", normalized=True, width=4),
        regime="full",
        tasks=(TaskEntry(source=kp.Source(task="toy")),),
    )
    vector = kp.TaskVector(random_changes(module, names=names, scale=0.02), about)
    result = kp.export_lora(vector, tmp_path / "lora", rank=4, **options)
    assert len(result.matrices) == len(names)
    assert not result.lost
    state = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    expected = copy.deepcopy(module)
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            if name in vector:
                u, s, v = torch.linalg.svd(vector[name], full_matrices=False)
                parameter += (u[:, :4] * s[:4]) @ v[:4]
        adapted = with_peft(module, tmp_path / "lora")
        assert len(state) == 2 * (len(names) + sum(name.endswith("in_proj_weight") for name in names))
        torch.testing.assert_close(forward(adapted, inputs), forward(expected, inputs), rtol=0, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    rank=st.integers(1, 6),
    singular=st.booleans(),
)
def test_truncation_is_the_best_in_its_metric(seed, shape, rank, singular):
    """Against the formula with symmetric square roots, and against random matrices of the same rank."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(shape, generator=generator, dtype=torch.float64)
    R, C = (random_psd(side, seed + k, torch.float64) for k, side in enumerate(shape))
    if singular:
        R[0], R[:, 0], C[-1], C[:, -1] = 0, 0, 0, 0

    def cost(X):
        return float(((W - X) * (R @ (W - X) @ C)).sum())

    U, V = truncate_in_metric(W, R, C, rank)
    best, size = cost(U @ V), cost(torch.zeros_like(W))
    assert U.shape[1] <= rank
    if not singular:

        def root(matrix, power):
            values, vectors = torch.linalg.eigh(matrix)
            return vectors * values.pow(power) @ vectors.T

        Y = root(R, 0.5) @ W @ root(C, 0.5)
        u, s, v = torch.linalg.svd(Y, full_matrices=False)
        X = root(R, -0.5) @ ((u[:, :rank] * s[:rank]) @ v[:rank]) @ root(C, -0.5)
        assert best == pytest.approx(cost(X), abs=1e-6 * size)
    P, Q = truncate(W, rank)
    assert best <= cost(P @ Q) + 1e-6 * size + 1e-12
    if rank >= min(shape):
        torch.testing.assert_close(U @ V, W, rtol=1e-6, atol=1e-6)


def metric_error(curvature, name, rest):
    """Sum over the blocks of the dense quadratic form of a change of one weight."""
    total = 0.0
    for block in curvature.blocks:
        if name in block.parameters:
            delta = torch.zeros(block.join.rows, block.join.columns, dtype=torch.float64)
            for piece in block.join.pieces:
                if piece.parameter == name:
                    part = rest[slice(*piece.rows)] if piece.rows else rest
                    part = part.T if piece.view == "transposed" else part
                    top, left = piece.at
                    delta[top : top + part.shape[0], left : left + part.shape[1]] = part
            flat = delta.flatten()
            total += float(flat @ dense_block(block) @ flat)
    return total


@EVERY_FORM
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("kind", ["kronecker", "merged", "whole"])
def test_no_weight_is_worse_than_plain_svd_in_the_metric(stored_as, rank, kind, tmp_path):
    """Over all structures and forms, with factors that are singular or not positive semi-definite."""
    curvature = small_curvature(stored_as)
    if kind == "merged":
        one, other = (of_task(task, seed=seed, stored_as=stored_as) for seed, task in enumerate(("a", "b")))
        curvature = kp.merge([one, other], rule="stack", weights=[1, 3])
    if kind == "whole":
        make = MATRIX_FORMS[stored_as]
        blocks = [
            kp.CurvatureBlock(b.name, b.operation, b.join, kp.Whole(make(random_psd(b.join.rows * b.join.columns, 5))))
            for b in curvature.blocks
        ]
        curvature = kp.Curvature(blocks, curvature.about)
    vector = of_curvature(curvature)
    result = kp.export_lora(vector, tmp_path / "lora", rank=rank, bundle=curvature, model=Small())
    state = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert {matrix.parameter for matrix in result.matrices} == {"one.weight", "two.weight"}
    for matrix in result.matrices:
        module = matrix.parameter.removesuffix(".weight")
        A, B = (state[f"base_model.model.{module}.lora_{side}.weight"].double() for side in "AB")
        W = vector[matrix.parameter].double()
        P, Q = truncate(W, rank)
        written = metric_error(curvature, matrix.parameter, W - B @ A)
        plain = metric_error(curvature, matrix.parameter, W - P @ Q)
        size = metric_error(curvature, matrix.parameter, W)
        assert max(written, 0) <= max(plain, 0) + 1e-5 * abs(size)
        assert matrix.error == pytest.approx(float((W - B @ A).norm() / W.norm()), abs=1e-6)
        if size > 0:
            assert matrix.metric_error == pytest.approx((max(written, 0) / size) ** 0.5, abs=1e-4)
            assert matrix.metric_error <= matrix.svd_metric_error
    if kind == "kronecker" and stored_as not in ("lowrank-signed",):
        assert any(matrix.method == "metric" for matrix in result.matrices)


def test_one_kronecker_block_gets_the_optimum(tmp_path):
    curvature = small_curvature()
    vector = of_curvature(curvature)
    result = kp.export_lora(vector, tmp_path / "lora", rank=2, bundle=curvature, model=Small())
    block = curvature.blocks[0]
    ((B, A, _),) = block.structure.terms
    R, C = B.dense(torch.float64), A.dense(torch.float64)[:6, :6]
    W = vector["one.weight"].double()
    L, M = torch.linalg.cholesky(R), torch.linalg.cholesky(C)
    s = torch.linalg.svdvals(L.T @ W @ M)
    expected = float((s[2:].square().sum() / s.square().sum()).sqrt())
    assert result.matrices[0].metric_error == pytest.approx(expected, rel=1e-4)
    assert result.matrices[0].metric_error < 0.9 * result.matrices[0].svd_metric_error


def test_lost_parameters_and_totals(tmp_path):
    curvature = small_curvature()
    vector = of_curvature(curvature)
    result = kp.export_lora(vector, tmp_path / "lora", rank=6, bundle=curvature, model=Small())
    lost = {parameter.parameter: parameter for parameter in result.lost}
    assert set(lost) == set(vector) - {"one.weight", "two.weight"}
    assert lost["one.bias"].reason == "a bias of Linear"
    assert lost["norm.weight"].reason == "a parameter of LayerNorm"
    total = sum(float(change.double().square().sum()) for change in vector.values())
    assert lost["token"].share == pytest.approx(float(vector["token"].double().square().sum()) / total)
    alone = {name: vector[name] if name == "norm.bias" else torch.zeros_like(vector[name]) for name in vector}
    G = float(curvature.quadratic(dict(vector)))
    assert lost["norm.bias"].metric_share == pytest.approx(float(curvature.quadratic(alone)) / G, rel=1e-4)
    rest = {name: vector[name] if name in lost else torch.zeros_like(vector[name]) for name in vector}
    assert result.error == pytest.approx(sum(p.share for p in result.lost) ** 0.5, rel=1e-4)
    assert result.metric_error == pytest.approx((float(curvature.quadratic(rest)) / G) ** 0.5, rel=1e-3)


def test_stored_factors_are_exported_without_loss(tmp_path):
    module = Mixed().eval()
    shapes = {"first.weight": (12, 8), "attn.in_proj_weight": (36, 12), "second.weight": (12, 12)}
    generator = torch.Generator().manual_seed(4)
    factors = {
        name: (torch.randn(m, 3, generator=generator), 0.1 * torch.randn(3, n, generator=generator))
        for name, (m, n) in shapes.items()
    }
    vector = low_rank_vector(module, factors)
    twice = vector + 0.5 * low_rank_vector(module, {name: (U.flip(0), V) for name, (U, V) in factors.items()})
    x = torch.randn(3, 5, 8)
    for number, (tau, rank) in enumerate(((vector, 3), (twice, 6))):
        folder = tmp_path / str(number)
        result = kp.export_lora(tau, folder, rank=rank, model=module)
        stored = [tau.factors(name) is not None for name in tau]
        assert any(stored)
        assert result.error < 1e-6
        for matrix, kept in zip(result.matrices, stored, strict=True):
            assert matrix.rank <= rank
            assert (matrix.method == "factors") == kept
        torch.testing.assert_close(with_peft(module, folder)(x), tau.apply(module)(x), rtol=0, atol=1e-5)
    assert kp.export_lora(vector, tmp_path / "less", rank=2, model=module).error > 1e-3


def low_rank_vector(module, factors):
    about = AboutVector(
        base=kp.identify(module, list(factors), family="test", name="small"),
        function=kp.Function(output="embedding", normalized=True, width=4),
        regime="full",
        tasks=(TaskEntry(source=kp.Source(task="toy")),),
    )
    return kp.TaskVector.from_storage(InMemoryVector({}, about, {}, factors=factors))


def test_an_unchanged_weight_is_left_out(tmp_path):
    module = Mixed().eval()
    changes = random_changes(module, names=["first.weight", "out.weight"])
    changes["out.weight"].zero_()
    result = kp.export_lora(vector_of(module, changes), tmp_path / "lora", rank=2, model=module)
    assert [matrix.parameter for matrix in result.matrices] == ["first.weight"]
    assert not result.lost
    changes["first.weight"].zero_()
    with refused(kp.TaskVectorError, "changes no weight"):
        kp.export_lora(vector_of(module, changes), tmp_path / "none", rank=2, model=module)


def test_names_that_are_ends_of_others(tmp_path):
    """PEFT matches ends of names, so the weight of the first `fc` must not be applied to the second one."""

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.inner = nn.Linear(4, 4), nn.Module()
            self.inner.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.inner.fc(self.fc(x).tanh())

    module = Nested()
    vector = vector_of(module, random_changes(module, names=["fc.weight"]))
    kp.export_lora(vector, tmp_path / "lora", rank=4, model=module)
    x = torch.randn(3, 4)
    torch.testing.assert_close(with_peft(module, tmp_path / "lora")(x), vector.apply(module)(x), rtol=0, atol=1e-5)
    both = random_changes(module, names=["fc.weight", "inner.fc.weight"])
    both["inner.fc.weight"] = both["inner.fc.weight"][:, :1] @ both["inner.fc.weight"][:1]
    vector = vector_of(module, both)
    kp.export_lora(vector, tmp_path / "both", rank=4, model=module)
    torch.testing.assert_close(with_peft(module, tmp_path / "both")(x), vector.apply(module)(x), rtol=0, atol=1e-5)


def test_bad_input_is_refused_and_nothing_is_written(tmp_path):
    module = Mixed()
    vector = vector_of(module, random_changes(module, names=["first.weight"]))
    for rank in (0, -1, True, 1.5):
        with refused(kp.KfacpackError, f"rank is {rank}", "positive"):
            kp.export_lora(vector, tmp_path / "lora", rank=rank, model=module)
    with refused(kp.KfacpackError, "covers no parameter", "small"):
        kp.export_lora(vector, tmp_path / "lora", rank=1, bundle=small_curvature(), model=module)
    other = small_curvature(seed=1)
    with refused(kp.KfacpackError, "different base model", "one.weight"):
        kp.export_lora(of_curvature(small_curvature()), tmp_path / "lora", rank=1, bundle=other, model=Small())
    function = kp.Function(output="embedding", normalized=False, width=4)
    changed = kp.Curvature(other.blocks, other.about.model_copy(update={"function": function}))
    with refused(kp.KfacpackError, "different function f"):
        kp.export_lora(of_curvature(other), tmp_path / "lora", rank=1, bundle=changed, model=Small())
    with refused(kp.KfacpackError, "no model family", "--model"):
        kp.export_lora(vector, tmp_path / "lora", rank=1)
    with refused(kp.TaskVectorError, "no parameter 'first.weight'"):
        kp.export_lora(vector, tmp_path / "lora", rank=1, model=Small())
    with refused(kp.TaskVectorError, "gain", "no weight that a LoRA adapter"):
        kp.export_lora(
            vector_of(module, random_changes(module, names=["gain"])), tmp_path / "lora", rank=1, model=module
        )
    assert not list(tmp_path.iterdir())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    with refused(kp.KfacpackError, tmp_path / "full", "not empty"):
        kp.export_lora(vector, tmp_path / "full", rank=1, model=module)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    module = Mixed()
    vector = vector_of(module, random_changes(module, names=["first.weight"]))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kfacpack.vectors.adapter_export.write_weights", full)
    with refused(kp.KfacpackError, tmp_path / "lora", "No space left"):
        kp.export_lora(vector, tmp_path / "lora", rank=1, model=module)
    assert not list(tmp_path.iterdir())


def test_a_vector_of_the_linearised_model_is_exported_with_a_warning(tmp_path):
    module = Mixed()
    vector = vector_of(module, random_changes(module, names=["first.weight"]), regime="linear")
    with warned(kp.LinearVectorWarning, "linearised", "θ0 + τ"):
        kp.export_lora(vector, tmp_path / "lora", rank=1, model=module)
    assert (tmp_path / "lora" / "adapter_config.json").exists()


def test_the_command(tmp_path):
    model = kp.load_model("tiny")
    names = [n for n, _ in model.module.named_parameters() if n.startswith("visual.transformer.resblocks.0.")]
    about = AboutVector(
        base=model.base(names),
        function=model.function,
        regime="linear",
        tasks=(TaskEntry(source=kp.Source(task="digits")),),
    )
    kp.TaskVector(random_changes(model.module, names=names), about).save(tmp_path / "t.safetensors")
    x = torch.rand(4, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    kp.estimate(model, [x], params=names).save(tmp_path / "t.kfac")

    def run(*arguments, code=0):
        result = CliRunner().invoke(app, ["export", *map(str, arguments)], catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result

    bundle = ["--bundle", tmp_path / "t.kfac"]
    shown = run(tmp_path / "t.safetensors", "--lora", 4, *bundle, "-o", tmp_path / "a")
    output = run(tmp_path / "t.safetensors", "--lora", 4, *bundle, "-o", tmp_path / "b", "--json", "--model", "tiny")
    result = json.loads(output.stdout)
    assert result["linearised"]
    assert "linearised" in shown.stderr
    assert {matrix["parameter"] for matrix in result["matrices"]} == {n for n in names if model_weight(n)}
    assert all(matrix["metric_error"] <= matrix["svd_metric_error"] for matrix in result["matrices"])
    assert {parameter["parameter"] for parameter in result["lost"]} == {n for n in names if not model_weight(n)}
    for words in ("attn.in_proj_weight", "wrote", "lost parameters: ", "next: "):
        assert words in shown.stdout
    assert (tmp_path / "a" / "adapter_model.safetensors").read_bytes() == (
        tmp_path / "b" / "adapter_model.safetensors"
    ).read_bytes()
    quiet = run(tmp_path / "t.safetensors", "--lora", 4, "-o", tmp_path / "c", "-q")
    assert not quiet.stdout
    assert not quiet.stderr
    assert "--lora RANK" in run(tmp_path / "t.safetensors", "-o", tmp_path / "d", code=2).stderr
    assert "applies to task vectors" in run(tmp_path / "t.kfac", "--lora", 4, "-o", tmp_path / "d", code=2).stderr
    assert "--dtype" in run(
        tmp_path / "t.safetensors", "--lora", 4, "--dtype", "float16", "-o", tmp_path / "d", code=2
    ).stderr.replace("\n", " ")
    assert run(tmp_path / "t.safetensors", "--lora", 0, "-o", tmp_path / "d", code=2)
    assert "not empty" in run(tmp_path / "t.safetensors", "--lora", 4, "-o", tmp_path / "a", code=2).stderr
    assert not (tmp_path / "d").exists()


def model_weight(name):
    return name.endswith("weight") and ".ln_" not in name and "out_proj" not in name
