"""The seal: one SHA-256 over length and header, and with them over every tensor's digest."""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple


class Keys(NamedTuple):
    """Where a sealed file's metadata has what, and what such a file is called."""

    manifest: str
    seal: str
    kind: str
    use: str
    """What takes such files, for somebody who gave one to something else."""


MANIFEST_KEY = "kfac"
SEAL_KEY = "kfac.sha256"
BUNDLE = Keys(
    MANIFEST_KEY,
    SEAL_KEY,
    "bundle",
    "Bundles are added up by `kfacpack merge`, shown by `kfacpack inspect` and used by `kfacpack train --reg`",
)
VECTOR = Keys(
    "kfacpack.vector",
    "kfacpack.vector.sha256",
    "task vector",
    "Task vectors are added up by `kfacpack add`, negated by `kfacpack negate` and used by `kfacpack eval --vector`",
)
KINDS = (BUNDLE, VECTOR)
UNSEALED = "0" * 64


def seal(header: bytes, claimed: str = UNSEALED) -> str:
    """SHA-256 over length prefix and header, with the seal's own 64 digits read as zeros."""
    return sha256(header.replace(claimed.encode(), UNSEALED.encode(), 1)).hexdigest()
