"""`kfacpack models`: lists the models and model families, or shows one model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import typer
from rich.text import Text
from typing_extensions import TypedDict

from kfacpack.errors import KfacpackError
from kfacpack.format.units import human_bytes

from .console import key_value_table, loading, out, plain_table, print_json, print_line
from .options import AS_JSON, IMAGE_SIZE, WEIGHTS, load_model_option

if TYPE_CHECKING:
    from kfacpack.models.model import Model


class EmbeddedModelOutput(TypedDict):
    """A model that is included in the package."""

    name: str
    family: str
    revision: str
    parameters: int
    """Number of weights of the model."""
    width: int
    """Width of the output f."""
    image_size: int
    """Side length of the input images in pixels."""
    bytes: int
    """Size of the weights file."""


class FamilyOutput(TypedDict):
    """A model family."""

    family: str
    named: str
    """Form of the model names that `--model` accepts for this family."""
    f: str
    """The output whose curvature is estimated."""
    head: str
    """How the logits of the classes are computed."""


class DownloadedModelOutput(TypedDict):
    """A model in the local cache of the Hub."""

    model: str
    """Name of the model, as passed to `--model`."""
    family: str
    repository: str
    revision: str
    bytes: int
    """Size of the files on disk."""


class ModelListOutput(TypedDict):
    """Output of `kfacpack models --json`."""

    embedded: list[EmbeddedModelOutput]
    families: list[FamilyOutput]
    downloaded: list[DownloadedModelOutput]


class ModelPropertiesOutput(TypedDict):
    """Output of `kfacpack models MODEL --json`."""

    name: str
    family: str
    revision: str | None
    """Revision of the weights; null if they were read from a file."""
    parameters: int
    """Number of weights of the model."""
    width: int
    """Width of the output f."""
    f: str | None
    """The output whose curvature is estimated."""
    preprocessing: str
    head: Literal["text", "words", "prototypes"]
    """Kind of head that `--head auto` selects if the task supports it."""
    frozen: list[str]
    """Name patterns of the frozen parameters."""


def models(
    name: str | None = typer.Argument(
        None, metavar="MODEL", help="Model to load and describe; by default, all models are listed."
    ),
    weights: str | None = WEIGHTS,
    image_size: int | None = IMAGE_SIZE,
    as_json: bool = AS_JSON,
) -> None:
    """List embedded models, model families and downloaded models, or show the properties of one model."""
    if name is not None:
        with loading(name, show=not as_json):
            properties = _properties(load_model_option(name, weights, image_size))
        print_json(properties) if as_json else _print_properties(properties)
        return
    if weights or image_size:
        raise KfacpackError("--weights and --image-size need a model; pass the name of the model as the argument")
    lists: ModelListOutput = {
        "embedded": list(_embedded()),
        "families": list(_families()),
        "downloaded": list(_downloaded()),
    }
    if as_json:
        print_json(lists)
        return
    _print_embedded(lists["embedded"])
    out.print()
    _print_families(lists["families"])
    out.print()
    _print_downloaded(lists["downloaded"])
    print_line("`kfacpack models MODEL` shows the properties of one model", style="dim")


def _embedded() -> Iterator[EmbeddedModelOutput]:
    from kfacpack.demo import EMBEDDED_MODELS

    for name, model in EMBEDDED_MODELS.items():
        config = model.architecture
        yield {
            "name": name,
            "family": "open_clip",
            "revision": model.revision,
            "parameters": model.parameters,
            "width": config["embed_dim"],
            "image_size": config["vision_cfg"]["image_size"],
            "bytes": model.weights.stat().st_size,
        }


def _families() -> Iterator[FamilyOutput]:
    from kfacpack.models.families import FAMILIES

    for family in FAMILIES.values():
        yield {"family": family.name, "named": family.form, "f": family.f, "head": family.head}


def _downloaded() -> Iterator[DownloadedModelOutput]:
    from kfacpack.models.families import downloaded_models

    for name, family, repository, revision, size in downloaded_models():
        yield {"model": name, "family": family, "repository": repository, "revision": revision, "bytes": size}


def _properties(model: Model) -> ModelPropertiesOutput:
    return {
        "name": model.name,
        "family": model.family,
        "revision": model.revision,
        "parameters": sum(parameter.numel() for parameter in model.module.parameters()),
        "width": model.function.width,
        "f": model.function.detail,
        "preprocessing": model.preprocessing,
        "head": "text" if model.encode_text else "words" if model.word_weights else "prototypes",
        "frozen": list(model.frozen),
    }


def _print_embedded(models: list[EmbeddedModelOutput]) -> None:
    table = plain_table("embedded", "family", numbers=("parameters", "width of f", "pixels", "weights"))
    for model in models:
        size = f"{model['image_size']}×{model['image_size']}"
        numbers = (f"{model['parameters']:,}", f"{model['width']}", size, human_bytes(model["bytes"]))
        table.add_row(model["name"], model["family"], *numbers)
    out.print(table)


def _print_families(families: list[FamilyOutput]) -> None:
    table = plain_table("family")
    for heading in ("--model", "f", "head"):
        table.add_column(heading, overflow="fold")
    for family in families:
        table.add_row(*map(Text, (family["family"], family["named"], family["f"], family["head"])))
    out.print(table)


def _print_downloaded(models: list[DownloadedModelOutput]) -> None:
    if not models:
        print_line("downloaded: none; models from the Hub are downloaded when they are first used", style="dim")
        return
    table = plain_table()
    table.add_column("downloaded", overflow="fold")
    table.add_column("from", overflow="fold")
    table.add_column("on disk", justify="right", no_wrap=True)
    for model in models:
        source = f"{model['repository']}@{model['revision'][:8]}"
        table.add_row(Text(model["model"]), Text(source), human_bytes(model["bytes"]))
    out.print(table)


def _print_properties(properties: ModelPropertiesOutput) -> None:
    rows = {
        "model": f"{properties['name']} ({properties['family']})",
        "revision": properties["revision"] or "weights from a file",
        "parameters": f"{properties['parameters']:,}",
        "f": f"{properties['f']}, of width {properties['width']}",
        "input": properties["preprocessing"],
        "head": properties["head"],
        "frozen": ", ".join(properties["frozen"]),
    }
    out.print(key_value_table(rows.items()))
