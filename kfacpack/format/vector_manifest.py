"""The manifest of a task vector, as pydantic models. This module does not import torch.

A task vector is a safetensors file. The change to a parameter is stored as a dense tensor under the parameter's own
name. The head of task k, counted from 0 in the order of the manifest, is stored as `HEAD.k.weight`, with shape
(classes, width of f), and `HEAD.k.bias`, with shape (classes,). All of these tensors are float32. `HEAD`, `FACTORS`,
`REMAINDER` and `SPARSE` stand for the prefixes defined below.

Since version 1.1, the change to parameter k, counted from 0 in the order of `base`, may instead be stored as a product
U V of factors. For a parameter with m rows and n columns, the factors are `FACTORS.k.U`, with shape (m, r), and
`FACTORS.k.V`, with shape (r, n). A dense change may have a remainder, which corrects elements for which rounding
makes base + change inexact. `REMAINDER.k.index` contains the indices of these elements, and `REMAINDER.k.value` the
numbers to add to them. Both tensors have shape (entries,). A vector that was extracted from a checkpoint also lists
that checkpoint.

Since version 1.2, the change may be sparse: `SPARSE.k.mask`, with shape (⌈elements / 8⌉,), has one bit per element, and
`SPARSE.k.value`, with shape (entries,), contains the elements whose bits are set. A file has the lowest version that
supports all of its features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Any, Literal

from pydantic import (
    FailFast,
    Field,
    SerializerFunctionWrapHandler,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_serializer,
    model_validator,
)

from kfacpack.format.container import Spec, first_duplicate
from kfacpack.format.manifest import (
    MAX_SIDE,
    Base,
    Count,
    Digest,
    Dimension,
    Entry,
    Function,
    Name,
    NonNegative,
    Source,
    Text,
)
from kfacpack.format.reference import SCHEME, parse_address

VERSION = "1.2"
"""Format version of files that have sparse changes or the regime `sparse`; see `version_of` for other files."""
HEAD = "kfacpack.head"
"""Reserved prefix for the names of the tensors of a head."""
FACTORS = "kfacpack.factors"
"""Reserved prefix for the names of the tensors that store factors."""
REMAINDER = "kfacpack.remainder"
"""Reserved prefix for the names of the tensors of a remainder."""
SPARSE = "kfacpack.sparse"
"""Reserved prefix for the names of the tensors of a sparse change."""

HeadKind = Literal["auto", "text", "words", "prototypes"]
"""Method by which a head is built. "auto" selects a method that suits the model and the task."""
RegimeName = Literal["linear", "full", "attention", "sparse"]
HeadOrigin = Literal["text", "prototypes", "words"]
Feature = Literal["factors", "remainders", "sparse"]
"""Optional features of a file. `factors` and `remainders` were added in version 1.1, and `sparse` in version 1.2."""
CheckpointKind = Literal["weights", "adapter"]
Setting = StrictBool | StrictInt | StrictFloat | Text


class Training(Entry):
    """The settings with which a vector was trained.

    With the base model, the data and the bundles, they are sufficient to reproduce the vector.
    """

    seed: Annotated[StrictInt, Field(ge=0, lt=2**64)] | None = None
    settings: dict[Name, Setting] = Field(default_factory=dict)
    bundles: Annotated[tuple[Digest, ...], FailFast()] = ()
    """Digests of the bundles that the penalty was computed from."""


class HeadEntry(Entry):
    """The classes and the origin of a head. The weights of the head are stored as tensors in the file."""

    origin: HeadOrigin
    """Source of the weights: texts, words or prototypes."""
    classes: Annotated[tuple[Text, ...], FailFast(), Field(min_length=1)]
    """Class names in the order of the logits."""


class TaskEntry(Entry):
    """A task of a task vector: its data, its training settings and its head."""

    source: Source
    training: Training | None = None
    head: HeadEntry | None = None

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.source.task


class Addend(Entry):
    """A vector that was added or merged, identified by its digest. A sum is replaced by its own addends."""

    sha256: Digest
    coefficient: StrictFloat
    tasks: Annotated[tuple[Name, ...], FailFast()] = ()


class FileEntry(Entry):
    """A file in a checkpoint and the SHA-256 of its bytes."""

    name: Name
    """Name of the file, without folders."""
    sha256: Digest


class CheckpointEntry(Entry):
    """A fine-tuned checkpoint or adapter that a vector was extracted from. Local paths are recorded without folders."""

    name: Name
    """Name of the local file or folder, or `hf://[datasets/]owner/repo[/path]`."""
    kind: CheckpointKind
    revision: Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{40}$")] | None = None
    """Commit of the checkpoint if it is on the Hub."""
    files: Annotated[tuple[FileEntry, ...], FailFast(), Field(min_length=1)]
    """The files that determine the vector: the weights and, for an adapter, its config."""

    @property
    def location(self) -> str:
        """The name of a local checkpoint, or `hf://[datasets/]owner/repo@commit[/path]` for a checkpoint on the Hub."""
        if not self.revision or not (address := parse_address(self.name)):
            return self.name
        path = f"/{address.path}" if address.path else ""
        kind = "datasets/" if address.kind == "dataset" else ""
        return f"{SCHEME}{kind}{address.repository}@{self.revision}{path}"


class SolvedBlock(Entry):
    """A report on how a merge method with curvature merged one block of parameters.

    The method minimises the objective Σ_t w_t <W − W_t, G_t (W − W_t)> + ε ‖W − W_0‖², where W is the merged block and
    W_0 the prior. W_t is the block of task t, G_t its curvature and w_t its weight.
    """

    name: Name
    """Name of the block in the bundles or, if no bundle covers it, of the parameter."""
    curvature: StrictBool = True
    """Whether a bundle covers the block. If not, the merged block is equal to the prior."""
    iterations: Count = 0
    """Number of iterations of the solver; 0 if the linear system was solved directly."""
    residual: NonNegative = 0.0
    """Norm of the residual of the linear system, relative to its right-hand side."""
    before: StrictFloat = 0.0
    """Value of the objective at the prior."""
    after: StrictFloat = 0.0
    """Value of the objective for the merged block."""
    repaired: StrictBool = False
    """Whether negative eigenvalues of the block's matrices were set to zero."""


