"""`kp.estimate`: the GGN of f at the model's parameters, block by block, in one pass over the data."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from kfacpack.bundle.manifest import EXPAND, REDUCE, About, Estimate, Function
from kfacpack.curvature.curvature import Curvature
from kfacpack.curvature.identify import identify
from kfacpack.errors import KfacpackError
from kfacpack.estimate.batch import to_device
from kfacpack.estimate.borrowed import borrowed
from kfacpack.estimate.collect import Settings
from kfacpack.estimate.estimation import Estimation
from kfacpack.estimate.plan import choose, plan
from kfacpack.estimate.probes import Probes
from kfacpack.estimate.trace import trace

if TYPE_CHECKING:
    from kfacpack.bundle.manifest import Source
    from kfacpack.estimate.batch import Batch, Forward
    from kfacpack.estimate.probes import Fisher, Probe


def estimate(
    model: nn.Module,
    batches: Iterable[Batch],
    fisher: Fisher = "mc",
    samples: int = 1,
    probe: Probe = "orthogonal",
    params: Iterable[str] | str | None = None,
    seed: int = 0,
    *,
    forward: Forward | None = None,
    sharing: Literal["expand", "reduce"] = "expand",
    structure: Literal["kronecker", "diagonal"] = "kronecker",
    compress: str | None = None,
    offload: bool = False,
    name: str | None = None,
    function: Function | None = None,
    source: Source | None = None,
) -> Curvature:
    """The curvature of a model's output f, (N, C), on the given inputs."""
    probes = Probes(fisher, probe, samples, seed)
    wanted = choose(model, params)
    remaining = iter(batches)
    first = next(remaining, None)
    if first is None:
        raise KfacpackError("there are no batches to estimate from")
    device = next(iter(wanted.values())).device
    dtype = next(iter(wanted.values())).dtype
    with borrowed(model, wanted):
        traced = trace(forward or model, to_device(first, device), wanted)
        planned = plan(traced, wanted, diagonal=structure == "diagonal")
        del traced
        settings = Settings(
            dtype=torch.promote_types(torch.float32, dtype),
            device=torch.device("cpu") if offload else device,
            reduce=sharing == "reduce",
        )
        estimation = Estimation(forward or model, planned, wanted, probes, settings)
        for batch in chain([first], remaining):
            start = estimation.examples
            estimation.take(to_device(batch, device), lambda count, start=start: range(start, start + count))
    blocks = estimation.finish()
    covered = {each for block in blocks for each in block.parameters}
    about = About(
        base=identify(model, covered, family="torch", name=name or type(model).__name__),
        function=function or Function(output="other", normalized=False, width=planned.width),
        scaling=EXPAND if sharing == "expand" else REDUCE,
        estimate=Estimate(fisher=fisher, seed=seed if fisher == "mc" else None, probe=probe if fisher == "mc" else None, probes=samples if fisher == "mc" else None),
        source=source,
    )
    return Curvature(blocks, about)
