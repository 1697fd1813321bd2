"""The device "standin": a strict accelerator for machines without a GPU.

`load()` builds `accelerator.cpp` and registers it as torch's PrivateUse1 device. It computes with the kernels of the
CPU on memory of its own, which holds NaN when it is allocated. It raises if a tensor with dimensions is on the CPU, and
reports kernels, copies between host and device, and waits, with the line of kfacpack that caused them:

    load()
    with recorded() as record:
        kp.train(...)
    print(record)

Waits are `item()`, `bool()`, `nonzero()`, blocking copies to the CPU and what else stops a CUDA program until the
device has finished. Streams, NCCL and sparse tensors are not emulated. The device is built once for each version of
torch, with g++ and ninja, in the cache of torch's extensions (TORCH_EXTENSIONS_DIR).
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).with_name("accelerator.cpp")
NAME = "standin"
_PACKAGE = re.compile(r".*/kfacpack/(?!tests/)(.*\.py)$")
_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64)


class UnavailableError(Exception):
    """The device cannot be built here; the message says why."""


def missing_tool() -> str | None:
    """Returns what the build lacks: a compiler or ninja; None if both are there."""
    if os.name != "posix" or sys.platform == "darwin":
        return "the stand-in device is built on Linux only"
    if not shutil.which(os.environ.get("CXX", "c++")) and not shutil.which("g++"):
        return "the stand-in device needs a C++ compiler: install g++"
    if not shutil.which("ninja", path=_search_path()):
        return "the stand-in device needs ninja: pip install ninja"
    return None


@cache
def load() -> ctypes.CDLL:
    """Builds the device, unless that has been done for this torch version, and registers it.

    Raises:
        UnavailableError: If there is no compiler or no ninja.
    """
    if problem := missing_tool():
        raise UnavailableError(problem)
    torch.utils.rename_privateuse1_backend(NAME)
    library = _build()
    library.standin_register()
    for function in ("standin_kernels", "standin_allocated", "standin_peak"):
        getattr(library, function).restype = ctypes.c_int64
    torch._register_device_module(NAME, _DeviceModule())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _register_attention()
    return library


def _build() -> ctypes.CDLL:
    from torch.utils import cpp_extension

    before = os.environ["PATH"]
    os.environ["PATH"] = _search_path()
    os.environ.setdefault("MAX_JOBS", "1")
    try:
        path: Any = cpp_extension.load(
            f"kfacpack_standin_{re.sub(r'[^0-9a-zA-Z]', '_', torch.__version__)}",
            [str(SOURCE)],
            extra_cflags=["-O0", "-w"],
            is_python_module=False,
            is_standalone=False,
        )
    finally:
        os.environ["PATH"] = before
    return ctypes.CDLL(path)


def _search_path() -> str:
    """Returns PATH with the programs of this environment, where pip installs ninja."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


class _DeviceModule:
    """`torch.standin`, with the functions that torch calls."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Does nothing: random numbers are drawn on the CPU."""

    def get_rng_state(self, device: object = 0) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: object = 0) -> None:
        """Does nothing, as `manual_seed_all`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: object = None) -> None:
        """Does nothing: every operation is complete when it returns."""

    def max_memory_allocated(self) -> int:
        return int(load().standin_peak())

    def reset_peak_memory_stats(self) -> None:
        load().standin_reset_peak()


# Recording


@dataclass(frozen=True)
class Event:
    """A copy or a wait."""

    kind: str
    """`"upload"`, `"download"` or `"wait"`."""
    cause: str
    """The operation."""
    bytes: int
    """Bytes copied; 0 for a wait."""
    place: str
    """File and line in kfacpack, or in the caller if kfacpack was not involved."""


@dataclass
class Record:
    """What the device did inside `recorded()`."""

    events: list[Event] = field(default_factory=list)
    kernels: int = 0
    """Operations that computed something, including copies on the device; views are not counted."""

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    @property
    def uploads(self) -> list[Event]:
        return self.of("upload")

    @property
    def downloads(self) -> list[Event]:
        return self.of("download")

    @property
    def waits(self) -> list[Event]:
        return self.of("wait")

    @property
    def uploaded_bytes(self) -> int:
        return sum(event.bytes for event in self.uploads)

    def __str__(self) -> str:
        copies = f"{len(self.uploads)} uploads, {len(self.downloads)} downloads"
        lines = [f"{self.kernels} kernels, {copies}, {len(self.waits)} waits"]
        counted = Counter((event.kind, event.place, event.cause) for event in self.events)
        lines += [f"{count:6} {kind:9} {place}  {cause}" for (kind, place, cause), count in sorted(counted.items())]
        return "\n".join(lines)


@contextmanager
def recorded() -> Iterator[Record]:
    """Records kernels, copies and waits of all threads."""
    library, record = load(), Record()
    before = library.standin_kernels()

    def add(kind: bytes, cause: bytes, count: int) -> None:
        record.events.append(Event(kind.decode(), cause.decode(), count, _place()))

    call = _LISTENER(add)
    library.standin_listen(call)
    try:
        yield record
    finally:
        library.standin_listen(_LISTENER())
        record.kernels = library.standin_kernels() - before


def _place() -> str:
    """Returns the innermost line of kfacpack in the current stack, or of the first caller outside torch."""
    frame, other = sys._getframe(2), None
    while frame is not None:
        path = frame.f_code.co_filename
        if inside := _PACKAGE.match(path):
            return f"{inside[1]}:{frame.f_lineno}"
        if other is None and "site-packages" not in path and not path.startswith("<"):
            other = f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return other or "backward pass"


# Modes


@contextmanager
def without_float64() -> Iterator[None]:
    """Creating a float64 tensor on the device raises, as on MPS."""
    load().standin_support_double(False)
    try:
        yield
    finally:
        load().standin_support_double(True)


@contextmanager
def attention_kernel(kernel: SDPBackend) -> Iterator[None]:
    """Makes scaled dot-product attention use the operators of this GPU kernel: math, flash or efficient."""
    load().standin_attention(kernel.value)
    try:
        yield
    finally:
        load().standin_attention(SDPBackend.MATH.value)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Emulates what torch offers on CUDA and not on this device.

    Moving a module keeps its tied weights tied, and `torch.sparse_coo_tensor` returns a dense tensor.
    """
    sparse_coo_tensor, swap = torch.sparse_coo_tensor, torch.__future__.get_swap_module_params_on_conversion()

    def dense(indices: Any, values: Any, size: Any = None, **settings: Any) -> Tensor:
        if not isinstance(values, Tensor) or values.device.type != NAME:
            return sparse_coo_tensor(indices, values, size, **settings)
        full = torch.zeros(size, dtype=values.dtype, device=values.device)
        return full.index_put_(tuple(indices), values, accumulate=True)

    torch.sparse_coo_tensor = dense
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.sparse_coo_tensor = sparse_coo_tensor
        torch.__future__.set_swap_module_params_on_conversion(swap)


