"""What of the Hub's models lies in this machine's cache already: looking makes no request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Repository:
    """A model repository's newest snapshot in the cache."""

    name: str
    """owner/repository."""
    revision: str
    files: Mapping[str, Path]
    """A file's name in the repository -> where it is."""

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.files.values())

    @cached_property
    def config(self) -> dict[str, Any]:
        """What its config.json says; nothing if there is none that can be read."""
        try:
            said = json.loads(self.files["config.json"].read_bytes())
        except (KeyError, OSError, ValueError):
            return {}
        return said if isinstance(said, dict) else {}

    @property
    def is_for_transformers(self) -> bool:
        """Whether weights and a tokenizer are there, as `t5:` and `hf:` need them."""
        weights = any(name.startswith("model") and name.endswith(".safetensors") for name in self.files)
        return weights and any(name in self.files for name in ("tokenizer.json", "tokenizer_config.json"))


def repositories() -> Iterator[Repository]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    for each in sorted(cache.repos, key=lambda each: each.repo_id):
        if each.repo_type == "model" and each.revisions:
            newest = max(each.revisions, key=lambda revision: revision.last_modified)
            files = {
                file.file_path.relative_to(newest.snapshot_path).as_posix(): file.file_path for file in newest.files
            }
            yield Repository(each.repo_id, newest.commit_hash, files)
