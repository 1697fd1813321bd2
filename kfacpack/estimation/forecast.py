"""Forecasts the blocks of an estimate, and the time, memory and disk space that the estimate needs.

For a layer-by-layer estimate, layers with equal parameter names and shapes are of the same kind, and only one layer of
each kind is planned and measured. This works without the actual weights: `loading="shapes"` loads a model with
arbitrary weights. The time can also be forecast for a GPU that this machine does not have, from the number of
floating-point operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from kfacpack.compression.codecs import CodecChain
from kfacpack.errors import KfacpackError, did_you_mean
from kfacpack.estimation.accumulator import BatchShape, BlockForecast
from kfacpack.estimation.estimate import probes_of
from kfacpack.models.functional import (
    batch_size_of,
    call_model,
    eval_mode,
    map_tensors,
    padding_mask,
    rows_per_example,
)

if TYPE_CHECKING:
    from kfacpack.estimation.block_plan import BlockPlan
    from kfacpack.estimation.stream import LayerStream
    from kfacpack.models.functional import Forward, ModelInput
    from kfacpack.models.layer_list import LayerCall


@dataclass(frozen=True)
class Forecast:
    """Forecast of the blocks, size, time and memory of an estimate."""

    blocks: tuple[BlockForecast, ...]
    frozen: tuple[str, ...]
    """Parameters that are excluded because the model's family freezes them or because they are not selected."""
    unused: tuple[str, ...]
    """Parameters that f does not depend on."""
    examples: int
    batches: int
    bytes: int
    """Size of the bundle's tensors in bytes."""
    seconds: float
    """Expected time of the estimate in seconds, extrapolated from one batch."""
    peak_memory: int
    """Expected peak memory in bytes: the weights and the sums, plus either the activations of a batch or the matrices
    that are computed from the sums, whichever is larger."""
    stored_bytes: int = 0
    """Total size in bytes of the temporary files that a layer-by-layer estimate needs."""


def activation_bytes(model: nn.Module, forward: Forward, batch: ModelInput) -> int:
    """Estimates how many bytes autograd saves for the backward pass of a batch, excluding weights.

    If the batch can be split into examples, the number is extrapolated from two copies of its first example.

    Args:
        model: Module whose parameters and buffers are not counted.
        forward: Function that computes f from a batch.
        batch: The batch, including its padding.
    """
    size = batch_size_of(batch)
    if size is None:
        return saved_bytes(model, lambda: call_model(forward, batch))
    pair = map_tensors(batch, lambda tensor: tensor[[0, 0]])
    return saved_bytes(model, lambda: call_model(forward, pair)) * size // 2


def saved_bytes(model: nn.Module, compute: Callable[[], Tensor]) -> int:
    """Measures how many bytes autograd saves for a backward pass, excluding weights.

    The largest tensor is counted three times, because two gradients of this size may exist at the same time.

    Args:
        model: Module whose parameters and buffers are not counted.
        compute: Function that runs the module.
    """
    weights = {tensor.untyped_storage().data_ptr() for tensor in _parameters_and_buffers(model)}
    kept: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        compute()
    return sum(kept.values()) + 2 * max(kept.values(), default=0)


