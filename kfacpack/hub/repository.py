"""Repositories on the Hub, and the bundles and task vectors that they contain.

An `Artifact` is a bundle or a task vector in a repository, with its summary, verification and usage examples. `kp.pull`
downloads files; `kp.search` finds repositories by the tags of model cards.
"""

from __future__ import annotations

import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, overload

from kfacpack.curvature.verification import Verification, verify
from kfacpack.errors import BundleError, HubError, KfacpackError, VerificationError
from kfacpack.format.bundle_index import INDEX_SUFFIX, files_of, open_container
from kfacpack.format.container import BUNDLE, VECTOR
from kfacpack.format.hub_client import digest_of_file, hub_api, hub_errors, local_copy
from kfacpack.format.manifest import Base, Source
from kfacpack.format.reader import Bundle, check_tensors
from kfacpack.format.reference import REPOSITORY, SCHEME, Reference, header_of
from kfacpack.format.writer import replace_atomically
from kfacpack.hub.card import (
    BASE_TAG,
    TAGS,
    TASK_TAG,
    bundle_summary,
    data_option,
    model_from_option,
    model_option,
    vector_summary,
)
from kfacpack.vectors.storage import VectorFile

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

    from kfacpack.format.reader import CheckProgress


_PLAIN_NAME = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*")
"""Pattern of file names that are safe to print, type and create. Names in a repository are untrusted."""
_REPOSITORY_NAME = re.compile(rf"(?:hf://(?:models/)?)?({REPOSITORY.pattern})(?:@(.+))?/?")


@dataclass(frozen=True)
class RepositoryFile:
    """A file in a repository."""

    name: str
    nbytes: int
    sha256: str | None
    """SHA-256 of the content; None for small files, which are stored in git itself."""
    git: str
    """Id of the file's git blob."""


@dataclass(frozen=True)
class HubRepository:
    """A repository on the Hub at a certain commit."""

    name: str
    commit: str
    private: bool
    files: tuple[RepositoryFile, ...]

    def reference(self, file: str) -> Reference:
        """Returns a reference to a file at this commit."""
        return Reference(self.name, file, self.commit)

    @property
    def candidates(self) -> list[RepositoryFile]:
        """Files that, judging by their names, may be bundles or task vectors."""
        return [file for file in self.files if file.name.endswith(SUFFIXES) and _PLAIN_NAME.fullmatch(file.name)]

    def item(self, file: str) -> Artifact | None:
        """Opens a bundle or task vector by downloading only its header. Returns None if the file is neither."""
        try:
            return Artifact.of(self.reference(file), file)
        except BundleError:
            return None


def parse_repository(text: str) -> tuple[str, str | None]:
    """Parses `owner/repo[@revision]`, with or without `hf://`.

    Returns:
        The name of the repository, and the revision or None.

    Raises:
        HubError: If `text` is not the name of a repository.
    """
    match = _REPOSITORY_NAME.fullmatch(text)
    if not match:
        raise HubError(text, "is not a repository name", "Expected owner/repo or owner/repo@revision")
    return match[1], match[2].replace("%2F", "/") if match[2] else None


@overload
def inspect_repository(name: str, revision: str | None, *, missing_ok: Literal[False] = False) -> HubRepository: ...
@overload
def inspect_repository(name: str, revision: str | None, *, missing_ok: Literal[True]) -> HubRepository | None: ...
def inspect_repository(name: str, revision: str | None, *, missing_ok: bool = False) -> HubRepository | None:
    """Lists the files of a repository.

    Args:
        name: Name of the repository, `owner/repo`.
        revision: Branch, tag or commit. Defaults to the main branch.
        missing_ok: Whether to return None if the repository does not exist or is not visible to the user.

    Returns:
        The repository at the current commit of the revision, or None if it does not exist and `missing_ok` is set.

    Raises:
        HubError: If the repository cannot be read.
    """
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    with hub_errors(name, name, revision):
        try:
            info = hub_api().model_info(name, revision=revision, files_metadata=True)
        except RepositoryNotFoundError as error:
            if missing_ok and not isinstance(error, GatedRepoError):
                return None
            raise
    files = tuple(
        RepositoryFile(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else None, file.blob_id or "")
        for file in info.siblings or ()
    )
    return HubRepository(name, info.sha or "", bool(info.private), files)


