"""Options that several commands have, declared once: they mean the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from kfacpack.errors import KfacpackError, printable
from kfacpack.format.reference import is_reference

from .console import show_note

if TYPE_CHECKING:
    import torch

    from kfacpack.format.manifest import FloatType
    from kfacpack.models.model import Model
    from kfacpack.models.prompts import PromptStyle
    from kfacpack.tasks.task import Task


File = str
"""A bundle or vector to read: a path, or hf://owner/repo[@revision]/FILE, of which a Path would lose a slash."""

MODEL, DATA, RUN = "The model", "The data", "The run"


def option(panel: str, default: Any, *names: str, help: str, **more: Any) -> Any:
    return typer.Option(default, *names, help=help, rich_help_panel=panel, **more)


MODEL_NAME = option(
    MODEL,
    "tiny",
    "--model",
    help="tiny, ViT-B-32, ViT-B-16/TAG (open_clip), timm:NAME, t5:NAME_OR_DIR or hf:NAME_OR_DIR.",
)
WEIGHTS = option(
    MODEL, None, "--weights", metavar="FILE", help="A safetensors file of the model's weights, or the word random."
)
IMAGE_SIZE = option(
    MODEL, None, "--image-size", min=1, metavar="N", help="Pixels of a side, instead of the model's own."
)
PROMPTS = option(
    MODEL,
    None,
    "--prompts",
    help="Prompt style of a t5: model: t5 or flan. By default the style the model was trained with.",
)
DEVICE = option(MODEL, "auto", "--device", help="cpu, cuda, cuda:1, mps; auto takes the first GPU there is.")
PARAMS = option(
    MODEL,
    None,
    "--params",
    metavar="PATTERN",
    help="Only parameters of this name or pattern; repeatable. Else all that the family does not freeze.",
)
DTYPE = option(
    MODEL, "float32", "--dtype", help="What the model computes in. What is added up or trained is float32 at least."
)
HeadKind = Literal["auto", "text", "words", "prototypes"]
HEAD = option(
    MODEL,
    "auto",
    "--head",
    help="What tells classes apart: their names through the text tower, or as the next word (T5), or prototypes, the "
    "means of their training examples. auto takes the first of these that there is.",
)
DATA_FOLDER = option(
    DATA,
    None,
    "--data",
    metavar="DIR|hf://…",
    help="The task's data: a folder with train-*.parquet as on the Hub, or with pictures in a folder for each class; "
    "or hf://datasets/OWNER/REPO, @REVISION and /CONFIG behind it if need be.",
)
COLUMNS = option(
    DATA,
    None,
    "--columns",
    metavar="KEY=COLUMN,…",
    help="What the columns of --data are: image=IMG,label=Y, or premise=A,hypothesis=B,label=Y. Else they are found by "
    "the task's name, or by their types.",
)
WORKERS = option(
    RUN,
    None,
    "--workers",
    min=0,
    metavar="N",
    help="Processes that decode and transform examples ahead; by default up to 4 where pictures come from files.",
)
QUIET = option(RUN, False, "--quiet", "-q", help="Print nothing but errors.")


def task_and_folder(name: str, text: str, *, bare: bool = False) -> tuple[str, str | None]:
    """What TASK=DIR says; where it may be `bare`, TASK alone, too. `name` is the option's."""
    task, equals, folder = text.partition("=")
    if not task or not (folder or (bare and not equals)):
        or_alone = ", or a task alone" if bare else ""
        problem = f"expected a task and its folder, such as cars=data/cars{or_alone}"
        raise KfacpackError(f"{name} {printable(text)!r}: {problem}")
    return task, folder or None


def folders_of(names: Sequence[str], given: Sequence[str]) -> dict[str, str]:
    """Task -> where its data is, of a `--data TASK=DIR` for each of several tasks."""
    found: dict[str, str] = {}
    for each in given:
        name, folder = task_and_folder("--data", each)
        assert folder is not None
        if name not in names or name in found:
            problem = "is given twice" if name in found else f"is not measured on; that are {', '.join(names)}"
            raise KfacpackError(f"--data {printable(each)!r}: task {printable(name)!r} {printable(problem)}")
        found[name] = folder
    return found


def load_model_option(
    model: str,
    weights: str | None,
    image_size: int | None,
    dtype: FloatType = "float32",
    device: str | torch.device = "cpu",
    seed: int = 0,
    prompts: PromptStyle | None = None,
) -> Model:
    """The model that the options name."""
    import torch

    from kfacpack.models.families import load_model

    number_type = getattr(torch, dtype)
    return load_model(
        model, weights=weights, image_size=image_size, dtype=number_type, device=device, seed=seed, prompts=prompts
    )


def load_task_option(name: str, data: str | None, columns: str | None, model: str, *, quiet: bool) -> Task:
    """The task that the options name. What a person should be told of it goes to stderr, unless `quiet`."""
    from kfacpack.tasks.registry import load_task

    found = load_task(name, data, columns)
    for notice in () if quiet else found.notices(model):
        show_note(f"warning: {notice}")
    return found


def check_output(output: Path, inputs: Sequence[File | Path]) -> None:
    """Better told before the work than after it."""
    if is_reference(output):
        raise KfacpackError(f"{output}: is on the Hub; write a file, and publish it with: kfacpack push")
    for each in (Path(each) for each in inputs if not is_reference(each)):
        if output.exists() and each.exists() and output.samefile(each):
            raise KfacpackError(f"{output}: is also an input; write to another file")
    if not output.absolute().parent.is_dir():
        raise KfacpackError(f"{output}: there is no folder {str(output.parent)!r}. Make it, or write to another one")
