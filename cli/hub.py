"""`kfacpack push`, `kfacpack pull` and `kfacpack search`: publish, download and find bundles and task vectors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from rich.panel import Panel
from rich.text import Text
from typing_extensions import TypedDict

from kfacpack.errors import KfacpackError, VerificationError, abbreviate, printable
from kfacpack.format.reference import Reference
from kfacpack.format.units import human_bytes

from .console import (
    checks_bar,
    key_value_table,
    name_cell,
    out,
    plain_table,
    print_json,
    print_line,
    show_error,
)
from .options import AS_JSON, QUIET, RUN_PANEL, option, output_option

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfacpack.hub.push import PushResult
    from kfacpack.hub.repository import Artifact, RepositoryFile


REPOSITORY_PANEL, CARD_PANEL, FILTER_PANEL = "Repository", "Card", "Filters"
MAX_TASKS = 8
"""Maximum number of tasks that are printed per file."""


class ArtifactOutput(TypedDict):
    """A bundle or task vector."""

    name: str
    """File name in the repository."""
    kind: Literal["bundle", "vector"]
    bytes: int
    sha256: str
    """Digest of the file."""
    base: str
    """Name of the base model."""
    tasks: list[str]


class PushedFileOutput(ArtifactOutput):
    """A file that was passed to `kfacpack push`."""

    sent: bool
    """Whether the file was uploaded or, with `--dry-run`, would be; false if the repository already has the file."""


class PulledFileOutput(ArtifactOutput):
    """A file that was downloaded."""

    reference: str
    """Location of the file on the Hub, hf://OWNER/REPO@REVISION/FILE."""
    path: str


class PushOutput(TypedDict):
    """Output of `kfacpack push --json`."""

    repository: str
    revision: str | None
    """Branch to which the files were pushed; null for main."""
    created: bool
    """Whether the repository is new."""
    commit: str | None
    """Hash of the commit; null if nothing was uploaded."""
    files: list[PushedFileOutput]
    card_changed: bool
    """Whether the card differs from the previous card on the Hub."""
    card: str
    """Text of the model card, README.md."""


class PullOutput(TypedDict):
    """Output of `kfacpack pull --json`."""

    files: list[PulledFileOutput]


class HubFileOutput(TypedDict):
    """A file in a repository."""

    name: str
    bytes: int


class ListingOutput(TypedDict):
    """Output of `kfacpack pull --list --json`."""

    repository: str
    files: list[HubFileOutput]


class RepositoryOutput(TypedDict):
    """A repository that matches the filters."""

    repository: str
    base_models: list[str]
    tasks: list[str]
    downloads: int
    files: list[HubFileOutput]


class SearchOutput(TypedDict):
    """Output of `kfacpack search --json`."""

    repositories: list[RepositoryOutput]


