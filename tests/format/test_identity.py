"""A base model is identified by the bytes of its covered parameters, however it is loaded."""

from __future__ import annotations

import hashlib

import torch
from kit import refused, small_curvature
from safetensors.torch import save_file

import kfacpack as kp


def test_the_digest_is_the_one_the_format_describes():
    state = {
        "b": torch.tensor([1.0, 2.0]),
        "a": torch.tensor(3, dtype=torch.int64),
        "c": torch.ones(1, 2).bfloat16(),
    }
    lines = ""
    for name, dtype, shape in (("a", "I64", ""), ("b", "F32", "2"), ("c", "BF16", "1x2")):
        data = state[name].reshape(-1).view(torch.uint8).numpy().tobytes()
        lines += f"{name}\n{dtype}\n{shape}\n{hashlib.sha256(data).hexdigest()}\n"
    base = kp.identify(state, ["c", "a", "b"], family="f", name="n")
    assert base.sha256 == hashlib.sha256(lines.encode()).hexdigest()
    assert [p.name for p in base.parameters] == ["b", "a", "c"], "in state-dict order, whatever order was requested"


def test_a_model_and_its_state_dict_have_the_same_base():
    model = torch.nn.Linear(3, 2)
    names = ["weight", "bias"]
    assert kp.identify(model, names, family="f", name="n") == kp.identify(
        model.state_dict(), names, family="f", name="n"
    )


def test_memory_layout_does_not_matter():
    weight = torch.randn(3, 4)
    columns_first = weight.T.contiguous().T
    one, two = (kp.identify({"w": w}, ["w"], family="f", name="n") for w in (weight, columns_first))
    assert one == two


def test_missing_parameters_are_rejected():
    with refused(kp.KfacpackError, "'ghost'", "state dict"):
        kp.identify(torch.nn.Linear(2, 2), ["ghost"], family="f", name="n")


def test_invalid_parameters_and_names_are_rejected():
    with refused(kp.KfacpackError, "parameters: ", "at least 1 item", "not 0"):
        kp.identify({}, [], family="f", name="n")
    with refused(kp.KfacpackError, "shape.0: ", "greater than or equal to 1"):
        kp.identify({"w": torch.zeros(0, 3)}, ["w"], family="f", name="n")
    with refused(kp.KfacpackError, "family: '../f'", "valid name"):
        kp.identify({"w": torch.zeros(1)}, ["w"], family="../f", name="n")
    with refused(kp.KfacpackError, "cannot store", "torch.complex64"):
        kp.identify({"w": torch.zeros(1, dtype=torch.complex64)}, ["w"], family="f", name="n")


def test_different_weights_are_reported_by_parameter(tmp_path):
    path = tmp_path / "t.kfac"
    curvature = small_curvature(seed=0)
    curvature.save(path)
    names = curvature.parameters
    generator = torch.Generator().manual_seed(0)
    shapes = {p.name: p.shape for p in curvature.about.base.parameters}
    state = {name: torch.randn(shapes[name], generator=generator) for name in names}

    def failures(changed):
        save_file(changed, tmp_path / "w.safetensors")
        results = []
        for model in (tmp_path / "w.safetensors", changed):
            checks = kp.verify(path, model).checks
            results.append({f.subject: f.problem for check in checks if check.name == "model" for f in check.failures})
        assert results[0] == results[1], "a file and a state dict with the same weights give the same result"
        return results[0]

    assert failures(state) == {}
    assert failures({**state, "head": torch.zeros(2)}) == {}
    assert list(failures({**state, "proj": state["proj"] + 1e-7})) == ["parameter 'proj'"]
    assert "dtype" in failures({**state, "proj": state["proj"].half()})["parameter 'proj'"]
    assert "shape" in failures({**state, "proj": state["proj"].T.contiguous()})["parameter 'proj'"]
    missing = {name: value for name, value in state.items() if name != "proj"}
    assert failures(missing) == {"parameter 'proj'": "is missing from the model's weights"}


def test_a_model_of_load_model_is_rejected():
    with refused(kp.KfacpackError, "nn.Module", "got Model", ".module"):
        kp.identify(kp.load_model("tiny"), ["visual.proj"], family="open_clip", name="tiny")
