"""Options of an estimate, and the probes that they select.

Probes are random directions s in which f is differentiated, with E[s sᵀ] = I: one backward pass each. The probes of an
example depend only on the seed and on the index of the example, and not on the batch size, the number of processes, or
the batch at which an interrupted run was resumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kfacpack.compression.codecs import BlockCodec, CodecChain
from kfacpack.errors import KfacpackError
from kfacpack.estimation.collectors import CollectorSettings
from kfacpack.format.manifest import (
    EXPAND,
    REDUCE,
    Estimate,
    EstimateStructure,
    Fisher,
    FloatType,
    Probe,
    Scaling,
    Sharing,
)


@dataclass(frozen=True)
class Probes:
    """Directions in which f is differentiated.

    Raises:
        KfacpackError: If an option has a value that is not supported.
    """

    fisher: Fisher = "mc"
    """"mc" for random probes, "exact" for all C unit vectors."""
    kind: Probe = "orthogonal"
    samples: int = 1
    """Number of random probes per example."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.fisher not in ("mc", "exact"):
            raise KfacpackError(f"fisher {self.fisher!r}: expected 'mc' or 'exact'")
        if self.kind not in ("orthogonal", "rademacher", "gaussian"):
            raise KfacpackError(f"probe {self.kind!r}: expected 'orthogonal', 'rademacher' or 'gaussian'")
        if not isinstance(self.samples, int) or self.samples < 1:
            raise KfacpackError(f"samples {self.samples}: expected an integer, at least 1")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise KfacpackError(f"seed {self.seed}: expected an integer from 0 to 2^64 - 1")

    def check(self, width: int) -> None:
        """Checks the number of probes for an output of this width.

        Raises:
            KfacpackError: If more orthogonal probes are requested than f has components.
        """
        if self.fisher == "mc" and self.kind == "orthogonal" and self.samples > width:
            problem = f"expected at most {width} orthogonal probes for an output of width {width}, got {self.samples}"
            raise KfacpackError(f"{problem}. {width} probes are exact: use fisher 'exact'")

    def passes(self, width: int) -> int:
        """Returns the number of backward passes per batch."""
        return width if self.fisher == "exact" else self.samples

    @property
    def divisor(self) -> int:
        """Number by which the sum over the passes is divided."""
        return 1 if self.fisher == "exact" else self.samples

    def draw(self, examples: Sequence[int], width: int) -> Iterator[Tensor]:
        """Yields the probes of the examples, (N, C), one tensor per pass.

        Args:
            examples: Indices of the N examples.
            width: C.
        """
        if self.fisher == "exact":
            for k in range(width):
                unit = torch.zeros(len(examples), width)
                unit[:, k] = 1
                yield unit
            return
        probes = torch.stack([self._of_example(example, width) for example in examples])
        if self.kind == "orthogonal":
            probes = torch.linalg.qr(probes.mT).Q.mT * width**0.5
        yield from probes.unbind(1)

    def _of_example(self, example: int, width: int) -> Tensor:
        """Returns the probes of one example, (samples, C), in float64."""
        generator = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, example]))
        shape = (self.samples, width)
        if self.kind == "rademacher":
            return torch.from_numpy(generator.integers(0, 2, shape) * 2.0 - 1.0)
        return torch.from_numpy(generator.standard_normal(shape))


_FLOAT_TYPES: dict[torch.dtype, FloatType] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


@dataclass(frozen=True)
class EstimateOptions:
    """Options of an estimate, as for `kp.estimate`.

    Raises:
        KfacpackError: If an option has a value that is not supported, or options contradict each other.
    """

    fisher: Fisher = "mc"
    samples: int = 1
    probe: Probe = "orthogonal"
    seed: int = 0
    sharing: Sharing = "expand"
    structure: EstimateStructure = "kronecker"
    compress: str | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        chain, _ = self.chain, self.probes  # both check their options
        if self.sharing not in ("expand", "reduce"):
            raise KfacpackError(f"sharing {self.sharing!r}: expected 'expand' or 'reduce'")
        if self.structure not in ("kronecker", "diagonal"):
            raise KfacpackError(f"structure {self.structure!r}: expected 'kronecker' or 'diagonal'")
        if self.structure == "diagonal" and chain.structure:
            problem = "a diagonal can only be compressed with fp16 or bf16"
            raise KfacpackError(f"compress {self.compress!r}: {problem}")

    @property
    def probes(self) -> Probes:
        """The probes to draw."""
        return Probes(self.fisher, self.probe, self.samples, self.seed)

    @cached_property
    def chain(self) -> CodecChain:
        """Codecs that the result is compressed with."""
        return CodecChain() if self.compress is None else CodecChain.parse(self.compress)

    @property
    def diagonal_blocks(self) -> int:
        """K of 'block:K': the number of diagonal blocks of each factor that are computed."""
        return self.chain.structure.count if isinstance(self.chain.structure, BlockCodec) else 1

    @property
    def scaling(self) -> Scaling:
        """Scaling of the factors, as in the manifest."""
        return EXPAND if self.sharing == "expand" else REDUCE

    def settings(self, dtype: torch.dtype, device: torch.device) -> CollectorSettings:
        """Returns the form of the sums for a model with this dtype and device."""
        return CollectorSettings(
            dtype=torch.promote_types(torch.float32, dtype),
            device=torch.device("cpu") if self.offload else device,
            reduce=self.sharing == "reduce",
            blocks=self.diagonal_blocks,
        )

    def manifest(self, dtype: torch.dtype) -> Estimate:
        """Returns the manifest entry for a model with this dtype."""
        sum_dtype = _FLOAT_TYPES[torch.promote_types(torch.float32, dtype)]
        common = {"model_dtype": _FLOAT_TYPES.get(dtype), "accumulation_dtype": sum_dtype}
        if self.fisher == "exact":
            return Estimate(fisher="exact", **common)
        return Estimate(fisher="mc", probe=self.probe, probes=self.samples, seed=self.seed, **common)
