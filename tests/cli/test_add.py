"""`kfacpack add` and `kfacpack negate`, from the command line."""

from __future__ import annotations

import json

import pytest
import torch
from kfacpack_cli.main import app
from kfacpack_cli.options import task_arguments
from safetensors.torch import load_file
from typer.testing import CliRunner

import kfacpack as kp
from kfacpack.format.vector_manifest import AboutVector, TaskEntry
from kfacpack.vectors.methods import METHODS

PREFIX = "visual.transformer.resblocks.3."


def run(*arguments, code=0):
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def random_vector(model, task, seed, regime="full", size=0.01):
    generator = torch.Generator().manual_seed(seed)
    state = {name: value for name, value in model.module.state_dict().items() if name.startswith(PREFIX)}
    tensors = {name: size * torch.randn(value.shape, generator=generator) for name, value in state.items()}
    base = kp.identify(model.module, list(tensors), family=model.family, name=model.name)
    tasks = (TaskEntry(source=kp.Source(task=task)),)
    classes = ("one", "two")
    head = kp.Head(torch.randn(2, model.function.width, generator=generator), torch.zeros(2), classes, "prototypes")
    about = AboutVector(base=base, function=model.function, regime=regime, tasks=tasks)
    return kp.TaskVector(tensors, about, {task: head})


@pytest.fixture(scope="module")
def tiny():
    return kp.load_model("tiny")


