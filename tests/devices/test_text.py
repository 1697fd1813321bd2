"""Training of text models on a device: reads of the batch are answered on the CPU, and results are those of the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from devices.conftest import assert_same
from devices.test_counts import per_step

import kfacpack as kp
from kfacpack.models.data_loading import BatchMover
from kfacpack.models.functional import MirroredTensor
from kfacpack.models.prompts import PROMPTS, Prompt
from kfacpack.tasks.task import DataOrigin

CLASSES = ("entailment", "neutral", "contradiction")
WORDS = ["dog", "runs", "over", "green", "field", "animal", "moves", "nobody", "sleeps"]
KINDS = ["encoder", "T5", "one-token answers", "long answers", "completions"]
SIZE = 6


@dataclass
class Texts:
    padded: bool
    completions: bool
    source: DataOrigin

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        first, second = (" ".join((WORDS * 2)[index : index + count]) for count in self._counts(index))
        if self.completions:
            return {"prompt": first, "completion": f" {second}"}
        return {"premise": first, "hypothesis": second}

    def _counts(self, index):
        return (3 + index % 3, 2 + index % 2) if self.padded else (4, 3)

    def label(self, index):
        return index % 3


@dataclass
class TextTask:
    name: str = "mnli"
    padded: bool = True
    completions: bool = False
    splits = ("train",)
    templates = ()
    source = "words"
    license = None

    @property
    def classes(self):
        return None if self.completions else CLASSES

    def split(self, name):
        return Texts(self.padded, self.completions, DataOrigin("words", name))


@pytest.fixture
def text_model(device, t5_folder, bert_folder, lm_folders, monkeypatch):
    """Returns a function that loads a model of a kind, with a task for it."""
    answers = {"contradiction": " no maybe", "neutral": " maybe", "entailment": " no yes"}
    monkeypatch.setitem(PROMPTS["plain"], "long", Prompt("{premise}. {hypothesis}?", answers))
    llama = f"lm:{lm_folders['llama']}"
    specs = {"encoder": f"hf:{bert_folder}", "T5": f"t5:{t5_folder}"}

    def load(kind, *, padded=True, where=device):
        model = kp.load_model(specs.get(kind, llama), device=where)
        name = {"long answers": "long", "completions": "texts"}.get(kind, "mnli")
        return model, TextTask(name, padded, kind == "completions")

    return load


def settings_for(model, task, *, penalty):
    """Trains the second layer only, and estimates on the CPU."""
    params = ["*.1.*"]
    settings = {"params": params, "batch_size": SIZE, "lr": 0.01}
    split = task.split("train")
    batch = model.prepare([split[k] for k in range(SIZE)], task.name)
    return {**settings, "reg": kp.estimate(model, [batch], samples=1, params=params)} if penalty else settings


@pytest.mark.parametrize("penalty", [False, True], ids=["no penalty", "penalty"])
@pytest.mark.parametrize("regime", ["linear", "full"])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "whole"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_step_waits_once_and_uploads_its_batch(text_model, standin, kind, padded, regime, penalty):
    """Token ids, mask, marks of the answers and labels are one copy; nothing is read but the results of the step."""
    model, task = text_model(kind, padded=padded)
    settings = settings_for(*text_model(kind, padded=padded, where="cpu"), penalty=penalty)
    counts, record = per_step(standin, lambda steps: kp.train(model, task, steps=steps, regime=regime, **settings))
    assert counts["wait"] <= 1, str(record)
    assert counts["upload"] <= 2, str(record)
    assert counts["download"] <= 1, str(record)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_whose_shapes_change_do_not_wait(text_model, standin, kind):
    model, task = text_model(kind)
    settings = {**settings_for(model, task, penalty=False), "micro_batch_size": 2}
    counts, record = per_step(standin, lambda steps: kp.train(model, task, steps=steps, regime="full", **settings))
    assert counts["wait"] <= 1, str(record)
    assert counts["upload"] <= 2, str(record)


@pytest.mark.parametrize("trace", [True, False], ids=["replayed", "untraced"])
@pytest.mark.parametrize("kind", KINDS)
def test_linearised_steps_on_padded_and_whole_batches(text_model, device, standin, kind, trace):
    """Each kind of batch is replayed by its own program, and no step waits to tell them apart."""
    inputs = []
    for padded in (True, False):
        model, task = text_model(kind, padded=padded)
        split = task.split("train")
        inputs.append(model.prepare([split[k] for k in range(SIZE)], task.name))
    if kind in ("encoder", "T5"):  # the same shape with and without padding
        inputs.append({**inputs[0], "attention_mask": torch.ones_like(inputs[0]["attention_mask"])})
    move = BatchMover(device)
    lin, plain = (kp.linearize(model, "*.1.*", trace=traced) for traced in (trace, False))
    generator = torch.Generator().manual_seed(0)
    tau = {name: 0.1 * torch.randn(zero.shape, generator=generator).to(device) for name, zero in lin.zeros().items()}

    def step(linearized, batch):
        point = linearized.at(batch, tau, finite=False)
        return point.f, point.change, point.gradient(torch.ones_like(point.f))

    expected = [step(plain, batch) for batch in inputs]
    for number in range(7):
        moved = [move(batch) for batch in inputs]
        with standin.recorded() as record:
            actual = [step(lin, batch) for batch in moved]
        if not trace or number > 4:  # by then, programs of both outcomes are verified
            assert not record.waits, str(record)
            assert not record.uploads, str(record)
        for (f, change, gradient), known in zip(actual, expected, strict=True):
            assert torch.equal(f, known[0])
            assert torch.equal(change, known[1])
            assert all(torch.equal(gradient[name], value) for name, value in known[2].items())
    assert lin.programs == (len(inputs) if trace else 0), lin.untraced


@pytest.mark.parametrize("regime", ["linear", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_result_is_that_of_the_cpu(text_model, kind, regime):
    vectors = []
    for where in ("cpu", None):
        model, task = text_model(kind, where="cpu") if where else text_model(kind)
        settings = settings_for(*text_model(kind, where="cpu"), penalty=True)
        vectors.append(kp.train(model, task, steps=6, regime=regime, **settings))
    expected, actual = vectors
    model, task = text_model(kind, where="cpu")
    split = task.split("train")
    batch = model.prepare([split[k] for k in range(SIZE)], task.name)
    lin = kp.linearize(model)
    assert_same(lin.outputs(batch, dict(actual))[1], lin.outputs(batch, dict(expected))[1], 1e-3)


def reads(mask):
    """What transformers and language models ask about a mask, in several forms."""
    yield bool(mask.all())
    yield bool(mask.sum() == mask.numel())
    yield bool((mask[:, -1] == 0).any())
    yield int((mask.to(mask.device, torch.int64).cumsum(1) - 1).clamp(min=0).max())
    yield (~mask.bool()).flatten().nonzero()[:, 0].tolist()
    yield mask.long().diff(dim=1).flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_reads_of_a_moved_batch(device, standin, dtype):
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).to(dtype)
    expected = list(reads(mask))
    moved = BatchMover(device)({"mask": mask, "x": torch.randn(2, 3)})
    assert isinstance(moved["mask"], MirroredTensor)
    assert not isinstance(moved["x"], MirroredTensor)
    with standin.recorded() as record:
        values = list(reads(moved["mask"]))
    assert values == expected
    # The positions of true elements are computed on the device, where they select rows.
    assert len(record.waits) <= 1, str(record)
    assert not record.uploads, str(record)


def test_a_modified_tensor_is_read_from_the_device(device):
    moved = BatchMover(device)(torch.ones(2, 3, dtype=torch.int64))
    before = moved == 1
    view = moved[:, 1:]
    moved[0, 2] = 0
    assert bool(before.all())
    for tensor in (moved, view, moved == 1, moved.long()):
        assert not bool(tensor.all())
    moved.add_(1)
    assert moved.tolist() == [[2, 2, 1], [2, 2, 2]]
    assert view.sum().item() == 7
