"""Which columns of a data set are the example, and which is its label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kfacpack.errors import KfacpackError, printable

TEXT_TYPES = ("string", "large_string")
STORED = {"bytes", "path"}
"""What a picture consists of in parquet."""
LABEL = "label"
LABEL_NAMES = (LABEL, "labels")
"""What a label that is no class label is called, where nobody says it."""
IMAGE = "image"
COLUMNS_FORM = (
    "image=COLUMN,label=COLUMN, or every text in its order and the label: premise=COLUMN,hypothesis=COLUMN,label=COLUMN"
)


@dataclass(frozen=True)
class RequestedColumns:
    """Which columns are asked for, by name: the first of each that is there is taken."""

    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """An example's key -> what its column may be called. Without any, they are found by their types."""
    label: tuple[str, ...] = ()
    required: bool = True
    """Whether it is an error that one is missing; else all are found by their types then."""


@dataclass(frozen=True)
class Columns:
    inputs: dict[str, str]
    """An example's key -> the column it is stored in: {"image": …}, or every text column under its own name."""
    label: str | None
    classes: tuple[str, ...] | None
    """The names that the label's type has; none for a label of numbers or texts, whose values are the classes."""
    values: tuple[Any, ...] | None = None
    """Of such a label, in the order of the classes; known when all of it has been read."""
    by_type: bool = False
    """Whether columns that were asked for by name are missing, so that these were found by type."""

    @property
    def by_value(self) -> bool:
        return self.label is not None and self.classes is None


def read_columns(said: str) -> RequestedColumns:
    """What `--columns` says."""
    found: dict[str, tuple[str, ...]] = {}
    for part in said.split(","):
        key, equals, column = (each.strip() for each in part.partition("="))
        if not (key and equals and column) or key in found:
            raise KfacpackError(f"--columns {printable(said)!r}: expected {COLUMNS_FORM}")
        found[key] = (column,)
    label = found.pop(LABEL, ())
    if IMAGE in found and len(found) > 1:
        raise KfacpackError(
            f"--columns {printable(said)!r}: a picture comes without other inputs; expected {COLUMNS_FORM}"
        )
    return RequestedColumns(found, label)


def find_columns(features: Any, where: str, wanted: RequestedColumns | None = None) -> Columns:
    """By name what is wanted, and what is not, by type: the picture, or else every text; and the class label."""
    wanted = wanted or RequestedColumns()
    inputs = {key: _first(names, features) for key, names in wanted.inputs.items()}
    label = _first(wanted.label, features)
    lacking = [names for key, names in wanted.inputs.items() if inputs[key] is None]
    lacking += [wanted.label] if wanted.label and label is None else []
    if lacking and wanted.required:
        problem = f"no column {printable(' or '.join(lacking[0]))!r}; there are {_list(features)}"
        raise KfacpackError(f"{where}: {problem}. --columns says which to take: {COLUMNS_FORM}")
    label = label or _label_by_type(features, where)
    if lacking or not inputs:
        taken = _inputs_by_type(features, where, label)
    else:
        taken = {key: column for key, column in inputs.items() if column is not None}
        for key, column in taken.items():
            _require_type(features, key, column, where)
    return Columns(taken, label, _classes(features, label, where), by_type=bool(lacking))


def is_image(feature: Any) -> bool:
    import datasets

    return isinstance(feature, datasets.Image)


def is_encoded_image(feature: Any) -> bool:
    """Whether it holds files of pictures without saying so, as parquet that datasets has not written does."""
    if isinstance(feature, dict):
        return "bytes" in feature
    return getattr(feature, "dtype", None) in ("binary", "large_binary")


def _label_by_type(features: Any, where: str) -> str | None:
    import datasets

    labels = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    if not labels:  # lest a text that is called label be read as a part of the example
        labels = [name for name in LABEL_NAMES if name in features and _may_be_label(features[name])][:1]
    return _only(labels, "class labels", where)


def _may_be_label(feature: Any) -> bool:
    dtype = getattr(feature, "dtype", None) or ""
    return dtype in TEXT_TYPES or dtype == "bool" or dtype.startswith(("int", "uint"))


def _inputs_by_type(features: Any, where: str, label: str | None) -> dict[str, str]:
    images = [name for name, feature in features.items() if is_image(feature)]
    images = images or [name for name, each in features.items() if isinstance(each, dict) and set(each) == STORED]
    texts = [name for name, each in features.items() if getattr(each, "dtype", None) in TEXT_TYPES and name != label]
    if image := _only(images, "pictures", where):
        return {IMAGE: image}
    if not texts:
        problem = f"no column of pictures or texts; there are {_list(features) or 'no columns'}"
        remedy = "Expected features of type Image or string, as datasets.Dataset.to_parquet writes them"
        raise KfacpackError(f"{where}: {problem}. {remedy}")
    return {name: name for name in texts}


def _only(found: list[str], kind: str, where: str) -> str | None:
    if len(found) > 1:
        problem = f"{len(found)} columns of {kind}, {_list(found)}; expected one"
        raise KfacpackError(f"{where}: {problem}. --columns says which to take: {COLUMNS_FORM}")
    return found[0] if found else None


def _require_type(features: Any, key: str, column: str, where: str) -> None:
    feature = features[column]
    if key == IMAGE:
        fits, expected = is_image(feature) or is_encoded_image(feature), "pictures"
    else:
        fits, expected = getattr(feature, "dtype", None) in TEXT_TYPES, "texts"
    if not fits:
        raise KfacpackError(f"{where}: column {printable(column)!r} is of type {feature}; expected {expected}")


def _classes(features: Any, label: str | None, where: str) -> tuple[str, ...] | None:
    import datasets

    if label is None:
        return None
    feature = features[label]
    if isinstance(feature, datasets.ClassLabel):
        return tuple(feature.names)
    if not _may_be_label(feature):
        problem = f"column {printable(label)!r} is of type {printable(str(feature))}"
        raise KfacpackError(f"{where}: {problem}; a label is a class label, a text or a whole number")
    return None


def _first(names: tuple[str, ...], features: Any) -> str | None:
    return next((name for name in names if name in features), None)


def _list(names: Any) -> str:
    return printable(", ".join(names))
