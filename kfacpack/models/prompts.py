"""Prompts for text-to-text models: how classification examples are formatted, and which words name a class.

T5 v1.0 was trained on `TASK column: text column: text` with the class names as answers. Flan-T5 was trained on
questions with listed options. A task without a flan prompt uses T5's form and its class names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any, Literal, NamedTuple, get_args

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


class FlanPrompt(NamedTuple):
    """The prompt of one task for flan-T5."""

    template: str
    """The question with its options; the fields are the task's columns."""
    answers: Mapping[str, str]
    """The option that stands for each class, by class name."""


def _listed(*options: str) -> str:
    return "\n\nOPTIONS:\n- " + "\n- ".join(options)


# Each task has its own options. The penalty keeps the drift of f small; the remaining drift is along the label words of
# the trained task, so tasks with the same words would still change each other's logits.
FLAN_PROMPTS = {
    "snli": FlanPrompt(
        "Premise: {premise}\n\nHypothesis: {hypothesis}\n\nDoes the premise entail the hypothesis?"
        + _listed("yes", "it is not possible to tell", "no"),
        {"entailment": "yes", "neutral": "it is not possible to tell", "contradiction": "no"},
    ),
    "mnli": FlanPrompt(
        "Text: {premise}\n\nClaim: {hypothesis}\n\nIs the claim correct?"
        + _listed("correct", "inconclusive", "incorrect"),
        {"entailment": "correct", "neutral": "inconclusive", "contradiction": "incorrect"},
    ),
    "sick": FlanPrompt(
        "Sentence A: {sentence_A}\n\nSentence B: {sentence_B}\n\nIf A holds, does B hold?"
        + _listed("always", "sometimes", "never"),
        {"entailment": "always", "neutral": "sometimes", "contradiction": "never"},
    ),
    "scitail": FlanPrompt(
        "{premise}\n\nIs this statement supported by the text above? {hypothesis}" + _listed("supported", "unclear"),
        {"entails": "supported", "neutral": "unclear"},
    ),
    "rte": FlanPrompt(
        "{sentence1}\n\nBased on this paragraph, is the following sentence true? {sentence2}"
        + _listed("true", "false"),
        {"entailment": "true", "not_entailment": "false"},
    ),
    "qnli": FlanPrompt(
        "Question: {question}\n\nSentence: {sentence}\n\nIs this the right sentence to answer the question?"
        + _listed("right", "wrong"),
        {"entailment": "right", "not_entailment": "wrong"},
    ),
}
"""Prompts by task."""


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
        columns: The strings of N examples, by column name.
        task: Task name; a class split (`NAME@k/n`) uses the prompts of the whole task.
        style: Prompt style of the model.

    Returns:
        N prompts.
    """
    task = base_task_name(task)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    flan = _flan_prompt(task, style)
    if flan and set(columns) == {field for _, field, _, _ in Formatter().parse(flan.template) if field}:
        return [flan.template.format(**row) for row in rows]
    trained = T5_COLUMNS.get(task, ())
    order = trained if set(trained) == set(columns) else tuple(columns)
    return [" ".join([task, *(f"{column}: {row[column]}" for column in order)]) for row in rows]


def label_words(classes: Sequence[str], task: str, style: PromptStyle) -> list[str]:
    """Returns the answer for each class, a word or phrase; underscores in class names are replaced by spaces."""
    flan = _flan_prompt(base_task_name(task), style)
    answers = flan.answers if flan else {}
    return [answers.get(name, name.replace("_", " ")) for name in classes]


def _flan_prompt(task: str, style: PromptStyle) -> FlanPrompt | None:
    return FLAN_PROMPTS.get(task) if style == "flan" else None
