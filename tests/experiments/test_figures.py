"""Figures are legible, and the same data give the same bytes."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from experiments import synthetic_results
from kit import refused
from PIL import Image

from kfacpack.errors import KfacpackError
from kfacpack.experiments.figure_style import THEMES, power_of_ten, render, save
from kfacpack.experiments.figures import FIGURES, nearest_index, smallest_nonzero

TASKS = synthetic_results.TASKS
UNUSUAL = ["$\\frac{1", "<script>&amp;", "a_b^c" * 9, *TASKS[3:]]
"""Names that could be mistaken for formulas or markup, or are too long for an axis."""


def data_of(figure, tasks=TASKS):
    generator = random.Random(0)
    return {
        "sweep": lambda: {f"arm {k}": synthetic_results.make_sweep(tasks, k / 5, generator) for k in range(3)},
        "disentanglement": lambda: synthetic_results.make_disentanglement(*tasks[:2], 0.3),
        "localisation": lambda: synthetic_results.make_localisation(tasks, 0.1, generator),
        "drift": lambda: synthetic_results.make_drift(tasks, 0.1, generator),
        "interference": lambda: synthetic_results.make_interference(tasks, generator),
        "spectra": lambda: synthetic_results.make_spectra(),
        "bars": lambda: {
            "base": dict.fromkeys(tasks, 0.3),
            "arms": {"kfac": {"individual": dict.fromkeys(tasks, 0.9), "added": dict.fromkeys(tasks, 0.8)}},
        },
    }[figure]()


def words(figure):
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text")) if text.get_text()]


def test_the_same_data_give_the_same_bytes_in_another_process(tmp_path):
    (tmp_path / "data.json").write_text(json.dumps({name: data_of(name) for name in FIGURES}))
    program = """
import json, sys
from pathlib import Path
from kfacpack.experiments.figure_style import save
from kfacpack.experiments.figures import FIGURES
folder = Path(sys.argv[1])
for name, data in json.loads((folder / "data.json").read_text()).items():
    save(FIGURES[name](data, theme="dark"), folder / f"{name}.svg")