class MethodEntry(Entry):
    """The merge method that produced a merged vector. An addend's `coefficient` is its α in `kp.add`.

    Example:
        >>> merged = kp.add(vectors, "curvature", bundles=bundles)
        >>> merged.about.method.worst_residual, merged.about.method.without_curvature
    """

    name: Name
    settings: dict[Name, Setting] = Field(default_factory=dict)
    bundles: Annotated[tuple[Digest, ...], FailFast()] = ()
    """Digests of the bundles that the method used."""
    blocks: Annotated[tuple[SolvedBlock, ...], FailFast()] = ()
    """One report for each block; empty for merge methods that do not report on individual blocks."""

    @property
    def solved(self) -> tuple[SolvedBlock, ...]:
        """The reports on the blocks that were merged with curvature."""
        return tuple(block for block in self.blocks if block.curvature)

    @property
    def without_curvature(self) -> tuple[str, ...]:
        """Names of the blocks and parameters that no bundle covers. Their merged values are those of the prior."""
        return tuple(block.name for block in self.blocks if not block.curvature)

    @property
    def repaired(self) -> tuple[str, ...]:
        """Names of the blocks whose matrices had negative eigenvalues that were set to zero."""
        return tuple(block.name for block in self.blocks if block.repaired)

    @property
    def max_iterations(self) -> int:
        """The largest number of solver iterations that any block needed."""
        return max((block.iterations for block in self.blocks), default=0)

    @property
    def worst_residual(self) -> float:
        """The largest relative residual of the linear systems of all blocks."""
        return max((block.residual for block in self.blocks), default=0.0)

    @property
    def objective(self) -> tuple[float, float]:
        """The objective at the prior and the objective after the merge, each summed over all blocks."""
        return sum(block.before for block in self.blocks), sum(block.after for block in self.blocks)

    def multiplied(self, factor: float) -> MethodEntry:
        """Returns the entry that describes the merged vector after multiplication by a factor.

        The objective is quadratic, so it is multiplied by the square of the factor.

        Args:
            factor: Number by which the merged vector is multiplied.
        """
        square = factor**2
        blocks = tuple(
            block.model_copy(update={"before": square * block.before, "after": square * block.after})
            for block in self.blocks
        )
        return self.model_copy(update={"blocks": blocks})


