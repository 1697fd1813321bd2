"""A small model and small tasks with the interfaces of the library."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import kfacpack as kp
from kfacpack.evaluation.accuracy import EvaluationSet
from kfacpack.evaluation.sweep import SelectionTask, validation_set
from kfacpack.models.model import Model
from kfacpack.models.weights import CheckpointFile
from kfacpack.tasks.task import DataOrigin

WIDTH, CLASSES = 6, ("round", "square", "flat")


class Attentive(nn.Module):
    """One attention layer and one feed-forward layer, over five positions of width four."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Linear(4, WIDTH)

    def forward(self, x):
        y = self.norm(x + self.attn(x, x, x, need_weights=False)[0])
        return torch.tanh(self.mlp(y)).mean(1)


def toy_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = Attentive().to(dtype).eval()
    return Model(
        family="toy",
        name="attentive",
        revision=None,
        module=module,
        forward=lambda x: module(x.to(dtype)),
        function=kp.Function(output="embedding", normalized=False, width=WIDTH),
        frozen=(),
        prepare=lambda examples, task: torch.stack([example["x"] for example in examples]),
        preprocessing="none",
        checkpoint=CheckpointFile(module, str),
    )


@dataclass
class Numbers:
    x: torch.Tensor
    labels: list[int]
    source: DataOrigin

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"x": self.x[index]}

    def label(self, index):
        return self.labels[index]


@dataclass
class ToyTask:
    name: str = "toy"
    seed: int = 0
    size: int = 30
    classes: tuple[str, ...] = CLASSES
    splits = ("train", "test")
    templates = ()
    source = "random numbers"
    license = None

    @property
    def sizes(self):
        return dict.fromkeys(self.splits, self.size)

    def split(self, name):
        generator = torch.Generator().manual_seed(1000 * self.seed + (name == "test"))
        labels = [k % len(self.classes) for k in range(self.size)]
        centres = torch.randn(len(self.classes), 5, 4, generator=torch.Generator().manual_seed(self.seed))
        x = centres[labels] + 0.5 * torch.randn(self.size, 5, 4, generator=generator)
        return Numbers(x.double(), labels, DataOrigin("toys", name))


class NoFloat64(torch.Tensor):
    """Emulates a tensor on a device without float64, such as MPS: it can become float64 only on the CPU."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cpu:
            return args[0].as_subclass(torch.Tensor)
        result = super().__torch_function__(func, types, args, kwargs or {})
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, NoFloat64) and tensor.dtype == torch.float64:
                raise TypeError("this device does not support float64")
        return result


def on_device(*tensors):
    """Moves tensors to the emulated device."""
    return tuple(tensor.as_subclass(NoFloat64) for tensor in tensors)


class ValidatedTask(ToyTask):
    splits = ("train", "validation", "test")


def toy_subjects(model: Model, seeds: dict[str, int], size: int = 60) -> list[SelectionTask]:
    """Returns a task for each name, with the model's default head for it."""
    tasks = [ValidatedTask(name, seed, size) for name, seed in seeds.items()]
    return [SelectionTask(kp.head_for(model, task), validation_set(task), EvaluationSet.of(task)) for task in tasks]
