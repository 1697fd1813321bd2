"""The manifest of a bundle, as pydantic models. The JSON Schema in spec/ is generated from these classes.

Unknown keys in a file are ignored, so that a later MINOR version can add keys. Keys that must not be ignored are listed
under `requires`. The classes reject unknown arguments. Validation of a list stops at its first invalid item
(FailFast), so that the error report of a malicious manifest stays small. This module does not import torch.
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

from kfacpack.format.container import first_duplicate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


VERSION = "1.3"
MAX_SIDE = 2**24
MAX_PIECES = 64

# Control characters, and characters that reorder or hide the text around them.
_HIDDEN = r"\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
_NAME = rf"^(?![A-Za-z]:)(?!/)(?!(.*/)?\.\.?(/|$))[^{_HIDDEN}\\]{{1,512}}$"
_TEXT = rf"^[^{_HIDDEN}]{{0,4096}}$"
# JSON can encode unpaired surrogates. They are not part of the patterns because not every regex dialect supports them.
_SURROGATE = re.compile("[\ud800-\udfff]")
_NAME_PATTERN, _TEXT_PATTERN = re.compile(_NAME), re.compile(_TEXT)


def _safe_name(name: str) -> str:
    """Returns a name after checking that it contains no hidden characters and that it is safe as part of a path."""
    if not _NAME_PATTERN.fullmatch(name) or _SURROGATE.search(name):
        raise ValueError(
            f"{name[:80]!r} is not a valid name: expected 1 to 512 characters. Backslashes, control characters, "
            "hidden characters, drive letters, a leading '/' and the path components '.' and '..' are not allowed"
        )
    return name


def _safe_text(text: str) -> str:
    if not _TEXT_PATTERN.fullmatch(text) or _SURROGATE.search(text):
        raise ValueError(f"{text[:80]!r} contains control or hidden characters, or more than 4096 characters")
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
Metric = Literal["l2", "kl"]
Sharing = Literal["expand", "reduce"]
EstimateStructure = Literal["kronecker", "diagonal"]
NonNegative = Annotated[StrictFloat, Field(ge=0)]


def first_problem(error: ValidationError) -> tuple[tuple[int | str, ...], str]:
    """Returns the location (a path of keys and indices) and the message of the first validation error."""
    first = error.errors(include_url=False, include_input=False)[0]
    return first["loc"], first["msg"].removeprefix("Value error, ")


class Entry(BaseModel):
    """Base class of all manifest entries, which are immutable and reject unknown arguments, NaN and Inf."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, revalidate_instances="always")


class Parameter(Entry):
    """A parameter of the base model, identified by its name, dtype, shape and SHA-256."""

    name: Name
    """Name of the parameter in the state dict."""
    dtype: Annotated[StrictStr, Field(pattern=r"^[A-Z0-9_]{1,16}$")]
    """Name of the dtype in safetensors."""
    shape: Annotated[tuple[Dimension, ...], FailFast(), Field(max_length=8)]
    sha256: Digest
    """SHA-256 of the parameter's bytes in row-major, little-endian order."""


def base_digest(parameters: tuple[Parameter, ...]) -> str:
    """Computes the digest that identifies a base model.

    Args:
        parameters: The parameters that the curvature covers.

    Returns:
        The SHA-256 of four lines per parameter (name, dtype, shape and SHA-256), with the parameters sorted by name.
    """
    lines = (
        f"{p.name}\n{p.dtype}\n{'x'.join(map(str, p.shape))}\n{p.sha256}\n"
        for p in sorted(parameters, key=lambda p: p.name.encode())
    )
    return sha256("".join(lines).encode()).hexdigest()


class Base(Entry):
    """The base model, identified by the parameters that the curvature covers.

    Two bundles are compatible if the parameters that both cover have equal digests. The names of the models may differ.

    Example:
        >>> base = kp.identify(model, ["fc.weight", "fc.bias"], family="test", name="small")
        >>> base.sha256
    """

    family: Name
    """Model family, such as open_clip."""
    name: Name
    """Name of the model within its family."""
    revision: Name | None = None
    """Tag or commit of the pretrained weights."""
    sha256: Digest
    """Digest of the covered parameters; see `base_digest`."""
    parameters: Annotated[tuple[Parameter, ...], FailFast(), Field(min_length=1)]
    """The covered parameters in state-dict order."""

    @model_validator(mode="after")
    def _check_digest(self) -> Base:
        if duplicate := first_duplicate(parameter.name for parameter in self.parameters):
            raise ValueError(f"the parameter {duplicate!r} is listed twice")
        if (digest := base_digest(self.parameters)) != self.sha256:
            raise ValueError(f"sha256 is {self.sha256}, but the listed parameters have the digest {digest}")
        return self


