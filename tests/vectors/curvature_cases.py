"""Task vectors and bundles of the small model of kit.py, and dense references for merge methods with bundles."""

from __future__ import annotations

import torch
from kit import of_task, random_tau

import kfacpack as kp
from kfacpack.curvature.blocks import gather, scatter
from kfacpack.format.vector_manifest import AboutVector, TaskEntry
from kfacpack.merging.solve import clipped
from kfacpack.vectors.methods.curvature import NEGLIGIBLE_DRIFT

SIZES = (100, 300, 50, 150)


def bundle(k: int, form: str = "packed") -> kp.Curvature:
    return of_task(f"task {k}", SIZES[k], seed=20 * k, stored_as=form)


def vector(k: int, *, curvature: kp.Curvature | None = None, params=None, tasks=None, **about) -> kp.TaskVector:
    curvature = curvature or bundle(k)
    tensors = random_tau(curvature, seed=100 + k)
    base = curvature.about.base
    if params:
        state = {p.name: torch.zeros(p.shape) for p in base.parameters}
        tensors = {name: tensors[name] for name in state if name in params}
        kept = tuple(p for p in base.parameters if p.name in params)
        base = kp.Base(family=base.family, name=base.name, sha256=kp.format.manifest.base_digest(kept), parameters=kept)
    fields = {
        "base": base,
        "function": curvature.about.function,
        "regime": "linear",
        "tasks": tuple(TaskEntry(source=kp.Source(task=task)) for task in tasks or (f"task {k}",)),
    }
    return kp.TaskVector(tensors, AboutVector(**{**fields, **about}))


def weights_of(count: int) -> list[float]:
    return [count * size / sum(SIZES[:count]) for size in SIZES[:count]]


def dense_of(structure: kp.BlockStructure, method: str, shrink: float) -> torch.Tensor | None:
    """G that a method uses, over the flattened entries of the block."""
    sides = [[matrix.dense(torch.float64) for matrix in side] for side in structure.sides]
    if method == "regmean":
        if len(sides) == 1:
            return None
        sides[0] = [torch.eye(len(b), dtype=torch.float64) for b in sides[0]]
        sides[1] = [(1 - shrink) * a + shrink * a.diag().diag() for a in sides[1]]
    terms = zip(structure.weights, *sides, strict=True)
    total = sum(w * (m[0] if len(m) == 1 else torch.kron(*m)) for w, *m in terms)
    return total.diag().diag() if method == "fisher" else total


def absolute_damping(vectors, negligible_drift: float = NEGLIGIBLE_DRIFT) -> float:
    """κ / ‖τ‖² for a normalised f."""
    return negligible_drift * len(vectors) / sum(float(v[n].double().square().sum()) for v in vectors for n in v)


def dense_merge(terms, prior, shapes, blocks, damping, method="curvature", shrink=0.1, repaired=(), absolute=0.0):
    """The minimiser of each block: terms are (weight, curvature, {parameter: W_t})."""
    result = {name: prior[name].double() for name in prior}
    sums = {name: torch.zeros(shapes[name], dtype=torch.float64) for name in prior}
    covered = set()
    for number, block in enumerate(blocks):
        fix = clipped if block.name in repaired else lambda structure: structure
        G = [dense_of(fix(c.blocks[number].structure), method, shrink) for _, c, _ in terms]
        start = gather({n: prior[n].double() for n in block.parameters}, block.join, shapes)
        if G[0] is not None:
            total = sum(w * g for (w, _, _), g in zip(terms, G, strict=True))
            epsilon = damping * total.trace() / len(total) + absolute
            right = sum(
                w * g @ (gather({n: tau[n].double() for n in block.parameters}, block.join, shapes) - start).flatten()
                for (w, _, tau), g in zip(terms, G, strict=True)
            )
            change = torch.linalg.solve(total + epsilon * torch.eye(len(total), dtype=torch.float64), right)
            start = start + change.reshape(start.shape)
        covered.update(block.parameters)
        for name, value in scatter(start, block.join, shapes).items():
            sums[name] += value
    return {name: sums[name] if name in covered else result[name] for name in prior}
