"""`kfacpack inspect`: shows what a bundle or task vector contains. `kfacpack verify`: checks bundles."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.panel import Panel
from rich.text import Text
from typing_extensions import TypedDict

from kfacpack.curvature.verification import verify as verify_bundle
from kfacpack.errors import KfacpackError, abbreviate, printable
from kfacpack.format.bundle_index import open_container
from kfacpack.format.container import VECTOR, Container
from kfacpack.format.identity import weights_of_file
from kfacpack.format.reader import Bundle, CheckResult
from kfacpack.format.reference import header_of, locate
from kfacpack.format.schema import LAYOUTS
from kfacpack.format.units import human_bytes
from kfacpack.hub.card import bundle_summary, relative_error, vector_summary

from .add import print_solved
from .console import checks_bar, key_value_table, out, plain_table, print_json, print_line, show_error
from .options import AS_JSON, IMAGE_SIZE, MODEL_PANEL, QUIET, RUN_PANEL, WEIGHTS, File, load_model_option, option

if TYPE_CHECKING:
    from torch import nn

    from kfacpack.curvature.verification import Verification
    from kfacpack.format.manifest import DenseEntry, FloatType, KroneckerEntry, Manifest
    from kfacpack.format.vector_manifest import MethodEntry, ParameterStorage
    from kfacpack.vectors.storage import FileVector

    AnyBlockEntry = KroneckerEntry | DenseEntry


MAX_BLOCKS = 2000
"""Maximum number of blocks or parameters in a table. Common models have a few hundred blocks."""


def inspect(
    file: File = typer.Argument(..., metavar="FILE", help="Bundle (.kfac) or task vector (.safetensors) to inspect."),
    blocks: bool = option(
        RUN_PANEL,
        False,
        "--blocks",
        help="List the parameters, form and size of every block. For a task vector, list every parameter. If the "
        "vector was merged with curvature, also list the iterations, residual and objective of every block.",
    ),
    norms: bool = option(
        RUN_PANEL,
        False,
        "--norms",
        help="For a task vector, also read the tensors and show the norm of the vector. With --blocks or --json, also "
        "show the norm of the change to each parameter.",
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Show what a bundle or task vector contains, without reading its tensors.

    Only the header is read or, for hf://OWNER/REPO/FILE, downloaded. The command is therefore fast for files of any
    size. With --norms, the tensors of a task vector are read and their hashes are checked. To check the tensors of
    a bundle, use `kfacpack verify`. With --json, the whole manifest is printed.
    """
    container = open_container(file if norms else header_of(file))
    if VECTOR.manifest in container.metadata:
        _inspect_vector(container, blocks=blocks, norms=norms, as_json=as_json)
        return
    if norms:
        raise KfacpackError(f"{file}: --norms applies to task vectors, but this file is a bundle; omit --norms")
    opened = Bundle(container)
    if as_json:
        print_json(_as_json(opened))
        return
    _print_summary(opened)
    if blocks:
        _print_blocks(opened)
    else:
        _print_kinds(opened)


class InspectOutput(TypedDict):
    """Output of `kfacpack inspect --json` for a bundle."""

    path: str
    sha256: str
    """Digest of the bundle."""
    bytes: int
    dense_bytes: int
    """Size of the matrices if stored as dense float32."""
    weights: int
    """Number of weights that the bundle covers."""
    manifest: dict[str, Any]
    """The manifest as stored in the file. The file format defines a JSON Schema for it."""


ChangeForm = Literal["dense", "factored", "sparse", "unchanged"]


class VectorParameterOutput(TypedDict):
    """The change to one parameter."""

    name: str
    shape: list[int]
    form: ChangeForm
    rank: int | None
    """Rank of the factors; 0 if the parameter does not change, null for a dense or sparse change."""
    remainder: int | None
    """Number of elements for which a float64 remainder is stored, so that adding the change to the base model restores
    the checkpoint exactly; null if there are none."""
    entries: int | None
    """Number of elements that a sparse change stores; null for other forms."""
    bytes: int
    norm: float | None
    """Frobenius norm of the change; null without `--norms`."""


class VectorInspectOutput(TypedDict):
    """Output of `kfacpack inspect --json` for a task vector."""

    path: str
    sha256: str
    """Digest of the vector."""
    bytes: int
    dense_bytes: int
    """Size of the changes if stored as dense float32."""
    weights: int
    """Number of weights that the vector covers."""
    norm: float | None
    """Euclidean norm of the vector; null without `--norms`."""
    parameters: list[VectorParameterOutput]
    manifest: dict[str, Any]
    """The manifest as stored in the file: base model, f, regime, tasks, heads, addends, checkpoints and, for a merged
    vector, the method with a report on every block."""


