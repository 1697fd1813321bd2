"""Stages as a person would type them."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kfacpack.plans.plan import Plan


def command(*words: object) -> str:
    return shlex.join(["kfacpack", *(str(word) for word in words)])


def for_model(plan: Plan) -> tuple[object, ...]:
    said = plan.model
    return (
        *("--model", said.name),
        *(("--weights", said.weights) if said.weights else ()),
        *(("--image-size", said.image_size) if said.image_size else ()),
        *(("--dtype", said.dtype) if said.dtype != "float32" else ()),
    )


def for_task(plan: Plan, name: str) -> tuple[object, ...]:
    said = plan.task(name)
    data = ("--data", said.data) if said.data else ()
    return ("--task", name, *data, *(("--columns", said.columns) if said.columns else ()))