@dataclass(frozen=True)
class PullResult:
    """A file that was downloaded and verified."""

    reference: Reference
    path: Path
    item: Artifact


def pull(
    what: str | Reference,
    files: Sequence[str] = (),
    *,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    on_progress: CheckProgress = lambda check, done, total: None,
) -> list[PullResult]:
    """Downloads bundles and task vectors from the Hub and verifies them.

    Each file is checked against the SHA-256 recorded by the Hub and against the digests in its own header, and is then
    written atomically. A damaged copy in the cache is downloaded again.

    Args:
        what: A file, `hf://owner/repo[@revision]/FILE`, or a repository, `owner/repo[@revision]`.
        files: Names of files in the repository. Defaults to all bundles and task vectors.
        output: Target directory or, if only one file is downloaded, target file. Defaults to the current directory.
        force: Whether to overwrite existing files that differ.
        on_progress: Called with the name of a check, the number of checked items and the total number of items.

    Returns:
        The downloaded files.

    Raises:
        KfacpackError: If a target file exists with different content, or `output` is a file instead of a folder.
        VerificationError: If a check on a file fails.
        HubError: If the repository cannot be read, or contains neither bundles nor task vectors.

    Example:
        >>> (file,) = kp.pull("hf://owner/repo/cars.kfac")
        >>> curvature = kp.load(file.path)
    """
    references = _select_files(what, files)
    pulled = []
    for reference, target in zip(references, _targets(references, output), strict=True):
        # The index of a bundle in several files comes last. All files are in one cache folder, at one commit.
        *shards, cached = [local_copy(file, checked=True) for file in _references(reference)]
        item = Artifact.of(cached, reference.file)
        item.require_valid(cached, on_progress)
        for shard in shards:
            _copy_to(shard, target.with_name(shard.name), force=force)
        _copy_to(cached, target, force=force)
        pulled.append(PullResult(reference, target, Artifact.of(target, reference.file)))
    return pulled


def _references(reference: Reference) -> list[Reference]:
    """Returns references to all files that make up a bundle or task vector. If there is an index, it comes last."""
    return [file for file in files_of(reference) if isinstance(file, Reference)]


def _select_files(what: str | Reference, files: Sequence[str]) -> list[Reference]:
    if isinstance(what, Reference) or (what.startswith(SCHEME) and what.endswith(SUFFIXES)):
        if files:
            raise KfacpackError(
                f"{what}: is the address of a file; to pull several files, pass the repository and their names"
            )
        return [what if isinstance(what, Reference) else Reference.parse(what)]
    name, revision = parse_repository(what)
    if files:
        return [Reference(name, file, revision) for file in files]
    repository = inspect_repository(name, revision)
    names = [file.name for file in repository.candidates if repository.item(file.name)]
    if not names:
        raise HubError(what, "contains neither bundles nor task vectors", "Check the name of the repository")
    return [Reference(name, file, revision) for file in names]


def _targets(references: Sequence[Reference], output: str | os.PathLike[str] | None) -> list[Path]:
    """Returns the local path at which each file will be stored."""
    target = Path(output) if output is not None else Path()
    if len(references) == 1 and output is not None and not target.is_dir() and target.name.endswith(SUFFIXES):
        return [target]
    if target.exists() and not target.is_dir():
        raise KfacpackError(f"{target}: expected a directory for the downloaded files, got a file")
    paths = [target / reference.name for reference in references]
    if len(set(paths)) < len(paths):
        raise KfacpackError("files in different folders of the repository have the same name; pull them one by one")
    return paths


def _copy_to(source: Path, target: Path, *, force: bool) -> None:
    """Copies a file atomically. A target with the same content is not written again unless `force` is set."""
    if target.exists() and not force:
        if target.is_file() and digest_of_file(target) == digest_of_file(source):
            return
        raise KfacpackError(f"{target}: already exists with different content; move it, or set `force` to overwrite it")
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        source.open("rb") as stream,
        replace_atomically(target) as descriptor,
        os.fdopen(descriptor, "wb", closefd=False) as output,
    ):
        shutil.copyfileobj(stream, output, 2**20)


@dataclass(frozen=True)
class SearchResult:
    """A repository with bundles or task vectors."""

    repository: str
    bases: tuple[str, ...]
    tasks: tuple[str, ...]
    downloads: int
    files: tuple[RepositoryFile, ...]