# Attention kernels of a GPU, by the formula. Their results are (N, L, H, D) in memory, seen as (N, H, L, D).


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    scores = q.float() @ k.float().mT * scale
    if bias is not None:
        scores = scores + bias
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _as_cuda_layout(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, bias, is_causal, q.shape[-1] ** -0.5 if scale is None else scale)
    return _as_cuda_layout(scores.softmax(-1) @ v.float(), q.dtype), scores.logsumexp(-1)


def _attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v and the scores."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    p, gradient = _scores(q, k, bias, is_causal, scale).softmax(-1), gradient.float()
    of_p = gradient @ v.float().mT
    of_scores = p * (of_p - (p * of_p).sum(-1, keepdim=True))
    of_q, of_k = scale * (of_scores @ k.float()), scale * (of_scores.mT @ q.float())
    return (*(_as_cuda_layout(part, q.dtype) for part in (of_q, of_k, p.mT @ gradient)), of_scores)


def _register_attention() -> None:
    def seed_and_offset() -> tuple[Tensor, Tensor]:
        return torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)

    def efficient(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
        output, log_sum = _attend(query, key, value, attn_bias, is_causal, scale)
        return output, log_sum if compute_log_sumexp else log_sum[..., :0], *seed_and_offset()

    def efficient_backward(
        grad, query, key, value, attn_bias, out, log_sum, seed, offset, dropout_p, mask, is_causal=False, *, scale=None
    ):
        bias = attn_bias if attn_bias is not None and attn_bias.numel() else None
        *gradients, of_scores = _attend_backward(grad, query, key, value, bias, is_causal, scale)
        of_bias = torch.empty(0, device=query.device)
        if mask[3] and bias is not None:
            of_bias = of_scores.sum_to_size(bias.shape).to(query.dtype)
        return *gradients, of_bias

    def flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        if query.dtype not in (torch.bfloat16, torch.float16):
            raise RuntimeError(f"standin: flash attention supports float16 and bfloat16, found {query.dtype}")
        output, log_sum = _attend(query, key, value, None, is_causal, scale)
        lengths = query.shape[2], key.shape[2]
        return output, log_sum, None, None, *lengths, *seed_and_offset(), torch.empty(0, device=query.device)

    def flash_backward(
        grad, query, key, value, out, log_sum, cq, ck, mq, mk, dropout_p, is_causal, seed, offset, *, scale=None
    ):
        return _attend_backward(grad, query, key, value, None, is_causal, scale)[:3]

    _LIBRARY.impl("_scaled_dot_product_efficient_attention", efficient, "PrivateUse1")
    _LIBRARY.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward, "PrivateUse1")
    _LIBRARY.impl("_scaled_dot_product_flash_attention", flash, "PrivateUse1")
    _LIBRARY.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "PrivateUse1")


_LIBRARY = torch.library.Library("aten", "IMPL")
"""Holds the registered kernels; they are removed when it is deleted."""
