"""Where a data set's splits are: parquet files as the Hub lays them out, or pictures in a folder for each class.

Everything here looks at names alone: paths from the folder or repository on, with slashes, at most three deep.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from kfacpack.errors import KfacpackError, printable

EXPECTED = (
    "expected train-*.parquet and test-*.parquet, there, in data/ or in the folder of a config, or pictures in CLASS/ "
    "or in train/CLASS/ and test/CLASS/"
)
DEEPEST = 3
PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
SPLITS = ("train", "validation", "valid", "val", "dev", "test")
"""What a folder of files is called that is a split, and no config or class."""
SHARD = re.compile(r"(.+?)(-(?P<number>\d+)-of-(?P<count>\d+)(-[0-9a-f]{16})?)?\.parquet")
"""train-00000-of-00002.parquet; older files have a hash behind the number."""
NUMBERED = re.compile(r"\d+\.parquet")
"""The Hub's own conversion has CONFIG/SPLIT/0000.parquet."""

Splits = dict[str, list[str]]
"""A split's name -> the paths of its files."""


def in_order(paths: Iterable[str]) -> list[str]:
    """Folder by folder, by name."""
    return sorted(paths, key=lambda path: path.split("/"))


def shards(paths: Iterable[str], config: str | None, where: str, *, asked: bool = False) -> Splits:
    """The parquet files of a config, by split; none if there are no parquet files.

    Those that lie in no config's folder, or in that of one called default, are of any config; but of none that was
    `asked` for by name, lest a slip of the pen be answered with other data. `where` is for errors.
    """
    found: dict[str | None, Splits] = {}
    for path in in_order(paths):
        *folders, name = path.split("/")
        match = SHARD.fullmatch(name)
        if not match:
            continue
        if folders[:1] == ["data"]:
            folders = folders[1:]
        # A config may be called test, too: there, the files have the names of splits.
        in_split = folders and folders[-1] in SPLITS and (match[1] == folders[-1] or match[1] not in SPLITS)
        split = folders.pop() if folders and (NUMBERED.fullmatch(name) or in_split) else match[1]
        if len(folders) < 2:
            found.setdefault(folders[0] if folders else None, {}).setdefault(split, []).append(path)
    return _of_config(found, config, where, asked) if found else {}


def _of_config(found: Mapping[str | None, Splits], config: str | None, where: str, asked: bool) -> Splits:
    for each in (config,) if asked and config not in (None, "default") else (config, None, "default"):
        if each in found:
            return found[each]
    if config is None and len(found) == 1:
        return next(iter(found.values()))
    names = sorted(name for name in found if name is not None)
    problem = f"there is no config {printable(config)!r}" if config else "there are several configs"
    if not names:
        raise KfacpackError(f"{where}: {problem}; its files are of none. Leave it out: --data {where}")
    there = printable(", ".join(names))
    raise KfacpackError(f"{where}: {problem}; there are {there}. Say which: --data {where}/{printable(names[0])}")


def lacking(files: Iterable[str]) -> int:
    """How many of a split's files are not there, by the numbers in the names of those that are."""
    named = [match for path in files if (match := SHARD.fullmatch(path.split("/")[-1])) and match["count"]]
    counts = {match["count"] for match in named}
    return max(0, int(counts.pop()) - len(named)) if len(counts) == 1 else 0


def pictures(paths: Iterable[str], where: str) -> Splits:
    """The pictures by split; without folders for splits, all of them are `train`. `where` is for errors."""
    seen = [path for path in in_order(paths) if path.lower().endswith(PICTURES)]
    splits: Splits = {}
    for path in seen:
        if path.count("/") == 2:
            splits.setdefault(path.split("/")[0], []).append(path)
    flat = [path for path in seen if path.count("/") == 1]
    if flat and not splits and {path.split("/")[0] for path in flat} <= set(SPLITS):
        problem = f"{printable(flat[0])!r} is in the folder of a split, and in none of a class"
        raise KfacpackError(f"{where}: {problem}; {EXPECTED}")
    return splits or ({"train": flat} if flat else {})
