"""Writes a page with the JSON Schema of what each command prints with `--json`, from the types that produce it."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command_pages import command_pages, literal
from generated_pages import add_pages
from kfacpack_cli import (
    add,
    bundles,
    estimate,
    experiments,
    export,
    hub,
    inspect,
    models,
    tasks,
    train,
    vectors,
)
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from kfacpack.estimation.forecast import Forecast
from kfacpack.evaluation.interference import InterferenceResult
from kfacpack.evaluation.sweep import ChoiceOutput, Evaluation, NegationOutput, SweepOutput
from kfacpack.experiments.offline_check import OfflineForecast
from kfacpack.experiments.results import StageEvent
from kfacpack.experiments.results_schema import (
    DisentanglementResult,
    DriftResult,
    LocalisationResult,
    Results,
    SpectraResult,
)

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

FOLDER = "reference/json"
INDEX = f"{FOLDER}/index.md"
DIALECT = "https://json-schema.org/draft/2020-12/schema"

OUTPUTS: dict[str, dict[str, Any]] = {
    "estimate": {"": estimate.EstimateOutput, "--dry-run": Forecast},
    "inspect": {"": inspect.InspectOutput, "VECTOR.safetensors": inspect.VectorInspectOutput},
    "verify": {"": inspect.VerifyOutput},
    "compress": {"": bundles.CompressOutput},
    "merge": {"": bundles.MergeOutput},
    "import": {"": export.ImportOutput},
    "export": {"": export.ExportOutput, "--lora RANK": export.AdapterOutput},
    "train": {"": train.TrainOutput},
    "extract": {"": vectors.ExtractOutput},
    "add": {"": add.AddOutput},
    "negate": {"": vectors.NegateOutput},
    "refine": {"": vectors.RefineOutput},
    "eval": {
        "": Evaluation,
        "--alpha FROM:TO:STEP": SweepOutput,
        "--choose": ChoiceOutput,
        "--control TASK": NegationOutput,
    },
    "measure": {
        "disentanglement": DisentanglementResult,
        "localisation": LocalisationResult,
        "drift": DriftResult,
        "interference": InterferenceResult,
        "spectra": SpectraResult,
    },
    "run": {
        "": Results,
        "--dry-run": experiments.RunForecastOutput,
        "--dry-run --gpu NAME": OfflineForecast,
        "--events": StageEvent,
    },
    "report": {"": experiments.ReportOutput},
    "demo": {"": Results, "--events": StageEvent},
    "push": {"": hub.PushOutput},
    "pull": {"": hub.PullOutput, "--list": hub.ListingOutput},
    "search": {"": hub.SearchOutput},
    "models": {"": models.ModelListOutput, "MODEL": models.ModelPropertiesOutput},
    "tasks": {
        "": tasks.TaskListOutput,
        "TASK": tasks.TaskOutput,
        "TASK (on the Hub)": tasks.PublishedTaskOutput,
    },
}
"""Command -> arguments -> type of the output."""


ROOT = Path(__file__).parents[2]


class UntitledSchema(GenerateJsonSchema):
    """Leaves out the titles of fields, which repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Returns False for every field."""
        return False


@cache
def field_descriptions() -> dict[str, dict[str, str]]:
    """Returns class -> field -> docstring, including inherited fields. The name of a class is unique in the code."""
    paths = [path for folder in ("kfacpack", "cli") for path in sorted((ROOT / folder).rglob("*.py"))]
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in paths)
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}

    def fields(name: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for base in classes[name].bases:
            if isinstance(base, ast.Name) and base.id in classes:
                found |= fields(base.id)
        for field, text in pairwise(classes[name].body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(words))):
                    found[key] = " ".join(words.split())
        return found

    return {name: fields(name) for name in classes}


def schema(output: Any) -> dict[str, Any]:
    """Returns the JSON Schema of an output. The docstrings of its fields are their descriptions.

    Args:
        output: A TypedDict, dataclass or pydantic model.
    """
    described = TypeAdapter(output).json_schema(mode="serialization", schema_generator=UntitledSchema)
    for part in (described, *described.get("$defs", {}).values()):
        if "description" in part:
            part["description"] = " ".join(part["description"].split("\n\n")[0].split())
        for name, text in field_descriptions().get(part.get("title", ""), {}).items():
            if name in part.get("properties", {}):
                part["properties"][name].setdefault("description", text)
    return {"$schema": DIALECT, **described}


def file_name(command: str, arguments: str) -> str:
    """Returns the name of the schema's file, such as `eval-choose.schema.json`."""
    words = "".join(letter if letter.isalnum() else " " for letter in arguments.lower()).split()
    return f"{'-'.join([command, *words])}.schema.json"


