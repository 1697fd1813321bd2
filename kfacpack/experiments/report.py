"""A report as one page of HTML that needs nothing else: no script, no network, no file beside it.

The sections of a report, in their order. One whose data a run does not have is left out.

The report of a run: a page, the numbers in it, and its figures.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kfacpack.errors import KfacpackError
from kfacpack.experiments.figure_style import THEMES
from kfacpack.experiments.report_accuracy import by_task, headline, negation, over_alpha, summary
from kfacpack.experiments.report_analysis import bundles, disentanglement, drift, localisation, provenance, spectra
from kfacpack.experiments.report_content import ReportContent, ReportFigure, Section, unique_name
from kfacpack.experiments.results_schema import Results, Times, read_results, read_times
from kfacpack.format.writer import write_atomically


def render_page(report: ReportContent, drawings: Mapping[str, Mapping[str, bytes]]) -> str:
    """`drawings` are the SVGs of each picture's file, by theme."""
    folder = files("kfacpack.experiments")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((folder / "page.html.j2").read_text(encoding="utf-8"))
    return template.render(
        report=report,
        # Ours, and in a <style>, where escaping would break it.
        style=Markup((folder / "page.css").read_text(encoding="utf-8")),
        themes=THEMES,
        inline={
            file: {theme: f"data:image/svg+xml;base64,{b64encode(svg).decode()}" for theme, svg in themes.items()}
            for file, themes in drawings.items()
        },
    )


SECTIONS: tuple[Callable[[Results], Section | None], ...] = (
    summary,
    by_task,
    over_alpha,
    negation,
    disentanglement,
    localisation,
    drift,
    bundles,
    spectra,
)


def compose(results: Results, times: Times | None) -> ReportContent:
    sections = [made_of for section in SECTIONS if (made_of := section(results))]
    sections.append(provenance(results, times))
    names = iter(unique_name([picture.file for section in sections for picture in section.pictures]))
    named = [
        section.model_copy(
            update={"pictures": [each.model_copy(update={"file": next(names)}) for each in section.pictures]}
        )
        for section in sections
    ]
    return ReportContent(title=results.name, headline=headline(results), sections=named)


_ENDS = (".svg", "-dark.svg", ".png")
"""Of the files of a figure."""


def report(
    run_dir: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Read RUN_DIR/results.json and times.json, and write the page `output`; give its path.

    Beside it are made: a file of the same name that ends in .json, which has every number of the page, and the folder
    `figures` with each figure as SVG and PNG; those that only the report had that is replaced are removed. The page is
    written last. The same results give the same bytes. `on_progress` hears how many figures are drawn, and how many
    there are.
    """
    folder, page = Path(run_dir), Path(output)
    _check_output(folder, page)
    content = compose(read_results(folder), read_times(folder))
    drawings = _draw(content, page.parent / "figures", on_progress or (lambda done, total: None))
    # It takes a template engine, which reading and refusing do not.
    pass  # DROP

    html = render_page(content, drawings)
    _clear(page, content)
    write_atomically(page.with_suffix(".json"), f"{content.model_dump_json(indent=1)}\n".encode(errors="replace"))
    write_atomically(page, html.encode(errors="replace"))
    return page


def _check_output(folder: Path, page: Path) -> None:
    if page.suffix.lower() not in (".html", ".htm"):
        raise KfacpackError(f"{page}: a report is a page of HTML; give it a name that ends in .html")
    if not page.absolute().parent.is_dir():
        raise KfacpackError(f"{page}: there is no folder {str(page.parent)!r}. Make it, or write to another one")
    beside = page.with_suffix(".json")
    for name in ("results.json", "times.json"):
        if beside.exists() and (folder / name).exists() and beside.samefile(folder / name):
            raise KfacpackError(f"{page}: its numbers would be written over {beside}; give it another name")


def _clear(page: Path, content: ReportContent) -> None:
    """Remove the figures that the report that is replaced says it has, and this one has not."""
    try:
        before = ReportContent.model_validate_json(page.with_suffix(".json").read_bytes())
    except (OSError, ValueError):
        return  # there is none, or it is not ours
    for name in _files(before) - _files(content):
        if Path(name).name == name:
            try:
                (page.parent / "figures" / name).unlink(missing_ok=True)
            except OSError as error:
                raise KfacpackError(
                    f"{page.parent / 'figures' / name}: could not be removed: {error.strerror}"
                ) from error


def _files(content: ReportContent) -> set[str]:
    """The names of all files in the folder of figures."""
    pictures = [picture.file for section in content.sections for picture in section.pictures]
    return {f"{name}{end}" for name in pictures for end in _ENDS}


def _draw(content: ReportContent, folder: Path, on_progress: Callable[[int, int], None]) -> dict[str, dict[str, bytes]]:
    """The SVGs of every picture, by theme; beside them in the folder, a PNG of the light one."""
    pictures = [picture for section in content.sections for picture in section.pictures]
    if pictures:
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise KfacpackError(f"{folder}: could not be made: {error.strerror or error}") from error
    made = {}
    for number, picture in enumerate(pictures):
        on_progress(number, len(pictures))
        made[picture.file] = _draw_one(picture, folder)
    on_progress(len(pictures), len(pictures))
    return made


def _draw_one(picture: ReportFigure, folder: Path) -> dict[str, bytes]:
    # matplotlib, which is slow to come.
    from kfacpack.experiments.figure_style import THEMES, save
    from kfacpack.experiments.figures import FIGURES

    drawn = {}
    for theme in THEMES:
        figure = FIGURES[picture.figure](picture.data, **picture.options, theme=theme)
        name = picture.file if theme == "light" else f"{picture.file}-{theme}"
        drawn[theme] = save(figure, folder / f"{name}.svg").read_bytes()
        if theme == "light":
            save(figure, folder / f"{name}.png")
    return drawn
