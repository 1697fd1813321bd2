"""The repositories of the fake Hub, kept in memory with their commits, and its validation of model cards."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

import yaml

LARGE = 4096
"""Files of at least this many bytes are stored by their SHA-256, as with Git LFS."""
ALWAYS_LARGE = (".safetensors", ".parquet", ".pt")
"""Extensions of files that are always stored by their SHA-256."""
LICENSES = {"apache-2.0", "mit", "cc-by-4.0", "cc-by-sa-4.0", "cc0-1.0", "openrail", "other", "unknown"}
KEYS = {
    "language", "license", "license_name", "license_link", "library_name", "tags", "datasets", "metrics", "base_model",
    "base_model_relation", "pipeline_tag", "thumbnail", "model-index", "new_version", "inference", "widget",
}  # fmt: skip


@dataclass
class Repo:
    """A repository: branches by name, commits by hash with the content of their files."""

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
    """The metadata of a file in a listing."""
    digest = hashlib.sha256(data).hexdigest()
    large = {"lfs": {"sha256": digest, "oid": digest, "size": len(data), "pointerSize": 130}}
    return {"size": len(data), **(large if is_large(path, len(data)) else {})}


def card_problems(content: str) -> list[str]:
    """Validates a card as the Hub does: the metadata is a mapping of known keys with linkable values."""
    match = re.match(r"\s*---\r?\n([\s\S]*?)\r?\n---[ \t]*(\r?\n|$)", content)
    if not match:
        return ["there is no metadata"]
    try:
        data = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        return [f"not YAML: {error}"]
    if not isinstance(data, dict):
        return ["metadata is not a mapping"]
    problems = [f'"{key}" is not allowed' for key in data if key not in KEYS]

    def values(key):
        value = data.get(key)
        return [] if value is None else [value] if isinstance(value, str) else value

    if any(value not in LICENSES for value in values("license")):
        problems.append(f'"license" must be one of {sorted(LICENSES)}')
    for key in ("base_model", "datasets"):
        if not all(isinstance(value, str) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", value) for value in values(key)):
            problems.append(f'"{key}" with value "{data[key]}" is not valid. Use an id')
    if not isinstance(data.get("tags", []), list) or not all(isinstance(tag, str) for tag in data.get("tags", [])):
        problems.append('"tags" must be a list of strings')
    return problems
