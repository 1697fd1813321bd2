"""Opening a sealed file, such as a bundle: the header alone decides whether it is one.

Tensor bytes are read, and checked, when touched.

What can be checked of an open bundle without computing with it: its bytes, its numbers, its base model.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from kfacpack.errors import BundleError, CorruptTensor
from kfacpack.format.container import (
    BUNDLE,
    ITEM_BYTES,
    KINDS,
    Container,
    SealKeys,
    TensorSpec,
    download_again,
    parse_json,
    seal,
)
from kfacpack.format.identity import difference
from kfacpack.format.manifest import VERSION, Manifest, first_problem
from kfacpack.format.schema import LAYOUTS, check_consistency

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping

    from kfacpack.format.identity import WeightReader
    from kfacpack.format.reference import FileLocation

    CheckProgress = Callable[[str, int, int], None]

    """Called with a check's name, how many things it has looked at and how many there are."""


ManifestT = TypeVar("ManifestT", bound=BaseModel)

FEATURES: frozenset[str] = frozenset()
"""The required features this version knows. 1.0 has none."""

_MAJOR = VERSION.split(".")[0]
_UPGRADE = "Upgrade kfacpack to read it"
_CHUNK = 2**20


class SealedFile:
    """An open safetensors file with a manifest, and a seal over it: what bundles and task vectors have in common.

    `digest` identifies the whole content: it seals the header, which holds the SHA-256 of every tensor.
    """

    def __init__(self, path: str | os.PathLike[str] | Container, keys: SealKeys):
        self._container = path if isinstance(path, Container) else Container(path)
        self._keys = keys
        self.path: FileLocation = self._container.path
        self.nbytes = self._container.nbytes
        self.digest = _check_seal(self._container, keys)
        self._digests: Mapping[str, str] = {}
        self._problems: dict[str, tuple[str | None, str | None]] = {}

    @property
    def said(self) -> dict[str, Any]:
        """The manifest as it stands in the file, with what this version does not know.

        Many open files should be small, so it is read from its text each time.
        """
        return _read_manifest(self._container, self._keys)

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        return self._container.tensors

    def bytes_of(self, name: str) -> memoryview:
        """One tensor's bytes, mapped from the file. The first touch checks its SHA-256 and that it is finite."""
        self._require_intact(name)
        return self._container.bytes_of(name)

    def read(self, name: str, start: int, stop: int) -> bytearray:
        """Bytes `start` to `stop` of one tensor, copied. The first touch checks all of it."""
        self._require_intact(name)
        return self._container.read(name, start, stop)

    def _require_intact(self, name: str) -> None:
        if problem := self.hash_problem(name) or self.finite_problem(name):
            raise CorruptTensor(self.path, problem, f"tensor {name!r}", download_again(self.path))

    def hash_problem(self, name: str) -> str | None:
        """How one tensor's bytes differ from the sealed ones, in words, or None."""
        return self._problems_of(name)[0]

    def finite_problem(self, name: str) -> str | None:
        """Which of one tensor's numbers is none, in words, or None."""
        return self._problems_of(name)[1]

    def _problems_of(self, name: str) -> tuple[str | None, str | None]:
        """Both are looked for once, in one pass, a chunk at a time so that memory stays flat."""
        if name not in self._problems:
            content, first, spec = sha256(), None, self.tensors[name]
            for start in range(0, spec.nbytes, _CHUNK):
                chunk = self._container.read(name, start, min(start + _CHUNK, spec.nbytes))
                content.update(chunk)
                if first is None and (place := _first_non_finite(chunk, spec.dtype)) is not None:
                    first = start // ITEM_BYTES[spec.dtype] + place
            found, expected = content.hexdigest(), self._digests[name]
            self._problems[name] = (
                None if found == expected else f"its bytes have SHA-256 {found}, sealed was {expected}",
                None if first is None else f"element {first} is not a finite number",
            )
        return self._problems[name]


class Bundle(SealedFile):
    """An open `.kfac` file: its manifest now, its tensors when asked for."""

    def __init__(self, path: str | os.PathLike[str] | Container):
        super().__init__(path, BUNDLE)
        self.manifest = validated(self.path, self.said, Manifest)
        check_consistency(self.path, self.manifest, self.tensors)
        self.matrices = {matrix.name: matrix for matrix in self.manifest.matrices}
        self._digests = {tensor.name: tensor.sha256 for matrix in self.manifest.matrices for tensor in matrix.tensors}

    @property
    def dense_bytes(self) -> int:
        """What the same matrices would take as full float32, the diagonal ones as they are."""
        return 4 * sum(LAYOUTS[matrix.form].full(matrix.side) for matrix in self.manifest.matrices)

    def __reduce__(self) -> tuple[type[Bundle], tuple[str]]:
        return Bundle, (str(self.path),)


