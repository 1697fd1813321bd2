"""What a Hub on loopback keeps: repositories in memory, with their commits; and what it thinks of a card."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

import yaml

LARGE = 4096
"""From how many bytes on a file is kept by its SHA-256."""
ALWAYS_LARGE = (".safetensors", ".parquet", ".pt")
"""Files that are kept so, whatever their size."""
LICENSES = {"apache-2.0", "mit", "cc-by-4.0", "cc-by-sa-4.0", "cc0-1.0", "openrail", "other", "unknown"}
KEYS = {
    "language", "license", "license_name", "license_link", "library_name", "tags", "datasets", "metrics", "base_model",
    "base_model_relation", "pipeline_tag", "thumbnail", "model-index", "new_version", "inference", "widget",
}  # fmt: skip


@dataclass
class Repo:
    private: bool = False
    gated: bool = False
    branches: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})
    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"0" * 40: {}})
    messages: list[str] = field(default_factory=list)


def is_large(path: str, size: int) -> bool:
    return path.endswith(ALWAYS_LARGE) or size >= LARGE


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def entry(path: str, data: bytes) -> dict:
    """What is told of a file without its content."""
    digest = hashlib.sha256(data).hexdigest()
    large = {"lfs": {"sha256": digest, "oid": digest, "size": len(data), "pointerSize": 130}}
    return {"size": len(data), **(large if is_large(path, len(data)) else {})}


def card_problems(content: str) -> list[str]:
    """What the Hub's validation looks at: metadata is a mapping, of known keys, whose values it can link to."""
    found = re.match(r"\s*---\r?\n([\s\S]*?)\r?\n---[ \t]*(\r?\n|$)", content)
    if not found:
        return ["there is no metadata"]
    try:
        data = yaml.safe_load(found[1])
    except yaml.YAMLError as error:
        return [f"not YAML: {error}"]
    if not isinstance(data, dict):
        return ["metadata is no mapping"]
    problems = [f'"{key}" is not allowed' for key in data if key not in KEYS]

    def many(key):
        value = data.get(key)
        return [] if value is None else [value] if isinstance(value, str) else value

    if any(each not in LICENSES for each in many("license")):
        problems.append(f'"license" must be one of {sorted(LICENSES)}')
    for key in ("base_model", "datasets"):
        if not all(isinstance(each, str) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", each) for each in many(key)):
            problems.append(f'"{key}" with value "{data[key]}" is not valid. Use an id')
    if not isinstance(data.get("tags", []), list) or not all(isinstance(tag, str) for tag in data.get("tags", [])):
        problems.append('"tags" must be a list of strings')
    return problems