assert "matplotlib.pyplot" not in sys.modules and "torch" not in sys.modules
"""
    settings = {**os.environ, "MATPLOTLIBRC": str(tmp_path), "PYTHONHASHSEED": "7"}
    (tmp_path / "matplotlibrc").write_text("font.size: 40\nlines.linewidth: 9\n")
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True, env=settings)
    for name in FIGURES:
        figure = render(FIGURES[name](data_of(name), theme="dark"), "svg")
        assert (tmp_path / f"{name}.svg").read_bytes() == figure
        assert b"<dc:date>" not in figure


@pytest.mark.parametrize("name", FIGURES)
def test_names_are_never_interpreted_as_markup(name):
    figure = FIGURES[name](data_of(name, UNUSUAL))
    root = ET.fromstring(render(figure, "svg"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    if name in ("localisation", "bars", "interference"):
        assert UNUSUAL[0] in words(figure)


def written(axis):
    """Returns the boxes of the tick labels within the limits of the axis."""
    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [tick.label1.get_window_extent() for tick in ticks if tick.label1.get_text()]


@pytest.mark.parametrize("name", FIGURES)
def test_axes_are_labelled_and_labels_do_not_overlap(name):
    figure = FIGURES[name](data_of(name))
    figure.draw_without_rendering()
    panel = figure.axes[0]
    if name != "bars":
        assert panel.get_xlabel()
        assert panel.get_ylabel()
    boxes = [*written(panel.yaxis)]
    if name not in ("bars", "interference"):  # their labels are rotated
        boxes += written(panel.xaxis)
    boxes += [text.get_window_extent() for legend in figure.legends for text in legend.get_texts()]
    overlapping = [(a, b) for k, a in enumerate(boxes) for b in boxes[:k] if a.overlaps(b)]
    assert not overlapping
    inside = figure.bbox
    assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 for box in boxes)


def test_themes_have_dark_and_light_backgrounds(tmp_path):
    for theme, bright in (("light", True), ("dark", False)):
        file = save(FIGURES["drift"](data_of("drift"), theme=theme), tmp_path / f"{theme}.png")
        with Image.open(file) as picture:
            assert (np.median(np.asarray(picture.convert("L"))) > 127) == bright


def luminance(colour):
    """Relative luminance as defined by the WCAG."""
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_colours_have_enough_contrast(theme):
    def contrast(colour):
        low, high = sorted((luminance(colour), luminance(theme.paper)))
        return (high + 0.05) / (low + 0.05)

    assert contrast(theme.ink) >= 7
    assert min(map(contrast, (*theme.series, theme.faint))) >= 3


def test_a_single_sweep_shows_its_tasks():
    one = synthetic_results.make_sweep(TASKS, 0.1, random.Random(0))
    labels = words(FIGURES["sweep"](one, references={"individual": 0.9}))
    assert {*TASKS, "mean", "individual"} <= set(labels)


def test_the_minimum_is_searched_where_both_alphas_are_nonzero():
    alphas, xi = [0.0, 1.0, 2.0], [[0.0, 0.1, 0.1], [0.1, 0.4, 0.3], [0.1, 0.2, 0.5]]
    assert smallest_nonzero(alphas, xi) == (2, 1)
    assert smallest_nonzero([0.0], [[0.0]]) == (0, 0)
    assert nearest_index(alphas, 1.0) == 1
    figure = FIGURES["disentanglement"]({"tasks": ["a", "b"], "alphas": alphas, "xi": xi})
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["minimum, α = 2 (a), 1 (b): ξ = 20 %", "α = 1 for both tasks: ξ = 40 %"]


def test_zeros_are_omitted_on_logarithmic_axes():
    zeros = {"examples": 3, "mean": 0.0, "quantiles": [0.0] * 5}
    some = {"examples": 3, "mean": 1.0, "quantiles": [0.0, 0.0, 1.0, 2.0, 3.0]}
    vectors = {"a": {"on": some, "off": zeros, "auroc": 1.0}}
    drift = {"pairs": [{"vector": "a", "task": "a", "predicted": 0.0, "measured": 1.0}], "layers": []}
    for figure in (FIGURES["localisation"]({"vectors": vectors}), FIGURES["drift"](drift)):
        assert render(figure, "png").startswith(b"\x89PNG")
    assert [power_of_ten(x) for x in (1e-12, 1.0, 1000.0, 0.0)] == ["10⁻¹²", "10⁰", "10³", ""]


def test_interference_shows_every_value_and_frames_own_tasks():
    pairs = [("a", "a", 2e-4), ("a", "b", 3e-6), ("b", "a", 0.0), ("b", "b", 0.05)]
    data = {
        "vectors": ["a", "b"],
        "tasks": [{"task": "a"}, {"task": "b"}],
        "pairs": [{"vector": v, "task": t, "own": v == t, "predicted": x} for v, t, x in pairs],
    }
    figure = FIGURES["interference"](data)
    assert {"2", "0.03", "0", "500", "own task"} <= set(words(figure))
    assert any("10⁻⁴" in text for text in words(figure))
    figure.draw_without_rendering()
    scale = figure.axes[1].yaxis.label.get_window_extent()
    assert figure.bbox.y0 <= scale.y0
    assert scale.y1 <= figure.bbox.y1
    frames = [
        patch for patch in figure.axes[0].patches if patch.get_label() == "own task" or patch.get_linewidth() == 1.5
    ]
    assert [patch.get_xy() for patch in frames] == [(-0.46, -0.46), (0.54, 0.54)]
    nothing = {**data, "pairs": [{**pair, "predicted": 0.0} for pair in data["pairs"]]}
    assert render(FIGURES["interference"](nothing), "png").startswith(b"\x89PNG")


def test_files_do_not_depend_on_earlier_files():
    first, second = (FIGURES["sweep"](data_of("sweep")) for _ in range(2))
    render(first, "png")
    assert render(first, "svg") == render(second, "svg")


def test_few_spectra_are_labelled_and_many_are_coloured_by_side():
    few = words(FIGURES["spectra"](synthetic_results.make_spectra(2)))
    assert "visual.blocks.1.mlp B" in few
    many = words(FIGURES["spectra"](synthetic_results.make_spectra(9)))
    assert {"A (inputs)", "B (gradients)"} <= set(many)
    assert not [text for text in many if "blocks" in text]


def test_files_are_svg_or_png(tmp_path):
    figure = FIGURES["sweep"](data_of("sweep"))
    with refused(KfacpackError, "'.pdf'", ".svg or .png"):
        save(figure, tmp_path / "a.pdf")
    with refused(KfacpackError, "theme 'sepia'", "light, dark"):
        FIGURES["sweep"](data_of("sweep"), theme="sepia")
    with refused(KfacpackError, tmp_path / "nowhere" / "a.svg", "could not be written", "No such file"):
        save(figure, tmp_path / "nowhere" / "a.svg")
    picture = save(figure, tmp_path / "a.png").read_bytes()
    with Image.open(io.BytesIO(picture)) as opened:
        assert not opened.info.get("Software")
    assert [file.name for file in tmp_path.iterdir()] == ["a.png"]