def _as_json(bundle: Bundle) -> InspectOutput:
    return {
        "path": str(bundle.path),
        "sha256": bundle.digest,
        "bytes": bundle.nbytes,
        "dense_bytes": bundle.dense_bytes,
        "weights": sum(map(_weights, bundle.manifest.blocks)),
        "manifest": bundle.manifest_json,
    }


def _print_summary(bundle: Bundle) -> None:
    summary = key_value_table(bundle_summary(bundle))
    out.print(Panel(summary, title=Text(printable(bundle.path.name)), title_align="left", expand=False))


def _print_kinds(bundle: Bundle) -> None:
    """Prints a table of the blocks with one row for each combination of operation, structure and form."""
    rows: dict[tuple[str, str, str], list[AnyBlockEntry]] = defaultdict(list)
    for block in bundle.manifest.blocks:
        rows[block.operation, block.structure, _forms(bundle, block)].append(block)
    table = plain_table("operation", "structure", "form", numbers=("blocks", "weights", "bytes"))
    counted: set[str] = set()
    for (operation, structure, forms), blocks in rows.items():
        size = sum(_bytes(bundle, block, counted) for block in blocks)
        numbers = (f"{len(blocks)}", f"{sum(map(_weights, blocks)):,}", human_bytes(size))
        table.add_row(Text(operation), structure, Text(forms), *numbers)
    out.print(table)
    print_line("--blocks lists every block; --json prints the whole manifest", style="dim")


def _print_blocks(bundle: Bundle) -> None:
    table = plain_table("block", "operation", "ΔW", "structure", "form", numbers=("bytes",))
    lossy = any(block.losses for block in bundle.manifest.blocks)
    if lossy:
        table.add_column("relative error")
    counted: set[str] = set()
    for block in bundle.manifest.blocks[:MAX_BLOCKS]:
        size = human_bytes(_bytes(bundle, block, counted))
        shape = f"{block.join.rows}×{block.join.columns}"
        name, forms = Text(block.name, overflow="fold"), Text(_forms(bundle, block))
        losses = abbreviate(f"{loss.step} {relative_error(loss.frobenius)}" for loss in block.losses)
        table.add_row(name, Text(block.operation), shape, block.structure, forms, size, *([Text(losses)] * lossy))
        others = [piece.parameter for piece in block.join.pieces if not block.name.startswith(piece.parameter)]
        if others:
            table.add_row(Text(f"  + {abbreviate(dict.fromkeys(others))}", style="dim", overflow="fold"))
    out.print(table)
    _print_omitted(len(bundle.manifest.blocks), "blocks")


def _forms(bundle: Bundle, block: AnyBlockEntry) -> str:
    """Returns the distinct forms of a block's matrices, such as 'packed F32 · block:8 I8'."""
    forms = list(dict.fromkeys(_form(bundle, name) for name, _ in block.references()))
    return " · ".join(forms)


def _form(bundle: Bundle, matrix: str) -> str:
    entry = bundle.matrices[matrix]
    data = bundle.tensors[entry.components["data"]]
    dimension = LAYOUTS[entry.form].count
    count = "" if dimension is None else f":{data.shape[dimension]}"
    return f"{entry.form}{count} {data.dtype}"


def _bytes(bundle: Bundle, block: AnyBlockEntry, counted: set[str]) -> int:
    """Returns the size in bytes of the block's matrices that are not in `counted`, and adds them to `counted`."""
    matrices = {name for name, _ in block.references()} - counted
    counted |= matrices
    return sum(bundle.tensors[t].nbytes for name in matrices for t in bundle.matrices[name].components.values())


def _weights(block: AnyBlockEntry) -> int:
    return block.join.rows * block.join.columns


def _inspect_vector(container: Container, *, blocks: bool, norms: bool, as_json: bool) -> None:
    """Prints a description of a task vector."""
    # Imported here so that inspecting a bundle does not wait for torch.
    from kfacpack.vectors.storage import FileVector

    vector = FileVector(container)
    file = vector.file
    parameters = list(_vector_parameters(vector, norms=norms))
    norm = sum((parameter["norm"] or 0.0) ** 2 for parameter in parameters) ** 0.5 if norms else None
    if as_json:
        weights = sum(prod(parameter["shape"]) for parameter in parameters)
        output: VectorInspectOutput = {
            "path": str(file.path),
            "sha256": file.digest,
            "bytes": file.nbytes,
            "dense_bytes": 4 * weights,
            "weights": weights,
            "norm": norm,
            "parameters": parameters,
            "manifest": file.manifest_json,
        }
        print_json(output)
        return
    rows = [*vector_summary(file), *([] if norm is None else [("norm", f"{norm:.4g}")])]
    title = Text(printable(file.path.name))
    out.print(Panel(key_value_table(rows), title=title, title_align="left", expand=False))
    if method := file.manifest.method:
        print_solved(method)
    if blocks:
        _print_parameters(parameters)
        if method and method.blocks:
            _print_solved_blocks(method)
    else:
        print_line("--blocks lists every parameter; --norms shows norms; --json prints the whole manifest", style="dim")


