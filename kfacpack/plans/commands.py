"""Stages as a person would type them, in the folder of the run: that is where every path in them is meant from."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from kfacpack.paths import expanded
from kfacpack.tasks.places import is_address

if TYPE_CHECKING:
    from kfacpack.plans.plan import Plan


class Written(str):
    """A word as the shell is to read it: quoted already, with variables in it."""

    __slots__ = ()


def command(*words: object) -> str:
    typed = ["kfacpack", *(word if isinstance(word, Written) else shlex.quote(str(word)) for word in words)]
    return " ".join(typed)


def for_model(plan: Plan, root: Path) -> tuple[object, ...]:
    said = plan.model
    prefix, _, folder = said.name.partition(":")
    name = typed(plan, folder, root, f"{prefix}:") if plan.model_folder() else said.name
    weights = typed(plan, said.weights, root) if said.weights not in (None, "random") else said.weights
    return (
        *("--model", name),
        *(("--weights", weights) if weights else ()),
        *(("--image-size", said.image_size) if said.image_size else ()),
        *(("--prompts", said.prompts) if said.prompts else ()),
        *(("--dtype", said.dtype) if said.dtype != "float32" else ()),
    )


def for_task(plan: Plan, name: str, root: Path) -> tuple[object, ...]:
    said = plan.task(name)
    data = ("--data", typed(plan, said.data, root)) if said.data else ()
    return ("--task", name, *data, *(("--columns", said.columns) if said.columns else ()))


def for_data(plan: Plan, name: str, root: Path) -> str:
    """TASK, or TASK=DIR."""
    data = plan.task(name).data
    return typed(plan, data, root, f"{name}=") if data else name


def typed(plan: Plan, said: str, root: Path, before: str = "") -> str:
    """A path of the plan, from the run's folder; one that is absolute stays as it is written, variables and all."""
    if is_address(said):
        return before + said
    full = expanded(os.path.expandvars(said))
    if not full.is_absolute():
        # Through no links: the shell and the system disagree on what is above one.
        return before + os.path.relpath(plan.place(said).resolve(), root.resolve())
    if "$" not in said and not said.startswith("~"):
        return before + said
    text = re.sub(r"^~(?=/|$)", "$HOME", said)
    text = str(full) if text.startswith("~") else text
    # In double quotes, a dollar that begins no name, and these three, would mean something else.
    escaped = re.sub(r'([\\"`]|\$(?![\w{]))', r"\\\1", before + text)
    return Written(f'"{escaped}"')