def weight_bytes(model: nn.Module) -> int:
    """Returns the total size in bytes of all parameters and buffers of a module."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in _parameters_and_buffers(model)}.values())


def row_count(batch: ModelInput) -> int:
    """Returns the number of rows of f for a batch."""
    return sum(rows_per_example(batch) or [batch_size_of(batch) or 1])


def _parameters_and_buffers(model: nn.Module) -> Collection[Tensor]:
    return [*model.parameters(), *model.buffers()]


@dataclass(frozen=True)
class Gpu:
    """Published specifications of a GPU."""

    name: str
    """Name of the GPU, including the memory size if there are several variants."""
    memory: float
    """Size of the memory in bytes."""
    half: float
    """Floating-point operations per second in bfloat16, without sparsity."""
    single: float
    """Floating-point operations per second in float32, the dtype in which factors are accumulated."""


GPUS = (
    Gpu("A100-40GB", 40e9, 312e12, 19.5e12),
    Gpu("A100-80GB", 80e9, 312e12, 19.5e12),
    Gpu("H100-80GB", 80e9, 989e12, 67e12),
    Gpu("L40S", 48e9, 362e12, 91.6e12),
    Gpu("RTX-4090", 24e9, 165e12, 82.6e12),
)
"""GPUs whose names `find_gpu` accepts."""
EFFICIENCY = 0.17
"""Assumed ratio of a GPU's actual speed to its published speed. With this ratio, the time computed for a linearised
training step of ViT-B/32 with 128 examples on an A100 is 0.1 s."""
DISK_SPEED = 1e9
"""Assumed read and write speed of the disk in bytes per second."""


def find_gpu(name: str) -> Gpu:
    """Returns the specifications of a GPU.

    Args:
        name: Name of the GPU, in upper or lower case. If the memory size is omitted (`A100`), the first GPU in `GPUS`
            with this name is returned.

    Raises:
        KfacpackError: If the name is unknown.
    """
    for gpu in GPUS:
        if f"{gpu.name}-".lower().startswith(f"{name}-".lower()):
            return gpu
    names = [gpu.name for gpu in GPUS]
    raise KfacpackError(f"unknown GPU {name!r}{did_you_mean(name, names)} Expected one of {', '.join(names)}")


@dataclass
class _Segment:
    """Blocks of one segment of a model, with the memory and time needed to estimate them."""

    blocks: tuple[BlockForecast, ...]
    weights: int
    """Size of the weights in bytes."""
    sums: int
    """Size of the sums in bytes."""
    peak: int
    """Peak memory in bytes while the segment is computed or written, excluding all weights."""
    flops: int = 0
    """Number of floating-point operations in the forward pass for one batch."""
    sum_flops: int = 0
    """Number of floating-point operations for adding one batch to the sums."""
    seconds: float = 0.0
    """Measured time of the forward and backward passes for one batch."""


def forecast_stream(
    stream: LayerStream,
    batch: ModelInput,
    *,
    examples: int,
    batches: int,
    gpu: Gpu | None = None,
    keeps_segments: bool = False,
) -> Forecast:
    """Forecasts the blocks, size, time and memory of a layer-by-layer estimate.

    Args:
        stream: The model, divided into segments.
        batch: The first batch, on the device of the model.
        examples: Number of examples.
        batches: Number of batches.
        gpu: GPU for which the time is forecast. By default, the time is measured on this machine.
        keeps_segments: Whether the bundle consists of the files that are written for the segments. Otherwise, these
            files are temporary, and their contents are copied into the bundle at the end.

    Returns:
        The forecast for all examples.
    """
    module, layers = stream.model.module, stream.layers
    with eval_mode(module, stream.outer):
        plans = stream.plan(batch, one_per_kind=True)
        size = batch_size_of(batch) or 1
        passes = stream.options.probes.passes(plans.head.width, max(rows_per_example(batch) or [1]))
        pair = map_tensors(batch, lambda tensor: tensor[[0, 0]])
        hidden, calls = layers.stem(pair)
        hidden = hidden.detach()
        kinds, of_kind = stream.representatives(), {}
        for index in dict.fromkeys(kinds):
            with stream.layer(index) as (layer, _):
                segment = _measured(stream, plans.layers[index], layer, calls[index], hidden, size, passes)
                if gpu is None:
                    whole, all_calls = layers.stem(batch)
                    segment.seconds = _seconds(
                        stream, plans.layers[index], layer, all_calls[index], whole.detach(), batch, passes
                    )
                of_kind[index] = segment
        ends = [_unmeasured(stream, plan) for plan in (plans.stem, plans.head)]
    segments = [
        replace(of_kind[kind], blocks=_renamed(of_kind[kind].blocks, layers.prefix(kind), layers.prefix(index)))
        for index, kind in enumerate(kinds)
    ]
    blocks = [block for segment in (ends[0], *segments, ends[1]) for block in segment.blocks]
    size_on_disk = sum(block.bytes for block in blocks)
    state = hidden.nbytes * size // 2
    calls_bytes = sum(t.nbytes for t in {id(t): t for call in calls for t in call.tensors()}.values()) * size // 2
    kept_inputs = len(segments) + 1 - plans.first_needed
    stored = batches * (state * (kept_inputs + 2 * passes) + calls_bytes) + (0 if keeps_segments else size_on_disk)
    in_memory = stream.model.layer_weights is None
    outer = weight_bytes(module) if in_memory else _outer_bytes(module, layers.is_outside)
    head = ends[1].sums + probes_of(stream.model, stream.options).sampling_bytes(row_count(batch)) + 4 * state
    needed = segments[plans.first_needed :]
    peak = outer + max(
        [head, ends[0].sums + 4 * state, *(segment.peak + (0 if in_memory else segment.weights) for segment in needed)]
    )
    if gpu is None:
        seconds = batches * sum(segment.seconds for segment in segments)
    else:
        seconds = _gpu_seconds(gpu, stream, segments, batches, passes) + _disk_seconds(
            segments, outer, state * batches, passes, size_on_disk
        )
    return Forecast(
        blocks=tuple(blocks),
        frozen=tuple(name for name, _ in module.named_parameters() if name not in stream.selected),
        unused=tuple(name for plan in plans.all for name in plan.unused),
        examples=examples,
        batches=batches,
        bytes=size_on_disk,
        seconds=seconds,
        peak_memory=peak,
        stored_bytes=stored,
    )


def _unmeasured(stream: LayerStream, plan: BlockPlan) -> _Segment:
    """Returns the blocks of the stem or the head, and the size of their sums. Their computation time is neglected."""
    accumulator = stream.accumulator(plan, {})
    return _Segment(accumulator.forecasts(stream.options.chain), 0, accumulator.nbytes, 0)


def _measured(
    stream: LayerStream, plan: BlockPlan, layer: nn.Module, call: LayerCall, hidden: Tensor, size: int, passes: int
) -> _Segment:
    """Returns the blocks of a layer, and their cost for a batch of `size` examples, extrapolated from two examples."""
    accumulator = stream.accumulator(plan, {})
    with FlopCounterMode(display=False) as counter:
        saved = saved_bytes(layer, lambda: call.run(layer, hidden.detach().requires_grad_()))
    activations = saved * size // 2 + 4 * hidden.nbytes * size // 2
    # According to measurements, the memory lost to fragmentation is up to the size of a layer's matrices.
    fragments = sum(block.bytes for block in accumulator.forecasts(CodecChain()))
    positions = hidden.numel() // hidden.shape[-1] * size // 2
    return _Segment(
        accumulator.forecasts(stream.options.chain),
        weights=sum(parameter.nbytes for parameter in layer.parameters()),
        sums=accumulator.nbytes,
        peak=accumulator.peak_bytes(max(activations, fragments), stream.options.chain),
        flops=counter.get_total_flops() * size // 2,
        sum_flops=accumulator.sum_flops(passes) * positions,
    )


def _seconds(
    stream: LayerStream,
    plan: BlockPlan,
    layer: nn.Module,
    call: LayerCall,
    hidden: Tensor,
    batch: ModelInput,
    passes: int,
) -> float:
    """Measures the time of two forward passes and all backward passes of a layer for one batch."""
    parameters = {name: dict(layer.named_parameters())[name.removeprefix(p)] for p, name in _own_names(stream, plan)}
    accumulator = stream.accumulator(plan, parameters)
    examples = batch_size_of(batch) or 1
    shape = BatchShape(examples, examples, passes, padding_mask(batch))
    start = time.perf_counter()
    call.run(layer, hidden)
    output = call.run(layer, hidden.requires_grad_())
    accumulator.add_output(output, (torch.randn_like(output) for _ in range(passes)), shape)
    return time.perf_counter() - start


def _own_names(stream: LayerStream, plan: BlockPlan) -> list[tuple[str, str]]:
    """Returns a pair (prefix of the layer, parameter name) for each parameter in a plan."""
    prefixes = [stream.layers.prefix(index) for index in range(len(stream.layers))]
    names = dict.fromkeys(name for block in plan.blocks for name in block.parameters)
    return [(next(prefix for prefix in prefixes if name.startswith(prefix)), name) for name in names]


def _renamed(blocks: Sequence[BlockForecast], old: str, new: str) -> tuple[BlockForecast, ...]:
    """Copies the blocks of a layer for another layer. In all names, the prefix `old` is replaced with `new`."""
    return tuple(
        replace(
            block,
            name=new + block.name.removeprefix(old),
            parameters=tuple(new + name.removeprefix(old) for name in block.parameters),
        )
        for block in blocks
    )


def _outer_bytes(module: nn.Module, is_outside: Any) -> int:
    """Returns the total size in bytes of all parameters outside the layers and of all buffers."""
    parameters = {id(p): p.nbytes for name, p in module.named_parameters() if is_outside(name)}
    return sum(parameters.values()) + sum(buffer.nbytes for buffer in module.buffers())


def _gpu_seconds(gpu: Gpu, stream: LayerStream, segments: Sequence[_Segment], batches: int, passes: int) -> float:
    """Returns the time in seconds that a GPU needs for the forward passes, the backward passes and the summation."""
    dtype = next(iter(stream.selected.values())).dtype
    speed = EFFICIENCY * (gpu.half if dtype.itemsize == 2 else gpu.single)
    model = sum(segment.flops for segment in segments) * (2 + passes) / speed
    sums = sum(segment.sum_flops for segment in segments) / (EFFICIENCY * gpu.single)
    return batches * (model + sums)


def _disk_seconds(segments: Sequence[_Segment], outer: int, states: int, passes: int, bundle: int) -> float:
    """Returns the time in seconds for reading and writing files.

    This includes reading the weights, storing and reading inputs and gradients, and writing the bundle twice.
    """
    weights = outer + 3 * sum(segment.weights for segment in segments)
    return (weights + len(segments) * states * (3 + 2 * passes) + 2 * bundle) / DISK_SPEED