def _vector_parameters(vector: FileVector, *, norms: bool) -> Iterator[VectorParameterOutput]:
    """Yields a description of the change to each parameter."""
    manifest, tensors = vector.file.manifest, vector.file.tensors
    storage = {entry.name: entry for entry in manifest.storage}
    for number, parameter in enumerate(manifest.base.parameters):
        entry = storage.get(parameter.name)
        specs = entry.specs(number, parameter.shape) if entry else {parameter.name: ("F32", parameter.shape)}
        rank = entry.rank if entry else None
        yield {
            "name": parameter.name,
            "shape": list(parameter.shape),
            "form": _change_form(entry),
            "rank": rank,
            "remainder": entry.remainder if entry else None,
            "entries": entry.entries if entry else None,
            "bytes": sum(tensors[name].nbytes for name in specs),
            "norm": float(vector.read(parameter.name).double().norm()) if norms else None,
        }


def _change_form(entry: ParameterStorage | None) -> ChangeForm:
    """Returns the form in which the change to a parameter is stored."""
    if entry is None or entry.remainder is not None:
        return "dense"
    return "sparse" if entry.entries is not None else "factored" if entry.rank else "unchanged"


def _print_parameters(parameters: Sequence[VectorParameterOutput]) -> None:
    with_norm = any(parameter["norm"] is not None for parameter in parameters)
    table = plain_table("parameter", "shape", "form", numbers=("bytes", *(("norm",) if with_norm else ())))
    for parameter in parameters[:MAX_BLOCKS]:
        form = f"factors of rank {parameter['rank']}" if parameter["rank"] else parameter["form"]
        form += f", elements with a remainder: {parameter['remainder']:,}" if parameter["remainder"] else ""
        form += f", elements: {parameter['entries']:,}" if parameter["entries"] else ""
        shape = "×".join(map(str, parameter["shape"])) or "scalar"
        norm = [] if parameter["norm"] is None else [f"{parameter['norm']:.3g}"]
        table.add_row(Text(parameter["name"], overflow="fold"), shape, form, human_bytes(parameter["bytes"]), *norm)
    out.print(table)
    _print_omitted(len(parameters), "parameters")


def _print_solved_blocks(method: MethodEntry) -> None:
    table = plain_table("block", numbers=("iterations", "residual", "objective before", "after"))
    for block in method.blocks[:MAX_BLOCKS]:
        numbers = f"{block.iterations}", f"{block.residual:.2g}", f"{block.before:.4g}", f"{block.after:.4g}"
        repaired = " (negative eigenvalues set to zero)" if block.repaired else ""
        name = Text(f"{block.name}{repaired}", overflow="fold")
        table.add_row(name, *(numbers if block.curvature else ("prior", "", "", "")))
    out.print(table)
    _print_omitted(len(method.blocks), "blocks")


def _print_omitted(count: int, kind: str) -> None:
    if (more := count - MAX_BLOCKS) > 0:
        print_line(f"{kind} not listed: {more}; --json lists all of them", style="dim")


MAX_FAILURES = 5
"""Maximum number of failures that are printed per check."""


class FailureOutput(TypedDict):
    """One item, such as a tensor, that failed a check."""

    subject: str
    """Name of the item, such as a tensor or a parameter."""
    problem: str


class CheckOutput(TypedDict):
    """The result of one check on all items of a file."""

    name: str
    checked: int
    """Number of items that were checked."""
    failures: list[FailureOutput]
    exempt: int
    """Number of items that the check does not apply to."""


class VerifiedBundleOutput(TypedDict):
    """The results of the checks of one bundle."""

    holds: bool
    """Whether the bundle passed all checks."""
    path: str
    sha256: str
    """Digest of the bundle."""
    checks: list[CheckOutput]


class UnreadableOutput(TypedDict):
    """A file that cannot be read as a bundle."""

    path: str
    error: str


class VerifyOutput(TypedDict):
    """Output of `kfacpack verify --json`."""

    bundles: list[VerifiedBundleOutput]
    unreadable: list[UnreadableOutput]


