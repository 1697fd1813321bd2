"""Finds the input columns and the label column of a dataset, by name or by type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kfacpack.errors import KfacpackError, printable
from kfacpack.tasks.task import COMPLETION_COLUMNS

TEXT_TYPES = ("string", "large_string")
STORED_IMAGE_FIELDS = {"bytes", "path"}
"""Fields of an image column in parquet."""
LABEL = "label"
LABEL_NAMES = (LABEL, "labels")
"""Names of a label column that is not of type ClassLabel."""
IMAGE = "image"
COLUMNS_FORM = (
    "image=COLUMN,label=COLUMN, or the text columns in order and the label, such as "
    "premise=COLUMN,hypothesis=COLUMN,label=COLUMN"
)
_REMEDY = f"Choose the columns with --columns (columns=…): {COLUMNS_FORM}"


@dataclass(frozen=True)
class RequestedColumns:
    """Columns requested by name. Each may have several possible names; the first that exists is used."""

    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Possible column names, by key in the example. If empty, input columns are found by type."""
    label: tuple[str, ...] = ()
    """Possible names of the label column. If empty, the label column is found by type."""
    required: bool = True
    """Whether a missing column is an error; otherwise, all input columns are found by type instead."""


@dataclass(frozen=True)
class Columns:
    """Columns of a dataset."""

    inputs: dict[str, str]
    """Columns by key in the example: {"image": …}, or every text column under its own name."""
    label: str | None
    """Label column, if there is one."""
    classes: tuple[str, ...] | None
    """Class names of a ClassLabel column; None for a label of numbers or texts, whose values are the classes."""
    values: tuple[Any, ...] | None = None
    """Values of a label column without class names, in the order of the classes; None until the column is read."""
    by_type: bool = False
    """Whether requested columns are missing and the input columns were found by type instead."""

    @property
    def by_value(self) -> bool:
        """Whether the classes are the values of the label column."""
        return self.label is not None and self.classes is None


def parse_columns(text: str) -> RequestedColumns:
    """Parses a choice of columns.

    Args:
        text: Comma-separated `KEY=COLUMN` pairs, such as `"image=IMG,label=Y"`.

    Returns:
        The requested columns.

    Raises:
        KfacpackError: If the text is invalid, a key occurs twice, or an image is combined with other inputs.
    """
    columns: dict[str, tuple[str, ...]] = {}
    for pair in text.split(","):
        key, equals, column = (part.strip() for part in pair.partition("="))
        if not (key and equals and column) or key in columns:
            raise KfacpackError(f"columns {printable(text)!r}: expected {COLUMNS_FORM}")
        columns[key] = (column,)
    label = columns.pop(LABEL, ())
    if IMAGE in columns and len(columns) > 1:
        problem = "an image cannot be combined with other inputs"
        raise KfacpackError(f"columns {printable(text)!r}: {problem}; expected {COLUMNS_FORM}")
    return RequestedColumns(columns, label)


def find_columns(features: Any, location: str, requested: RequestedColumns | None = None) -> Columns:
    """Finds the columns of a dataset: requested ones by name, others by type.

    By type, the input is the only image column, or else every text column; the label is the only ClassLabel column, or
    else one named label or labels. Data with the text columns prompt and completion has no other inputs and no label.

    Args:
        features: `datasets.Features` of the data.
        location: File or folder, for errors.
        requested: Columns requested by name.

    Returns:
        The columns of the inputs and of the label.

    Raises:
        KfacpackError: If a required column is missing or has the wrong type, or there are several candidates.
    """
    requested = requested or RequestedColumns()
    if not (requested.inputs or requested.label) and all(_is_text(features.get(name)) for name in COMPLETION_COLUMNS):
        return Columns({name: name for name in COMPLETION_COLUMNS}, None, None)
    named = {key: _first_existing(names, features) for key, names in requested.inputs.items()}
    label = _first_existing(requested.label, features)
    missing = [names for key, names in requested.inputs.items() if named[key] is None]
    missing += [requested.label] if requested.label and label is None else []
    if missing and requested.required:
        problem = f"no column {printable(' or '.join(missing[0]))!r}; the columns are {_join(features)}"
        raise KfacpackError(f"{location}: {problem}. {_REMEDY}")
    label = label or _label_by_type(features, location)
    if missing or not named:
        inputs = _inputs_by_type(features, location, label)
    else:
        inputs = {key: column for key, column in named.items() if column is not None}
        for key, column in inputs.items():
            _require_type(features, key, column, location)
    return Columns(inputs, label, _class_names(features, label, location), by_type=bool(missing))


def is_image(feature: Any) -> bool:
    """Returns whether a feature has the type `datasets.Image`."""
    import datasets

    return isinstance(feature, datasets.Image)


def is_encoded_image(feature: Any) -> bool:
    """Returns whether a feature may contain encoded images, as in parquet files not written by `datasets`."""
    if isinstance(feature, dict):
        return "bytes" in feature
    return getattr(feature, "dtype", None) in ("binary", "large_binary")


def _label_by_type(features: Any, location: str) -> str | None:
    import datasets

    labels = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    if not labels:  # otherwise a text column named label would become an input
        labels = [name for name in LABEL_NAMES if name in features and _may_be_label(features[name])][:1]
    return _only(labels, "class labels", location)


def _may_be_label(feature: Any) -> bool:
    dtype = getattr(feature, "dtype", None) or ""
    return dtype in TEXT_TYPES or dtype == "bool" or dtype.startswith(("int", "uint"))


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in TEXT_TYPES


def _inputs_by_type(features: Any, location: str, label: str | None) -> dict[str, str]:
    images = [name for name, feature in features.items() if is_image(feature)]
    images = images or [
        name for name, feature in features.items() if isinstance(feature, dict) and set(feature) == STORED_IMAGE_FIELDS
    ]
    texts = [name for name, feature in features.items() if _is_text(feature) and name != label]
    if image := _only(images, "images", location):
        return {IMAGE: image}
    if not texts:
        problem = f"no column of images or texts; the columns are {_join(features) or 'none'}"
        remedy = "Expected features of type Image or string, as datasets.Dataset.to_parquet writes them"
        raise KfacpackError(f"{location}: {problem}. {remedy}")
    return {name: name for name in texts}


def _only(columns: list[str], kind: str, location: str) -> str | None:
    if len(columns) > 1:
        problem = f"{len(columns)} columns of {kind}, {_join(columns)}; expected one"
        raise KfacpackError(f"{location}: {problem}. {_REMEDY}")
    return columns[0] if columns else None


def _require_type(features: Any, key: str, column: str, location: str) -> None:
    feature = features[column]
    if key == IMAGE:
        is_valid, expected = is_image(feature) or is_encoded_image(feature), "images"
    else:
        is_valid, expected = _is_text(feature), "texts"
    if not is_valid:
        raise KfacpackError(f"{location}: column {printable(column)!r} has type {feature}; expected {expected}")


def _class_names(features: Any, label: str | None, location: str) -> tuple[str, ...] | None:
    import datasets

    if label is None:
        return None
    feature = features[label]
    if isinstance(feature, datasets.ClassLabel):
        return tuple(feature.names)
    if not _may_be_label(feature):
        problem = f"label column {printable(label)!r} has type {printable(str(feature))}"
        raise KfacpackError(f"{location}: {problem}; expected ClassLabel, strings or integers")
    return None


def _first_existing(names: tuple[str, ...], features: Any) -> str | None:
    return next((name for name in names if name in features), None)


def _join(names: Iterable[str]) -> str:
    return printable(", ".join(names))