class Function(Entry):
    """The output f of the model, linearised at the base model's parameters θ0. The curvature measures changes in f.

    Example:
        >>> kp.Function(output="embedding", normalized=True, width=512)
    """

    output: Literal["embedding", "hidden-state", "logits", "other"]
    normalized: StrictBool
    """Whether f has unit Euclidean norm."""
    width: Side
    """The number C of components of f."""
    at: Literal["base"] = "base"
    """The point at which f is linearised: the parameters of the base model."""
    detail: Text | None = None
    """Additional description of f."""


class OutputScale(Entry):
    """Mean square and variance of f on the examples. In a merged curvature, both are weighted means over tasks."""

    mean_square: NonNegative
    """The mean square E‖f‖²."""
    variance: NonNegative
    """The variance E‖f − E f‖², with the divisor n − 1 for n examples; 0 if there is only one example."""

    @property
    def reference(self) -> float:
        """The scale by which penalties divide the drift of f: the variance of f, but at least a thousandth of E‖f‖².

        The variance is used because a large constant part of f does not distinguish examples. The lower limit keeps the
        scale away from zero if f is nearly constant.
        """
        return max(self.variance, self.mean_square / 1000)


FORMULAS = {
    "expand": "G = B (x) A; A = 1/P sum_{n,r} a a^T; B = 1/N sum_{n,s,r} w_s g g^T",
    "reduce": "G = B (x) A; A = 1/N sum_n abar abar^T, abar = 1/R_n sum_r a; "
    "B = 1/N sum_{n,s} w_s gsum gsum^T, gsum = sum_r g",
}


class Scaling(Entry):
    """The formula by which the Kronecker factors are normalised, stored in full so that it is unambiguous."""

    sharing: Sharing
    formula: Text

    @model_validator(mode="after")
    def _check_formula(self) -> Scaling:
        if self.formula != FORMULAS[self.sharing]:
            raise ValueError(f"the formula for the sharing {self.sharing!r} must be {FORMULAS[self.sharing]!r}")
        return self


EXPAND = Scaling(sharing="expand", formula=FORMULAS["expand"])
REDUCE = Scaling(sharing="reduce", formula=FORMULAS["reduce"])


class Estimate(Entry):
    """How the curvature was estimated: exactly, or with random probes at the output f.

    Example:
        >>> kp.Estimate(fisher="mc", probe="orthogonal", probes=1, seed=0)
    """

    fisher: Fisher
    """`exact`, or `mc` (Monte Carlo) for random probes."""
    probe: Literal["gaussian", "rademacher", "orthogonal", "sampled"] | None = None
    """Distribution of the probes; set only for `mc`. `sampled` is used with the metric `kl`."""
    probes: Annotated[StrictInt, Field(ge=1, le=2**32)] | None = None
    """Number of probes per example; set only for `mc`."""
    seed: Annotated[StrictInt, Field(ge=0, lt=2**64)] | None = None
    model_dtype: FloatType | None = None
    """Compute dtype of the model."""
    accumulation_dtype: FloatType | None = None
    """Dtype in which the factors were accumulated."""

    @model_validator(mode="after")
    def _check_probes(self) -> Estimate:
        is_set = [value is not None for value in (self.probe, self.probes)]
        if not all(is_set) if self.fisher == "mc" else any(is_set):
            raise ValueError("fisher 'mc' requires probe and probes; fisher 'exact' allows neither of them")
        return self


class Source(Entry):
    """The task and the data that a curvature or task vector was computed from.

    Example:
        >>> kp.Source(task="digits", split="train", examples=256, dataset_size=1437)
    """

    task: Name
    dataset: Name | None = None
    revision: Name | None = None
    """Revision of the dataset."""
    split: Name | None = None
    preprocessing: Text | None = None
    examples: Count | None = None
    """Number of examples from which the curvature or task vector was computed."""
    dataset_size: Count | None = None
    """Number of examples in the full split."""
    license: Text | None = None


