"""Options of an estimate, and the probes that they select.

Probes are random directions s in which f is differentiated, with one backward pass per probe. With the metric `l2`,
E[s sᵀ] = I. With `kl`, s = Wᵀ (e_y - p), where W is the output layer of a language model, p = softmax(W f), y is drawn
from p, and e_y is the one-hot vector of y, so that E[s sᵀ] = Wᵀ (diag p - p pᵀ) W. The random numbers for an example
depend only on the seed and on the index of the example. They do not depend on the batch size, the number of processes,
or the batch at which an interrupted run was resumed.

The probes for different rows of f are independent, so the expected product of the probes for two rows is zero, and one
backward pass is sufficient for all rows of an example. Exact directions are not random and need separate passes for
each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from kfacpack.compression.codecs import BlockCodec, CodecChain, HalfCodec
from kfacpack.errors import KfacpackError
from kfacpack.estimation.collectors import CollectorSettings
from kfacpack.format.manifest import (
    EXPAND,
    REDUCE,
    Estimate,
    EstimateStructure,
    Fisher,
    FloatType,
    Metric,
    Probe,
    Scaling,
    Sharing,
)

RowNumber: TypeAlias = tuple[int, int]
"""Index of an example, and index of a row of f among the rows for this example."""


@dataclass(frozen=True)
class Probes:
    """The directions in which f is differentiated.

    Raises:
        KfacpackError: If an option has a value that is not supported.
    """

    fisher: Fisher = "mc"
    """"mc" for random probes, "exact" for C directions per row of f, which give the exact result."""
    kind: Probe = "orthogonal"
    samples: int = 1
    """Number of random probes per example."""
    seed: int = 0
    output_layer: Tensor | None = field(default=None, compare=False, repr=False)
    """Weight of the model's output layer, (vocabulary, C), if the metric is `kl`; None if it is `l2`."""

    def __post_init__(self) -> None:
        if self.fisher not in ("mc", "exact"):
            raise KfacpackError(f"fisher {self.fisher!r}: expected 'mc' or 'exact'")
        if self.kind not in ("orthogonal", "rademacher", "gaussian"):
            raise KfacpackError(f"probe {self.kind!r}: expected 'orthogonal', 'rademacher' or 'gaussian'")
        if not isinstance(self.samples, int) or self.samples < 1:
            raise KfacpackError(f"samples {self.samples}: expected an integer of at least 1")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise KfacpackError(f"seed {self.seed}: expected an integer from 0 to 2^64 - 1")

    def check(self, width: int) -> None:
        """Checks that the number of probes is possible for an output f with `width` components.

        Raises:
            KfacpackError: If more orthogonal probes are requested than f has components.
        """
        if self.fisher == "mc" and self.kind == "orthogonal" and self.samples > width and self.output_layer is None:
            problem = f"{self.samples} orthogonal probes are not possible for an output of width {width}"
            raise KfacpackError(f"{problem}; expected at most {width}. To cover all directions, use fisher 'exact'")

    def passes(self, width: int, rows: int = 1) -> int:
        """Returns the number of backward passes for a batch whose examples have at most `rows` rows of f."""
        return width * rows if self.fisher == "exact" else self.samples

    @property
    def divisor(self) -> int:
        """Number by which the sum over backward passes is divided: the number of random probes, or 1 for "exact"."""
        return 1 if self.fisher == "exact" else self.samples

    def sampling_bytes(self, rows: int) -> int:
        """Returns how many bytes are needed to draw the probes for `rows` rows of f.

        The metric `kl` needs distributions over the vocabulary. For `l2`, the number of bytes is 0.
        """
        if self.output_layer is None:
            return 0
        # Per element: p in float32, and its cumulative sum in float64, which is computed from a copy.
        return min(rows, ROWS_AT_ONCE) * len(self.output_layer) * 16

    def draw(self, numbers: Sequence[RowNumber], f: Tensor) -> Iterator[Tensor]:
        """Yields the probes for the P rows of f in a batch: one tensor, (P, C), per backward pass.

        Args:
            numbers: For each row, the index of its example, and the index of the row among the rows for this example.
            f: The output of the model for the batch, (P, C).
        """
        width = f.shape[1]
        if self.fisher == "exact":
            roots = None if self.output_layer is None else _metric_roots(f, self.output_layer)
            row_of = torch.tensor([row for _, row in numbers], device=f.device)
            for row in range(max(row for _, row in numbers) + 1):
                for k in range(width):
                    directions = torch.eye(width, dtype=f.dtype, device=f.device)[k] if roots is None else roots[..., k]
                    yield directions * (row_of == row)[:, None]
            return
        if self.output_layer is not None:
            uniform = torch.stack([torch.from_numpy(self._generator(row).random(self.samples)) for row in numbers])
            yield from _sampled_probes(f, self.output_layer, uniform)
            return
        probes = torch.stack([self._of_row(number, width) for number in numbers])
        if self.kind == "orthogonal":
            probes = torch.linalg.qr(probes.mT).Q.mT * width**0.5
        yield from probes.unbind(1)

    def _generator(self, number: RowNumber) -> np.random.Generator:
        example, row = number
        return np.random.Generator(np.random.Philox(key=self.seed, counter=[0, row, 0, example]))

    def _of_row(self, number: RowNumber, width: int) -> Tensor:
        """Returns the random probes for one row of f, (samples, C), in float64."""
        generator, shape = self._generator(number), (self.samples, width)
        if self.kind == "rademacher":
            return torch.from_numpy(generator.integers(0, 2, shape) * 2.0 - 1.0)
        return torch.from_numpy(generator.standard_normal(shape))