def type_text(part: dict[str, Any]) -> str:
    """Returns the type of a value in words, with links to the objects on the same page."""
    if "$ref" in part:
        name = part["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in part:
        return f"`{json.dumps(part['const'])}`"
    if "enum" in part:
        return " or ".join(f"`{json.dumps(value)}`" for value in part["enum"])
    if "anyOf" in part:
        return " or ".join(map(type_text, part["anyOf"]))
    if part.get("type") == "array":
        items = part.get("items") or (part.get("prefixItems") or [{}])[0]
        return f"array of {type_text(items)}" if items else "array"
    if part.get("type") == "object" and isinstance(part.get("additionalProperties"), dict):
        return f"object with values of type {type_text(part['additionalProperties'])}"
    return str(part.get("type", "any value"))


def fields_text(part: dict[str, Any]) -> str:
    """Returns the fields of an object as a list."""
    required = set(part.get("required", ()))
    lines = []
    for name, field in part.get("properties", {}).items():
        kind = type_text(field) if name in required else f"{type_text(field)}, optional"
        text = f" – {literal(field['description'])}" if "description" in field else ""
        lines.append(f"- **`{name}`** ({kind}){text}")
    return "\n".join(lines)


def page_text(command: str) -> str:
    """Returns the page of a command."""
    parts = [f"# kfacpack {command} --json", f"Output of [`kfacpack {command}`](../cli/{command}.md) with `--json`."]
    written: set[str] = set()
    for arguments, output in OUTPUTS[command].items():
        root = schema(output)
        if len(OUTPUTS[command]) > 1:
            usage = " ".join(filter(None, ["kfacpack", command, arguments, "--json"]))
            parts += [f"## `{usage}`", literal(root.get("description", ""))]
        parts.append(fields_text(root))
        for name, definition in root.get("$defs", {}).items():
            if name not in written:
                written.add(name)
                about = literal(definition.get("description", ""))
                parts += [f"### {name} {{ #{name.lower()} }}", about, fields_text(definition)]
        name = file_name(command, arguments)
        text = json.dumps(root, indent=2, ensure_ascii=False)
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        parts += [f'??? note "JSON Schema"\n\n    [{name}]({name})\n\n    ```json\n{indented}\n    ```']
    return "\n\n".join(filter(None, parts)) + "\n"


def schema_files() -> Iterator[tuple[str, str]]:
    """Yields the name and text of each schema."""
    for command, outputs in OUTPUTS.items():
        for arguments, output in outputs.items():
            text = json.dumps(schema(output), indent=2, ensure_ascii=False)
            yield file_name(command, arguments), f"{text}\n"


def index_table() -> str:
    """Returns the list of pages, for the index page."""
    lines = []
    for page in command_pages():
        if page.name in OUTPUTS:
            links = ", ".join(f"[schema]({file_name(page.name, arguments)})" for arguments in OUTPUTS[page.name])
            lines.append(f"| [`kfacpack {page.name}`]({page.name}.md) | {links} |")
    return "\n".join(["| command | JSON Schema |", "|---|---|", *lines])


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages and the schemas."""
    return add_pages(files, config, FOLDER, {command: page_text(command) for command in OUTPUTS}, dict(schema_files()))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Writes the list of outputs into the index page."""
    return markdown.replace("<!-- outputs -->", index_table()) if page.file.src_uri == INDEX else markdown
