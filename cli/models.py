"""`kfacpack models`: which models can be named, and what one of them is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from kfacpack.errors import KfacpackError
from kfacpack.format.units import human_bytes

from .console import key_value_table, loading, out, print_json
from .options import load_model_option

if TYPE_CHECKING:
    from kfacpack.models.model import Model


def models(
    name: str | None = typer.Argument(
        None, metavar="NAME", help="Show this model. It is loaded for that, as other commands load it."
    ),
    weights: str | None = typer.Option(
        None, "--weights", metavar="FILE", help="With a name, where the weights are, or the word random."
    ),
    image_size: int | None = typer.Option(
        None, "--image-size", min=1, metavar="N", help="With a name, pixels of a side."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print it as JSON."),
) -> None:
    """List the models in the package, the families of models and what of them is downloaded, or show one model."""
    if name is not None:
        with loading(name, show=not as_json):
            about = _of_model(load_model_option(name, weights, image_size))
        print_json(about) if as_json else _print_facts(about)
        return
    if weights or image_size:
        raise KfacpackError("--weights and --image-size belong to a model: give its name as well")
    listed = {"embedded": list(_embedded()), "families": list(_families()), "downloaded": list(_downloaded())}
    if as_json:
        print_json(listed)
        return
    _print_embedded(listed["embedded"])
    out.print()
    _print_families(listed["families"])
    out.print()
    _print_downloaded(listed["downloaded"])
    out.print(Text("models NAME shows one of them", style="dim"))


def _embedded() -> Iterator[dict[str, Any]]:
    from kfacpack.demo.tiny_model import EMBEDDED_MODELS

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


def _families() -> Iterator[dict[str, str]]:
    from kfacpack.models.families import FAMILIES

    for family in FAMILIES.values():
        yield {"family": family.name, "named": family.form, "f": family.f, "head": family.head}


def _downloaded() -> Iterator[dict[str, Any]]:
    from kfacpack.models.families import downloaded

    for each in downloaded():
        yield {
            "model": each.model,
            "family": each.family,
            "repository": each.repository,
            "revision": each.revision,
            "bytes": each.nbytes,
        }


def _of_model(model: Model) -> dict[str, Any]:
    return {
        "name": model.name,
        "family": model.family,
        "revision": model.revision,
        "parameters": sum(parameter.numel() for parameter in model.module.parameters()),
        "width": model.function.width,
        "f": model.function.detail,
        "preprocessing": model.preprocessing,
        "head": "text" if model.encode_text else "words" if model.word_weights else "prototypes",
        "frozen": model.frozen,
    }


def _print_embedded(listed: list[dict[str, Any]]) -> None:
    table = Table("in the package", "family", box=None, header_style="bold", pad_edge=False)
    for heading in ("parameters", "width of f", "pixels", "weights"):
        table.add_column(heading, justify="right")
    for each in listed:
        size = f"{each['image_size']}×{each['image_size']}"
        numbers = (f"{each['parameters']:,}", f"{each['width']}", size, human_bytes(each["bytes"]))
        table.add_row(each["name"], each["family"], *numbers)
    out.print(table)


def _print_families(listed: list[dict[str, str]]) -> None:
    table = Table("family", box=None, header_style="bold", pad_edge=False)
    for heading in ("named", "f", "head"):
        table.add_column(heading, overflow="fold")
    for each in listed:
        table.add_row(*map(Text, each.values()))
    out.print(table)


def _print_downloaded(listed: list[dict[str, Any]]) -> None:
    if not listed:
        out.print(Text("downloaded: none; a model of the Hub is downloaded when it is first used", style="dim"))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("downloaded", overflow="fold")
    table.add_column("from", overflow="fold")
    table.add_column("on disk", justify="right", no_wrap=True)
    for each in listed:
        source = f"{each['repository']}@{each['revision'][:8]}"
        table.add_row(Text(each["model"]), Text(source), human_bytes(each["bytes"]))
    out.print(table)


def _print_facts(about: dict[str, Any]) -> None:
    shown = {
        "model": f"{about['name']} ({about['family']})",
        "revision": about["revision"] or "weights of a file",
        "parameters": f"{about['parameters']:,}",
        "f": f"{about['f']}, of width {about['width']}",
        "input": about["preprocessing"],
        "head": about["head"],
        "frozen": ", ".join(about["frozen"]),
    }
    out.print(key_value_table(shown.items()))
