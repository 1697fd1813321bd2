"""Prompts for text-to-text models: how classification examples are formatted, and which words name a class.

T5 v1.0 was trained on `TASK column: text column: text` with the class names as answers. Flan-T5 was trained on
questions with listed options. A task without a flan template uses T5's form and its class names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from kfacpack.format.identity import base_task_name

PromptStyle = Literal["t5", "flan"]
PROMPT_STYLES: tuple[PromptStyle, ...] = get_args(PromptStyle)
CONFIG_KEY = "kfacpack_prompts"
"""Key of the prompt style in a saved config.json, so that an edited model uses the prompts of its base model."""

T5_COLUMNS = {
    "mnli": ("hypothesis", "premise"),
    "qnli": ("question", "sentence"),
    "rte": ("sentence1", "sentence2"),
}
"""Tasks that T5 was trained on, with the column order of its training data."""

ENTAILMENT_ANSWERS = {
    "entailment": "yes",
    "entails": "yes",
    "neutral": "it is not possible to tell",
    "contradiction": "no",
    "not_entailment": "no",
}
"""Class name to flan's answer."""
_THREE = "OPTIONS:\n- yes\n- it is not possible to tell\n- no"
_TWO = "OPTIONS:\n- yes\n- no"
FLAN_TEMPLATES = {
    "snli": "Caption: {premise}\n\nStatement: {hypothesis}\n\nDoes the caption mean that the statement is true?\n\n"
    + _THREE,
    "mnli": "Premise: {premise}\n\nHypothesis: {hypothesis}\n\nDoes the premise entail the hypothesis?\n\n" + _THREE,
    "sick": "Sentence A: {sentence_A}\n\nSentence B: {sentence_B}\n\nIf A is true, is B true?\n\n" + _THREE,
    "scitail": "Text: {premise}\n\nScientific claim: {hypothesis}\n\nDoes the text support the claim?\n\n"
    + "OPTIONS:\n- yes\n- it is not possible to tell",
    "rte": "{sentence1}\n\nCan we conclude from this paragraph that {sentence2}\n\n" + _TWO,
    "qnli": "Question: {question}\n\nSentence: {sentence}\n\nDoes the sentence answer the question?\n\n" + _TWO,
}
"""Task to template; the fields are the task's columns."""


def prompt_style(name: str, config: Any) -> PromptStyle:
    """Returns the prompt style that a model was trained with.

    Args:
        name: Name of the repository or folder.
        config: The model's configuration. A style that kfacpack recorded there takes precedence over the name.
    """
    recorded = getattr(config, CONFIG_KEY, None)
    if recorded in PROMPT_STYLES:
        return recorded  # type: ignore[no-any-return]
    return "flan" if "flan" in name.lower() else "t5"


def prompts(columns: Mapping[str, Sequence[str]], task: str, style: PromptStyle) -> list[str]:
    """Formats examples as prompts.

    Args:
        columns: Column name to the strings of N examples.
        task: Task name; a class split (`NAME@k/n`) uses the prompts of the whole task.
        style: Prompt style of the model.

    Returns:
        N prompts.
    """
    task = base_task_name(task)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    template = FLAN_TEMPLATES.get(task)
    if style == "flan" and template and set(columns) == set(_fields(template)):
        return [template.format(**row) for row in rows]
    trained = T5_COLUMNS.get(task, ())
    order = trained if set(trained) == set(columns) else tuple(columns)
    return [" ".join([task, *(f"{column}: {row[column]}" for column in order)]) for row in rows]


def label_words(classes: Sequence[str], task: str, style: PromptStyle) -> list[str]:
    """Returns the answer for each class, a word or phrase; underscores in class names are replaced by spaces."""
    answers = ENTAILMENT_ANSWERS if style == "flan" and base_task_name(task) in FLAN_TEMPLATES else {}
    return [answers.get(name, name.replace("_", " ")) for name in classes]


def _fields(template: str) -> list[str]:
    from string import Formatter

    return [field for _, field, _, _ in Formatter().parse(template) if field]
