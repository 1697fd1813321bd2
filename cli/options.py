"""Options shared by several commands, declared once so that they have the same meaning everywhere."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from kfacpack.errors import KfacpackError, printable
from kfacpack.format.bundle_index import files_of
from kfacpack.format.reference import is_reference

from .console import show_note

if TYPE_CHECKING:
    import torch

    from kfacpack.format.manifest import Base, FloatType
    from kfacpack.models.model import Loading, Model
    from kfacpack.models.prompts import PromptStyle
    from kfacpack.tasks.task import Task


File = str
"""Type of an input file: a path or hf://owner/repo[@revision]/FILE. A `Path` would replace `//` with `/`."""

MODEL_PANEL, DATA_PANEL, RUN_PANEL = "Model", "Data", "Run"
"""Titles of the help panels."""


def option(panel: str, default: Any, *names: str, help: str, **more: Any) -> Any:
    """Declares a command-line option.

    Args:
        panel: Help panel in which the option is listed.
        default: Default value; `...` makes the option required.
        *names: Flags, such as "--output" and "-o".
        help: Help text. Square brackets in it are escaped, so that rich does not interpret them as markup.
        **more: Further arguments of `typer.Option`.
    """
    more.setdefault("metavar", {int: "N", float: "X"}.get(type(default)))
    return typer.Option(default, *names, help=escape(help), rich_help_panel=panel, **more)


IMPLIED_VALUES = {"--ray": "auto"}
"""Options that may be given without a value, with the values that are used in this case."""
PLAN_SUFFIXES = (".yaml", ".yml")
"""File extensions of plans. An argument that ends in one of them is never taken as the value of an option in
`IMPLIED_VALUES`."""


def output_option(metavar: str, default: Any = ..., help: str = "Output file.") -> Any:
    """Declares the option `--output`.

    Args:
        metavar: Placeholder for the file or folder in the help.
        default: Default value; `...` makes the option required.
        help: Help text. Square brackets in it are escaped, so that rich does not interpret them as markup.
    """
    return option(RUN_PANEL, default, "--output", "-o", metavar=metavar, help=help)


def split_option(default: str) -> Any:
    """Declares the option `--split`."""
    return option(DATA_PANEL, default, "--split", metavar="SPLIT", help="Split to take the examples from.")


def examples_option(default: str) -> Any:
    """Declares the option `--examples`."""
    help = "Number of examples per task, a percentage of the split, or all. The selection is deterministic."
    return option(DATA_PANEL, default, "--examples", metavar="N|P%|all", help=help)


