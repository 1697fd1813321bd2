"""`kfacpack merge`, from the command line."""

from __future__ import annotations

import json

import pytest
from kfacpack_cli.main import app
from kit import of_task, random_tau
from typer.testing import CliRunner

import kfacpack as kp
from kfacpack.format.manifest import base_digest
from kfacpack.merging.merge import merge_and_report


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


@pytest.fixture
def paths(tmp_path):
    paths = [tmp_path / f"{task}.kfac" for task in ("dtd", "cars", "svhn")]
    for number, path in enumerate(paths):
        of_task(path.stem, 100 * (number + 1), 31 * number).save(path)
    return paths


def test_merge_reports_the_error(paths, tmp_path):
    result = run("merge", *paths, "-o", tmp_path / "all.kfac")
    assert (result.exit_code, result.stderr) == (0, "")
    report = merge_and_report(paths).report.total
    assert "tak merge of dtd × 0.5, cars × 1, svhn × 1.5" in result.stdout
    assert f"relative error of G: {report.frobenius:.2g} " in result.stdout
    assert f"the bound from the TAK paper is {report.relative_bound:.2g}" in result.stdout
    kp.merge(paths).save(tmp_path / "python.kfac")
    assert (tmp_path / "python.kfac").read_bytes() == (tmp_path / "all.kfac").read_bytes()
    assert "tak: dtd × 0.5, cars × 1, svhn × 1.5" in run("inspect", tmp_path / "all.kfac").stdout
    assert run("verify", tmp_path / "all.kfac").exit_code == 0


def test_json_has_parents_weights_and_errors(paths, tmp_path):
    output = tmp_path / "all.kfac"
    completed = run("merge", *paths, "-o", output, "--rule", "optimal", "--rank", "2", "--json")
    result = json.loads(completed.stdout)
    bundle = kp.Bundle(output)
    assert (result["path"], result["sha256"], result["bytes"]) == (str(output), bundle.digest, output.stat().st_size)
    assert (result["rule"], result["rank"]) == ("optimal", 2)
    assert result["parents"] == [parent.model_dump() for parent in bundle.manifest.merge.parents]
    losses = {block.name: [loss.frobenius for loss in block.losses] for block in bundle.manifest.blocks}
    for block in result["blocks"]:
        assert set(block) == {"name", "terms", "missing", "frobenius", "bound"}
        assert losses[block["name"]] == ([pytest.approx(block["frobenius"], rel=1e-5)] if block["frobenius"] else [])
        assert block["frobenius"] <= block["bound"] + 1e-9
    assert 0 < result["frobenius"] <= result["bound"]
    assert [loss.frobenius for loss in bundle.manifest.losses] == [pytest.approx(result["frobenius"], rel=1e-5)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rule", "stack"], ["stack merge of", "exact"]),
        (["--rule", "optimal", "--rank", "2"], ["optimal merge (rank 2) of dtd"]),
        (["--weights", "1,1,2"], ["dtd × 0.75, cars × 0.75, svhn × 1.5"]),
        (["--without", "cars"], ["tak merge of dtd × 0.5, svhn × 1.5"]),
        (["--without", "cars", "--without", "dtd"], ["tak merge of svhn × 1:"]),
        (["--blocks"], ["bound (TAK paper)", "attn.in_proj_weight[0:2]"]),
    ],
)
def test_options(paths, tmp_path, arguments, words):
    result = run("merge", *paths, "-o", tmp_path / "m.kfac", *arguments)
    assert result.exit_code == 0
    for word in words:
        assert word in result.stdout


def test_one_bundle_of_all_tasks_serves_each_of_them(paths, tmp_path):
    run("merge", *paths, "-o", tmp_path / "all.kfac")
    for path in paths:
        completed = run("merge", tmp_path / "all.kfac", path, "--without", path.stem, "-o", tmp_path / "others.kfac")
        assert completed.exit_code == 0
        assert "error after a subtraction is unknown" in completed.stdout
        others = [parent.task for parent in kp.Bundle(tmp_path / "others.kfac").manifest.merge.parents]
        assert others == [other.stem for other in paths if other != path]
    result = run(
        "merge", tmp_path / "all.kfac", paths[0], "--without", "dtd", "-o", tmp_path / "o.kfac", "--json"
    ).stdout
    assert json.loads(result)["frobenius"] is None
    assert json.loads(result)["blocks"][0]["bound"] is None


