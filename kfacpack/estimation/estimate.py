"""`kp.estimate`: the GGN of f at the model's parameters, block by block, in one pass over the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kfacpack.compression.compress import choice_of, compress_by
from kfacpack.curvature.curvature import Curvature, identify
from kfacpack.errors import KfacpackError
from kfacpack.estimation import distributed
from kfacpack.estimation.accumulator import CurvatureAccumulator
from kfacpack.estimation.block_plan import plan_blocks, require_used
from kfacpack.estimation.options import EstimateOptions
from kfacpack.estimation.tracing import ModelTrace, trace_model
from kfacpack.format.manifest import About, Function, Loss
from kfacpack.models.functional import batch_size_of, eval_mode, select_parameters, to_device
from kfacpack.models.model import Model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfacpack.compression.compression_report import CompressionReport
    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.estimation.block_plan import BlockPlan
    from kfacpack.estimation.options import EstimateStructure
    from kfacpack.format.manifest import Base, Fisher, Probe, Sharing, Source
    from kfacpack.models.functional import Forward, ModelInput


def estimate(
    model: nn.Module | Model,
    batches: Iterable[ModelInput],
    fisher: Fisher = "mc",
    samples: int = 1,
    probe: Probe = "orthogonal",
    params: Iterable[str] | str | None = None,
    seed: int = 0,
    *,
    forward: Forward | None = None,
    sharing: Sharing = "expand",
    structure: EstimateStructure = "kronecker",
    compress: str | None = None,
    offload: bool = False,
    name: str | None = None,
    function: Function | None = None,
    source: Source | None = None,
) -> Curvature:
    """The curvature of a model's output f on the given inputs, G = 1/N Σ JᵀJ, block by block.

    `model(*batch)`, or `forward(*batch)` if given, is f, of shape (N, C). A batch is a tensor, a tuple (its parts are
    the arguments) or a dict (of keyword arguments). An `attention_mask` in a dict leaves out padded positions. The
    model is used in evaluation mode and is afterwards as it was. Of a kfacpack model, f is its own, and by default what
    its family freezes stays out.

    - fisher: "mc" asks the output in `samples` random directions per example, "exact" in all C of them.
    - probe: how these are drawn: "orthogonal", "rademacher" or "gaussian"; `seed` and an example's number decide.
    - params: names or patterns (`*.mlp.*`) of the parameters to cover; None covers all that f depends on.
    - sharing: "expand" or "reduce", how KFAC treats positions that share a weight.
    - structure: "diagonal" gives the diagonal of G for every block instead of Kronecker factors.
    - compress: a codec, as for `kp.compress`; of "block:K" only the K diagonal blocks of each factor are computed.
    - offload: the sums are kept on the CPU, whatever the model's device.
    - name, function, source: what the bundle says of the model, of f and of the data.

    With several processes (torch.distributed), all are given the same batches; each takes its share of them, and all
    get the whole result.
    """
    params = list(params) if params is not None and not isinstance(params, str) else params
    options = EstimateOptions(fisher, samples, probe, seed, sharing, structure, compress, offload)
    frozen: tuple[str, ...] = ()
    family, revision = "torch", None
    if isinstance(model, Model):
        module, frozen, family, revision = model.module, model.frozen, model.family, model.revision
        # Another f than the model's own is not what `function` would say of it.
        function = function or (model.function if forward is None else None)
        forward, name = forward or model.forward, name or model.name
    elif isinstance(model, nn.Module):
        module = model
    else:
        raise KfacpackError(f"expected a module or a model of kp.load_model, found {type(model).__name__}")
    wanted = select_parameters(module, params, frozen)
    remaining = iter(batches)
    first = next(remaining, None)
    if first is None:
        raise KfacpackError("there are no batches to estimate from")
    with eval_mode(module, wanted), ThreadPoolExecutor(max_workers=1) as background:
        estimation = begin_accumulation(forward or module, to_device(first, device_of(wanted)), wanted, options, params)
        called = name or type(module).__name__
        base = background.submit(identify, module, estimation.covered, family=family, name=called, revision=revision)
        for number, batch in _own_share(chain([first], remaining), estimation):
            estimation.take(to_device(batch, device_of(wanted)), number)
    function = function or Function(output="other", normalized=False, width=estimation.plan.width)
    curvature = finish_curvature(estimation, options, base.result(), function, source)
    return compress_result(curvature, options)[0] if options.compress else curvature


def _own_share(batches: Iterable[ModelInput], estimation: CurvatureAccumulator) -> Iterator[tuple[int, ModelInput]]:
    """The batches that this process takes, each with the number of its first example."""
    if distributed.world_size() == 1:
        for batch in batches:
            yield estimation.examples, batch
        return
    start = 0
    for number, batch in enumerate(batches):
        size = batch_size_of(batch)
        if size is None:
            problem = "for several processes, all tensors of a batch must have the examples in their first dimension"
            raise KfacpackError(problem)
        if number % distributed.world_size() == distributed.rank():
            yield start, batch
        start += size


def begin_accumulation(
    forward: Forward,
    batch: ModelInput,
    wanted: Mapping[str, Tensor],
    options: EstimateOptions,
    params: Iterable[str] | str | None,
    number: int = 0,
) -> CurvatureAccumulator:
    """Look at the model once, plan, and make room for the sums.

    `params` is how the wanted parameters were asked for, `number` that of the batch's first example.
    """
    traced, planned = _planned(forward, batch, wanted, options)
    settings = options.settings(next(iter(wanted.values())).dtype, device_of(wanted))
    known = (number, traced.f[0].detach()) if traced.twice and traced.example == 0 else None
    require_used(planned, params)
    return CurvatureAccumulator(forward, planned, wanted, options.probes, settings, known)


def _planned(
    forward: Forward, batch: ModelInput, wanted: Mapping[str, Tensor], options: EstimateOptions
) -> tuple[ModelTrace, BlockPlan]:
    """The plan by the batch's first example; by a later one, if that has gradients where the first has none."""
    best: tuple[ModelTrace, BlockPlan] | None = None
    for example in sorted({0, (batch_size_of(batch) or 1) // 2, (batch_size_of(batch) or 1) - 1}):
        traced = trace_model(forward, batch, wanted, example)
        planned = plan_blocks(traced, wanted, options)
        if best is None or traced.silent < best[0].silent:
            best = traced, planned
        if not (traced.silent and traced.twice):
            break
    assert best is not None
    return best


def finish_curvature(
    estimation: CurvatureAccumulator, options: EstimateOptions, base: Base, function: Function, source: Source | None
) -> Curvature:
    """What all processes have summed, as a curvature."""
    distributed.all_reduce_sum(tensor for _, tensor in estimation.tensors())
    blocks = [_with_loss(block, options) for block in estimation.finish()]
    about = About(
        base=base,
        function=function,
        output_scale=estimation.output_scale,
        scaling=options.scaling,
        estimate=options.manifest(estimation.dtype),
        source=source,
    )
    return Curvature(blocks, about)


def _with_loss(block: CurvatureBlock, options: EstimateOptions) -> CurvatureBlock:
    """What lies outside the blocks of 'block:K' was never computed, so nobody knows how much was lost."""
    if any(matrix.form == "block" for _, matrix in block.structure.matrices()):
        return replace(block, losses=(Loss(step=str(options.chain.structure)),))
    return block


def compress_result(curvature: Curvature, options: EstimateOptions) -> tuple[Curvature, CompressionReport]:
    """By the steps of `compress` that make a matrix smaller than its sum is already, and what those lose."""
    smaller, report = compress_by(curvature, choice_of(curvature, options.compress, None))
    if options.diagonal_blocks > 1:
        not_known = (Loss(step=str(options.chain)),)
        smaller = Curvature(smaller.blocks, smaller.about.model_copy(update={"losses": not_known}))
    return smaller, report


def device_of(wanted: Mapping[str, Tensor]) -> torch.device:
    return next(iter(wanted.values())).device