class AboutVector(Entry):
    """The metadata of a task vector: base model, function, regime, tasks and provenance."""

    base: Base
    function: Function
    regime: RegimeName
    tasks: Annotated[tuple[TaskEntry, ...], FailFast()]
    addends: Annotated[tuple[Addend, ...], FailFast()] = ()
    """The vectors that were added or merged; empty for a vector that was trained or extracted."""
    method: MethodEntry | None = None
    """The method that merged the addends; None if they were simply summed, or if there are no addends."""
    checkpoints: Annotated[tuple[CheckpointEntry, ...], FailFast()] = ()
    """The checkpoints from which the vector or its addends were extracted."""

    @model_validator(mode="after")
    def _check_names(self) -> AboutVector:
        if duplicate := first_duplicate(task.name for task in self.tasks):
            raise ValueError(f"the task {duplicate!r} is listed twice")
        for prefix in (HEAD, FACTORS, REMAINDER, SPARSE):
            if reserved := [p.name for p in self.base.parameters if p.name.startswith(prefix)]:
                raise ValueError(f"invalid parameter name {reserved[0]!r}: the prefix {prefix!r} is reserved")
        if self.method and not self.addends:
            raise ValueError(f"the method is {self.method.name!r}, but no addends are listed")
        return self


class ParameterStorage(Entry):
    """How the change to a parameter is stored, if it is not stored as a single dense tensor."""

    name: Name
    """Name of the parameter."""
    rank: Annotated[StrictInt, Field(ge=0, le=MAX_SIDE)] | None = None
    """Rank r of the factors; 0 means that the change is exactly zero and that nothing is stored."""
    remainder: Dimension | None = None
    """Number of entries in the remainder."""
    entries: Dimension | None = None
    """Number of stored elements of a sparse change."""

    @model_validator(mode="after")
    def _check_form(self) -> ParameterStorage:
        if [self.rank, self.remainder, self.entries].count(None) != 2:
            raise ValueError(f"{self.name!r}: expected exactly one of the keys rank, remainder and entries")
        return self

    @model_serializer(mode="wrap")
    def _without_entries(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omits `entries` if it is not set. Files of version 1.1 lack this key, and their bytes must not change."""
        return {key: value for key, value in handler(self).items() if key != "entries" or value is not None}

    @property
    def feature(self) -> Feature:
        """The feature that a reader must support to read the change to this parameter."""
        if self.entries is not None:
            return "sparse"
        return "remainders" if self.rank is None else "factors"

    def specs(self, number: int, shape: tuple[int, ...]) -> dict[str, Spec]:
        """Returns the dtype and shape of each tensor in which the change is stored, by tensor name.

        Args:
            number: Index of the parameter in the manifest.
            shape: Shape of the parameter.
        """
        if self.remainder is not None:
            index = "I32" if prod(shape) < 2**31 else "I64"
            return {
                self.name: ("F32", shape),
                remainder_name(number, "index"): (index, (self.remainder,)),
                remainder_name(number, "value"): ("F64", (self.remainder,)),
            }
        if self.entries is not None:
            return {
                sparse_name(number, "mask"): ("U8", (-(-prod(shape) // 8),)),
                sparse_name(number, "value"): ("F32", (self.entries,)),
            }
        if not self.rank:
            return {}
        rows, columns = (shape[0], prod(shape[1:])) if shape else (1, 1)
        return {
            factor_name(number, "U"): ("F32", (rows, self.rank)),
            factor_name(number, "V"): ("F32", (self.rank, columns)),
        }


_KEYS_OF_1_1 = ("requires", "storage", "checkpoints")


class StoredTensor(Entry):
    """A tensor in the file and the SHA-256 of its bytes."""

    name: Name
    sha256: Digest


class VectorManifest(AboutVector):
    """The manifest of a task vector: its metadata and tensors."""

    version: Annotated[StrictStr, Field(pattern=r"^(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})$")]
    """Format version, MAJOR.MINOR."""
    producer: Text | None = None
    """Software that wrote the file."""
    requires: Annotated[tuple[Feature, ...], FailFast()] = ()
    """Features that a reader must support."""
    storage: Annotated[tuple[ParameterStorage, ...], FailFast()] = ()
    """The parameters whose change is not stored as a single dense tensor, in the order of `base`."""
    tensors: Annotated[tuple[StoredTensor, ...], FailFast()]

    @model_validator(mode="after")
    def _check_storage(self) -> VectorManifest:
        shapes = {parameter.name: parameter.shape for parameter in self.base.parameters}
        if duplicate := first_duplicate(entry.name for entry in self.storage):
            raise ValueError(f"the storage of {duplicate!r} is listed twice")
        for entry in self.storage:
            if entry.name not in shapes:
                raise ValueError(f"storage is listed for {entry.name!r}, which is not a parameter of the base model")
            shape = shapes[entry.name]
            size = prod(shape)
            if (entry.rank or 0) > min(side := shape[0] if shape else 1, size // side):
                raise ValueError(
                    f"the storage of {entry.name!r} has rank {entry.rank}, which is too high for shape {list(shape)}"
                )
            if (count := entry.remainder or entry.entries or 0) > size:
                form = "remainder" if entry.remainder else "sparse change"
                raise ValueError(f"the {form} of {entry.name!r} has {count} entries, expected at most {size}")
            if entry.feature not in self.requires:
                raise ValueError(
                    f"the storage of {entry.name!r} uses {entry.feature!r}, a feature that `requires` does not list"
                )
        return self

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omits keys added in version 1.1 if their values are empty, so that files of version 1.0 keep their bytes."""
        return {key: value for key, value in handler(self).items() if value or key not in _KEYS_OF_1_1}

    def specs(self) -> dict[str, Spec]:
        """Returns the dtype and shape of every tensor in the file, by name."""
        storage = {entry.name: entry for entry in self.storage}
        specs: dict[str, Spec] = {}
        for number, parameter in enumerate(self.base.parameters):
            entry = storage.get(parameter.name)
            specs |= entry.specs(number, parameter.shape) if entry else {parameter.name: ("F32", parameter.shape)}
        for number, task in enumerate(self.tasks):
            if task.head:
                specs[head_name(number, "weight")] = "F32", (len(task.head.classes), self.function.width)
                specs[head_name(number, "bias")] = "F32", (len(task.head.classes),)
        return specs

    def index_limits(self) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
        """Returns the limits that readers check for the values of index tensors and bitmaps.

        Returns:
            Two dicts. The first maps the name of each index tensor to the number of elements of its parameter. The
            second maps the name of each bitmap to the number of bits that must be set and the number of elements of its
            parameter.
        """
        storage = {entry.name: entry for entry in self.storage}
        indices, bitmaps = {}, {}
        for number, parameter in enumerate(self.base.parameters):
            entry, size = storage.get(parameter.name), prod(parameter.shape)
            if entry and entry.remainder is not None:
                indices[remainder_name(number, "index")] = size
            elif entry and entry.entries is not None:
                bitmaps[sparse_name(number, "mask")] = entry.entries, size
        return indices, bitmaps

    def with_digests(self, digests: Mapping[str, str]) -> VectorManifest:
        """Returns a copy of the manifest with the SHA-256 of each tensor filled in.

        Args:
            digests: SHA-256 by tensor name.
        """
        tensors = tuple(tensor.model_copy(update={"sha256": digests[tensor.name]}) for tensor in self.tensors)
        return self.model_copy(update={"tensors": tensors})

    def about(self) -> AboutVector:
        """Returns the metadata without the tensors. The result is not validated again."""
        return AboutVector.model_construct(**{key: getattr(self, key) for key in AboutVector.model_fields})


def head_name(number: int, tensor: Literal["weight", "bias"]) -> str:
    """Returns the name of a head's tensor, such as `kfacpack.head.0.weight`.

    Args:
        number: Index of the task in the manifest.
        tensor: "weight" or "bias".
    """
    return f"{HEAD}.{number}.{tensor}"


def factor_name(number: int, factor: Literal["U", "V"]) -> str:
    """Returns the name of the tensor that stores a factor, such as `kfacpack.factors.0.U`.

    Args:
        number: Index of the parameter in the manifest.
        factor: "U" or "V".
    """
    return f"{FACTORS}.{number}.{factor}"


def remainder_name(number: int, tensor: Literal["index", "value"]) -> str:
    """Returns the name of a remainder's tensor, such as `kfacpack.remainder.0.index`.

    Args:
        number: Index of the parameter in the manifest.
        tensor: "index" or "value".
    """
    return f"{REMAINDER}.{number}.{tensor}"


def sparse_name(number: int, tensor: Literal["mask", "value"]) -> str:
    """Returns the name of a sparse change's tensor, such as `kfacpack.sparse.0.mask`.

    Args:
        number: Index of the parameter in the manifest.
        tensor: "mask" or "value".
    """
    return f"{SPARSE}.{number}.{tensor}"


def version_of(about: AboutVector, storage: Sequence[ParameterStorage]) -> str:
    """Returns the lowest version of the file format that supports all features of a vector.

    Args:
        about: Metadata of the vector.
        storage: The parameters whose change is not stored as a single dense tensor.
    """
    if about.regime == "sparse" or any(entry.feature == "sparse" for entry in storage):
        return VERSION
    return "1.1" if storage or about.checkpoints else "1.0"
