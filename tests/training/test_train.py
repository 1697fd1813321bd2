"""`kp.train` and `kp.estimate_task` give the same files as the commands, and `kp.run` the same results."""

from __future__ import annotations

import inspect
import os
from types import SimpleNamespace

import numpy as np
import pytest
from experiments.small_plan import TEXT
from kfacpack_cli.main import app
from kit import refused
from toys import ToyTask, toy_model
from typer.testing import CliRunner

import kfacpack as kp
from kfacpack.training.optimizer import TrainingSettings
from kfacpack.training.train import uses_autocast

FEW = ["visual.transformer.resblocks.3.mlp.*"]
OPTIONS = ["--params", FEW[0]]


def command(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output


def test_the_function_and_the_command_give_the_same_bundle(tmp_path):
    curvature = kp.estimate_task("tiny", "faces", examples=12, params=FEW, seed=3, output=tmp_path / "function.kfac")
    estimate = ("estimate", "--task", "faces", "--examples", 12, *OPTIONS, "--seed", 3, "-q")
    command(*estimate, "-o", tmp_path / "command.kfac")
    assert kp.load(tmp_path / "function.kfac").digest == kp.load(tmp_path / "command.kfac").digest == curvature.digest
    assert kp.estimate_task("tiny", "faces", examples=12, params=FEW, seed=3).digest == curvature.digest


def test_the_function_and_the_command_give_the_same_vector(tmp_path):
    bundle = tmp_path / "faces.kfac"
    kp.estimate_task("tiny", "faces", examples=12, params=FEW, output=bundle)
    settings = {"reg": bundle, "params": FEW, "steps": 3, "batch_size": 8, "seed": 2, "strength": 5}
    vector = kp.train("tiny", "digits", output=tmp_path / "function.safetensors", **settings)
    training = ("--steps", 3, "--batch-size", 8, "--seed", 2, "--strength", 5, "-q")
    command("train", "--task", "digits", "--reg", bundle, *OPTIONS, *training, "-o", tmp_path / "command.safetensors")
    digests = {kp.TaskVector.load(tmp_path / f"{name}.safetensors").digest for name in ("function", "command")}
    assert digests == {vector.digest}
    steps = []
    again = kp.train("tiny", "digits", on_progress=lambda metrics, total: steps.append(metrics.step), **settings)
    assert again.digest == vector.digest
    assert steps == [1, 2, 3]


def test_defaults_are_those_of_the_settings():
    defaults = TrainingSettings()
    for name, parameter in inspect.signature(kp.train).parameters.items():
        if hasattr(defaults, name):
            assert parameter.default == getattr(defaults, name), name


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"strength": 3.0}, ("--strength (strength) needs a penalty", "--reg (reg)", "--reg-data (reg_data)")),
        ({"preset": "tak"}, ("--preset", "with --reg (reg)")),
        ({"reg_every": 2}, ("--reg-every", "with --reg (reg)")),
        ({"resume": True}, ("resume=True needs an output",)),
        ({"reg_data": ["digits"]}, ("--reg-data (reg_data): digits", "the task being trained")),
        ({"reg_data": ["faces", "faces"]}, ("--reg-data (reg_data): faces", "twice")),
        ({"reg": ["no.kfac"], "reg_data": ["faces"]}, ("bundles (--reg, reg)", "data (--reg-data, reg_data)", "both")),
        ({"steps": 2, "epochs": 1.0}, ("steps", "epochs")),
        ({"regime": "none"}, ("'none'", "linear")),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, facts):
    with refused(kp.KfacpackError, *facts):
        kp.train("tiny", "digits", params=FEW, **settings)


def test_one_task_of_the_penalty_needs_no_list():
    settings = {"params": FEW, "steps": 2, "batch_size": 8}
    one, listed = (kp.train("tiny", "faces", reg_data=other, **settings) for other in ("weaves", ["weaves"]))
    assert one.digest == listed.digest


@pytest.mark.parametrize("shard", [(3, 2), (0, 2), (-1, 2), (1, 0)])
def test_shards_that_do_not_exist_are_refused(shard):
    with refused(kp.KfacpackError, f"{shard[0]}/{shard[1]}"):
        kp.estimate_task("tiny", "faces", examples=8, params=FEW, shard=shard)


