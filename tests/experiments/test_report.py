"""The report of a run: a self-contained page, its numbers as JSON, and errors for invalid results."""

from __future__ import annotations

import json
import re
import statistics
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from experiments.synthetic_results import TIMES, make_results, write_run
from kfacpack_cli.main import app
from kit import refused
from typer.testing import CliRunner

from kfacpack.errors import KfacpackError
from kfacpack.experiments.report import compose, report
from kfacpack.experiments.report_accuracy import summary as summary_section
from kfacpack.experiments.report_content import ReportContent
from kfacpack.experiments.results_schema import Results

VOID = {"meta", "img", "source", "br", "link", "input", "hr"}
NUMBER = re.compile(r"\d[\d,.]*(?:e[+-]\d+)?")
MALICIOUS = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "$\\frac{1", "a & b\x07"]


class Page(HTMLParser):
    """Parses a page: elements, attributes and the text of cells and headline; asserts that elements are closed."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.cells, self.headline, self.text = [], [], [], "", ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))
        if tag in ("td", "th") and ("tbody", {}) in self.open:
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        tags = [tag for tag, _ in self.open]
        if "style" in tags:
            return
        self.text += data
        if "tbody" in tags and {"td", "th"} & set(tags):
            self.cells[-1] += data
        if ("p", {"class": "headline"}) in self.open:
            self.headline += data

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), make_results(3, 2, 2), TIMES)


@pytest.fixture(scope="module")
def report_folder(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    assert report(run, folder / "report.html") == folder / "report.html"
    return folder


@pytest.fixture(scope="module")
def page(report_folder):
    return Page((report_folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def numbers(report_folder):
    return json.loads((report_folder / "report.json").read_text(encoding="utf-8"))


def bare(folder, results):
    """Writes the report of a run with only two figures, which is fast; returns the page as text."""
    return report(write_run(folder / "run", results), folder / "report.html").read_text(encoding="utf-8")


def test_the_page_is_well_formed_and_accessible(page):
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("title")) == len(page.all("h1")) == 1
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(image["alt"] for image in page.all("img"))
    assert len(page.all("figcaption")) == len(page.all("figure")) == len(page.all("img"))
    assert len(page.all("caption")) == len(page.all("table"))
    assert {head["scope"] for head in page.all("th")} == {"row", "col"}
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {link["href"][1:] for link in page.all("a")} <= set(ids)


def test_the_page_loads_and_runs_nothing(report_folder, page):
    for tag, attrs in page.elements:
        assert tag not in ("script", "link", "iframe", "object")
        for key, value in attrs.items():
            assert not key.startswith("on")
            if key in ("src", "srcset", "href"):
                assert value.startswith(("data:image/svg+xml;base64,", "#"))
    html = (report_folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|url\(|@import", html)
    assert "default-src 'none'" in html
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html


def test_every_number_of_the_page_is_in_the_json(page, numbers):
    cells = [cell for s in numbers["sections"] for t in s["tables"] for row in t["rows"] for cell in row]
    assert [" ".join(text.split()) for text in page.cells] == [" ".join(shown(cell).split()) for cell in cells]
    assert NUMBER.findall(page.headline) == [n for cell in numbers["headline"] for n in NUMBER.findall(shown(cell))]
    assert sum(isinstance(cell["value"], float) for cell in cells) > 50


def shown(cell):
    """An independent implementation of the formatting."""
    value, std = cell["value"], cell["std"]
    if value is None:
        return "–"
    if cell["kind"] in ("text", "code"):
        return value
    if cell["kind"] == "percent":
        spread = "" if std is None else f" ± {100 * std:.1f}"
        return f"{100 * value:.1f}{spread} %".replace("-", "−")
    if cell["kind"] == "number":
        return f"{value:.3g}" + ("" if std is None else f" ± {std:.2g}")
    if cell["kind"] == "score":
        return f"{value:.3f}" + ("" if std is None else f" ± {std:.3f}")
    if cell["kind"] == "count":
        return f"{value:,}"
    if cell["kind"] == "bytes":
        return f"{value / 1e6:.1f} MB" if value < 1e9 else f"{value / 1e9:.1f} GB"
    assert cell["kind"] == "seconds"
    return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"


def test_numbers_match_the_results_of_the_run(run, numbers):
    results = json.loads((run / "results.json").read_text())
    tables = {section["id"]: section["tables"] for section in numbers["sections"]}
    without = results["arms"][0]
    row = next(row for row in tables["tasks"][0]["rows"] if row[0]["value"] == "mnist")
    individual = [seed["individual"]["mnist"] for seed in without["seeds"]]
    assert row[1]["value"] == results["base"]["tasks"]["mnist"]["accuracy"]
    assert row[2]["value"] == pytest.approx(statistics.mean(individual))
    assert row[2]["std"] == pytest.approx(statistics.stdev(individual))
    titles = tables["summary"][0]["columns"]
    assert [row[titles.index("recovered")]["value"] for row in tables["summary"][0]["rows"]] == [
        summary["recovered"] for summary in results["summary"]
    ]
    pictures = {p["file"]: p for section in numbers["sections"] for p in section["pictures"]}
    swept = pictures["sweep"]["data"]["without"]["mean"][3]
    assert swept == pytest.approx(statistics.mean(seed["sweep"]["mean"][3] for seed in without["seeds"]))
    xi = pictures["disentanglement-1-without-digits-mnist"]["data"]["xi"][2][7]
    assert xi == pytest.approx(statistics.mean(seed["disentanglement"][0]["xi"][2][7] for seed in without["seeds"]))
    ratios = [
        pair["predicted"] / pair["measured"]
        for seed in without["seeds"]
        for pair in seed["drift"]["pairs"]
        if pair["vector"] == pair["task"]
    ]
    assert tables["drift"][0]["rows"][0][1]["value"] == pytest.approx(statistics.median(ratios))


def headline_of(results):
    headline = compose(Results.model_validate(results), None).headline
    return "".join(f"{cell.shown} " for cell in headline)


def test_the_headline_compares_the_best_dataless_penalty_with_none():
    results = make_results(3, 4, full=False)
    rows = {row["arm"]: row for row in results["summary"]}
    assert rows["data"]["added"] > rows["kfac"]["added"] > rows["diagonal"]["added"] > rows["without"]["added"]
    headline = headline_of(results)
    for row, key in (("without", "added"), ("kfac", "added"), ("kfac", "individual"), ("kfac", "recovered")):
        assert f"{100 * rows[row][key]:.1f} %" in headline
    assert "“data”" not in headline


def test_removed_is_explained_only_if_vectors_were_negated():
    for full in (True, False):
        section = summary_section(Results.model_validate(make_results(3, 2, full=full)))
        assert ("“Removed”" in section.how_to_read) == ("removed" in section.tables[0].columns) == full


def test_harmful_penalties_are_shown_as_such():
    results = make_results(3, 2, full=False)
    results["summary"][1].update(added=0.25, recovered=-1.5)
    headline = headline_of(results)
    assert "25.0 %" in headline
    assert "−150.0 %" in headline


def test_the_page_shows_its_provenance(page, run):
    results = json.loads((run / "results.json").read_text())
    for fact in (*results["versions"].values(), results["plan"]["sha256"], results["plan"]["text"].splitlines()[1]):
        assert fact in page.text
    for command in results["commands"]:
        assert command in page.text
    assert {bundle["file"] for bundle in results["bundles"]} <= set(page.cells)
    assert {"1.2 GB", "estimate", "reused"} <= set(page.cells)


def test_every_figure_is_written_to_a_file(report_folder, numbers):
    files = [p["file"] for section in numbers["sections"] for p in section["pictures"]]
    assert len(files) == len(set(files)) == 2 + 2 * (2 + 1 + 1) + 1
    wanted = {name for file in files for name in (f"{file}.svg", f"{file}.png", f"{file}-dark.svg")}
    assert {file.name for file in (report_folder / "figures").iterdir()} == wanted
    assert {file.name for file in report_folder.iterdir()} == {"report.html", "report.json", "figures"}


def test_the_same_results_give_the_same_bytes(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        bare(tmp_path / folder, make_results(3, 2, full=False))
    one, two = (sorted(p for p in (tmp_path / f).rglob("*") if p.is_file()) for f in ("one", "two"))
    assert len(one) == len(two) == 1 + 2 + 2 * 3
    assert [file.read_bytes() for file in one] == [file.read_bytes() for file in two]
    ReportContent.model_validate_json((tmp_path / "one" / "report.json").read_text())


def test_sections_without_data_are_omitted(tmp_path):
    results = make_results(2, 1, full=False)
    results["bundles"] = results["merges"] = []
    for seed in results["arms"][0]["seeds"]:
        del seed["sweep"]
        seed["best"] = None
    page = Page(bare(tmp_path, results))
    assert [section["id"] for section in page.all("section")] == ["summary", "tasks", "provenance"]
    assert "AUROC" not in page.text
    assert "recovers" not in page.headline
    assert "last run" not in page.cells


def test_names_are_escaped(tmp_path):
    results = make_results(MALICIOUS, 2, full=False)
    results["name"] = results["plan"]["text"] = results["commands"][0] = MALICIOUS[0]
    results["arms"][1]["name"] = results["summary"][1]["arm"] = MALICIOUS[1]
    html = bare(tmp_path, results)
    page = Page(html)
    assert "<script" not in html
    assert not [image for image in page.all("img") if not image["src"].startswith("data:")]
    assert not [attrs for _, attrs in page.elements if "onerror" in attrs]
    assert MALICIOUS[0] in page.cells
    assert MALICIOUS[0] in page.text


def test_figures_with_similar_names_have_different_files(tmp_path):
    results = make_results(["A b", "a-b", "a_b"], 1, full=False)
    loose = make_results(["A b", "a-b", "a_b"], 1)["arms"][0]["seeds"][0]
    results["arms"][0]["seeds"][0]["disentanglement"] = loose["disentanglement"]
    bare(tmp_path, results)
    names = {file.name for file in (tmp_path / "figures").glob("disentanglement*[!k].svg")}
    assert names == {"disentanglement-1-without-a-b-a-b.svg", "disentanglement-1-without-a-b-a-b--2.svg"}


def without(key):
    def change(results):
        del results[key]

    return change


def changed(path, value):
    def change(results):
        for step in path[:-1]:
            results = results[step]
        results[path[-1]] = value

    return change


SEED = ("arms", 0, "seeds", 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("base"), "base: Field required"),
        (changed(["format"], "kfacpack.run/2"), "format is 'kfacpack.run/2', expected 'kfacpack.run/1'"),
        (changed(["arms"], []), "arms: .*at least 1"),
        (changed([*SEED, "individual", "mnist"], float("nan")), "individual.mnist: .*finite number, got nan"),
        (changed([*SEED, "individual"], {"mnist": 0.5}), "arm 'without', seed 0: tasks differ"),
        (changed([*SEED, "sweep", "mean"], [0.5]), r"one accuracy per α \(number of alphas: 21\)"),
        (changed([*SEED, "disentanglement", 0, "xi"], [[0.1]]), "xi: expected a 16 × 16 matrix"),
        (changed(["spectra", "blocks", 0, "ranks"], [1]), "number of ranks: 1, number of eigenvalues: "),
        (changed(["arms", 1, "name"], "without"), "duplicate arm names"),
        (changed(["bundles", 0, "bytes"], "\x1b[31mred"), r"bundles.0.bytes: .* got '\\x1b\[31mred'"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, change, words):
    results = make_results(2, 2)
    change(results)
    with pytest.raises(KfacpackError, match=words):
        bare(tmp_path, results)
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no results.json"),
        (b"{", "damaged: not valid JSON"),
        (b"\xff\xfe", "damaged"),
        (b"[]", "format is None"),
        (b"[" * 100_000, "damaged"),
    ],
)
def test_files_that_are_not_results_are_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(KfacpackError, match=words):
        report(tmp_path, tmp_path / "report.html")


def test_figures_of_the_replaced_report_are_removed(tmp_path):
    """Files that are not part of the report are kept."""
    before = make_results(2, 1, full=False)
    page, figures = tmp_path / "report.html", tmp_path / "figures"
    report(write_run(tmp_path / "run", before), page)
    ours = {file.name for file in figures.iterdir()}
    assert {"sweep.svg", "sweep-dark.svg", "sweep.png"} <= ours
    (figures / "mine.svg").write_text("mine")
    for arm in before["arms"]:
        for seed in arm["seeds"]:
            seed["sweep"] = None
    report(write_run(tmp_path / "run", before), page)
    assert {file.name for file in figures.iterdir()} == {name for name in ours if "sweep" not in name} | {"mine.svg"}


def test_invalid_replaced_reports_remove_nothing(tmp_path):
    run, page = write_run(tmp_path / "run", make_results(2, 1, full=False)), tmp_path / "report.html"
    report(run, page)
    summary = json.loads(page.with_suffix(".json").read_text())
    next(section for section in summary["sections"] if section["pictures"])["pictures"][0]["file"] = "../mine"
    (tmp_path / "mine.svg").write_text("mine")
    for content in (json.dumps(summary), "{}", "no JSON"):
        page.with_suffix(".json").write_text(content)
        report(run, page)
        assert (tmp_path / "mine.svg").read_text() == "mine"


def test_unknown_keys_are_reported(tmp_path):
    results = make_results(2, 1, full=False)
    results["arms"][0]["seeds"][0]["negatoin"] = None
    run = write_run(tmp_path / "run", results, {"stages": [], "seconds": 1.0, "hours": 0})
    arguments = ["report", str(run), "-o", str(tmp_path / "report.html")]
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert (result.exit_code, json.loads(result.stdout)["page"]) == (0, str(tmp_path / "report.html"))
    assert "results.json: unknown keys are ignored: arms.0.seeds.0.negatoin." in result.stderr
    assert "times.json: unknown keys are ignored: hours." in result.stderr
    assert not CliRunner().invoke(app, [*arguments, "--quiet"], catch_exceptions=False).output


def test_times_are_checked_too(tmp_path):
    write_run(tmp_path, make_results(2, 1, full=False), {"stages": "none"})
    with refused(KfacpackError, "times.json: stages: ", "list"):
        report(tmp_path, tmp_path / "report.html")


@pytest.mark.parametrize(
    ("output", "words"),
    [("report.pdf", "ends in .html"), ("nowhere/report.html", "does not exist"), ("results.html", "would overwrite")],
)
def test_invalid_output_paths_are_refused(tmp_path, output, words):
    write_run(tmp_path, make_results(2, 1, full=False))
    before = (tmp_path / "results.json").read_bytes()
    with pytest.raises(KfacpackError, match=words):
        report(tmp_path, tmp_path / output)
    assert (tmp_path / "results.json").read_bytes() == before


def test_the_command(tmp_path):
    run = write_run(tmp_path / "run", make_results(2, 1, full=False))

    def call(*more):
        return CliRunner().invoke(app, ["report", *map(str, more)], catch_exceptions=False)

    result = call(run, "-o", tmp_path / "report.html", "--json")
    output = json.loads(result.stdout)
    assert output["page"] == str(tmp_path / "report.html")
    assert output["bytes"] == (tmp_path / "report.html").stat().st_size
    assert output["figures"] == [str(tmp_path / "figures" / f"{name}.svg") for name in ("bars", "sweep")]
    assert not call(run, "-o", tmp_path / "report.html", "--quiet").output
    refused = call(tmp_path, "-o", tmp_path / "report.html")
    assert refused.exit_code == 2
    assert "no results.json" in refused.stderr
