"""The manifest: what a bundle says about itself. The JSON Schema in spec/ is generated from these classes.

Unknown keys in a file are ignored, so that a later MINOR version may add some; a key that must not be ignored is
announced under `requires`. From Python they are refused: there they are slips of the pen. Every list stops at its first
wrong item (FailFast), so that a hostile manifest cannot make a report of its own size. Nothing here imports torch.
"""

from __future__ import annotations

import re
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from kfacpack.format.container import refuse_duplicate_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


VERSION = "1.1"
MAX_SIDE = 2**24
MAX_PIECES = 64

# Control characters, and those that reorder or hide what stands around them.
_UNSEEN = r"\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
_NAME = rf"^(?![A-Za-z]:)(?!/)(?!(.*/)?\.\.?(/|$))[^{_UNSEEN}\\]{{1,512}}$"
_TEXT = rf"^[^{_UNSEEN}]{{0,4096}}$"
# JSON can spell half a surrogate pair, which is no character; patterns in a schema cannot say so in every language.
_SURROGATE = re.compile("[\ud800-\udfff]")
_NAME_RULE, _TEXT_RULE = re.compile(_NAME), re.compile(_TEXT)


def _safe_name(name: str) -> str:
    """Names end up in file names and tables: no control character, nothing that a file system would follow."""
    if not _NAME_RULE.fullmatch(name) or _SURROGATE.search(name):
        raise ValueError(
            f"{name[:80]!r} is not allowed as a name: 1 to 512 characters, no backslash, no control or hidden "
            "character, no drive letter, no leading '/', no '.' or '..' between slashes"
        )
    return name


def _safe_text(text: str) -> str:
    if not _TEXT_RULE.fullmatch(text) or _SURROGATE.search(text):
        raise ValueError(f"{text[:80]!r} is not allowed as a text: at most 4096 characters, no control character")
    return text


Name = Annotated[StrictStr, AfterValidator(_safe_name), WithJsonSchema({"type": "string", "pattern": _NAME})]
Digest = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[StrictInt, Field(ge=0, le=2**53)]
Side = Annotated[StrictInt, Field(ge=1, le=MAX_SIDE)]
Dimension = Annotated[StrictInt, Field(ge=1, le=2**40)]
Text = Annotated[StrictStr, AfterValidator(_safe_text), WithJsonSchema({"type": "string", "pattern": _TEXT})]
FloatType = Literal["float64", "float32", "float16", "bfloat16"]
Fisher = Literal["exact", "mc"]
Probe = Literal["gaussian", "rademacher", "orthogonal"]
Sharing = Literal["expand", "reduce"]
NonNegative = Annotated[StrictFloat, Field(ge=0)]


def first_problem(error: ValidationError) -> tuple[tuple[int | str, ...], str]:
    """The place of the first thing that pydantic found wrong, and what it is, in words."""
    first = error.errors(include_url=False, include_input=False)[0]
    return first["loc"], first["msg"].removeprefix("Value error, ")


class Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, revalidate_instances="always")


class Parameter(Entry):
    """One covered parameter of the base model, as it was when the curvature was computed."""

    name: Name
    dtype: Annotated[StrictStr, Field(pattern=r"^[A-Z0-9_]{1,16}$")]
    shape: Annotated[tuple[Dimension, ...], FailFast(), Field(max_length=8)]
    sha256: Digest


def base_digest(parameters: tuple[Parameter, ...]) -> str:
    """The identity of a base model: four lines a parameter (name, dtype, shape, SHA-256 of its bytes), by name."""
    lines = (
        f"{p.name}\n{p.dtype}\n{'x'.join(map(str, p.shape))}\n{p.sha256}\n"
        for p in sorted(parameters, key=lambda p: p.name.encode())
    )
    return sha256("".join(lines).encode()).hexdigest()


class Base(Entry):
    """The base model. Bundles belong together when the digests of the parameters they share agree, not for its name."""

    family: Name
    name: Name
    revision: Name | None = None
    sha256: Digest
    parameters: Annotated[tuple[Parameter, ...], FailFast(), Field(min_length=1)]

    @model_validator(mode="after")
    def _digest_holds(self) -> Base:
        if twice := refuse_duplicate_keys(parameter.name for parameter in self.parameters):
            raise ValueError(f"the parameter {twice!r} is listed twice")
        if (found := base_digest(self.parameters)) != self.sha256:
            raise ValueError(f"sha256 is {self.sha256}, the listed parameters give {found}")
        return self


