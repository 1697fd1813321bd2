"""Parquet files as the Hub lays them out: what they say of their columns, and their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kfacpack.errors import KfacpackError, first_line, printable


def looked_into(file: Path) -> tuple[Any, int]:
    """The columns that a parquet file declares, with the Hub's types if it has them; and how many rows it has."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            return datasets.Features.from_arrow_schema(opened.schema_arrow), opened.metadata.num_rows
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        raise KfacpackError(f"{file}: is no parquet file that can be read: {first_line(error)}") from error


def says_types(file: Path) -> bool:
    """Whether a parquet file has the Hub's types, such as the names of classes, in its metadata."""
    import pyarrow
    from pyarrow import parquet

    try:
        return b"huggingface" in (parquet.read_schema(file).metadata or {})
    except (pyarrow.ArrowException, OSError):
        return True  # what is wrong with it is told where it is read


def column(file: Path, name: str) -> list[Any]:
    import pyarrow
    from pyarrow import parquet

    try:
        return list(parquet.read_table(file, columns=[name]).column(name).to_pylist())
    except (pyarrow.ArrowException, OSError, KeyError) as error:
        raise KfacpackError(f"{file}: its column {printable(name)!r} cannot be read: {first_line(error)}") from error


def read(files: Sequence[Path], split: str, features: Any | None, place: str) -> Any:
    """All rows of the files, as datasets has them; `features` are their types, where the files do not say them."""
    import datasets

    # datasets reads an Arrow copy that it maps into memory. The mapping outlives the file's name, so the copy's
    # disk space is free again when the data is let go, or when the process is killed.
    with _no_progress_bars(), TemporaryDirectory(prefix="kfacpack-") as copies:
        try:
            found = {split: [escape(str(file)) for file in files]}
            return datasets.load_dataset("parquet", data_files=found, split=split, cache_dir=copies, features=features)
        except Exception as error:  # Arrow's, datasets' and the system's errors have no common base
            cause = first_line(error.__cause__ or error)
            raise KfacpackError(f"{place}: split {split!r} cannot be read: {cause}") from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    import datasets

    hidden = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not hidden:
            datasets.enable_progress_bars()