MODEL_NAME = option(
    MODEL_PANEL,
    "tiny",
    "--model",
    metavar="MODEL",
    help="Name of the model: tiny, an open_clip name (ViT-B-32, ViT-B-16/TAG), timm:NAME, clip:NAME_OR_DIR, "
    "t5:NAME_OR_DIR, lm:NAME_OR_DIR or hf:NAME_OR_DIR.",
)
WEIGHTS = option(
    MODEL_PANEL,
    None,
    "--weights",
    metavar="FILE",
    help="Safetensors file with the model's weights, or `random` for random weights. [default: the pretrained weights]",
)
IMAGE_SIZE = option(
    MODEL_PANEL,
    None,
    "--image-size",
    min=1,
    metavar="N",
    help="Side length of the input images in pixels. [default: the model's own image size]",
)
PROMPTS = option(
    MODEL_PANEL,
    None,
    "--prompts",
    help="Prompt style: t5 or flan for t5:NAME_OR_DIR, plain or chat for lm:NAME_OR_DIR. [default: the style that the "
    "model was trained with]",
)
DEVICE = option(
    MODEL_PANEL,
    "auto",
    "--device",
    metavar="DEVICE",
    help="Device of the model: cpu, cuda, cuda:1, mps, or auto for the first GPU, or the CPU if there is none.",
)
PARAMS = option(
    MODEL_PANEL,
    None,
    "--params",
    metavar="PATTERN",
    help="Use only parameters whose names match this pattern, such as `*.mlp.*`; repeatable. [default: all parameters "
    "that are not frozen]",
)
DTYPE = option(
    MODEL_PANEL,
    "float32",
    "--dtype",
    help="Compute dtype of the model; accumulation and training use at least float32.",
)
HEAD = option(
    MODEL_PANEL,
    "auto",
    "--head",
    help="How classes are predicted from the model output f. text: from the embeddings of the class names. words: from "
    "the logits of the class names as the next word (only for t5:NAME_OR_DIR and lm:NAME_OR_DIR). prototypes: from the "
    "mean of f over the training examples of each class. auto: the first of these heads that the model and the task "
    "support.",
)
TASK_HELP = "Task name, as listed by `kfacpack tasks`, or any name if --data is passed"
TASK = option(DATA_PANEL, ..., "--task", metavar="TASK", help=f"{TASK_HELP}.")
DATA_FOLDER = option(
    DATA_PANEL,
    None,
    "--data",
    metavar="DIR|hf://…",
    help="Data of the task: a folder of Parquet or JSON Lines files, a folder with one subfolder of images per class, "
    "or hf://datasets/OWNER/REPO[@REVISION][/CONFIG].",
)
COLUMNS = option(
    DATA_PANEL,
    None,
    "--columns",
    metavar="KEY=COLUMN,…",
    help="Columns to read from --data, such as image=IMG,label=Y or premise=A,hypothesis=B,label=Y. [default: chosen "
    "by name or type]",
)
BATCH_SIZE = option(RUN_PANEL, 64, "--batch-size", min=1, metavar="N", help="Number of examples per forward pass.")
WORKERS = option(
    RUN_PANEL,
    None,
    "--workers",
    min=0,
    metavar="N",
    help="Number of processes that load and transform examples. [default: up to 4 for image files, otherwise 0]",
)
JOBS = option(
    RUN_PANEL,
    None,
    "--jobs",
    min=1,
    metavar="N",
    help="Maximum number of processes that compute independent stages. Fewer are started if there is not enough "
    "memory. [default: with CUDA, one per GPU; on a CPU, the number of cores divided by --threads; on other devices, "
    "1]",
)
THREADS = option(
    RUN_PANEL,
    None,
    "--threads",
    min=1,
    metavar="N",
    help="Number of threads per stage, which affects rounding. [default: the value of OMP_NUM_THREADS. If it is not "
    "set: with CUDA, the number of cores per GPU; on other devices, 1 for models with fewer than 50M parameters, 4 for "
    "models with fewer than 500M, and 16 for larger models, but at most the number of cores]",
)
EVENTS = option(RUN_PANEL, False, "--events", help="Print the events of all stages to stderr, as JSON Lines.")
RESUME = option(RUN_PANEL, False, "--resume", help="Resume an interrupted run.")
AS_JSON = option(RUN_PANEL, False, "--json", help="Print the result as JSON.")
QUIET = option(RUN_PANEL, False, "--quiet", "-q", help="Print only errors.")


def task_and_folder(name: str, text: str, *, folder_optional: bool = False) -> tuple[str, str | None]:
    """Parses an option value of the form TASK=DIR.

    Args:
        name: Name of the option, for the error message.
        text: Value of the option.
        folder_optional: Whether a TASK without a folder is also valid.

    Returns:
        The task and its folder. The folder is None if the value is TASK alone.

    Raises:
        KfacpackError: If the value does not have this form.
    """
    task, equals, folder = text.partition("=")
    if not task or not (folder or (folder_optional and not equals)):
        alternative = ", or TASK alone" if folder_optional else ""
        raise KfacpackError(f"{name} {printable(text)!r}: expected TASK=DIR, such as cars=data/cars{alternative}")
    return task, folder or None


def data_folders(tasks: Sequence[str], values: Sequence[str]) -> dict[str, str]:
    """Parses repeated `--data TASK=DIR` options.

    Args:
        tasks: The tasks that the command uses.
        values: The values of --data.

    Returns:
        Folders by task.

    Raises:
        KfacpackError: If a value is not TASK=DIR or names a task that the command does not use, or if a task is given
            twice.
    """
    folders: dict[str, str] = {}
    for value in values:
        task, folder = task_and_folder("--data", value)
        assert folder is not None
        if task in folders:
            raise KfacpackError(f"--data {printable(value)!r}: the data of task {printable(task)!r} is given twice")
        if task not in tasks:
            expected = f"expected {' or '.join(tasks)}" if tasks else "omit --data"
            problem = f"task {task!r} is not used by this command; {expected}"
            raise KfacpackError(f"--data {printable(value)!r}: {printable(problem)}")
        folders[task] = folder
    return folders