class Function(Entry):
    """What f is: the output whose drift the curvature measures, linearised at θ0 = the base model's parameters."""

    output: Literal["embedding", "hidden-state", "logits", "other"]
    normalized: StrictBool
    width: Side
    at: Literal["base"] = "base"
    detail: Text | None = None


class OutputScale(Entry):
    """How large f is on the examples. Of a merged curvature, the weighted means over its tasks."""

    mean_square: NonNegative
    """E‖f‖²."""
    variance: NonNegative
    """E‖f − E f‖², with the divisor n − 1; 0 for a single example."""


FORMULAS = {
    "expand": "G = B (x) A; A = 1/P sum_{n,r} a a^T; B = 1/N sum_{n,s,r} w_s g g^T",
    "reduce": "G = B (x) A; A = 1/N sum_n abar abar^T, abar = 1/R_n sum_r a; "
    "B = 1/N sum_{n,s} w_s gsum gsum^T, gsum = sum_r g",
}


class Scaling(Entry):
    """How the factors are normalised: one of two formulas, written out so that no reader has to guess."""

    sharing: Sharing
    formula: Text

    @model_validator(mode="after")
    def _formula_is_known(self) -> Scaling:
        if self.formula != FORMULAS[self.sharing]:
            raise ValueError(f"for {self.sharing!r} the formula must read {FORMULAS[self.sharing]!r}")
        return self


EXPAND = Scaling(sharing="expand", formula=FORMULAS["expand"])
REDUCE = Scaling(sharing="reduce", formula=FORMULAS["reduce"])


class Estimate(Entry):
    """How the expectation over f's outputs was taken."""

    fisher: Fisher
    probe: Probe | None = None
    probes: Annotated[StrictInt, Field(ge=1, le=2**32)] | None = None
    seed: Annotated[StrictInt, Field(ge=0, lt=2**64)] | None = None
    model_dtype: FloatType | None = None
    accumulation_dtype: FloatType | None = None

    @model_validator(mode="after")
    def _probes_go_with_mc(self) -> Estimate:
        given = [value is not None for value in (self.probe, self.probes)]
        if not all(given) if self.fisher == "mc" else any(given):
            raise ValueError("fisher 'mc' needs probe and probes, fisher 'exact' has neither")
        return self


class Source(Entry):
    """Whose curvature it is: the task and the data behind it."""

    task: Name
    dataset: Name | None = None
    revision: Name | None = None
    split: Name | None = None
    preprocessing: Text | None = None
    examples: Count | None = None
    dataset_size: Count | None = None
    license: Text | None = None


class Parent(Entry):
    """One of the bundles that a merge took, by the digest of its whole content."""

    sha256: Digest
    weight: StrictFloat
    task: Name | None = None
    dataset_size: Count | None = None


class Merge(Entry):
    """Which bundles were merged, with which weights, by which rule. Parents of parents are listed, not nested."""

    rule: Name
    rank: Annotated[StrictInt, Field(ge=1)] | None = None
    parents: Annotated[tuple[Parent, ...], FailFast()]

    @model_validator(mode="after")
    def _no_parent_twice(self) -> Merge:
        if twice := refuse_duplicate_keys(parent.sha256 for parent in self.parents):
            raise ValueError(f"the parent {twice} is there twice")
        return self


RelativeError = Annotated[StrictFloat, Field(ge=0)]


class Loss(Entry):
    """What one lossy step did to one block, or to all: the codec or rule, and the relative errors measured then.

    `quadratic` is that on random task vectors, `vector` that on a real one.
    """

    step: Name
    frobenius: RelativeError | None = None
    quadratic: RelativeError | None = None
    vector: RelativeError | None = None

    @classmethod
    def measured(cls, step: str, **errors: float | None) -> Loss:
        """Errors to six digits: more would be noise, and differ from one processor to the next."""
        return cls(
            step=step, **{key: None if error is None else float(f"{error:.6g}") for key, error in errors.items()}
        )


