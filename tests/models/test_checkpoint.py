"""Saved checkpoints of edited models: their own libraries load them and compute the same f."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from kit import refused
from safetensors import SafetensorError
from safetensors.torch import load_file

import kfacpack
from kfacpack._compat import make_torchvision_importable
from kfacpack.errors import KfacpackError
from kfacpack.models.families import load_model
from kfacpack.models.weights import CheckpointFolder, write_weights


def edited(spec, **options):
    """Loads a model and adds noise to its weights."""
    model = load_model(spec, **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def loaded_by_its_line(model, path):
    """Evaluates the line of Python that loads the checkpoint."""
    make_torchvision_importable()
    import open_clip
    import timm
    import transformers

    names = {"open_clip": open_clip, "timm": timm, "transformers": transformers, "kfacpack": kfacpack}
    loaded = eval(model.checkpoint.load_command(path), names)
    return getattr(loaded, "module", loaded).eval()


def assert_same_weights(state, expected):
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("size", [None, 48])
@pytest.mark.parametrize("which", ["clip", "tiny", "timm"])
def test_image_models(which, size, tiny_clip, pictures, tmp_path):
    spec = {"clip": tiny_clip, "tiny": "tiny", "timm": "timm:test_vit"}[which]
    size = 160 if which == "timm" and size is None else size  # timm's own size; its weights are not available here
    model = edited(spec, image_size=size, **({} if which == "tiny" else {"weights": "random"}))
    path = tmp_path / "edited.safetensors"
    model.checkpoint.save(path)
    stock = loaded_by_its_line(model, path)
    assert_same_weights(stock.state_dict(), model.module.state_dict())
    again = load_model(spec, weights=path, image_size=size)
    batch = model.prepare(pictures, "task")
    assert torch.equal(again.forward(batch), model.forward(batch))
    assert [path.name for path in tmp_path.iterdir()] == ["edited.safetensors"]


def test_the_line_that_loads_an_open_clip_model(tiny_clip, tmp_path):
    line = load_model(tiny_clip, weights="random", image_size=48).checkpoint.load_command(tmp_path / "a.safetensors")
    assert line.startswith(f"open_clip.create_model({tiny_clip!r}, pretrained=")
    assert line.endswith("force_image_size=48)")


def test_a_random_text_tower_is_not_saved(tiny_clip, pictures, tmp_path):
    whole = load_model(tiny_clip, weights="random")
    state = whole.module.state_dict()
    write_weights(
        tmp_path / "vision.safetensors", {name: value for name, value in state.items() if name.startswith("visual.")}
    )
    model = edited(tiny_clip, weights=tmp_path / "vision.safetensors")
    model.checkpoint.save(tmp_path / "edited.safetensors")
    assert all(name.startswith("visual.") for name in load_file(tmp_path / "edited.safetensors"))
    again = loaded_by_its_line(model, tmp_path / "edited.safetensors")
    batch = model.prepare(pictures, "task")
    torch.testing.assert_close(again.encode_image(batch, normalize=True), model.forward(batch))


@pytest.mark.parametrize("family", ["t5", "hf"])
def test_text_models(family, t5_folder, bert_folder, pairs, tmp_path):
    model = edited(f"{family}:{t5_folder if family == 't5' else bert_folder}")
    path = tmp_path / "edited"
    model.checkpoint.save(path)
    stock = loaded_by_its_line(model, path)
    assert_same_weights(stock.state_dict(), model.module.state_dict())
    again = load_model(f"{family}:{path}")
    batch = model.prepare(pairs, "mnli")
    assert torch.equal(again.forward(**again.prepare(pairs, "mnli")), model.forward(**batch))
    assert [path.name for path in tmp_path.iterdir()] == ["edited"]
    with refused(KfacpackError, path, "a folder that is not empty"):
        model.checkpoint.save(path)


def test_missing_weights_of_an_encoder_are_not_saved(bert_folder, tmp_path):
    model = load_model(f"hf:{bert_folder}")
    state = {name: value for name, value in model.module.state_dict().items() if not name.startswith("pooler.")}
    write_weights(tmp_path / "without.safetensors", state)
    load_model(f"hf:{bert_folder}", weights=tmp_path / "without.safetensors").checkpoint.save(tmp_path / "saved")
    assert set(load_file(tmp_path / "saved" / "model.safetensors")) == set(state)


def test_failed_saves_leave_no_files(tiny_clip, t5_folder, tmp_path, monkeypatch):
    image, text = load_model(tiny_clip, weights="random"), load_model(f"t5:{t5_folder}")
    with refused(KfacpackError, tmp_path / "model.bin", ".safetensors"):
        image.checkpoint.save(tmp_path / "model.bin")
    (tmp_path / "file").write_text("mine")
    with refused(KfacpackError, tmp_path / "file", "new folder"):
        text.checkpoint.save(tmp_path / "file")
    with refused(KfacpackError, tmp_path / "nowhere" / "model", "could not be written", "No such file"):
        text.checkpoint.save(tmp_path / "nowhere" / "model")
    with refused(KfacpackError, tmp_path / "nowhere" / "model.safetensors", "could not be written", "No such file"):
        image.checkpoint.save(tmp_path / "nowhere" / "model.safetensors")

    problem = "No space left on device"
    # safetensors has an error class of its own, tokenizers raises Exception.
    for error in (OSError(28, problem), SafetensorError(problem), Exception(problem)):
        monkeypatch.setattr(type(text.module), "save_pretrained", Mock(side_effect=error))
        with refused(KfacpackError, tmp_path / "model", problem):
            text.checkpoint.save(tmp_path / "model")

    def fill(folder):
        write_weights(folder / "missing" / "weights", {})

    with refused(KfacpackError, tmp_path / "model", "No such file") as caught:
        CheckpointFolder(fill, str).save(tmp_path / "model")
    assert ".partial" not in str(caught.value), "the temporary folder is not named"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_any_tensor_of_a_state_dict_can_be_written(tmp_path):
    state = {
        "half": torch.randn(3, 5).half(),
        "scalar": torch.tensor(3),
        "strided": torch.randn(4, 6).T,
        "flags": torch.tensor([True, False]),
        "double": torch.randn(2, dtype=torch.float64),
        "none": torch.zeros(0, 3),
    }
    write_weights(tmp_path / "a.safetensors", state)
    loaded = load_file(tmp_path / "a.safetensors")
    assert set(loaded) == set(state)
    assert all(torch.equal(loaded[name], state[name]) and loaded[name].dtype == state[name].dtype for name in state)
