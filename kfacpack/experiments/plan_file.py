"""A plan as YAML: read, checked, and refused with the line and the key that are wrong.

The plan of `kfacpack demo`, as a user would write it.
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
from kfacpack.experiments import plan as plans
from kfacpack.experiments.plan import KeyPath, Plan
from kfacpack.training.penalty_weights import STRENGTH

_LARGEST = 1 << 20
_REPLACED = {f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "timestamp")}


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML as people read it: 0:2:0.1 is no number of seconds, and no is no truth value."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - it is what PyYAML calls it
        first: [(tag, pattern) for tag, pattern in found if tag not in _REPLACED]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        # Nine lines of aliases of aliases stand for a billion keys.
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            problem = f"an alias, *{event.anchor}; a plan has none: write out what it stands for"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def read_plan(path: Path) -> tuple[Plan, str]:
    """The plan, and its text. Paths in it are meant from the folder that it is in."""
    try:
        if path.stat().st_size > _LARGEST:
            raise KfacpackError(f"{path}: has more than {_LARGEST} bytes; a plan is a page of YAML")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KfacpackError(f"{path}: cannot be read: {error.strerror}. Expected a plan, a YAML file") from error
    except UnicodeDecodeError as error:
        raise KfacpackError(f"{path}: is no text in UTF-8; expected a plan, a YAML file") from error
    return parse(text, str(path)).based_at(path.absolute().parent), text


def parse(text: str, name: str) -> Plan:
    """`name` is what messages call the file."""
    lines: dict[KeyPath, int] = {}
    with _refuse_with_line(name):
        loader = _Loader(text)
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise KfacpackError(f"{name}, line 1: expected keys such as model, tasks and arms, found none")
        _key_lines(root, (), lines, name)
        said = _plain(loader.construct_document(root))

    def where(place: KeyPath) -> str:
        """The file, the line, and the key."""
        known = place
        while known not in lines:
            known = known[:-1]
        key = ".".join(map(str, place))
        return f"{name}, line {lines[known]}: {printable(key)}" if key else f"{name}, line {lines[known]}"

    try:
        plan = Plan.model_validate(said, strict=False).told_by(where)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        # Of what may be one thing or another, pydantic also says which; a plan has no such key.
        place = tuple(each for each in first["loc"] if each not in ("[key]", "TaskPart", "str"))
        raise KfacpackError(f"{where(place)}: {_problem(place, first)}") from error
    if found := plan.contradiction():
        raise KfacpackError(f"{where(found[0])}: {found[1]}")
    return plan


@contextmanager
def _refuse_with_line(name: str) -> Iterator[None]:
    """Whatever PyYAML has against a text is told with the file, and the line if it knows it."""
    try:
        yield
    except RecursionError as error:
        raise KfacpackError(f"{name}: is no plan: it is nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise KfacpackError(f"{name}, line {line}: is no plan: {printable(str(error.problem))}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise KfacpackError(f"{name}: is no plan: {printable(str(error))}") from error


def _key_lines(node: yaml.Node, place: KeyPath, lines: dict[KeyPath, int], name: str) -> None:
    lines.setdefault(place, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*place, str(key.value))
            line = key.start_mark.line + 1
            if inner in lines:
                key, first = ".".join(map(str, inner)), lines[inner]
                raise KfacpackError(f"{name}, line {line}: {printable(key)} is there twice, first in line {first}")
            lines[inner] = line
            _key_lines(value, inner, lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            _key_lines(value, (*place, number), lines, name)


def _plain(said: Any) -> Any:
    """Keys as text: YAML reads `1:` and `no:` as other things."""
    if isinstance(said, dict):
        return {str(key): _plain(value) for key, value in said.items()}
    return [_plain(each) for each in said] if isinstance(said, list) else said


_WORDS = {
    "missing": "is missing",
    "dict_type": "expected keys and values",
    "model_type": "expected keys and values",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "string_type": "expected text",
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
}
"""What pydantic calls an error, where its own words speak of Python."""


def _problem(place: KeyPath, error: Any) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return _WORDS[kind]
    if kind == "extra_forbidden":
        return f"is no key of a plan there. Expected {', '.join(_expected(place[:-1]))}"
    words = _WORDS.get(kind) or str(error["msg"]).removeprefix("Value error, ").replace("Input should", "should")
    if kind == "too_short":
        words = f"expected at least {context['min_length']}"
    found = error.get("input")
    return printable(f"{words}, found {printable(repr(found))[:80]}", longest=1000)


_SECTIONS: dict[tuple[str, ...], type[plans.PlanSection]] = {
    (): Plan,
    ("model",): plans.ModelSection,
    ("tasks",): plans.TaskSection,
    ("curvature",): plans.CurvatureSection,
    ("training",): plans.TrainingSection,
    ("arms",): plans.ArmSection,
    ("arms", "training"): plans.TrainingSection,
    ("evaluation",): plans.EvaluationSection,
    ("evaluation", "negation"): plans.NegationSection,
    ("evaluation", "disentanglement"): plans.PairsSection,
    ("evaluation", "localisation"): plans.ExamplesSection,
    ("evaluation", "drift"): plans.DriftSection,
}
"""Keys, without the arms' names and numbers in lists -> what stands there."""


def _expected(place: Sequence[str | int]) -> list[str]:
    """The keys that may stand at a place."""
    names = [str(each) for each in place if not isinstance(each, int)]
    if names[:1] == ["arms"]:
        names = ["arms", *names[2:]]
    return list(_SECTIONS[tuple(names)].model_fields)


THREE = ("digits", "hebrew", "weaves")
EIGHT = ("digits", "mnist", "materials", "faces", "hebrew", "syllabics", "emblems", "weaves")

_TEXT = """\
# A comparison on the small CLIP that comes with kfacpack. Copy it, edit it, and: kfacpack run plan.yaml
name: demo
model: {{name: tiny, head: prototypes}}
tasks: [{tasks}]
seeds: [0]

curvature:            # of each task, from its own data
  examples: 256
training:             # of each task's vector, apart from the others
  steps: {steps}
  batch_size: 32

arms:                 # ways of training that are compared
  without: {{penalty: none}}
  kfac: {{penalty: kronecker, strength: {strength:g}}}

evaluation:
  methods: [sum]
  alphas: 0:2:0.1     # how much of the sum is added; 1 is as it is, untuned
  examples: 200
  negation: {{control: {control}, keep: 0.95}}
  disentanglement: {{examples: 100}}
  localisation: {{examples: 100}}
  drift: {{examples: 50, layer_examples: 4}}
  spectra: true
"""


def plan_text(*, every: bool = False) -> str:
    tasks = EIGHT if every else THREE
    return _TEXT.format(tasks=", ".join(tasks), control=tasks[0], steps=40, strength=STRENGTH)
