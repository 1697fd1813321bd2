"""Toy tasks with examples and vectors, and brute-force references."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import Attentive, ToyTask, on_device, toy_model

import kfacpack as kp
from kfacpack.evaluation import bundle_quality, disentanglement
from kfacpack.evaluation.accuracy import EvaluationSet
from kfacpack.evaluation.edited_model import output_changes
from kfacpack.format.vector_manifest import AboutVector, TaskEntry
from kfacpack.linearization.linearize import Linearized

TASKS = {name: ToyTask(name, seed=seed, size=20) for seed, name in enumerate(("one", "two", "three"), start=1)}
EVALUATION_SETS = {name: EvaluationSet.of(task, "test") for name, task in TASKS.items()}


def task_vector(model, task, regime="linear", *, size=0.3, seed=None, params=None):
    """Returns a random vector with the task's head."""
    generator = torch.Generator().manual_seed(task.seed if seed is None else seed)
    wanted = {name: p for name, p in model.module.named_parameters() if params is None or name.startswith(params)}
    tensors = {name: size * torch.randn(p.shape, generator=generator) for name, p in wanted.items()}
    about = AboutVector(
        base=kp.identify(model.module, list(wanted), family="toy", name="attentive"),
        function=model.function,
        regime=regime,
        tasks=(TaskEntry(source=kp.Source(task=task.name, dataset_size=task.size)),),
    )
    return kp.TaskVector(tensors, about, {task.name: kp.head_for(model, task)})


def inputs(model, evaluation_set):
    return model.prepare([evaluation_set.split[number] for number in evaluation_set.numbers], evaluation_set.task.name)


def change(model, x, tau):
    """Returns J τ, (N, C), from the full Jacobian of torch.func."""
    parameters = {name: p.detach() for name, p in model.module.named_parameters()}
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = jacrev(lambda values: functional_call(model.module, {**parameters, **values}, (x,)))(
            {name: parameters[name] for name in tau}
        )
    return sum(torch.einsum("nc...,...->nc", jacobian[name], tau[name].double()) for name in tau)


def bundle_of(model, task, split="train"):
    """Returns the exact curvature over all examples of a split."""
    evaluation_set = EvaluationSet.of(task, split)
    about = {"name": model.name, "function": model.function, "source": kp.Source(task=task.name, dataset_size=20)}
    return kp.estimate(model.module, [inputs(model, evaluation_set)], fisher="exact", forward=model.forward, **about)


def linear_model():
    """Returns a deep linear net with one position, for which Kronecker factors are exact."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(20, 5, bias=False), torch.nn.Linear(5, 6, bias=False)).double()
    toy = toy_model()
    return replace(
        toy,
        module=module,
        forward=module,
        prepare=lambda examples, task: torch.stack([example["x"].flatten() for example in examples]),
    )


class Crossed(Attentive):
    """Queries have another source than keys and values, so two blocks share the input projection."""

    def forward(self, x):
        other = x.flip(1)
        return torch.tanh(self.mlp(self.norm(self.attn(x, other, other, need_weights=False)[0]))).mean(1)


def crossed_model():
    toy = toy_model()
    module = Crossed().double().eval()
    module.load_state_dict(toy.module.state_dict())
    return replace(toy, module=module, forward=module)


def emulate_device(monkeypatch):
    """From now on, measurements get outputs on a device without float64, such as MPS."""
    plain = Linearized.outputs

    def changes(*args):
        return (on_device(*pair) for pair in output_changes(*args))

    for module in (bundle_quality, disentanglement):
        monkeypatch.setattr(module, "output_changes", changes)
    monkeypatch.setattr(Linearized, "outputs", lambda self, *args: on_device(*plain(self, *args)))