@pytest.fixture(scope="module")
def vectors(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    for number, task in enumerate(("one", "two", "three")):
        random_vector(tiny, task, number).save(folder / f"{task}.safetensors")
        random_vector(tiny, task, number, "linear").save(folder / f"{task}-linear.safetensors")
    random_vector(kp.load_model("tiny", weights="random"), "four", 4).save(folder / "other-base.safetensors")
    random_vector(tiny, "one", 9).save(folder / "other-head.safetensors")
    kp.add([folder / "one.safetensors", folder / "two.safetensors"]).save(folder / "sum.safetensors")
    return folder


@pytest.fixture
def three(vectors):
    return [vectors / f"{task}.safetensors" for task in ("one", "two", "three")]


def test_a_sum_has_all_heads_and_records_its_addends(three, tmp_path):
    output = tmp_path / "sum.safetensors"
    result = json.loads(run("add", *three, "-o", output, "--json").stdout)
    vector = kp.TaskVector.load(output)
    one, two, last = map(kp.TaskVector.load, three)
    assert (result["path"], result["sha256"], result["bytes"]) == (str(output), vector.digest, output.stat().st_size)
    assert (result["method"], result["alphas"], result["settings"]) == ("sum", [1.0, 1.0, 1.0], {})
    assert result["tasks"] == ["one", "two", "three"] == list(vector.heads)
    assert result["model"] is None
    assert [entry["sha256"] for entry in result["addends"]] == [one.digest, two.digest, last.digest]
    assert vector.digest == (one + two + last).digest


@pytest.mark.parametrize(
    ("method", "options", "settings"),
    [
        ("ties", ["--keep", 0.3, "--mean"], {"keep": 0.3, "mean": True}),
        ("dare", ["--drop", 0.5, "--seed", 7], {"drop": 0.5, "seed": 7}),
        ("tsv", [], {"mean": False}),
        ("iso", [], {"mean": False}),
        ("iso-cts", ["--common", 0.6], {"common": 0.6, "mean": False}),
    ],
)
def test_every_method_with_its_settings(method, options, settings, three, tmp_path):
    output = tmp_path / "merged.safetensors"
    alphas = ["--alpha", 0.5, "--alpha", 1, "--alpha", -2]
    result = json.loads(run("add", *three, "-o", output, "--method", method, *options, *alphas, "--json").stdout)
    assert (result["method"], result["settings"], result["alphas"]) == (method, settings, [0.5, 1.0, -2.0])
    assert result["scale"] == METHODS[method].scale
    expected = kp.add(three, method, alpha=[0.5, 1, -2], **settings)
    vector = kp.TaskVector.load(output)
    assert vector.digest == expected.digest == result["sha256"]
    assert vector.about.method.settings == settings


def test_the_help_describes_every_method():
    result = " ".join(run("add", "--help").stdout.replace("│", " ").split())
    assert all(f"{method}:" in result for method in METHODS)
    assert "not of their mean" in result


def test_a_vector_plus_its_negation_is_zero(three, tmp_path):
    negative, nothing = tmp_path / "negative.safetensors", tmp_path / "nothing.safetensors"
    result = json.loads(run("negate", three[0], "-o", negative, "--json").stdout)
    assert (result["alpha"], result["sha256"]) == (1.0, kp.TaskVector.load(negative).digest)
    run("add", three[0], negative, "-o", nothing, "-q")
    assert all(not value.any() for name, value in load_file(nothing).items() if name.startswith(PREFIX))
    run("negate", three[0], "-o", negative, "--alpha", 0.5, "-q")
    one, half = kp.TaskVector.load(three[0]), kp.TaskVector.load(negative)
    assert all(torch.equal(half[name], -0.5 * one[name]) for name in one)
    assert list(half.heads) == ["one"]


def test_the_output_is_summarised(three, tmp_path):
    result = run("add", *three, "-o", tmp_path / "sum.safetensors")
    assert f"wrote {tmp_path / 'sum.safetensors'}: one, two, three: " in result.stdout
    assert not run("add", *three, "-o", tmp_path / "sum.safetensors", "--quiet").output


def test_save_model(three, tiny, tmp_path):
    output, whole = tmp_path / "sum.safetensors", tmp_path / "model.safetensors"
    result = json.loads(run("add", *three, "-o", output, "--save-model", whole, "--json").stdout)
    assert result["model"] == {
        "path": str(whole),
        "load": f"kfacpack.load_model('tiny', weights={str(whole)!r})",
        "note": None,
    }
    expected = kp.TaskVector.load(output).apply(tiny.module).state_dict()
    loaded = kp.load_model("tiny", weights=whole).module.state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    run("negate", three[0], "-o", output, "--save-model", whole, "-q")
    expected = (-kp.TaskVector.load(three[0])).apply(tiny.module).state_dict()
    loaded = kp.load_model("tiny", weights=whole).module.state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_a_linearised_vector_comes_with_a_note(vectors, tmp_path):
    common = [vectors / "one-linear.safetensors", "-o", tmp_path / "v.safetensors"]
    result = run("add", *common, "--save-model", tmp_path / "m.safetensors", "--json")
    assert "linearised" in json.loads(result.stdout)["model"]["note"]
    assert "note: the vector was trained in the linearised model" in result.stderr
    result = run("negate", *common, "--save-model", tmp_path / "m.safetensors", "-q")
    assert not result.output


def test_a_model_in_half_precision_and_at_another_size(tmp_path):
    """The dtype of the base model comes from the vector, the image size from the option."""
    base = kp.load_model("tiny", image_size=64, dtype=torch.bfloat16)
    random_vector(base, "one", 1).save(tmp_path / "one.safetensors")
    one, whole = tmp_path / "one.safetensors", tmp_path / "whole.safetensors"
    common = ["add", one, "-o", tmp_path / "sum.safetensors", "--save-model", whole]
    result = json.loads(run(*common, "--image-size", 64, "--json").stdout)
    assert result["model"]["load"].endswith("image_size=64)")
    loaded = kp.load_model("tiny", weights=whole, image_size=64, dtype=torch.bfloat16).module.state_dict()
    expected = kp.TaskVector.load(one).apply(base.module).state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


WRONG = {
    "other base": (["one", "other-base"], [], "different base models (tiny and tiny)"),
    "other regime": (["one", "two-linear"], [], "different regimes: 'full' and 'linear'"),
    "other head": (["one", "other-head"], [], "different heads for 'one'"),
    "twice": (["one", "two", "one"], [], "are the same vector, which would be counted twice"),
    "in a sum": (["one", "sum"], [], "have an addend in common, which would be counted twice"),
    "nothing": (["nothing"], [], "No such file"),
    "no method": (["one"], ["--method", "average"], "unknown method 'average'"),
    "no such setting": (["one"], ["--method", "tsv", "--keep", 0.1], "'tsv' has no setting 'keep'"),
    "sum has no mean": (["one"], ["--mean"], "'sum' has no setting 'mean'"),
    "wrong setting": (["one"], ["--method", "ties", "--keep", 2], "keep is 2.0, expected a number in (0, 1]"),
    "alphas": (["one", "two", "three"], ["--alpha", 1, "--alpha", 2], "α is a list of length 2, expected"),
    "infinite alpha": (["one"], ["--alpha", "inf"], "α is inf"),
    "alpha over float32": (
        ["one", "two"],
        ["--alpha", "1e39"],
        "would be 1e+39, expected a magnitude of at most 3.4e+38",
    ),
    "one of them": (["one", "two"], ["--method", "tsv", "--alpha", 1, "--alpha=-1e39"], "would be -1e+39"),
    "no number": (["one"], ["--alpha", "much"], "as a number"),
    "weights of nothing": (["one"], ["--weights", "random"], "pass --save-model"),
    "other weights": (
        ["one"],
        ["--save-model", "MODEL.safetensors", "--weights", "random"],
        "the model is a different one",
    ),
    "ending": (["one"], ["--save-model", "MODEL.bin"], "must end in .safetensors"),
    "no model": (["one"], ["--save-model", "MODEL.safetensors", "--model", "tinny"], "'tinny'; did you mean 'tiny'"),
    "no folder": (
        ["one"],
        ["--save-model", "nowhere/MODEL.safetensors"],
        "nowhere/MODEL.safetensors: no such folder: 'nowhere'",
    ),
    "same file": (
        ["one"],
        ["--save-model", "out.safetensors"],
        "out.safetensors: --output and --save-model name the same file",
    ),
}


@pytest.mark.parametrize(("names", "options", "words"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_refused_and_nothing_is_written(names, options, words, vectors, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("add", *(vectors / f"{name}.safetensors" for name in names), "-o", "out.safetensors", *options, code=2)
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert not result.stdout
    assert not list(tmp_path.iterdir())


def test_bundles_and_vectors_are_not_confused(three, tmp_path):
    bundle = tmp_path / "one.kfac"
    kp.estimate(torch.nn.Linear(2, 2), [torch.ones(3, 2)]).save(bundle)
    for command in (["add", three[0], bundle], ["negate", bundle]):
        result = run(*command, "-o", tmp_path / "new.safetensors", code=2).stderr
        assert f"{bundle}: is a bundle, expected a task vector. Bundles are merged by `kfacpack merge`" in result
    for command in (["merge", bundle, three[0], "-o", tmp_path / "new.kfac"], ["verify", three[0]]):
        result = run(*command, code=2).stderr
        assert f"{three[0]}: is a task vector, expected a bundle. Task vectors are added by `kfacpack add`" in result
    assert not list(tmp_path.glob("new*"))


def test_an_input_is_never_overwritten(three):
    before = three[0].read_bytes()
    for command in (["add", *three], ["negate", three[0]]):
        assert "is also an input" in run(*command, "-o", three[0], code=2).stderr
        result = run(*command, "-o", three[0].parent / "new.safetensors", "--save-model", three[0], code=2)
        assert "is also an input" in result.stderr
    assert three[0].read_bytes() == before
    assert not (three[0].parent / "new.safetensors").exists()


def test_a_damaged_vector_is_named(three, tmp_path):
    damaged = tmp_path / "damaged.safetensors"
    raw = three[1].read_bytes()
    damaged.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    result = run("add", three[0], damaged, "-o", tmp_path / "sum.safetensors", code=2)
    assert f"{damaged}: tensor" in result.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["damaged.safetensors"]


@pytest.fixture(scope="module")
def bundles(tiny, tmp_path_factory):
    """Bundles of one layer for the tasks of `vectors`, and one of another task."""
    folder = tmp_path_factory.mktemp("bundles")
    names = [name for name in tiny.module.state_dict() if name.startswith(PREFIX)]
    for number, task in enumerate(("one", "two", "three", "four")):
        generator = torch.Generator().manual_seed(number)
        images = torch.randn(4, 3, 28, 28, generator=generator)
        source = kp.Source(task=task, dataset_size=100 * (number + 1))
        kp.estimate(tiny, [images], params=names, source=source).save(folder / f"{task}.kfac")
    return folder


def bundle_options(bundles, *tasks, option="--bundle"):
    return [word for task in tasks for word in (option, bundles / f"{task}.kfac")]


@pytest.mark.parametrize(
    ("method", "options", "settings"),
    [
        ("curvature", ["--prior", "mean", "--damping", 0.5, "--iterations", 3], {"prior": "mean", "damping": 0.5}),
        ("regmean", ["--shrink", 0.5, "--task-weights", "size"], {"shrink": 0.5, "task_weights": "size"}),
        ("fisher", [], {}),
    ],
)
def test_methods_with_bundles(method, options, settings, three, bundles, tmp_path):
    outputs = [tmp_path / "once.safetensors", tmp_path / "twice.safetensors"]
    selected = bundle_options(bundles, "two", "three", "one")
    for output in outputs:
        result = json.loads(run("add", *three, "--method", method, *selected, *options, "-o", output, "--json").stdout)
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert settings.items() <= result["settings"].items()
    assert result["bundles"] == [kp.load(bundles / f"{task}.kfac").digest for task in ("two", "three", "one")]
    entry = kp.TaskVector.load(output).about.method
    assert [block["name"] for block in result["blocks"]] == [block.name for block in entry.blocks]
    for block, recorded in zip(result["blocks"], entry.blocks, strict=True):
        assert block == recorded.model_dump()
        assert block["after"] <= block["before"]
    assert any(block["curvature"] for block in result["blocks"])


def test_a_merge_with_bundles_is_summarised(three, bundles, tmp_path):
    selected = bundle_options(bundles, "one", "two", "three")
    output = tmp_path / "merged.safetensors"
    shown = run("add", *three, "--method", "regmean", *selected, "-o", output).stdout
    assert "blocks solved" in shown
    assert "objective" in shown
    assert f"{PREFIX}ln_1.weight" in shown, "blocks without curvature are listed"
    assert not run("add", *three, "--method", "regmean", *selected, "-o", output, "-q").output


def test_wrong_bundles_are_refused(three, bundles, tmp_path):
    output = tmp_path / "merged.safetensors"
    command = ["add", *three, "-o", output, "--method", "curvature"]
    assert "'three'" in run(*command, *bundle_options(bundles, "one", "two"), code=2).stderr
    assert "four.kfac" in run(*command, *bundle_options(bundles, "one", "two", "three", "four"), code=2).stderr
    assert "bundles" in run("add", *three, "-o", output, *bundle_options(bundles, "one"), code=2).stderr
    assert "damping is 0" in run(*command, *bundle_options(bundles, "one"), "--damping", 0, code=2).stderr
    assert not output.exists()


def test_refine(three, bundles, tmp_path):
    output = tmp_path / "refined.safetensors"
    selected = [
        *bundle_options(bundles, "one", option="--own"),
        *bundle_options(bundles, "two", "four", option="--reg"),
    ]
    result = json.loads(run("refine", three[0], *selected, "--iterations", 5, "-o", output, "--json").stdout)
    refined, tau = kp.TaskVector.load(output), kp.TaskVector.load(three[0])
    assert (result["method"], result["settings"]["iterations"]) == ("refine", 5)
    assert [addend["sha256"] for addend in result["addends"]] == [tau.digest]
    other = kp.load(bundles / "two.kfac")
    assert float(other.quadratic(dict(refined))) < float(other.quadratic(dict(tau)))
    first = output.read_bytes()
    assert "blocks solved" in run("refine", three[0], *selected, "--iterations", 5, "-o", output).stdout
    assert output.read_bytes() == first
    assert not run("refine", three[0], *selected, "--iterations", 1, "-o", output, "-q").output
    wrong = [*bundle_options(bundles, "one", option="--own"), *bundle_options(bundles, "one", option="--reg")]
    assert "one.kfac" in run("refine", three[0], *wrong, "-o", output, code=2).stderr


def test_inspect_shows_a_merged_vector_and_its_blocks(three, bundles, tmp_path):
    output = tmp_path / "merged.safetensors"
    run("add", *three, "--method", "curvature", *bundle_options(bundles, "one", "two", "three"), "-o", output)
    method = kp.TaskVector.load(output).about.method
    assert method.solved
    summary = run("inspect", output).stdout
    for fact in (
        "one, two, three",
        "curvature",
        f"{len(method.solved)} blocks solved",
        kp.TaskVector.load(output).digest,
    ):
        assert fact in " ".join(summary.split()), fact
    assert method.solved[0].name not in summary
    listed = run("inspect", output, "--blocks").stdout
    for block in method.blocks:
        assert block.name in listed
    shown = json.loads(run("inspect", output, "--json").stdout)
    assert [block["name"] for block in shown["manifest"]["method"]["blocks"]] == [block.name for block in method.blocks]


def test_inspect_reads_tensors_only_for_norms(three, tmp_path):
    vector, damaged = kp.TaskVector.load(three[0]), tmp_path / "damaged.safetensors"
    shown = json.loads(run("inspect", three[0], "--norms", "--json").stdout)
    assert shown["sha256"] == vector.digest
    assert [parameter["name"] for parameter in shown["parameters"]] == list(vector)
    for parameter in shown["parameters"]:
        assert parameter["norm"] == pytest.approx(float(vector[parameter["name"]].norm()), rel=1e-5)
    total = torch.cat([vector[name].flatten() for name in vector])
    assert (shown["weights"], shown["dense_bytes"]) == (len(total), 4 * len(total))
    assert shown["norm"] == pytest.approx(float(total.norm()), rel=1e-5)
    assert sum(parameter["bytes"] for parameter in shown["parameters"]) < shown["bytes"] == three[0].stat().st_size
    raw = bytearray(three[0].read_bytes())
    raw[-1] ^= 1  # in the last tensor, which belongs to the head
    raw[8 + int.from_bytes(raw[:8], "little") + 4] ^= 1  # in the first tensor
    damaged.write_bytes(raw)
    unread = json.loads(run("inspect", damaged, "--json").stdout)
    assert unread["norm"] is None
    assert {parameter["norm"] for parameter in unread["parameters"]} == {None}
    assert "SHA-256" in run("inspect", damaged, "--norms", code=2).stderr


def test_norms_of_a_bundle_are_refused(bundles):
    assert "task vector" in run("inspect", bundles / "one.kfac", "--norms", code=2).stderr


def test_suggested_arguments_name_the_data_of_tasks_that_are_not_registered():
    known = ("--task", "digits@1/2", "--task", "dtd")
    assert task_arguments(["digits@1/2", "dtd", "mine"]) == (*known, "--task", "mine", "--data", "mine=DIR")