def _check_json(check: CheckResult) -> CheckOutput:
    return {
        "name": check.name,
        "checked": check.checked,
        "failures": [{"subject": failure.subject, "problem": failure.problem} for failure in check.failures],
        "exempt": check.exempt,
    }


def _verified_json(result: Verification) -> VerifiedBundleOutput:
    checks = list(map(_check_json, result.checks))
    return {"holds": result.holds, "path": result.path, "sha256": result.sha256, "checks": checks}


def verify(
    bundles: list[File] = typer.Argument(..., metavar="FILE.kfac...", help="Bundles to check."),
    model: str | None = option(
        MODEL_PANEL,
        None,
        "--model",
        metavar="MODEL|FILE",
        help="Also check that the bundles were estimated for this model: a model name, or a safetensors file with the "
        "weights.",
    ),
    weights: str | None = WEIGHTS,
    image_size: int | None = IMAGE_SIZE,
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Verify the hashes of bundles, and check that their matrices are finite, symmetric and positive semi-definite.

    Exit codes: 0 if all checks passed, 1 if a check failed, 2 if a file is not a readable bundle.
    """
    if model is None and (weights or image_size):
        raise KfacpackError("--weights and --image-size need a model; pass the model with --model")
    bases = BaseModels(model, weights, image_size)
    verified: list[Verification] = []
    unreadable: list[UnreadableOutput] = []
    for path in bundles:
        try:
            manifest = Bundle(path).manifest
        except KfacpackError as error:
            show_error(str(error))
            unreadable.append({"path": path, "error": str(error)})
            continue
        with checks_bar(locate(path).name, show=not (quiet or as_json)) as advance:
            result = verify_bundle(path, bases.load_for(manifest), on_progress=advance)
        verified.append(result)
        if not as_json:
            _print_result(result, model, quiet)
    if as_json:
        output: VerifyOutput = {"bundles": list(map(_verified_json, verified)), "unreadable": unreadable}
        print_json(output)
    if unreadable:
        raise typer.Exit(2)
    if not all(result.holds for result in verified):
        raise typer.Exit(1)


class BaseModels:
    """Source of the weights that bundles are compared with: a file, or a model in the dtype that each bundle records.

    Args:
        model: Name of a model or path of a safetensors file, or None if the weights are not to be compared.
        weights: The value of --weights.
        image_size: The value of --image-size.

    Raises:
        KfacpackError: If the model is a file that cannot be read.
    """

    def __init__(self, model: str | None, weights: str | None, image_size: int | None):
        self._model, self._weights, self._image_size = model, weights, image_size
        self._loaded: dict[tuple[str, int], nn.Module] = {}
        self._is_file = model is not None and weights is None and image_size is None and Path(model).is_file()
        if model is not None and self._is_file:
            weights_of_file(model)  # so that a damaged file is reported before any bundle is checked

    def load_for(self, manifest: Manifest) -> str | nn.Module | None:
        """Returns the file or module to compare a bundle with, or None if --model was not passed."""
        if self._model is None or self._is_file:
            return self._model
        dtype: FloatType = (manifest.estimate and manifest.estimate.model_dtype) or "float32"
        random = re.fullmatch(r"random-([0-9]+)", manifest.base.revision or "")
        seed = int(random[1]) if random else 0
        if (dtype, seed) not in self._loaded:
            loaded = load_model_option(self._model, self._weights, self._image_size, dtype, seed=seed)
            self._loaded[dtype, seed] = loaded.module
        return self._loaded[dtype, seed]


def _print_result(result: Verification, model: str | None, quiet: bool) -> None:
    for check in result.checks:
        against = f" ({model})" if check.name == "model" else ""
        for failure in check.failures[:MAX_FAILURES]:
            show_error(f"{result.path}: {failure.subject}: {failure.problem}{against}")
        if (more := len(check.failures) - MAX_FAILURES) > 0:
            omitted = f"{more} more of {check.checked} items failed; --json lists all failures"
            show_error(f"{result.path}: {check.name}: {omitted}")
    if quiet:
        return
    if result.holds:
        verdict, names = ("passed ", "bold green"), [_count(check) for check in result.checks]
    else:
        verdict, names = ("failed ", "bold red"), [check.name for check in result.checks if check.failures]
    out.print(Text.assemble(verdict, printable(f"{result.path}: {', '.join(names)}")), soft_wrap=True)


def _count(check: CheckResult) -> str:
    exempt = f"; {check.exempt} not checked" if check.exempt else ""
    return f"{check.name} ({check.checked}{exempt})"
