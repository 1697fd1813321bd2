"""The HTML report of a run: one self-contained page, its numbers as JSON, and its figures as SVG and PNG."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path

from kfacpack._compat import require
from kfacpack.errors import KfacpackError
from kfacpack.experiments.report_accuracy import by_task, headline, negation, over_alpha, summary
from kfacpack.experiments.report_analysis import bundles, disentanglement, drift, localisation, provenance, spectra
from kfacpack.experiments.report_content import ReportContent, ReportFigure, Section, unique_names
from kfacpack.experiments.results_schema import Results, Times, read_results, read_times
from kfacpack.format.writer import write_atomically


def render_page(report: ReportContent, drawings: Mapping[str, Mapping[str, bytes]]) -> str:
    """Renders the report as one self-contained HTML page that needs no scripts, no network access and no other files.

    Args:
        report: The content of the page.
        drawings: Contents of the SVG files, by name of the figure and by theme.
    """
    # Imported here, so that invalid results are reported without waiting for the import of Jinja and Matplotlib.
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    from kfacpack.experiments.figure_style import THEMES

    folder = files("kfacpack.experiments")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((folder / "page.html.j2").read_text(encoding="utf-8"))
    return template.render(
        report=report,
        # The style sheet is trusted, and escaping would break it inside <style>.
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
"""Functions that return the sections of a report, in order. They return None for a section without data."""


def compose(results: Results, times: Times | None) -> ReportContent:
    """Returns the content of the report: all sections, with unique names for the files of their figures."""
    sections = [content for section in SECTIONS if (content := section(results))]
    sections.append(provenance(results, times))
    names = iter(unique_names([picture.file for section in sections for picture in section.pictures]))
    renamed = [
        section.model_copy(
            update={"pictures": [picture.model_copy(update={"file": next(names)}) for picture in section.pictures]}
        )
        for section in sections
    ]
    return ReportContent(title=results.name, headline=headline(results), sections=renamed)


_SUFFIXES = (".svg", "-dark.svg", ".png")
"""Suffixes of the files that are written for each figure."""


def report(
    run_dir: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Writes the report of a run as one HTML page.

    All numbers on the page are also written to a JSON file with the same name as the page and the suffix `.json`. All
    figures are also written as SVG and PNG to the folder `figures` beside the page. If the page replaces an older
    report, figures that only the older report uses are removed. The page is written after all other files. The same
    results always give identical files.

    Args:
        run_dir: Folder of a run, with `results.json` and, optionally, `times.json`.
        output: The page to write. Its name must end in `.html`, and its folder must exist.
        on_progress: Called with the number of figures drawn so far and the total number.

    Returns:
        The path of the page.

    Raises:
        KfacpackError: If the results are missing or invalid, the page cannot be written, or a package from the
            extra `report` is not installed.

    Example:
        >>> import kfacpack as kp
        >>> kp.report("demo", "report.html")  # after `kfacpack demo`
        PosixPath('report.html')
    """
    folder, page = Path(run_dir), Path(output)
    _check_output(folder, page)
    require(extra="report", feature="a report")
    content = compose(read_results(folder), read_times(folder))
    drawings = _draw(content, page.parent / "figures", on_progress or (lambda done, total: None))
    html = render_page(content, drawings)
    _remove_old_figures(page, content)
    write_atomically(page.with_suffix(".json"), f"{content.model_dump_json(indent=1)}\n".encode(errors="replace"))
    write_atomically(page, html.encode(errors="replace"))
    return page


def _check_output(folder: Path, page: Path) -> None:
    if page.suffix.lower() not in (".html", ".htm"):
        raise KfacpackError(f"{page}: unsupported suffix {page.suffix!r}; expected a name that ends in .html")
    if not page.absolute().parent.is_dir():
        raise KfacpackError(f"{page}: folder {str(page.parent)!r} does not exist. Create it, or choose another folder")
    numbers = page.with_suffix(".json")
    for name in ("results.json", "times.json"):
        if numbers.exists() and (folder / name).exists() and numbers.samefile(folder / name):
            raise KfacpackError(f"{page}: the JSON file for this page would overwrite {numbers}; choose another name")


def _remove_old_figures(page: Path, content: ReportContent) -> None:
    """Removes the figures that are listed in the replaced report but not in the new report."""
    try:
        replaced = ReportContent.model_validate_json(page.with_suffix(".json").read_bytes())
    except (OSError, ValueError):
        return  # there is no such file, or it is not a report
    for name in _figure_files(replaced) - _figure_files(content):
        if Path(name).name == name:
            try:
                (page.parent / "figures" / name).unlink(missing_ok=True)
            except OSError as error:
                raise KfacpackError(f"{page.parent / 'figures' / name}: cannot be removed: {error.strerror}") from error


def _figure_files(content: ReportContent) -> set[str]:
    """Returns the names of all files that are written for the figures of a report."""
    pictures = [picture.file for section in content.sections for picture in section.pictures]
    return {f"{name}{suffix}" for name in pictures for suffix in _SUFFIXES}


def _draw(content: ReportContent, folder: Path, on_progress: Callable[[int, int], None]) -> dict[str, dict[str, bytes]]:
    """Writes all figures to the folder, and returns the contents of the SVG files by name and theme."""
    pictures = [picture for section in content.sections for picture in section.pictures]
    if pictures:
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise KfacpackError(f"{folder}: cannot be created: {error.strerror or error}") from error
    drawings = {}
    for number, picture in enumerate(pictures):
        on_progress(number, len(pictures))
        drawings[picture.file] = _draw_figure(picture, folder)
    on_progress(len(pictures), len(pictures))
    return drawings


def _draw_figure(picture: ReportFigure, folder: Path) -> dict[str, bytes]:
    """Writes a figure as SVG in each theme and as PNG in the light theme, and returns the SVG contents by theme."""
    # Imported here because importing Matplotlib is slow.
    from kfacpack.experiments.figure_style import THEMES, save
    from kfacpack.experiments.figures import FIGURES

    drawings = {}
    for theme in THEMES:
        figure = FIGURES[picture.figure](picture.data, **picture.options, theme=theme)
        name = picture.file if theme == "light" else f"{picture.file}-{theme}"
        drawings[theme] = save(figure, folder / f"{name}.svg").read_bytes()
        if theme == "light":
            save(figure, folder / f"{name}.png")
    return drawings
