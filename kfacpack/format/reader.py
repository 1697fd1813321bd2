"""Opens sealed files, such as bundles, and checks their integrity.

When a file is opened, only its header is read and validated. Tensor bytes are read and checked on first access. The
checks at the end of this module cover the digests and values of the tensors, and the base model.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from kfacpack.errors import BundleError, CorruptTensor
from kfacpack.format.bundle_index import open_container
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
    short_repr,
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
    """Callback that receives the name of a check, the number of checked items and the total number of items."""


ManifestT = TypeVar("ManifestT", bound=BaseModel)

_MAJOR = VERSION.split(".")[0]
_UPGRADE = "Upgrade kfacpack to read this file"
_CHUNK = 2**20


class SealedFile:
    """An open safetensors file with a manifest and a seal. Base class of bundles and task vectors.

    Attributes:
        path: Location of the file.
        nbytes: Size of the file in bytes.
        digest: The seal. It identifies the whole content, because it covers the header, which contains the SHA-256 of
            every tensor.

    Args:
        path: A path, an `hf://` reference or an open container.
        keys: The expected kind of file.

    Raises:
        BundleError: If the file is not a sealed file of this kind, or its seal does not match.
    """

    def __init__(self, path: str | os.PathLike[str] | Container, keys: SealKeys):
        self._container = path if isinstance(path, Container) else open_container(path)
        self._keys = keys
        self.path: FileLocation = self._container.path
        self.nbytes = self._container.nbytes
        self.digest = _check_seal(self._container, keys)
        self._digests: Mapping[str, str] = {}
        self._problems: dict[str, tuple[str | None, str | None]] = {}

    @property
    def manifest_json(self) -> dict[str, Any]:
        """The manifest as plain JSON values, including keys that this version of kfacpack does not know.

        The manifest is parsed on each access, to save memory when many files are open.
        """
        return _read_manifest(self._container, self._keys)

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """The dtype, shape and position of each tensor in the file, by name."""
        return self._container.tensors

    def bytes_of(self, name: str) -> memoryview:
        """Maps a tensor's bytes into memory. The first access checks the tensor's SHA-256 and values.

        Args:
            name: Name of the tensor.

        Returns:
            The bytes as a copy-on-write mapping of the file.

        Raises:
            CorruptTensor: If the SHA-256 does not match, or if a value is not finite.
            BundleError: If the file has been modified since it was opened, or cannot be read.
        """
        self._require_intact(name)
        return self._container.bytes_of(name)

    def read(self, name: str, start: int, stop: int) -> bytearray:
        """Copies bytes `start` to `stop` of a tensor. The first access checks the tensor's SHA-256 and values.

        Args:
            name: Name of the tensor.
            start: Index of the first byte to read, counted from the start of the tensor.
            stop: Index at which to stop reading. The byte at this index is not read.

        Returns:
            A copy of the bytes.

        Raises:
            CorruptTensor: If the SHA-256 does not match, or if a value is not finite.
            BundleError: If the file has been modified since it was opened, or cannot be read.
        """
        self._require_intact(name)
        return self._container.read(name, start, stop)

    def _require_intact(self, name: str) -> None:
        if problem := self.hash_problem(name) or self.finite_problem(name):
            raise CorruptTensor(self.path, problem, f"tensor {name!r}", download_again(self.path))

    def hash_problem(self, name: str) -> str | None:
        """Compares the SHA-256 of a tensor's bytes with the SHA-256 in the manifest.

        Args:
            name: Name of the tensor.

        Returns:
            A description of the difference, or None if the two are equal.
        """
        return self._problems_of(name)[0]

    def finite_problem(self, name: str) -> str | None:
        """Checks that all values of a tensor are finite.

        Args:
            name: Name of the tensor.

        Returns:
            A description of the first NaN or Inf, or None if all values are finite.
        """
        return self._problems_of(name)[1]

    def _problems_of(self, name: str) -> tuple[str | None, str | None]:
        """Returns the results of `hash_problem` and `finite_problem`.

        Both results are computed on first use. The tensor is read once, in chunks, so that memory use stays constant.
        """
        if name not in self._problems:
            content, first, spec = sha256(), None, self.tensors[name]
            for start in range(0, spec.nbytes, _CHUNK):
                chunk = self._container.read(name, start, min(start + _CHUNK, spec.nbytes))
                content.update(chunk)
                if first is None and (index := _first_non_finite(chunk, spec.dtype)) is not None:
                    first = start // ITEM_BYTES[spec.dtype] + index
            digest, expected = content.hexdigest(), self._digests[name]
            self._problems[name] = (
                None if digest == expected else f"its bytes have SHA-256 {digest}, expected {expected}",
                None if first is None else f"element {first} is not a finite number",
            )
        return self._problems[name]


class Bundle(SealedFile):
    """An open `.kfac` file. The manifest is read when the file is opened, tensors when they are accessed.

    Attributes:
        path: Location of the file.
        nbytes: Size of the file in bytes.
        digest: SHA-256 that identifies the whole content.
        manifest: The validated manifest.
        matrices: Manifest entries of the matrices, by name.

    Args:
        path: A path, an `hf://` reference or an open container. For a bundle in several files, the path of its index,
            `NAME.kfac.index.json`.

    Raises:
        BundleError: If the file is not a valid bundle.

    Example:
        >>> bundle = kp.Bundle("digits.kfac")
        >>> bundle.manifest.source.task
        'digits'
        >>> data = bundle.bytes_of("fc.weight/B")
    """

    def __init__(self, path: str | os.PathLike[str] | Container):
        super().__init__(path, BUNDLE)
        self.manifest = validated(self.path, self.manifest_json, Manifest)
        check_consistency(self.path, self.manifest, self.tensors)
        self.matrices = {matrix.name: matrix for matrix in self.manifest.matrices}
        self._digests = {tensor.name: tensor.sha256 for matrix in self.manifest.matrices for tensor in matrix.tensors}

    @property
    def dense_bytes(self) -> int:
        """Uncompressed size of all matrices in float32, in bytes. Diagonal matrices count as vectors."""
        return 4 * sum(LAYOUTS[matrix.form].full(matrix.side) for matrix in self.manifest.matrices)

    def __reduce__(self) -> tuple[type[Bundle], tuple[str]]:
        return Bundle, (str(self.path),)


def _check_seal(container: Container, keys: SealKeys) -> str:
    """Returns the seal after checking that it occurs exactly once in the header and matches the header."""
    if keys.manifest not in container.metadata:
        if other := next((kind for kind in KINDS if kind.manifest in container.metadata), None):
            raise BundleError(container.path, f"is a {other.kind}, expected a {keys.kind}", None, other.usage)
        problem = f"is a safetensors file, but not a {keys.kind}: its metadata has no {keys.manifest!r} key"
        raise BundleError(container.path, problem, None, f"Pass a {keys.kind}; this file may contain model weights")
    if keys.seal not in container.metadata:
        problem = f"has no seal: its metadata has no {keys.seal!r} key"
        raise BundleError(container.path, problem, None, download_again(container.path))
    stored = container.metadata[keys.seal]
    # The header is JSON, so the seal may contain any character, even an unpaired surrogate that cannot be encoded.
    is_unique = len(stored) == 64 and stored.isascii() and container.header.count(stored.encode()) == 1
    if not is_unique or seal(container.header, stored) != stored:
        problem = f"the SHA-256 of the header does not match the seal ({stored[:64]!r})"
        raise BundleError(container.path, problem, "header", download_again(container.path))
    return stored


def _read_manifest(container: Container, keys: SealKeys) -> dict[str, Any]:
    """Parses the manifest and checks its version and required features."""
    text = container.metadata[keys.manifest].encode("utf-8", "replace")
    remedy = "The seal matches, so the file was written this way; report the problem to the publisher of the file"
    manifest = parse_json(container.path, text, "manifest", remedy)
    version, requires = manifest.get("version"), manifest.get("requires", [])
    if not isinstance(version, str) or version.split(".")[0] != _MAJOR:
        problem = f"unsupported format version {short_repr(version)}, expected {_MAJOR}.x"
        raise BundleError(container.path, problem, "manifest: version", _UPGRADE)
    features = requires if isinstance(requires, list) else [requires]
    # Values that are not strings may be unhashable, so they must not reach the set.
    unknown = [feature for feature in features if not isinstance(feature, str) or feature not in keys.features]
    if unknown:
        problem = f"the file requires the unknown feature {short_repr(unknown[0])}"
        raise BundleError(container.path, problem, "manifest: requires", _UPGRADE)
    return manifest


def validated(path: FileLocation, manifest: dict[str, Any], kind: type[ManifestT]) -> ManifestT:
    """Validates a manifest. Unknown keys are ignored.

    Args:
        path: The file that contains the manifest, for error messages.
        manifest: The manifest as plain JSON values.
        kind: The pydantic model to validate against.

    Returns:
        An instance of `kind`.

    Raises:
        BundleError: If the manifest is invalid. The error names the first invalid key.
    """
    try:
        return kind.model_validate(manifest, extra="ignore")
    except ValidationError as error:
        keys, problem = first_problem(error)
        raise BundleError(path, problem, f"manifest: {_key_path(manifest, keys)}") from error


def _key_path(value: Any, keys: tuple[int | str, ...]) -> str:
    """Formats the path of a key in the manifest. List items are shown with their names: `matrices.3 'fc/B'.side`."""
    parts = []
    for key in keys:
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list):
            value = value[key] if type(key) is int and key < len(value) else None
        name = value.get("name") if type(key) is int and isinstance(value, dict) else None
        parts.append(f"{key} {name[:80]!r}" if isinstance(name, str) else str(key)[:80])
    return ".".join(parts)


def _first_non_finite(data: bytearray, dtype: str) -> int | None:
    """Returns the index of the first NaN or Inf, or None if all values are finite."""
    if not dtype.startswith(("F", "BF")):
        return None
    numbers = np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}[dtype])
    # numpy has no bfloat16. A bfloat16 is NaN or Inf if all bits of its exponent, the eight after the sign, are set.
    finite = (numbers & 0x7F80) != 0x7F80 if dtype == "BF16" else np.isfinite(numbers)
    return None if finite.all() else int(finite.argmin())


@dataclass(frozen=True)
class CheckFailure:
    """An item that failed a check."""

    subject: str
    """The item, such as "tensor 'fc/B'" or "parameter 'fc.weight'"."""
    problem: str
    """Description of the problem."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check, which was run on all items of a file, such as all tensors."""

    name: str
    """Name of the check."""
    checked: int
    """Number of items that were checked."""
    failures: tuple[CheckFailure, ...]
    exempt: int = 0
    """Number of items to which the check does not apply."""