def test_quiet_prints_nothing(paths, tmp_path):
    result = run("merge", *paths, "-o", tmp_path / "m.kfac", "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_an_input_is_never_overwritten(paths, tmp_path):
    (tmp_path / "link.kfac").symlink_to(paths[1])
    before = paths[1].read_bytes()
    for output in (paths[1], tmp_path / "link.kfac"):
        result = run("merge", *paths, "-o", output)
        assert result.exit_code == 2
        assert "is also an input" in result.stderr
    assert paths[1].read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "error_message"),
    [
        (["--weights", "1,x,2"], "--weights '1,x,2': expected numbers"),
        (["--weights", "1,2"], "the number of weights is 2, expected 3"),
        (["--rank", "2"], "takes no rank, got 2"),
        (["--rule", "best"], "unknown merge rule 'best'"),
        (["--without", "sun"], "the task 'sun'; available tasks: cars, dtd, svhn"),
    ],
)
def test_bad_input_exits_with_2_and_writes_nothing(paths, tmp_path, arguments, error_message):
    result = run("merge", *paths, "-o", tmp_path / "m.kfac", *arguments)
    assert result.exit_code == 2
    assert error_message in result.stderr
    assert not result.stdout
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_a_damaged_input_leaves_the_old_output(paths, tmp_path):
    raw = bytearray(paths[2].read_bytes())
    raw[-3] ^= 1
    paths[2].write_bytes(raw)
    (tmp_path / "m.kfac").write_text("the old file")
    for rule in ("tak", "stack"):
        result = run("merge", *paths, "-o", tmp_path / "m.kfac", "--rule", rule)
        assert result.exit_code == 2
        assert "svhn.kfac: tensor" in result.stderr
    assert (tmp_path / "m.kfac").read_text() == "the old file"
    assert run("merge", *paths, "-o", tmp_path / "no" / "m.kfac").exit_code == 2


def test_partial_blocks_are_named(paths, tmp_path):
    curvature = kp.load(paths[0])
    base = curvature.about.base
    kept = [block for block in curvature.blocks if block.name != "token"]
    parameters = tuple(p for p in base.parameters if p.name != "token")
    base = base.model_copy(update={"parameters": parameters, "sha256": base_digest(parameters)})
    kp.Curvature(kept, curvature.about.model_copy(update={"base": base})).save(tmp_path / "less.kfac")
    inputs = [tmp_path / "less.kfac", *paths[1:]]
    refused = run("merge", *inputs, "-o", tmp_path / "m.kfac")
    assert refused.exit_code == 2
    assert "less.kfac does not have the block 'token'" in refused.stderr
    result = run("merge", *inputs, "-o", tmp_path / "m.kfac", "--allow-partial")
    assert result.exit_code == 0
    assert f"block token is missing from {tmp_path / 'less.kfac'}" in result.stdout


def test_merged_shards_equal_one_run(tmp_path):
    estimate = ["estimate", "--task", "digits", "--examples", "24", "--batch-size", "8", "--params", "visual.proj"]
    for k in (1, 2, 3):
        result = run(*estimate, "--shard", f"{k}/3", "-o", tmp_path / f"{k}.kfac")
        assert result.exit_code == 0, result.stderr
    assert run(*estimate, "-o", tmp_path / "whole.kfac").exit_code == 0
    result = run(
        "merge", *(tmp_path / f"{k}.kfac" for k in (1, 2, 3)), "--rule", "shards", "-o", tmp_path / "joined.kfac"
    )
    assert "exact, provided that no example is in two shards" in result.stdout
    whole, joined = kp.load(tmp_path / "whole.kfac"), kp.load(tmp_path / "joined.kfac")
    tau = random_tau(whole)
    assert float(joined.quadratic(tau)) == pytest.approx(float(whole.quadratic(tau)), rel=1e-6)
    assert joined.about.source == whole.about.source
    for bad in ("0/3", "4/3", "1", "a/b"):
        assert run(*estimate, "--shard", bad, "-o", tmp_path / "x.kfac").exit_code == 2