def search(
    *, base_model: str | None = None, task: str | None = None, author: str | None = None, limit: int = 20
) -> list[SearchResult]:
    """Searches the Hub for repositories with bundles or task vectors, by the tags of their model cards.

    Args:
        base_model: The base model, either as a value of the option `--model` (ViT-B-32/openai, timm:NAME, or ViT-B-32
            for any pretrained tag) or as a Hub id.
        task: Name of a task.
        author: User or organisation.
        limit: Maximum number of repositories.

    Returns:
        The repositories and their files.

    Raises:
        HubError: If the Hub cannot be reached.
    """
    from huggingface_hub import constants

    tags = [TAGS[0], *([f"{TASK_TAG}{task}"] if task else [])]
    alternatives = _tag_filters(base_model) if base_model else [[]]
    models: dict[str, ModelInfo] = {}
    if constants.HF_HUB_OFFLINE:
        problem = "needs the Hub, but HF_HUB_OFFLINE is set"
        raise HubError("search", problem, "Unset HF_HUB_OFFLINE", unreachable=True)
    with hub_errors("search", "the Hub", offline_remedy="set HF_ENDPOINT to a mirror"):
        for more in alternatives:
            for model in hub_api().list_models(filter=[*tags, *more], author=author, limit=limit, full=True):
                models.setdefault(model.id, model)
    return [_search_result(model) for model in list(models.values())[:limit]]


def _tag_filters(base_model: str) -> list[list[str]]:
    """Returns two alternative tag filters for a base model: one with its name, and one with its Hub id."""
    name, model_id = model_from_option(base_model)
    return [[f"{BASE_TAG}{name}"], [f"base_model:{model_id}"]]


def _search_result(info: ModelInfo) -> SearchResult:
    def tagged(prefix: str) -> tuple[str, ...]:
        return tuple(tag.removeprefix(prefix) for tag in info.tags or () if tag.startswith(prefix))

    files = tuple(inspect_repository(info.id, None).candidates)
    return SearchResult(info.id, tagged(BASE_TAG), tagged(TASK_TAG), info.downloads or 0, files)


SUFFIXES = (".kfac", ".safetensors", INDEX_SUFFIX)
"""File name suffixes of bundles and task vectors; a bundle in several files is represented by its index."""