def run_check(
    name: str, subjects: Iterable[str], failure: Callable[[str], CheckFailure | None], on_progress: CheckProgress
) -> CheckResult:
    """Runs a check on every item and collects the failures.

    Args:
        name: Name of the check.
        subjects: Names of the items to check.
        failure: Function that takes the name of an item and returns its failure, or None if the item passes.
        on_progress: Called before each item and at the end, with the name of the check, the number of checked
            items and the total number of items.

    Returns:
        The result of the check: the number of items that were checked, and the failures.
    """
    names = list(subjects)
    failures = []
    for done, subject in enumerate(names):
        on_progress(name, done, len(names))
        if problem := failure(subject):
            failures.append(problem)
    on_progress(name, len(names), len(names))
    return CheckResult(name, len(names), tuple(failures))


def check_tensors(
    name: str, bundle: SealedFile, problem: Callable[[str], str | None], on_progress: CheckProgress
) -> CheckResult:
    """Runs a check on every tensor in a sealed file.

    Args:
        name: Name of the check.
        bundle: The open file.
        problem: Function that takes the name of a tensor and returns a description of its problem, or None if
            the tensor passes the check.
        on_progress: Called with the name of the check, the number of checked items and the total number of items.

    Returns:
        The result of the check: the number of tensors that were checked, and the failures.
    """

    def failure(tensor: str) -> CheckFailure | None:
        description = problem(tensor)
        return CheckFailure(f"tensor {tensor!r}", description) if description else None

    return run_check(name, bundle.tensors, failure, on_progress)


def check_model(bundle: Bundle, weights: WeightReader, on_progress: CheckProgress) -> CheckResult:
    """Checks that a model's parameters are equal to those at which the curvature was computed.

    Args:
        bundle: The open bundle.
        weights: Function that takes the name of a parameter and returns its safetensors dtype, shape and bytes.
        on_progress: Called with the name of the check, the number of checked items and the total number of items.

    Returns:
        The result of the check: the number of parameters that were checked, and the failures.
    """
    parameters = {parameter.name: parameter for parameter in bundle.manifest.base.parameters}

    def failure(name: str) -> CheckFailure | None:
        description = difference(parameters[name], weights)
        return CheckFailure(f"parameter {name!r}", description) if description else None

    return run_check("model", parameters, failure, on_progress)