def load_model_option(
    model: str,
    weights: str | None,
    image_size: int | None,
    dtype: FloatType = "float32",
    device: str | torch.device = "cpu",
    seed: int = 0,
    prompts: PromptStyle | None = None,
    loading: Loading = "memory",
) -> Model:
    """Loads a model from the values of the options --model, --weights and so on; see `kfacpack.load_model`."""
    import torch

    from kfacpack.models.families import load_model

    return load_model(
        model,
        weights=weights,
        image_size=image_size,
        dtype=getattr(torch, dtype),
        device=device,
        seed=seed,
        prompts=prompts,
        loading=loading,
    )


def load_task_option(name: str, data: str | None, columns: str | None, model: str, *, quiet: bool) -> Task:
    """Loads a task from the values of --task, --data and --columns. Prints its warnings, unless `quiet` is true."""
    from kfacpack.tasks.registry import load_task

    task = load_task(name, data, columns=columns)
    for notice in () if quiet else task.notices(model):
        show_note(f"warning: {notice}")
    return task


def model_arguments(base: Base) -> tuple[str, ...]:
    """Returns the `--model` argument for suggested commands, or an empty tuple if the base model is the default."""
    from kfacpack.hub.card import model_option

    model = model_option(base) or "MODEL"
    return () if model == MODEL_NAME.default else ("--model", model)


def task_arguments(tasks: Iterable[str]) -> tuple[str, ...]:
    """Returns the arguments that select tasks in a suggested `kfacpack eval` command.

    Vectors do not record where the data of a task is stored. For a task without a registered name, the arguments
    therefore contain the placeholder `--data TASK=DIR`.
    """
    from kfacpack.tasks.registry import is_registered

    words: list[str] = []
    for task in tasks:
        words += ["--task", task, *(() if is_registered(task) else ("--data", f"{task}=DIR"))]
    return tuple(words)


def default_output(task: str, suffix: str) -> Path:
    """Returns the default output file for a task. Slashes in the task name are replaced by dashes."""
    return Path(f"{task.replace('/', '-')}{suffix}")


MAX_SHARD_SIZE = option(
    RUN_PANEL,
    None,
    "--max-shard-size",
    metavar="SIZE",
    help="Maximum size of each shard if the output is an index, NAME.kfac.index.json. [default: 5GB]",
)


def check_shard_size(size: str | None, output: Path | None) -> None:
    """Checks the value of --max-shard-size before any work is done.

    Raises:
        KfacpackError: If the value is not a valid size or the output is not an index.
    """
    from kfacpack.curvature.saving import parse_shard_size
    from kfacpack.format.bundle_index import INDEX_SUFFIX, is_index

    if size is None:
        return
    parse_shard_size(size)
    if output is None or not is_index(output):
        raise KfacpackError(f"--max-shard-size requires an index as the output; pass -o NAME{INDEX_SUFFIX}")


def _parts(file: Path) -> list[Path]:
    """Returns the input file and, if it is the index of a sharded bundle, its shards."""
    try:
        return [Path(str(part)) for part in files_of(file)]
    except KfacpackError:  # an invalid index is reported when it is read
        return [file]


def check_output(output: Path, inputs: Sequence[File | Path], *, allow_folder: bool = False) -> None:
    """Checks an output path before any work is done.

    Args:
        output: The file to write.
        inputs: Files that the command reads; none of them may be overwritten.
        allow_folder: Whether the output may be an existing folder. The content of the folder is not checked here.

    Raises:
        KfacpackError: If the output is on the Hub, is a folder or an input, or if its folder does not exist or is not
            writable.
    """
    if is_reference(output):
        raise KfacpackError(f"{output}: cannot write to the Hub; write a file and publish it with `kfacpack push`")
    for path in (part for file in inputs if not is_reference(file) for part in _parts(Path(file))):
        if output.exists() and path.exists() and output.samefile(path):
            raise KfacpackError(f"{output}: this file is also an input; write to another file")
    if output.is_dir() and not allow_folder:
        raise KfacpackError(f"{output}: is a folder; expected the path of a file")
    if not output.absolute().parent.is_dir():
        raise KfacpackError(f"{output}: no such folder: {str(output.parent)!r}. Create it or write to another folder")
    if not os.access(output.absolute().parent, os.W_OK):
        raise KfacpackError(f"{output}: the folder {str(output.parent)!r} is not writable. Write to another folder")
