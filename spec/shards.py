"""Joins the files of a kfac bundle (README.md, section 9) into a single file, which reader.py can read.

python shards.py NAME.kfac.index.json NAME.kfac
"""

import json
import sys
from pathlib import Path
from typing import Any


def header_of(raw: bytes) -> tuple[dict[str, Any], int]:
    """Returns the header of a safetensors file, and the position of its data."""
    start = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:start]), start


def join(index_path: str | Path) -> bytes:
    """Returns the content of the single file, with the header that the index contains."""
    path = Path(index_path)
    index = json.loads(path.read_bytes())
    if not index["version"].startswith("1."):
        raise ValueError(f"{path}: unsupported version {index['version']!r}")
    header = index["header"].encode()
    parts: dict[str, bytes] = {}
    for shard in index["shards"]:
        raw = path.with_name(shard["file"]).read_bytes()
        entries, start = header_of(raw)
        if len(raw) != shard["bytes"] or entries.pop("__metadata__")["kfac.sha256"] != shard["sha256"]:
            raise ValueError(f"{path}: the shard {shard['file']} belongs to another bundle or is damaged")
        for name, entry in entries.items():
            first, last = entry["data_offsets"]
            parts[name] = raw[start + first : start + last]
    entries = json.loads(header)
    del entries["__metadata__"]
    if parts.keys() != entries.keys():
        raise ValueError(f"{path}: the tensors of the shards differ from those of the header")
    ordered = sorted(entries, key=lambda name: entries[name]["data_offsets"])
    return b"".join([len(header).to_bytes(8, "little"), header, *(parts[name] for name in ordered)])


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(join(sys.argv[1]))