class About(Entry):
    """Everything that is said of a curvature and is not the curvature itself."""

    base: Base
    function: Function
    output_scale: OutputScale | None = None
    """Scale of f on the examples, which a penalty compares the drift of f with. New in 1.1."""
    scaling: Scaling = EXPAND
    estimate: Estimate | None = None
    source: Source | None = None
    merge: Merge | None = None
    losses: Annotated[tuple[Loss, ...], FailFast()] = ()


class Piece(Entry):
    """A parameter's place in the matrix of its block.

    `rows` takes a slice of the parameter's first dimension; `view` makes it a matrix; its first element goes to `at`.
    """

    parameter: Name
    view: Literal["matrix", "transposed", "column"] = "matrix"
    rows: tuple[Count, Count] | None = None
    at: tuple[Count, Count] = (0, 0)

    def matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of this piece, once its parameter, of that shape, is sliced and seen as a matrix."""
        if self.rows is not None:
            shape = (self.rows[1] - self.rows[0], *shape[1:])
        if self.view == "column":
            return prod(shape), 1
        rows, columns = shape[0], prod(shape[1:])
        return (columns, rows) if self.view == "transposed" else (rows, columns)


class Join(Entry):
    """How parameters make up one matrix of `rows` × `columns`: the pieces tile it."""

    rows: Dimension
    columns: Dimension
    pieces: Annotated[tuple[Piece, ...], FailFast(), Field(min_length=1, max_length=MAX_PIECES)]


class Term(Entry):
    """One `weight · B ⊗ A`."""

    B: Name
    A: Name
    weight: StrictFloat = 1.0


class BlockEntry(Entry):
    name: Name
    operation: Name
    join: Join
    losses: Annotated[tuple[Loss, ...], FailFast()] = ()


class KroneckerEntry(BlockEntry):
    """G = Σ weight · B ⊗ A, acting on the joined matrix as B ΔW A."""

    structure: Literal["kronecker"]
    terms: Annotated[tuple[Term, ...], FailFast(), Field(min_length=1)]

    def references(self) -> Iterator[tuple[str, int]]:
        """The matrices this block refers to, each with the side it must have."""
        for term in self.terms:
            yield term.B, self.join.rows
            yield term.A, self.join.columns


class DenseEntry(BlockEntry):
    """G itself, acting on the joined matrix flattened row by row. Held as 'diagonal', it is G's diagonal."""

    structure: Literal["dense", "diagonal"]
    matrix: Name

    def references(self) -> Iterator[tuple[str, int]]:
        yield self.matrix, self.join.rows * self.join.columns


class TensorEntry(Entry):
    """One tensor of a matrix: which component it is, its name in the file and the SHA-256 of its bytes."""

    component: Name
    name: Name
    sha256: Digest


class MatrixEntry(Entry):
    """A symmetric matrix and how it is held. `examples` and `positions` are what its mean ran over."""

    name: Name
    form: Name
    version: Annotated[StrictInt, Field(ge=1)] = 1
    side: Side
    psd: StrictBool = True
    examples: Count | None = None
    positions: Count | None = None
    tensors: Annotated[tuple[TensorEntry, ...], FailFast(), Field(min_length=1, max_length=8)]

    @property
    def components(self) -> dict[str, str]:
        """Component -> tensor name."""
        return {tensor.component: tensor.name for tensor in self.tensors}


class Manifest(About):
    version: Annotated[StrictStr, Field(pattern=r"^(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})$")]
    scaling: Scaling
    requires: Annotated[tuple[Name, ...], FailFast()] = ()
    producer: Text | None = None
    matrices: Annotated[tuple[MatrixEntry, ...], FailFast(), Field(min_length=1)]
    blocks: Annotated[
        tuple[Annotated[KroneckerEntry | DenseEntry, Field(discriminator="structure")], ...],
        FailFast(),
        Field(min_length=1),
    ]

    def about(self) -> About:
        """What it says beside the matrices and blocks. It has been checked, and is not checked again."""
        return About.model_construct(**{key: getattr(self, key) for key in About.model_fields})

    def with_digests(self, digests: Mapping[str, str]) -> Manifest:
        """The same manifest, the SHA-256 of each tensor filled in."""
        matrices = tuple(
            matrix.model_copy(
                update={"tensors": tuple(t.model_copy(update={"sha256": digests[t.name]}) for t in matrix.tensors)}
            )
            for matrix in self.matrices
        )
        return self.model_copy(update={"matrices": matrices})
