"""`kfacpack push`: bundles and task vectors to the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from kfacpack.errors import DoesNotHoldError, KfacpackError, printable
from kfacpack.hub.files.reference import Reference

from .console import human_bytes, out, print_json, show_error
from .options import QUIET, RUN, option
from .progress import checks_bar

if TYPE_CHECKING:
    from kfacpack.hub.push import Pushed

WHERE, CARD = "The repository", "The card"


def push(
    files: list[str] = typer.Argument(
        ..., metavar="FILE... OWNER/REPO", help="Bundles and task vectors, and the repository they go to."
    ),
    private: bool = option(WHERE, False, "--private", help="If the repository is not there yet, make it private."),
    revision: str | None = option(
        WHERE, None, "--revision", "--branch", metavar="BRANCH", help="Another branch than main; made if it is missing."
    ),
    message: str | None = option(WHERE, None, "--message", "-m", help="What the commit says of itself."),
    license: str | None = option(
        CARD, None, "--license", metavar="ID", help="The licence you give them, in the Hub's words: apache-2.0, mit."
    ),
    base_model: str | None = option(
        CARD, None, "--base-model", metavar="OWNER/REPO", help="The base model on the Hub, where that is not known."
    ),
    dry_run: bool = option(RUN, False, "--dry-run", help="Show the files and the card; send nothing."),
    as_json: bool = option(RUN, False, "--json", help="Print what was sent, and the card, as JSON."),
    quiet: bool = QUIET,
) -> None:
    """Publish bundles and task vectors on the Hub, with a card made of what they say of themselves.

    They are verified first; exit code 1: one does not hold, and nothing was sent. The repository is made if it is not
    there. Files and card go in one commit; what is there already is not sent again, so that a push that was cut off
    goes on with the same command.

    Of a card that is there, your own text stays: ours lies between two comments. Log in with: hf auth login.
    """
    *paths, repository = files
    if not paths:
        raise KfacpackError(f"{printable(repository)}: expected files and then the repository: push t.kfac owner/repo")
    if Path(repository).exists():
        raise KfacpackError(f"{printable(repository)}: the last word is the repository, owner/repo, and this is a file")
    # They bring torch, which --help has no need to wait for.
    from kfacpack.hub.push import push as pushed

    show = not (quiet or as_json)
    try:
        with checks_bar("verifying", show=show) as advance:
            done = pushed(
                paths,
                repository,
                private=private,
                revision=revision,
                message=message,
                license=license,
                base_model=base_model,
                dry_run=dry_run,
                progress=advance,
            )
    except DoesNotHoldError as error:
        show_error(f"{error}. Nothing was sent")
        raise typer.Exit(1) from error
    if as_json:
        print_json(_as_json(done))
    elif show:
        _print(done, dry_run)


def _as_json(done: Pushed) -> dict[str, Any]:
    return {
        "repository": done.repository,
        "revision": done.revision,
        "created": done.creates,
        "commit": done.commit,
        "files": [{**each.item.as_json(), "sent": not each.there} for each in done.files],
        "card_changed": done.card_changed,
        "card": done.card,
    }


def _print(done: Pushed, dry_run: bool) -> None:
    where = f"{done.repository}{f'@{done.revision}' if done.revision else ''}"
    for each in done.files:
        word = "is there" if each.there else "would send" if dry_run else "sent"
        tasks = f": {', '.join(each.item.tasks[:8])}" if each.item.tasks else ""
        said = f"{word} {each.item.name}: {each.item.kind} of {each.item.base.name}{tasks}"
        out.print(Text(printable(f"{said}, {human_bytes(each.item.file.nbytes)}")), soft_wrap=True)
    if dry_run:
        new = (
            "a new repository" if done.creates else "README.md would change" if done.card_changed else "README.md stays"
        )
        out.print(Text(f"to {where}, {new}; nothing was sent. The card:\n"), soft_wrap=True)
        out.print(Text(done.card), soft_wrap=True)
    elif done.commit is None:
        out.print(Text(f"{where} has all of this already; nothing was sent"), soft_wrap=True)
    else:
        card = " and the card" if done.card_changed else ""
        new = ", a new repository" if done.creates else ""
        out.print(
            Text(f"pushed to {where}{new}: commit {done.commit[:12]}, with the files above{card}"), soft_wrap=True
        )
        place = Reference(done.repository, done.files[0].item.name, done.revision)
        out.print(Text(f"read it anywhere as {place}"), soft_wrap=True)