class Parent(Entry):
    """A bundle from which a merged bundle was computed. It is identified by its digest."""

    sha256: Digest
    weight: StrictFloat
    task: Name | None = None
    dataset_size: Count | None = None


class Merge(Entry):
    """The merge rule and the bundles that were merged. A bundle that was itself merged is replaced by its parents."""

    rule: Name
    rank: Annotated[StrictInt, Field(ge=1)] | None = None
    parents: Annotated[tuple[Parent, ...], FailFast()]

    @model_validator(mode="after")
    def _check_parents(self) -> Merge:
        if duplicate := first_duplicate(parent.sha256 for parent in self.parents):
            raise ValueError(f"the parent {duplicate} is listed twice")
        return self


RelativeError = Annotated[StrictFloat, Field(ge=0)]


class Loss(Entry):
    """The relative errors that a lossy step (a codec or merge rule) causes in one block, or in all blocks together.

    `frobenius` is the error of G in the Frobenius norm. `quadratic` is the error of the quadratic form τᵀGτ on random
    task vectors τ, and `vector` is the error of τᵀGτ on a real task vector.
    """

    step: Name
    frobenius: RelativeError | None = None
    quadratic: RelativeError | None = None
    vector: RelativeError | None = None

    @classmethod
    def measured(cls, step: str, **errors: float | None) -> Loss:
        """Creates an entry from measured errors.

        Args:
            step: Name of the codec or merge rule.
            **errors: The errors by field name; None for errors that were not measured.

        Returns:
            The entry, with errors rounded to six significant digits, because further digits depend on the processor.
        """
        return cls(
            step=step, **{key: None if error is None else float(f"{error:.6g}") for key, error in errors.items()}
        )


class About(Entry):
    """The metadata of a curvature: base model, function, scaling, provenance and losses.

    Example:
        >>> curvature = kp.load("digits.kfac")
        >>> curvature.about.source.task
        'digits'
    """

    base: Base
    function: Function
    output_scale: OutputScale | None = None
    """Scale of f on the examples. Penalties divide the drift of f by this scale. Added in format version 1.1."""
    metric: Literal["kl"] | None = None
    """`kl` if ½ τᵀGτ approximates the Kullback-Leibler divergence between the token distributions at θ0 and θ0 + τ.

    If None, the metric is `l2`: τᵀGτ approximates the squared norm of the change in f. Added in format version 1.2.
    """
    scaling: Scaling = EXPAND
    estimate: Estimate | None = None
    source: Source | None = None
    merge: Merge | None = None
    losses: Annotated[tuple[Loss, ...], FailFast()] = ()
    """Lossy steps that were applied to all blocks together."""


