"""Which columns of a data set are the example, and which is its label."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfacpack.errors import KfacpackError, printable

TEXT_TYPES = ("string", "large_string")


@dataclass(frozen=True)
class Columns:
    inputs: dict[str, str]
    """An example's key -> the column it is stored in: {"image": …}, or every text column under its own name."""
    label: str | None
    classes: tuple[str, ...] | None


def find_columns(features: Any, where: Path) -> Columns:
    """By their types, never by their names: the picture, or else every text; and the class label."""
    import datasets

    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    texts = [name for name, feature in features.items() if getattr(feature, "dtype", None) in TEXT_TYPES]
    labels = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    for kind, found in (("pictures", images), ("class labels", labels)):
        if len(found) > 1:
            raise KfacpackError(f"{where}: {len(found)} columns of {kind}, {_list(found)}; expected one")
    if not images and not texts:
        problem = f"no column of pictures or texts; there are {_list(features) or 'no columns'}"
        remedy = "Expected features of type Image or string, as datasets.Dataset.to_parquet writes them"
        raise KfacpackError(f"{where}: {problem}. {remedy}")
    return Columns(
        inputs={"image": images[0]} if images else {name: name for name in texts},
        label=labels[0] if labels else None,
        classes=tuple(features[labels[0]].names) if labels else None,
    )


def _list(names: Any) -> str:
    return printable(", ".join(names))
