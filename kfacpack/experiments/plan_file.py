"""Reads plans from YAML files, and reports errors with the file, the line and the key.

The module also contains the plan of `kfacpack demo`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from kfacpack.errors import KfacpackError, printable
from kfacpack.experiments import plan_sections as plans
from kfacpack.experiments.plan import Plan
from kfacpack.experiments.plan_sections import KeyPath
from kfacpack.training.penalty_weights import STRENGTH

_MAX_BYTES = 1 << 20
_SCALES = "scales"
"""Key under which a plan defines scales: named sets of settings for the same comparison at another size."""
_REPLACED = {f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "timestamp")}


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML loader that reads dates, base-60 numbers (`1:30`), `yes` and `no` as strings, contrary to YAML 1.1."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the name and type are PyYAML's
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        # Nested aliases can expand nine lines into a billion keys.
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            problem = f"alias *{event.anchor}: plans cannot use aliases; write out the value"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def read_plan(path: Path, scale: str | None = None) -> tuple[Plan, str]:
    """Reads a plan from a file.

    Args:
        path: The YAML file. Paths in the plan are relative to the folder of this file.
        scale: Name of an entry in the plan's `scales`; the settings in this entry override those of the plan.

    Returns:
        The plan and its text. If a scale is given, the text is the YAML of the resulting plan, without `scales`.

    Raises:
        KfacpackError: If a file cannot be read or is not a valid plan, or the plan has no scale with this name.
    """
    text, name = _read(path), str(path)
    if scale is not None:
        text, name = _scaled_text(text, path, scale), f"{path} with --scale {printable(scale)}"
    return parse(text, name).based_at(path.absolute().parent), text


def _read(path: Path) -> str:
    """Returns the text of a YAML file."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise KfacpackError(f"{path}: larger than {_MAX_BYTES} bytes; expected a plan in YAML")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise KfacpackError(f"{path}: cannot be read: {error.strerror}. Expected a plan in YAML") from error
    except UnicodeDecodeError as error:
        raise KfacpackError(f"{path}: not UTF-8 text; expected a plan in YAML") from error


def scales_of(path: Path) -> list[str]:
    """Returns the names of the scales that a plan defines.

    Args:
        path: The YAML file.

    Raises:
        KfacpackError: If the file cannot be read, or is not a YAML file with valid `scales`.
    """
    return list(_scales(_content(_read(path), str(path)), str(path)))


def _scales(content: dict[str, Any], name: str) -> dict[str, Any]:
    scales = content.get(_SCALES) or {}
    if not isinstance(scales, dict):
        problem = f"expected names, each with settings that override the plan, got {printable(repr(scales))[:80]}"
        raise KfacpackError(f"{name}: {_SCALES}: {problem}")
    return scales


def _scaled_text(text: str, path: Path, scale: str) -> str:
    """Returns the text of a plan with the settings of a scale applied."""
    content = _content(text, str(path))
    scales = _scales(content, str(path))
    if scale not in scales:
        expected = f"expected one of: {', '.join(scales)}" if scales else "this plan has no scales"
        raise KfacpackError(f"{path}: unknown scale {printable(scale)!r}; {expected}")
    content.pop(_SCALES)
    overrides = scales[scale] if isinstance(scales[scale], list) else [scales[scale]]
    for override in overrides:
        if isinstance(override, str):
            file = path.parent / override
            override = _content(_read(file), str(file))
        if not isinstance(override, dict):
            expected = "expected settings, the name of a YAML file with settings, or a list of settings and file names"
            raise KfacpackError(f"{path}: {_SCALES}.{scale}: {expected}, got {printable(repr(override))[:80]}")
        content = _overridden(content, override)
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120))


def _overridden(settings: Any, override: Any) -> Any:
    """Returns settings with overrides applied. Mappings are merged, and the value null removes a key."""
    if not isinstance(settings, dict) or not isinstance(override, dict):
        return override
    merged = {key: value for key, value in settings.items() if override.get(key, ...) is not None}
    for key, value in override.items():
        if value is not None:
            merged[key] = _overridden(merged.get(key), value)
    return merged


def _content(text: str, name: str) -> dict[str, Any]:
    """Parses the text of a plan, or of a file with settings that override a plan, without validating the keys."""
    with _convert_yaml_errors(name):
        content = _with_text_keys(_Loader(text).get_single_data())
    if not isinstance(content, dict):
        raise KfacpackError(f"{name}, line 1: expected keys such as model, tasks and arms, got none")
    return content


def parse(text: str, name: str) -> Plan:
    """Parses and validates the text of a plan.

    Args:
        text: The plan in YAML.
        name: File name to use in error messages.

    Returns:
        The validated plan.

    Raises:
        KfacpackError: If the text is not a valid plan; the message starts with the file and, if they are known,
            the line and the key.
    """
    lines: dict[KeyPath, int] = {}
    with _convert_yaml_errors(name):
        loader = _Loader(text)
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise KfacpackError(f"{name}, line 1: expected keys such as model, tasks and arms, got none")
        _key_lines(root, (), lines, name)
        content = _with_text_keys(loader.construct_document(root))
        content.pop(_SCALES, None)

    def locate(key_path: KeyPath) -> str:
        """Formats a location as file, line and key. For a key that is not in the file, uses the line of its parent."""
        present = key_path
        while present not in lines:
            present = present[:-1]
        key = ".".join(map(str, key_path))
        return f"{name}, line {lines[present]}: {printable(key)}" if key else f"{name}, line {lines[present]}"

    try:
        plan = Plan.model_validate(content, strict=False).with_locations(name, locate)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        # For an invalid key, pydantic appends the label `[key]` to the location.
        key_path = tuple(part for part in first["loc"] if part != "[key]")
        raise KfacpackError(f"{locate(key_path)}: {_describe(key_path, first)}") from error
    if contradiction := plan.contradiction():
        key_path, problem = contradiction
        raise KfacpackError(f"{locate(key_path)}: {problem}")
    return plan