@dataclass(frozen=True)
class Artifact(ABC):
    """A bundle or a task vector in a repository."""

    kind: ClassVar[Literal["bundle", "vector"]]
    label: ClassVar[str]
    """Name of this kind of file in model cards."""

    name: str
    """File name in the repository."""
    file: Bundle | VectorFile

    @staticmethod
    def of(path: str | os.PathLike[str], name: str) -> Artifact:
        """Opens a file and determines its kind from its header alone.

        Args:
            path: The file, or a reference to a file on the Hub.
            name: File name in the repository.

        Raises:
            BundleError: If the file is neither a bundle nor a task vector.
        """
        location = header_of(path)
        container = open_container(location)  # opened once: on the Hub, every access may be a request
        if BUNDLE.manifest in container.metadata:
            return BundleArtifact(name, Bundle(container))
        if VECTOR.manifest in container.metadata:
            return VectorArtifact(name, VectorFile(container))
        problem = "is a safetensors file, but neither a bundle nor a task vector"
        raise BundleError(location, problem, None, "It may contain model weights; pass a bundle or a task vector")

    @property
    def base(self) -> Base:
        """Manifest entry of the base model."""
        return self.file.manifest.base

    @property
    @abstractmethod
    def sources(self) -> tuple[Source, ...]:
        """The tasks and datasets that the file records.

        An empty tuple if no source is recorded, as for a merge of several tasks, which records only their names.
        """

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks that the file was computed from."""
        return tuple(source.task for source in self.sources)

    @property
    @abstractmethod
    def summary(self) -> list[tuple[str, str]]:
        """Summary of the file, as pairs of a label and a value."""

    @abstractmethod
    def commands(self, location: str) -> list[str]:
        """Returns shell commands that use the file.

        Args:
            location: Path or `hf://` reference of the file.
        """

    @abstractmethod
    def python(self, location: str) -> list[str]:
        """Returns lines of Python code that use the file.

        Args:
            location: Path or `hf://` reference of the file.
        """

    @abstractmethod
    def verify(self, path: str | os.PathLike[str], on_progress: CheckProgress) -> Verification:
        """Runs all checks on the file.

        Args:
            path: Local path of the file.
            on_progress: Called with the name of a check, the number of checked items and the total number of items.

        Returns:
            The results of the checks. A failed check is recorded in the results and does not raise an error.
        """

    def require_valid(self, path: str | os.PathLike[str], on_progress: CheckProgress) -> None:
        """Runs all checks on the file, and raises an error if one fails.

        Args:
            path: Local path of the file.
            on_progress: Called with the name of a check, the number of checked items and the total number of items.

        Raises:
            VerificationError: If a check fails.
        """
        verification = self.verify(path, on_progress)
        for check in verification.checks:
            for failure in check.failures[:1]:
                more = f" ({len(check.failures)} of {check.checked} failed)" if len(check.failures) > 1 else ""
                raise VerificationError(f"{verification.path}: {failure.subject}: {failure.problem}{more}")

    @property
    def _model(self) -> str:
        """The `--model` option for commands, with a leading space. Empty for the default model and unknown families."""
        model = model_option(self.base)
        return "" if model in (None, "tiny") else f" --model {model}"


@dataclass(frozen=True)
class BundleArtifact(Artifact):
    """A bundle in a repository."""

    kind = "bundle"
    label = "curvature"

    file: Bundle

    @property
    def sources(self) -> tuple[Source, ...]:
        """The task and dataset on which the curvature was estimated; an empty tuple if they are not recorded."""
        source = self.file.manifest.source
        return (source,) if source else ()

    @property
    def tasks(self) -> tuple[str, ...]:
        """The bundle's task or, for a merged bundle, the tasks of its parents."""
        if merge := self.file.manifest.merge:
            return tuple(dict.fromkeys(parent.task for parent in merge.parents if parent.task))
        return super().tasks

    @property
    def summary(self) -> list[tuple[str, str]]:
        """Summary of the bundle, as pairs of a label and a value."""
        return list(bundle_summary(self.file))

    def commands(self, location: str) -> list[str]:
        """Returns shell commands that inspect the bundle and train with it."""
        train = f"kfacpack train{self._model} --task TASK --reg {location} -o TASK.safetensors"
        return ["pip install kfacpack", f"kfacpack inspect {location}", train]

    def python(self, location: str) -> list[str]:
        """Returns lines of Python code that load the bundle and use it."""
        use = "drift = curvature.quadratic(tau)  # predicted drift of f on this task for a task vector tau"
        return ["import kfacpack as kp", f'curvature = kp.load("{location}")', use]

    def verify(self, path: str | os.PathLike[str], on_progress: CheckProgress) -> Verification:
        """Runs all checks of `kfacpack.verify` on the bundle."""
        return verify(path, on_progress=on_progress)


@dataclass(frozen=True)
class VectorArtifact(Artifact):
    """A task vector in a repository."""

    kind = "vector"
    label = "task vector"

    file: VectorFile

    @property
    def sources(self) -> tuple[Source, ...]:
        """The tasks and datasets of the vector."""
        return tuple(task.source for task in self.file.manifest.tasks)

    @property
    def summary(self) -> list[tuple[str, str]]:
        """Summary of the task vector, as pairs of a label and a value."""
        return list(vector_summary(self.file))

    def commands(self, location: str) -> list[str]:
        """Returns shell commands that download the task vector and evaluate it."""
        task = f" --task {self.tasks[0]}{data_option(self.sources[0])}" if self.tasks else ""
        evaluate = f"kfacpack eval{self._model}{task} --vector {location}"
        return ["pip install kfacpack", f"kfacpack pull {location} -o {self.name.rpartition('/')[2]}", evaluate]

    def python(self, location: str) -> list[str]:
        """Returns lines of Python code that load the task vector and apply it."""
        use = "edited = vector.apply(model)  # the base model with the vector added"
        return ["import kfacpack as kp", f'vector = kp.TaskVector.load("{location}")', use]

    def verify(self, path: str | os.PathLike[str], on_progress: CheckProgress) -> Verification:
        """Checks that all SHA-256 digests match, all values are finite and all stored indices are valid."""
        file = VectorFile(path)
        checks = (
            check_tensors("sha256", file, file.hash_problem, on_progress),
            check_tensors("finite", file, file.finite_problem, on_progress),
            *([check_tensors("indices", file, file.index_problem, on_progress)] if file.has_indices else []),
        )
        return Verification(str(file.path), file.digest, checks)
