"""The figures, one file each. They are given plain numbers, as they stand in JSON, and know nothing of models."""

from collections.abc import Callable

from matplotlib.figure import Figure

from kfacpack.figures.bars import bars
from kfacpack.figures.disentanglement import disentanglement
from kfacpack.figures.drift import drift
from kfacpack.figures.localisation import localisation
from kfacpack.figures.saving import render, save
from kfacpack.figures.spectra import spectra
from kfacpack.figures.style import THEMES
from kfacpack.figures.sweep import sweep

FIGURES: dict[str, Callable[..., Figure]] = {
    "sweep": sweep,
    "disentanglement": disentanglement,
    "localisation": localisation,
    "drift": drift,
    "spectra": spectra,
    "bars": bars,
}

__all__ = ["FIGURES", "THEMES", "render", "save"]
