"""The sections of a report, in their order. One whose data a run does not have is left out."""

from __future__ import annotations

from collections.abc import Callable

from kfacpack.reporting.accuracies import by_task, headline, negation, over_alpha, summary
from kfacpack.reporting.content import Report, Section
from kfacpack.reporting.making import bundles, made
from kfacpack.reporting.naming import unlike
from kfacpack.reporting.results import Results, Times
from kfacpack.reporting.understanding import disentanglement, drift, localisation, spectra

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


def compose(results: Results, times: Times | None) -> Report:
    sections = [made_of for section in SECTIONS if (made_of := section(results))]
    sections.append(made(results, times))
    names = iter(unlike([picture.file for section in sections for picture in section.pictures]))
    named = [
        section.model_copy(
            update={"pictures": [each.model_copy(update={"file": next(names)}) for each in section.pictures]}
        )
        for section in sections
    ]
    return Report(title=results.name, headline=headline(results), sections=named)
