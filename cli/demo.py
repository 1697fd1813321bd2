"""`kfacpack demo`: the whole story on the model that comes with the package."""

from __future__ import annotations

from pathlib import Path

from kfacpack.errors import KfacpackError

from .console import out, show_note
from .options import DEVICE, QUIET, RUN, option
from .plan import carry_out


def demo(
    output: Path = option(RUN, Path("demo"), "--output", "-o", metavar="DIR", help="The folder to write to."),
    every: bool = option(RUN, False, "--all", help="All eight tasks instead of three; takes longer."),
    device: str = DEVICE,
    as_json: bool = option(RUN, False, "--json", help="Print the results as JSON."),
    quiet: bool = QUIET,
) -> None:
    """Three tasks, a small CLIP: vectors trained apart, with and without the penalty, added up, negated, measured.

    It is a plan like any other, written to DIR/plan.yaml for you to copy and edit; 'kfacpack run' carries it out again.
    """
    from kfacpack.plans.demo import plan_text
    from kfacpack.plans.reading import parse
    from kfacpack.running.files import write_whole

    path, text = output / "plan.yaml", plan_text(every=every)
    try:
        output.mkdir(parents=True, exist_ok=True)
        before = path.read_text(encoding="utf-8") if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise KfacpackError(f"{output}: cannot be used for the demo: {error}. Give another folder with -o") from error
    if before is not None and before != text:
        remedy = f"Carry it out with 'kfacpack run {path} -o {output}', or give another folder with -o"
        raise KfacpackError(f"{path}: is there already, and is not the demo's. {remedy}")
    write_whole(path, text.encode())
    if not (quiet or as_json):
        out.print(f"the plan is {path}")
    carry_out(parse(text, str(path)), text, output, device, dry_run=False, as_json=as_json, quiet=quiet, explain=True)
    if not (quiet or as_json):
        show_note(f"edit {path} and call 'kfacpack run {path} -o {output}': only what has changed is made again")