ROWS_AT_ONCE = 256
"""Maximum number of rows of f whose distributions over the vocabulary are in memory at the same time."""


def _sampled_probes(f: Tensor, output_layer: Tensor, uniform: Tensor) -> Iterator[Tensor]:
    """Yields the probes Wᵀ (e_y - p), where y is drawn from p = softmax(W f): one tensor, (P, C), per sample.

    The cumulative distributions are computed in float64 on the CPU, because not every device supports float64, and
    because the samples must not depend on the order in which a device adds numbers.

    Args:
        f: The output of the model for a batch, (P, C).
        output_layer: W, (vocabulary, C).
        uniform: Uniform random numbers, (P, samples), from which y is computed by inverting the distribution function.
    """
    W = output_layer.detach()
    parts = []
    for rows, numbers in zip(f.split(ROWS_AT_ONCE), uniform.split(ROWS_AT_ONCE), strict=True):
        p = (rows.to(W) @ W.T).softmax(1, dtype=torch.promote_types(W.dtype, torch.float32))
        cumulative = p.cpu().double().cumsum(1)
        y = torch.searchsorted(cumulative, numbers * cumulative[:, -1:]).clamp(max=len(W) - 1)
        parts.append(W[y.to(W.device)] - (p.to(W) @ W)[:, None])
    yield from torch.cat(parts).unbind(1)


def _metric_roots(f: Tensor, output_layer: Tensor) -> Tensor:
    """Returns a matrix R with R Rᵀ = Wᵀ (diag p - p pᵀ) W for each row of f, where p = softmax(W f).

    The matrices, (P, C, C), are computed in float64 on the CPU.
    """
    W = output_layer.detach().cpu().double()
    roots = []
    for row in f.detach().cpu().double():
        p = (W @ row).softmax(0)
        centred = W - p @ W
        values, vectors = torch.linalg.eigh(centred.T @ (p[:, None] * centred))
        roots.append((vectors * values.clamp(min=0).sqrt()).to(f))
    return torch.stack(roots)


_FLOAT_TYPES: dict[torch.dtype, FloatType] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


@dataclass(frozen=True)
class EstimateOptions:
    """Options of an estimate; see `kp.estimate`.

    Raises:
        KfacpackError: If an option has a value that is not supported, or if options contradict each other.
    """

    fisher: Fisher = "mc"
    samples: int = 1
    probe: Probe = "orthogonal"
    seed: int = 0
    sharing: Sharing = "expand"
    structure: EstimateStructure = "kronecker"
    compress: str | None = None
    offload: bool = False
    metric: Metric = "l2"

    def __post_init__(self) -> None:
        chain, _ = self.chain, self.probes  # both properties check options
        if self.sharing not in ("expand", "reduce"):
            raise KfacpackError(f"sharing {self.sharing!r}: expected 'expand' or 'reduce'")
        if self.structure not in ("kronecker", "diagonal"):
            raise KfacpackError(f"structure {self.structure!r}: expected 'kronecker' or 'diagonal'")
        if self.structure == "diagonal" and not all(isinstance(step, HalfCodec) for step in chain.steps):
            problem = "the structure 'diagonal' can only be compressed with fp16 or bf16"
            raise KfacpackError(f"compress {self.compress!r}: {problem}")
        if self.metric not in ("l2", "kl"):
            raise KfacpackError(f"metric {self.metric!r}: expected 'l2' or 'kl'")
        if self.metric == "kl" and self.probe != "orthogonal":
            problem = "with the metric 'kl', probes are drawn from the output distribution"
            raise KfacpackError(f"probe {self.probe!r}: {problem}; omit this option")

    @property
    def probes(self) -> Probes:
        """The `Probes` for these options. With the metric `kl`, `probes_of` adds the output layer of the model."""
        return Probes(self.fisher, self.probe, self.samples, self.seed)

    @cached_property
    def chain(self) -> CodecChain:
        """The codecs that compress the estimate."""
        return CodecChain() if self.compress is None else CodecChain.parse(self.compress)

    @property
    def diagonal_blocks(self) -> int:
        """Number of diagonal blocks that `compress` requests for each factor: K for 'block:K', otherwise 1."""
        return self.chain.structure.count if isinstance(self.chain.structure, BlockCodec) else 1

    @property
    def scaling(self) -> Scaling:
        """Scaling of the factors, as recorded in the manifest."""
        return EXPAND if self.sharing == "expand" else REDUCE

    def settings(self, dtype: torch.dtype, device: torch.device) -> CollectorSettings:
        """Returns the dtype, device and other settings of the sums, given the dtype and device of the model."""
        return CollectorSettings(
            dtype=torch.promote_types(torch.float32, dtype),
            device=torch.device("cpu") if self.offload else device,
            reduce=self.sharing == "reduce",
            blocks=None if self.chain.structure is None else self.diagonal_blocks,
        )

    def manifest(self, dtype: torch.dtype) -> Estimate:
        """Returns the manifest entry that describes the estimate, given the dtype of the model."""
        sum_dtype = _FLOAT_TYPES[torch.promote_types(torch.float32, dtype)]
        common = {"model_dtype": _FLOAT_TYPES.get(dtype), "accumulation_dtype": sum_dtype}
        if self.fisher == "exact":
            return Estimate(fisher="exact", **common)
        probe = "sampled" if self.metric == "kl" else self.probe
        return Estimate(fisher="mc", probe=probe, probes=self.samples, seed=self.seed, **common)