class Piece(Entry):
    """The position of a parameter, or of a slice of a parameter, in the joined matrix of its block.

    `rows` selects a slice (start, stop) of the parameter's first dimension. By default, the whole parameter is used.
    `view` reshapes the slice to a matrix (first dimension × all other dimensions), to its transpose, or to one column.
    `at` is the position (row, column) of the first element of the slice in the joined matrix.

    Example:
        >>> kp.Piece(parameter="fc.bias", at=(0, 64))
    """

    parameter: Name
    view: Literal["matrix", "transposed", "column"] = "matrix"
    rows: tuple[Count, Count] | None = None
    at: tuple[Count, Count] = (0, 0)

    def matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the shape of the matrix that is formed from a parameter according to `rows` and `view`.

        Args:
            shape: Shape of the whole parameter.

        Returns:
            The number of rows and the number of columns.
        """
        if self.rows is not None:
            shape = (self.rows[1] - self.rows[0], *shape[1:])
        if self.view == "column":
            return prod(shape), 1
        rows, columns = shape[0], prod(shape[1:])
        return (columns, rows) if self.view == "transposed" else (rows, columns)


class Join(Entry):
    """The arrangement of a block's parameters in one joined `rows` × `columns` matrix. The pieces tile this matrix.

    Example:
        >>> weight, bias = kp.Piece(parameter="fc.weight"), kp.Piece(parameter="fc.bias", at=(0, 64))
        >>> kp.Join(rows=10, columns=65, pieces=(weight, bias))
    """

    rows: Dimension
    columns: Dimension
    pieces: Annotated[tuple[Piece, ...], FailFast(), Field(min_length=1, max_length=MAX_PIECES)]


class Term(Entry):
    """One term `weight · B ⊗ A` of a Kronecker block. `B` and `A` are the names of matrices in the manifest."""

    B: Name
    A: Name
    weight: StrictFloat = 1.0


class BlockEntry(Entry):
    """Fields that are common to blocks of all structures."""

    name: Name
    operation: Name
    """The operation that uses the parameters, such as `linear`."""
    join: Join
    losses: Annotated[tuple[Loss, ...], FailFast()] = ()
    """Lossy steps that were applied to this block."""


class KroneckerEntry(BlockEntry):
    """A block G = Σ weight · B ⊗ A. It maps ΔW, a change to the joined matrix, to Σ weight · B ΔW A."""

    structure: Literal["kronecker"]
    terms: Annotated[tuple[Term, ...], FailFast(), Field(min_length=1)]

    def references(self) -> Iterator[tuple[str, int]]:
        """Yields the name and the required side length of each matrix of this block."""
        for term in self.terms:
            yield term.B, self.join.rows
            yield term.A, self.join.columns


class DenseEntry(BlockEntry):
    """A block G that is stored as one matrix. G is applied to a vector: the joined matrix, flattened row by row.

    With structure `diagonal`, only the diagonal of G is stored.
    """

    structure: Literal["dense", "diagonal"]
    matrix: Name

    def references(self) -> Iterator[tuple[str, int]]:
        """Yields the name and the required side length of the matrix of this block."""
        yield self.matrix, self.join.rows * self.join.columns


class TensorEntry(Entry):
    """One of the tensors that store a matrix: its component, its name in the file and the SHA-256 of its bytes."""

    component: Name
    name: Name
    sha256: Digest


class MatrixEntry(Entry):
    """A symmetric matrix and the form in which it is stored.

    `psd` declares that the matrix is positive semi-definite. `examples` and `positions` are the numbers of examples and
    positions over which the matrix was averaged.
    """

    name: Name
    form: Name
    """How the matrix is stored; see `kfacpack.format.schema.LAYOUTS`."""
    version: Annotated[StrictInt, Field(ge=1)] = 1
    """Version of the form."""
    side: Side
    psd: StrictBool = True
    examples: Count | None = None
    positions: Count | None = None
    tensors: Annotated[tuple[TensorEntry, ...], FailFast(), Field(min_length=1, max_length=8)]

    @property
    def components(self) -> dict[str, str]:
        """Names of the matrix's tensors by component, such as "data" or "scale"."""
        return {tensor.component: tensor.name for tensor in self.tensors}


class Manifest(About):
    """The manifest of a bundle: its metadata, matrices and blocks."""

    version: Annotated[StrictStr, Field(pattern=r"^(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})$")]
    """Format version, MAJOR.MINOR."""
    scaling: Scaling
    requires: Annotated[tuple[Name, ...], FailFast()] = ()
    """Features that a reader must support. They include `metric` if the key `metric` is set."""
    producer: Text | None = None
    """Software that wrote the file."""
    matrices: Annotated[tuple[MatrixEntry, ...], FailFast(), Field(min_length=1)]
    blocks: Annotated[
        tuple[Annotated[KroneckerEntry | DenseEntry, Field(discriminator="structure")], ...],
        FailFast(),
        Field(min_length=1),
    ]

    @model_validator(mode="after")
    def _check_features(self) -> Manifest:
        if self.metric and "metric" not in self.requires:
            raise ValueError(f"the metric is {self.metric!r}, but `requires` does not list 'metric'")
        return self

    def about(self) -> About:
        """Returns the metadata without the matrices or blocks. The result is not validated again."""
        return About.model_construct(**{key: getattr(self, key) for key in About.model_fields})

    def with_digests(self, digests: Mapping[str, str]) -> Manifest:
        """Returns a copy of the manifest with the SHA-256 of each tensor filled in.

        Args:
            digests: SHA-256 by tensor name.
        """
        matrices = tuple(
            matrix.model_copy(
                update={"tensors": tuple(t.model_copy(update={"sha256": digests[t.name]}) for t in matrix.tensors)}
            )
            for matrix in self.matrices
        )
        return self.model_copy(update={"matrices": matrices})
