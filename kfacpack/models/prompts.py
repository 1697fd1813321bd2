"""Prompts for text models: how examples are formatted, and which words denote the classes.

The templates are stored in `prompts.json`, by style and task. The styles are:

- `t5`: `TASK column: text column: text`, with the class names as answers, as in the training data of T5 v1.0.
- `flan`: a question with a list of options, as in the training data of flan-T5.
- `plain`: a text that a base language model continues with the answer. Answers begin with a space.
- `chat`: a question to an instruction-tuned language model, formatted with its chat template.

Except in the style `t5`, templates of different tasks have different answers. The penalty during training keeps the
change in f on other tasks small but not zero, and this change is along the directions that predict the answers of the
trained task. If another task had the same answers, its logits would therefore change. For a task without a template,
the prompt lists the columns, and the answers are the class names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any, Literal, NamedTuple

from kfacpack.errors import KfacpackError, printable
from kfacpack.format.identity import base_task_name

PromptStyle = Literal["t5", "flan", "plain", "chat"]
CONFIG_KEY = "kfacpack_prompts"
"""Key under which config.json records the prompt style, so that an edited model uses the prompts of its base model."""


class Prompt(NamedTuple):
    """The prompt of one task in one style."""

    template: str
    """Format string whose fields are column names of the task."""
    answers: Mapping[str, str] = {}
    """Answers by class name; empty if the class names are the answers."""

    @property
    def columns(self) -> set[str]:
        """Names of the columns that the template uses."""
        return {field for _, field, _, _ in Formatter().parse(self.template) if field}


PROMPTS: dict[PromptStyle, dict[str, Prompt]] = {
    style: {task: Prompt(**entry) for task, entry in prompts.items()}
    for style, prompts in json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8")).items()
}
"""Prompts by style and task."""


def prompt_style(config: Any, default: PromptStyle, styles: Sequence[PromptStyle]) -> PromptStyle:
    """Returns the prompt style that is recorded in a model's config, or `default` if the config records no style.

    Args:
        config: The model's config.
        default: Style to return if the config does not record a style.
        styles: Styles of the model's family. Any other recorded style is ignored.
    """
    recorded = getattr(config, CONFIG_KEY, None)
    return next((style for style in styles if style == recorded), default)


def prompts(columns: Mapping[str, Sequence[str]], task: str, style: PromptStyle) -> list[str]:
    """Formats examples as prompts.

    Args:
        columns: For each column name, the strings of N examples.
        task: Task name; a class split (`NAME@k/n`) uses the prompts of the whole task.
        style: Prompt style of the model.

    Returns:
        N prompts.

    Raises:
        KfacpackError: If a `plain` or `chat` template uses a column that the examples do not have.
    """
    task = base_task_name(task)
    prompt = PROMPTS[style].get(task)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if prompt and prompt.columns <= set(columns):
        return [prompt.template.format(**row) for row in rows]
    if style in ("t5", "flan"):
        trained = PROMPTS["t5"].get(task)
        if trained and trained.columns == set(columns):
            return [trained.template.format(**row) for row in rows]
        return [" ".join([task, *(f"{column}: {text}" for column, text in row.items())]) for row in rows]
    if prompt:
        missing = ", ".join(sorted(prompt.columns - set(columns)))
        problem = f"the {style!r} template of the task {task!r} uses columns that are missing: {missing}"
        remedy = "Select the columns with --columns (columns=…), or use another task name"
        raise KfacpackError(f"{problem}; available columns: {printable(', '.join(columns))}. {remedy}")
    end = "\nAnswer:" if style == "plain" else ""
    return ["\n".join(f"{column}: {text}" for column, text in row.items()) + end for row in rows]


def answers(task: str, style: PromptStyle) -> Mapping[str, str]:
    """Returns the answers that a task's template defines, by class name.

    The result is empty if the task has no template, or if the class names themselves are the answers.

    Args:
        task: Name of the task.
        style: Prompt style.
    """
    prompt = PROMPTS[style].get(base_task_name(task))
    return prompt.answers if prompt else {}


def label_words(classes: Sequence[str], task: str, style: PromptStyle) -> list[str]:
    """Returns the answer of each class: the template's, or the class name with underscores replaced by spaces."""
    by_class, before = answers(task, style), " " if style == "plain" else ""
    return [by_class.get(name, before + name.replace("_", " ")) for name in classes]
