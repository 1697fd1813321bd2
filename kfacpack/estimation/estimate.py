"""Implements `kp.estimate`: the generalised Gauss-Newton matrix of f, block by block, in one pass over the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kfacpack.compression.codecs import BlockCodec
from kfacpack.compression.compress import choose_codecs, compress_with
from kfacpack.curvature.curvature import Curvature, identify
from kfacpack.errors import KfacpackError
from kfacpack.estimation import distributed
from kfacpack.estimation.accumulator import CurvatureAccumulator
from kfacpack.estimation.block_plan import plan_blocks, require_used
from kfacpack.estimation.collectors import WIDE_BLOCKS
from kfacpack.estimation.options import EstimateOptions, Probes
from kfacpack.estimation.tracing import ModelTrace, trace_model
from kfacpack.format.manifest import About, Function, Loss
from kfacpack.models.functional import batch_size_of, eval_mode, select_parameters, to_device
from kfacpack.models.model import Model, unwrap_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfacpack.compression.compression_report import CompressionReport
    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.estimation.block_plan import BlockPlan
    from kfacpack.format.manifest import Base, EstimateStructure, Fisher, Metric, OutputScale, Probe, Sharing, Source
    from kfacpack.models.functional import Forward, ModelInput


def estimate(
    model: nn.Module | Model,
    batches: Iterable[ModelInput],
    *,
    fisher: Fisher = "mc",
    samples: int = 1,
    probe: Probe = "orthogonal",
    params: Iterable[str] | str | None = None,
    seed: int = 0,
    forward: Forward | None = None,
    sharing: Sharing = "expand",
    structure: EstimateStructure = "kronecker",
    compress: str | None = None,
    offload: bool = False,
    metric: Metric = "l2",
    name: str | None = None,
    function: Function | None = None,
    source: Source | None = None,
) -> Curvature:
    """Estimates the curvature of a model's output f on the given inputs: G = 1/N Σ JᵀJ, block by block.

    N is the number of examples, and J is the Jacobian of f for one example with respect to the parameters. The model is
    used in eval mode, and its previous mode is restored afterwards. With several processes (torch.distributed), pass
    the same batches to all processes. Each process uses some of the batches, and all return the same curvature.

    Args:
        model: A module, where f is `model(*batch)` of shape (N, C); or a model from `kp.load_model`, which defines f
            itself.
        batches: An iterable of batches without labels. A batch is a tensor, a tuple of arguments or a dict of keyword
            arguments. An `attention_mask` in a dict, with shape (N, R), excludes padded positions.
        fisher: "mc" differentiates f in `samples` random directions per example, "exact" in all C directions.
        samples: Number of random directions (probes) per example.
        probe: Distribution of the probes: "orthogonal", "rademacher" or "gaussian".
        params: Names or patterns (`*.mlp.*`) of the parameters to cover. Defaults to all parameters that
            f depends on, except those that the family of a model from `kp.load_model` freezes.
        seed: Seed for the probes. The random numbers for an example depend only on the seed and the example's index.
        forward: Function that computes f from a batch, if f is not `model(*batch)`.
        sharing: KFAC variant for weights that several positions share: "expand" or "reduce".
        structure: "kronecker", or "diagonal" for the diagonal of G in every block.
        compress: Codecs such as "block:8+int8"; see `kp.compress`. With "block:K", only K diagonal blocks of each
            factor are computed.
        offload: Whether to keep the sums on the CPU, regardless of the model's device.
        metric: Measure of a change in f: "l2" for the squared norm of the change, or "kl" for the Kullback-Leibler
            divergence between the output distributions. "kl" requires a language model from `kp.load_model`.
        name: Name of the model in the bundle. Defaults to the model's own name, or to the name of its class.
        function: Description of f, which is stored in the bundle.
        source: Description of the data, which is stored in the bundle.

    Returns:
        The curvature.

    Raises:
        KfacpackError: If an option is not supported, there are no batches, or the curvature of a parameter cannot be
            estimated.

    Example:
        >>> curvature = kp.estimate(model, ((x,) for x, _ in loader), params=["*.weight"])
        >>> curvature.save("digits.kfac")
    """
    params = list(params) if params is not None and not isinstance(params, str) else params
    options = EstimateOptions(fisher, samples, probe, seed, sharing, structure, compress, offload, metric)
    module, own_forward, frozen = unwrap_model(model)
    family, revision = "torch", None
    if isinstance(model, Model):
        family, revision, name = model.family, model.revision, name or model.name
        # `model.function` describes the model's own f, not the output of `forward`.
        function = function or (model.function if forward is None else None)
    parameters = select_parameters(module, params, frozen)
    if isinstance(batches, (Tensor, Mapping)):
        # Both are iterable, but yield single examples and keys, respectively.
        problem = f"expected an iterable of batches, got a single {type(batches).__name__}"
        raise KfacpackError(f"{problem}. Pass [batch], or batch.split(32) to divide a tensor into batches")
    remaining = iter(batches)
    first = next(remaining, None)
    if first is None:
        raise KfacpackError("expected at least one batch, got no batches")
    device = device_of(parameters)
    with eval_mode(module, parameters), ThreadPoolExecutor(max_workers=1) as background:
        probes = probes_of(model if forward is None else module, options)
        accumulator = begin_accumulation(
            forward or own_forward, to_device(first, device), parameters, options, params, probes=probes
        )
        name = name or type(module).__name__
        base = background.submit(identify, module, accumulator.covered, family=family, name=name, revision=revision)
        for start, batch in _own_batches(chain([first], remaining), accumulator):
            accumulator.add_batch(to_device(batch, device), start)
    function = function or Function(output="other", normalized=False, width=accumulator.plan.width)
    curvature = finish_curvature(accumulator, options, base.result(), function, source)
    return compress_result(curvature, options)[0] if options.compress else curvature


def _own_batches(batches: Iterable[ModelInput], accumulator: CurvatureAccumulator) -> Iterator[tuple[int, ModelInput]]:
    """Yields the batches of this process, each with the index of its first example."""
    if distributed.world_size() == 1:
        for batch in batches:
            yield accumulator.examples, batch
        return
    start = 0
    for index, batch in enumerate(batches):
        size = batch_size_of(batch)
        if size is None:
            problem = "cannot distribute batches over processes: the tensors of a batch have different first dimensions"
            raise KfacpackError(f"{problem}; every tensor must have one entry per example along its first dimension")
        if index % distributed.world_size() == distributed.rank():
            yield start, batch
        start += size


def probes_of(model: nn.Module | Model, options: EstimateOptions) -> Probes:
    """Returns the probes for an estimate, including the model's output layer if the metric needs this layer.

    Args:
        model: Model whose curvature is estimated.
        options: The options of the estimate.

    Raises:
        KfacpackError: If the metric is `kl` and f does not predict tokens.
    """
    output_layer = require_metric(model, options.metric)
    return options.probes if output_layer is None else replace(options.probes, output_layer=output_layer())


def require_metric(model: nn.Module | Model, metric: str) -> Callable[[], Tensor] | None:
    """Checks that a metric can measure changes in the output f of a model.

    Returns:
        A function that returns the model's output layer; None if the metric does not need this layer.

    Raises:
        KfacpackError: If the metric is `kl` and f does not predict tokens.
    """
    if metric == "l2":
        return None
    output_layer = model.output_layer if isinstance(model, Model) else None
    if output_layer is None:
        name = model.name if isinstance(model, Model) else type(model).__name__
        problem = f"the output f of {name} does not predict the tokens of a vocabulary"
        raise KfacpackError(f"metric 'kl': {problem}; use the metric 'l2', or a language model (lm:NAME)")
    return output_layer


def begin_accumulation(
    forward: Forward,
    batch: ModelInput,
    parameters: Mapping[str, Tensor],
    options: EstimateOptions,
    params: Iterable[str] | str | None,
    number: int = 0,
    probes: Probes | None = None,
) -> CurvatureAccumulator:
    """Traces the model, plans the blocks and allocates the sums.

    Args:
        forward: Function that computes f from a batch.
        batch: The first batch.
        parameters: Selected parameters, by name.
        options: Options of the estimate.
        params: Names or patterns by which `parameters` were selected; None if they were not selected by name.
        number: Index of the first example in the batch.
        probes: The probes to draw, from `probes_of`. Defaults to the probes for the metric `l2`.

    Returns:
        An accumulator for the planned blocks, to which no batch has been added.

    Raises:
        KfacpackError: If the curvature of a parameter cannot be estimated, or f does not depend on any parameter that
            a pattern in `params` selects.
    """
    trace, plan = _trace_and_plan(forward, batch, parameters, options)
    settings = options.settings(next(iter(parameters.values())).dtype, device_of(parameters))
    reference = (number, trace.f[0].detach()) if trace.twice and trace.example == 0 else None
    require_used(plan, params)
    probes = probes or options.probes
    return CurvatureAccumulator(forward, plan, parameters, probes, settings, reference, split_inputs=trace.twice)


def _trace_and_plan(
    forward: Forward, batch: ModelInput, parameters: Mapping[str, Tensor], options: EstimateOptions
) -> tuple[ModelTrace, BlockPlan]:
    """Traces the model on an example of a batch, and plans the blocks from the trace.

    The first example is used if none of its gradients are zero. Otherwise, the middle and the last example are tried
    as well, and the example with the fewest zero gradients is used.
    """
    best: tuple[ModelTrace, BlockPlan] | None = None
    for example in sorted({0, (batch_size_of(batch) or 1) // 2, (batch_size_of(batch) or 1) - 1}):
        trace = trace_model(forward, batch, parameters, example)
        plan = plan_blocks(trace, parameters, options)
        if best is None or trace.zero_gradients < best[0].zero_gradients:
            best = trace, plan
        if not (trace.zero_gradients and trace.twice):
            break
    assert best is not None
    return best


def finish_curvature(
    accumulator: CurvatureAccumulator,
    options: EstimateOptions,
    base: Base,
    function: Function,
    source: Source | None,
    output_scale: OutputScale | None = None,
) -> Curvature:
    """Adds up the sums of all processes, and returns the resulting curvature.

    Args:
        accumulator: The sums of this process; they cannot be used afterwards.
        options: Options of the estimate.
        base: Description of the model.
        function: Description of f.
        source: Description of the data.
        output_scale: Mean squared norm and variance of f. Defaults to the values in the accumulator.
    """
    distributed.all_reduce_sum(tensor for _, tensor in accumulator.tensors())
    blocks = [_with_loss(block, options) for block in accumulator.finish()]
    about = About(
        base=base,
        function=function,
        output_scale=output_scale or accumulator.output_scale,
        metric="kl" if options.metric == "kl" else None,
        scaling=options.scaling,
        estimate=options.manifest(accumulator.dtype),
        source=source,
    )
    return Curvature(blocks, about)


def _with_loss(block: CurvatureBlock, options: EstimateOptions) -> CurvatureBlock:
    """Returns the block, with its approximation error marked as unknown if only part of a factor was computed."""
    if any(matrix.form == "block" for _, matrix in block.structure.matrices()):
        return replace(block, losses=(Loss(step=str(options.chain.structure or BlockCodec(WIDE_BLOCKS))),))
    return block


def compress_result(curvature: Curvature, options: EstimateOptions) -> tuple[Curvature, CompressionReport]:
    """Compresses an estimate with the codecs in `options.compress`.

    If these include 'block:K', only diagonal blocks were computed, so the error of this codec is unknown.

    Returns:
        The compressed curvature, and a report on the measured approximation errors.
    """
    compressed, report = compress_with(curvature, choose_codecs(curvature, options.compress, None))
    return with_unknown_loss(compressed, options), report


def with_unknown_loss(curvature: Curvature, options: EstimateOptions) -> Curvature:
    """Returns the curvature, with its approximation error marked as unknown if 'block:K' is among the codecs."""
    if options.diagonal_blocks <= 1:
        return curvature
    unknown = (Loss(step=str(options.chain)),)
    return Curvature(curvature.blocks, curvature.about.model_copy(update={"losses": unknown}))


def device_of(parameters: Mapping[str, Tensor]) -> torch.device:
    """Returns the device of the first parameter."""
    return next(iter(parameters.values())).device