@contextmanager
def _convert_yaml_errors(name: str) -> Iterator[None]:
    """Converts errors raised by PyYAML to `KfacpackError`, with the file and, if known, the line."""
    try:
        yield
    except RecursionError as error:
        raise KfacpackError(f"{name}: not a valid plan: nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise KfacpackError(f"{name}, line {line}: not a valid plan: {printable(str(error.problem))}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise KfacpackError(f"{name}: not a valid plan: {printable(str(error))}") from error


def _key_lines(node: yaml.Node, key_path: KeyPath, lines: dict[KeyPath, int], name: str) -> None:
    """Records the line of every key and list entry below `node`, and rejects duplicate keys."""
    lines.setdefault(key_path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*key_path, str(key.value))
            line = key.start_mark.line + 1
            if inner in lines:
                key, first = ".".join(map(str, inner)), lines[inner]
                raise KfacpackError(f"{name}, line {line}: duplicate key {printable(key)}, first used on line {first}")
            lines[inner] = line
            _key_lines(value, inner, lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            _key_lines(value, (*key_path, number), lines, name)


def _with_text_keys(value: Any) -> Any:
    """Converts the keys of all mappings to strings, because YAML reads a key such as `1:` as a number."""
    if isinstance(value, dict):
        return {str(key): _with_text_keys(entry) for key, entry in value.items()}
    return [_with_text_keys(entry) for entry in value] if isinstance(value, list) else value


_MESSAGES = {
    "missing": "missing; this key is required",
    "dict_type": "expected keys and values",
    "model_type": "expected keys and values",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "string_type": "expected text",
    "int_type": "expected an integer",
    "int_parsing": "expected an integer",
    "int_from_float": "expected an integer",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
}
"""Messages by type of pydantic error. They replace messages of pydantic that mention Python types."""


def _describe(key_path: KeyPath, error: Any) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return _MESSAGES[kind] if isinstance(key_path[-1], str) else "missing; this list entry is required"
    if kind == "extra_forbidden":
        return f"unknown key; expected one of: {', '.join(_expected_keys(key_path[:-1]))}"
    message = _MESSAGES.get(kind) or str(error["msg"]).removeprefix("Value error, ").replace("Input should", "should")
    if kind == "value_error":  # the message already states the value
        return printable(message, max_length=1000)
    if kind == "too_short":
        message = f"too few entries; expected at least {context['min_length']}"
    if kind == "too_long":
        message = f"too many entries; expected at most {context['max_length']}"
    return printable(f"{message}, got {printable(repr(error.get('input')))[:80]}", max_length=1000)


_SECTIONS: dict[tuple[str, ...], type[plans.PlanSection]] = {
    (): Plan,
    ("model",): plans.ModelSection,
    ("tasks",): plans.TaskSection,
    ("references",): plans.TaskSection,
    ("curvature",): plans.CurvatureSection,
    ("training",): plans.TrainingSection,
    ("penalty",): plans.PenaltySection,
    ("arms",): plans.ArmSection,
    ("arms", "curvature"): plans.CurvatureSection,
    ("arms", "training"): plans.TrainingSection,
    ("evaluation",): plans.EvaluationSection,
    ("evaluation", "methods"): plans.MethodSection,
    ("evaluation", "negation"): plans.NegationSection,
    ("evaluation", "disentanglement"): plans.PairsSection,
    ("evaluation", "localisation"): plans.ExamplesSection,
    ("evaluation", "drift"): plans.DriftSection,
}
"""Classes of the sections of a plan, by location. Locations contain neither the names of arms nor list indices."""


def _expected_keys(key_path: Sequence[str | int]) -> list[str]:
    names = [str(part) for part in key_path if not isinstance(part, int)]
    if names[:1] == ["arms"]:
        names = ["arms", *names[2:]]
    return list(_SECTIONS[tuple(names)].model_fields)


THREE_TASKS = ("digits", "hebrew", "weaves")
EIGHT_TASKS = ("digits", "mnist", "materials", "faces", "hebrew", "syllabics", "emblems", "weaves")

_TEXT = """\
# A comparison on the small CLIP model that is included in kfacpack. Copy and edit this file, then run:
#     kfacpack run plan.yaml
name: demo
model: {{name: tiny, head: prototypes}}
tasks: [{tasks}]
seeds: [0]

curvature:            # estimated for each task on the data of this task
  examples: 256
training:             # one vector per task, trained independently of the other vectors
  steps: {steps}
  batch_size: 32

arms:                 # the training variants to compare
  without: {{penalty: none}}
  kfac: {{penalty: kronecker, strength: {strength:g}}}

evaluation:
  methods: [sum]
  alphas: 0:2:0.1     # scales of the sum of the vectors; 1 means that the vectors are added as they are
  examples: 200       # test examples per task
  negation: {{control: {control}, keep: 0.95}}
  disentanglement: {{examples: 50}}
  localisation: {{examples: 100}}
  drift: {{examples: 50, layer_examples: 2}}
  spectra: true
"""


def plan_text(*, all_tasks: bool = False) -> str:
    """Returns the plan for `kfacpack demo` as YAML.

    Args:
        all_tasks: Whether to use all eight embedded tasks instead of three.
    """
    tasks = EIGHT_TASKS if all_tasks else THREE_TASKS
    return _TEXT.format(tasks=", ".join(tasks), control=tasks[0], steps=40, strength=STRENGTH)