def push(
    files: list[str] = typer.Argument(
        ..., metavar="FILE... OWNER/REPO", help="Bundles and task vectors to publish, followed by the repository."
    ),
    private: bool = option(REPOSITORY_PANEL, False, "--private", help="If the repository is new, make it private."),
    revision: str | None = option(
        REPOSITORY_PANEL,
        None,
        "--revision",
        "--branch",
        metavar="BRANCH",
        help="Branch to push to; it is created if it does not exist. [default: main]",
    ),
    message: str | None = option(REPOSITORY_PANEL, None, "--message", "-m", metavar="TEXT", help="Commit message."),
    license: str | None = option(
        CARD_PANEL,
        None,
        "--license",
        metavar="ID",
        help="License of the files, as an identifier that the Hub uses, such as apache-2.0 or mit.",
    ),
    base_model: str | None = option(
        CARD_PANEL,
        None,
        "--base-model",
        metavar="OWNER/REPO",
        help="Base model on the Hub to name in the card. Needed only if it cannot be derived from the files.",
    ),
    dry_run: bool = option(RUN_PANEL, False, "--dry-run", help="Show the files and the card without uploading them."),
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Publish bundles and task vectors on the Hub, with a model card.

    The files are verified first; if a check fails, nothing is uploaded and the exit code is 1. The repository is
    created if it does not exist. The files and the card are uploaded in one commit. Files that have not changed are not
    uploaded again, so an interrupted push can be repeated.

    In an existing card, only the part between two marker comments is replaced. Log in with: hf auth login
    """
    *paths, repository = files
    if not paths:
        raise KfacpackError(
            f"{printable(repository)}: expected files and a repository, as in: kfacpack push t.kfac owner/repo"
        )
    if Path(repository).exists():
        raise KfacpackError(f"{printable(repository)}: is a local path; expected OWNER/REPO as the last argument")
    # Imported here so that --help does not wait for torch.
    from kfacpack.hub.push import push as push_files

    show = not (quiet or as_json)
    try:
        with checks_bar("verifying", show=show) as advance:
            result = push_files(
                paths,
                repository,
                private=private,
                revision=revision,
                message=message,
                license=license,
                base_model=base_model,
                dry_run=dry_run,
                on_progress=advance,
            )
    except VerificationError as error:
        show_error(f"{error}. Nothing was uploaded")
        raise typer.Exit(1) from error
    if as_json:
        print_json(_push_json(result))
    elif show:
        _print_push(result, dry_run)


def _artifact_json(item: Artifact) -> ArtifactOutput:
    return {
        "name": item.name,
        "kind": item.kind,
        "bytes": item.file.nbytes,
        "sha256": item.file.digest,
        "base": item.base.name,
        "tasks": list(item.tasks),
    }


def _push_json(result: PushResult) -> PushOutput:
    return {
        "repository": result.repository,
        "revision": result.revision,
        "created": result.creates,
        "commit": result.commit,
        "files": [{**_artifact_json(file.item), "sent": not file.unchanged} for file in result.files],
        "card_changed": result.card_changed,
        "card": result.card,
    }


def _print_push(result: PushResult, dry_run: bool) -> None:
    target = f"{result.repository}{f'@{result.revision}' if result.revision else ''}"
    for file in result.files:
        action = "unchanged" if file.unchanged else "would upload" if dry_run else "uploaded"
        tasks = f": {abbreviate(file.item.tasks, MAX_TASKS)}" if file.item.tasks else ""
        description = f"{file.item.kind} of {file.item.base.name}{tasks}"
        print_line(f"{action} {file.item.name}: {description}, {human_bytes(file.item.file.nbytes)}")
    if dry_run:
        state = "a new repository" if result.creates else "an existing repository"
        card = "README.md would change" if result.card_changed else "README.md would stay the same"
        print_line(f"target: {target}, {state}; {card}. Nothing was uploaded. The card:")
        out.print()
        out.print(Text(result.card), soft_wrap=True)
    elif result.commit is None:
        print_line(f"{target} is up to date; nothing was uploaded")
    else:
        card = ", with a new README.md" if result.card_changed else ""
        state = ", a new repository" if result.creates else ""
        print_line(f"pushed to {target}{state}: commit {result.commit[:12]}{card}")
        item = result.files[0].item
        # The first command installs kfacpack. The second inspects a bundle or downloads a vector.
        reference = Reference(result.repository, item.name, result.revision)
        print_line(f"next: {item.commands(str(reference))[1]}", style="dim")


def pull(
    source: str = typer.Argument(..., metavar="hf://OWNER/REPO/FILE|OWNER/REPO", help="File or repository on the Hub."),
    files: list[str] | None = typer.Argument(
        None, metavar="FILE...", help="Files in the repository to download; by default, all bundles and task vectors."
    ),
    output: Path | None = output_option("DIR|FILE", None, "Output folder or file. [default: the current folder]"),
    force: bool = option(RUN_PANEL, False, "--force", help="Overwrite local files that differ from those on the Hub."),
    listing: bool = option(
        RUN_PANEL, False, "--list", help="List the bundles and task vectors of the repository without downloading them."
    ),
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Download bundles and task vectors, verify them and show what they contain.

    OWNER/REPO@REVISION selects a branch, tag or commit. Interrupted downloads are resumed. The SHA-256 of each file is
    compared with the one on the Hub, and the content of the file is verified. If a check fails, the file is not saved
    and the exit code is 1. For private repositories, log in with: hf auth login
    """
    if listing:
        if flag := next((flag for flag, value in (("FILE", files), ("-o", output), ("--force", force)) if value), None):
            raise KfacpackError(f"--list downloads nothing and cannot be combined with {flag}; omit one of them")
        _list_files(source, as_json=as_json)
        return
    # Imported here so that --help does not wait for torch.
    from kfacpack.hub.repository import pull as pull_files

    show = not (quiet or as_json)
    try:
        with checks_bar("verifying", show=show) as advance:
            pulled = pull_files(source, files or (), output=output, force=force, on_progress=advance)
    except VerificationError as error:
        show_error(f"{error}. The file was not saved")
        raise typer.Exit(1) from error
    if as_json:
        listed: list[PulledFileOutput] = [
            {"reference": str(file.reference), "path": str(file.path), **_artifact_json(file.item)} for file in pulled
        ]
        result: PullOutput = {"files": listed}
        print_json(result)
    elif show:
        for file in pulled:
            title = Text(printable(f"{file.path}: {file.item.kind}"))
            out.print(Panel(key_value_table(file.item.summary), title=title, title_align="left", expand=False))
        for file in pulled[:1]:
            print_line(f"next: {file.item.commands(str(file.path))[-1]}", style="dim")


def _list_files(repository: str, *, as_json: bool) -> None:
    from kfacpack.hub.repository import inspect_repository, parse_repository

    name, revision = parse_repository(repository)
    files = inspect_repository(name, revision).candidates
    if as_json:
        listing: ListingOutput = {"repository": name, "files": _files_json(files)}
        print_json(listing)
        return
    if not files:
        raise KfacpackError(f"{printable(repository)}: contains no .kfac or .safetensors files")
    table = plain_table("file", numbers=("size",))
    for file in files:
        table.add_row(name_cell(file.name), human_bytes(file.nbytes))
    out.print(table)


def _files_json(files: Iterable[RepositoryFile]) -> list[HubFileOutput]:
    return [{"name": file.name, "bytes": file.nbytes} for file in files]


def search(
    base_model: str | None = option(
        FILTER_PANEL,
        None,
        "--base-model",
        metavar="MODEL",
        help="List only repositories for this base model: a name as passed to --model, or a model id on the Hub.",
    ),
    task: str | None = option(
        FILTER_PANEL, None, "--task", metavar="TASK", help="List only repositories for this task."
    ),
    author: str | None = option(
        FILTER_PANEL, None, "--author", metavar="NAME", help="List only repositories of this user or organisation."
    ),
    limit: int = option(FILTER_PANEL, 20, "--limit", min=1, help="Maximum number of repositories to list."),
    as_json: bool = AS_JSON,
) -> None:
    """List the bundles and task vectors in repositories on the Hub."""
    from kfacpack.hub.repository import search as search_hub

    repositories = search_hub(base_model=base_model, task=task, author=author, limit=limit)
    if as_json:
        listed: list[RepositoryOutput] = [
            {
                "repository": repository.repository,
                "base_models": list(repository.bases),
                "tasks": list(repository.tasks),
                "downloads": repository.downloads,
                "files": _files_json(repository.files),
            }
            for repository in repositories
        ]
        result: SearchOutput = {"repositories": listed}
        print_json(result)
        return
    if not repositories:
        filtered = base_model or task or author
        print_line("no repositories match all filters; try fewer filters" if filtered else "no repositories found")
        return
    table = plain_table("file", "base model", "tasks", numbers=("size",))
    for repository in repositories:
        for file in repository.files:
            name = name_cell(f"hf://{repository.repository}/{file.name}")
            names = (name_cell(", ".join(group)) for group in (repository.bases, repository.tasks))
            table.add_row(name, *names, human_bytes(file.nbytes))
    out.print(table)