def _check_seal(container: Container, keys: SealKeys) -> str:
    if keys.manifest not in container.metadata or keys.seal not in container.metadata:
        if other := next((each for each in KINDS if each.manifest in container.metadata), None):
            raise BundleError(container.path, f"is a {other.kind}, expected a {keys.kind}", None, other.use)
        missing = f"its metadata has no {keys.manifest!r} and {keys.seal!r}"
        problem = f"is a safetensors file, but no {keys.kind}: {missing}"
        raise BundleError(container.path, problem, None, "Are these a model's weights?")
    claimed = container.metadata[keys.seal]
    once = len(claimed) == 64 and container.header.count(claimed.encode("utf-8", "replace")) == 1
    if not once or seal(container.header, claimed) != claimed:
        problem = f"its bytes do not give the SHA-256 written in it ({claimed[:64]!r})"
        raise BundleError(container.path, problem, "header", download_again(container.path))
    return claimed


def _read_manifest(container: Container, keys: SealKeys) -> dict[str, Any]:
    """The manifest as JSON, once its version and required features are known ones."""
    text = container.metadata[keys.manifest].encode("utf-8", "replace")
    said = parse_json(container.path, text, "manifest", "It is sealed like this, so its writer broke the format")
    version, requires = said.get("version"), said.get("requires", [])
    if not isinstance(version, str) or version.split(".")[0] != _MAJOR:
        problem = f"is format version {version!r}, this reader knows {_MAJOR}.x"
        raise BundleError(container.path, problem, "manifest: version", _UPGRADE)
    unknown = [each for each in requires if each not in FEATURES] if isinstance(requires, list) else [requires]
    if unknown:
        problem = f"needs the feature {unknown[0]!r}, which this reader does not know"
        raise BundleError(container.path, problem, "manifest: requires", _UPGRADE)
    return said


def validated(path: FileLocation, said: dict[str, Any], kind: type[ManifestT]) -> ManifestT:
    """A manifest of that kind; what this version does not know of it is ignored."""
    try:
        return kind.model_validate(said, extra="ignore")
    except ValidationError as error:
        keys, problem = first_problem(error)
        raise BundleError(path, problem, f"manifest: {_place(said, keys)}") from error


def _place(manifest: Any, keys: tuple[int | str, ...]) -> str:
    """A path into the manifest, with the names of the list items it passes: matrices.3 'fc/B'.side"""
    words = []
    for key in keys:
        if isinstance(manifest, dict):
            manifest = manifest.get(key)
        elif isinstance(manifest, list):
            manifest = manifest[key] if type(key) is int and key < len(manifest) else None
        name = manifest.get("name") if type(key) is int and isinstance(manifest, dict) else None
        words.append(f"{key} {name[:80]!r}" if isinstance(name, str) else str(key)[:80])
    return ".".join(words)


def _first_non_finite(data: bytearray, dtype: str) -> int | None:
    """Where the first NaN or infinity is."""
    if dtype.startswith("I"):
        return None
    numbers = np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}[dtype])
    # numpy has no bfloat16: its exponent is the eight bits under the sign, all ones for NaN and infinity.
    finite = (numbers & 0x7F80) != 0x7F80 if dtype == "BF16" else np.isfinite(numbers)
    return None if finite.all() else int(finite.argmin())


@dataclass(frozen=True)
class CheckFailure:
    subject: str
    """What is at fault: tensor 'fc/B', parameter 'fc.weight'."""
    problem: str


@dataclass(frozen=True)
class CheckResult:
    name: str
    checked: int
    failures: tuple[CheckFailure, ...]
    exempt: int = 0
    """How many were not looked at because they do not promise to hold."""


def run_check(
    name: str, subjects: Iterable[str], failure: Callable[[str], CheckFailure | None], progress: CheckProgress
) -> CheckResult:
    """Look at every subject; one failure does not spare the others."""
    todo = list(subjects)
    failures = []
    for done, subject in enumerate(todo):
        progress(name, done, len(todo))
        if found := failure(subject):
            failures.append(found)
    progress(name, len(todo), len(todo))
    return CheckResult(name, len(todo), tuple(failures))


def check_tensors(
    name: str, bundle: SealedFile, problem: Callable[[str], str | None], progress: CheckProgress
) -> CheckResult:
    """Every tensor of a sealed file, by what `problem` says of it."""

    def failure(tensor: str) -> CheckFailure | None:
        found = problem(tensor)
        return CheckFailure(f"tensor {tensor!r}", found) if found else None

    return run_check(name, bundle.tensors, failure, progress)


def check_model(bundle: Bundle, weights: WeightReader, progress: CheckProgress) -> CheckResult:
    """Do these weights hold the very parameters the curvature was computed at?"""
    listed = {parameter.name: parameter for parameter in bundle.manifest.base.parameters}

    def failure(name: str) -> CheckFailure | None:
        found = difference(listed[name], weights)
        return CheckFailure(f"parameter {name!r}", found) if found else None

    return run_check("model", listed, failure, progress)