def test_a_run_with_another_seed_is_not_resumed(tmp_path):
    settings = {"params": FEW, "steps": 3, "batch_size": 8, "output": tmp_path / "faces.safetensors"}
    with pytest.raises(kp.Interrupted):
        kp.train("tiny", "faces", stopped=lambda: True, **settings)
    # The default learning rate follows from the seed, so it differs as well.
    with refused(kp.KfacpackError, "seed = 0", "got 3"):
        kp.train("tiny", "faces", seed=3, resume=True, **settings)


def test_a_plan_runs_from_python(tmp_path):
    (tmp_path / "plan.yaml").write_text(TEXT.split("evaluation:")[0] + "evaluation: {examples: 4, alphas: '0,1'}\n")
    results = kp.run(tmp_path / "plan.yaml", tmp_path / "out", device="cpu")
    assert (tmp_path / "out" / "results.json").exists()
    assert {line["arm"] for line in results["summary"]} == {"without", "kfac"}
    asked = []
    kp.run(tmp_path / "plan.yaml", tmp_path / "out", device="cpu", show=lambda *stage: asked.append(stage))
    assert not asked


@pytest.mark.parametrize(("device", "requested", "expected"), [
    ("cuda", None, True), ("cuda", False, False), ("cpu", None, False), ("mps", None, False), ("cpu", True, True),
])  # fmt: skip
def test_autocast_is_the_default_on_cuda_only(device, requested, expected):
    """One rule for `kfacpack train`, plans and `kp.train`."""
    parameter = SimpleNamespace(device=SimpleNamespace(type=device))
    model = SimpleNamespace(module=SimpleNamespace(parameters=lambda: iter([parameter])))
    assert uses_autocast(model, requested) is expected


@pytest.mark.filterwarnings("ignore::kfacpack.linearization.linearize.SlowLinearizationWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile
@pytest.mark.parametrize("mode", ["traced", "fallback", "compiled"])
def test_a_run_resumes_with_the_same_bytes_in_every_mode(mode, tmp_path, monkeypatch):
    """Interrupted before, while and after a step is recorded. KFACPACK_TEST_COMPILE adds the compiled mode."""
    if mode == "fallback":
        monkeypatch.setattr("kfacpack._torch.missing_jvp_parts", lambda: ("torch._C._DisableAutocast",))
    if mode == "compiled" and not os.environ.get("KFACPACK_TEST_COMPILE"):
        pytest.skip("needs KFACPACK_TEST_COMPILE")
    steps = []

    def run(name, stop=None, resume=False):
        return kp.train(
            toy_model(),
            ToyTask(),
            steps=8,
            batch_size=10,
            lr=0.02,
            compile=mode == "compiled",
            output=tmp_path / name,
            resume=resume,
            on_progress=lambda metrics, total: steps.append(metrics.step),
            stopped=lambda: steps[-1:] == [stop],
        )

    run("whole.safetensors")
    for stop in (1, 3, 6):
        with pytest.raises(kp.Interrupted):
            run("parts.safetensors", stop, resume=stop > 1)
    run("parts.safetensors", resume=True)
    assert (tmp_path / "parts.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ({"steps": "1"}, "'1'"),
        ({"steps": 1.5}, "1.5"),
        ({"steps": True}, "True"),
        ({"steps": 1, "lr": "fast"}, "fast"),
        ({"steps": 1, "task": 5}, "int"),
        ({"steps": 1, "strength": "strong", "reg_data": "faces"}, "strong"),
    ],
)
def test_arguments_of_other_types_are_refused(arguments, fact):
    task = arguments.get("task", ToyTask())
    settings = {name: value for name, value in arguments.items() if name != "task"}
    with refused(kp.KfacpackError, fact):
        kp.train(toy_model(), task, **settings)


@pytest.mark.parametrize("path", [None, 5, {}])
def test_a_plan_that_is_no_path_is_refused(path):
    with refused(kp.KfacpackError, "plan", type(path).__name__):
        kp.run(path)


def test_settings_may_be_numbers_of_numpy():
    settings = TrainingSettings(steps=np.int64(5), lr=np.float32(0.5))
    assert (settings.steps, settings.lr) == (5, 0.5)
