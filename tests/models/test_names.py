"""What `--model` may say, and what is answered when it says something else."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from kit import refused
from PIL import Image

from kfacpack._compat import make_torchvision_importable
from kfacpack.errors import KfacpackError
from kfacpack.models.families import FAMILIES, load_model


@pytest.mark.parametrize(
    ("spec", "answer"),
    [
        ("ViT-B/32", "'ViT-B/32' is no model that open_clip knows; close to it are ViT-B-32,"),
        ("vit-b-16", "close to it are ViT-B-16,"),
        ("ViT-B-32/opnai", "ViT-B-32 has no tag 'opnai' in open_clip; its tags are openai, laion400m_e31"),
        ("ViT-B-32-256", "stands for no weights by itself; choose one: ViT-B-32-256/datacomp_s34b_b86k"),
        ("timm:vit_tiny_patch16_225", "no model that timm knows; close to it are vit_tiny_patch16_224"),
        ("timm:vit_tiny_patch16_224.best", "has no tag 'best' in timm; its tags are augreg_in21k, augreg"),
        ("keras:resnet", "'keras:resnet' names no model. A model is tiny, NAME or NAME/TAG of open_clip"),
        ("timm:", "names no model"),
        ("", "is no model that open_clip knows|names no model"),
        ("t5:./no/such/folder", "no such directory"),
        ("hf:~nobody-of-that-name/folder", "no such directory"),
        ("hf:nobody/nothing", "its config and tokenizer cannot be loaded"),
        ("nonsense", r"timm:NAME, t5:NAME_OR_DIR, hf:NAME_OR_DIR"),
    ],
)
def test_an_unknown_name_is_answered_with_those_it_may_have_meant(spec, answer):
    with pytest.raises(KfacpackError, match=answer):
        load_model(spec)


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("ViT-B-32", "ViT-B-32/openai: open_clip_model.safetensors"),
        ("ViT-B-16/laion2b_s34b_b88k", "ViT-B-16/laion2b_s34b_b88k: open_clip_model.safetensors"),
        ("timm:vit_tiny_patch16_224", "timm:vit_tiny_patch16_224: model.safetensors"),
    ],
)
def test_without_network_the_local_ways_are_named(spec, wanted):
    with refused(KfacpackError, wanted, "--weights"):
        load_model(spec)


def test_a_tag_brings_its_activation_and_its_preprocessing(tiny_clip, monkeypatch):
    from open_clip import pretrained

    setting = {"quick_gelu": True, "mean": (0.1, 0.2, 0.3), "std": (1.0, 1.0, 1.0), "resize_mode": "squash"}
    monkeypatch.setitem(pretrained._PRETRAINED, tiny_clip, {"quick": setting})
    tagged, plain = (load_model(name, weights="random") for name in (f"{tiny_clip}/quick", tiny_clip))
    for model, quick in ((tagged, True), (plain, False)):
        assert quick == any(type(each).__name__ == "QuickGELU" for each in model.module.modules())
        assert quick == ("QuickGELU" in model.function.detail)
    picture = [{"image": Image.new("RGB", (50, 20), (255, 255, 255))}]
    white = torch.tensor([0.9, 0.8, 0.7]).reshape(1, 3, 1, 1).expand(1, 3, 32, 32)
    torch.testing.assert_close(tagged.prepare(picture, "any"), white)


def test_bad_sizes_and_devices_are_refused():
    with refused(KfacpackError, "0"):
        load_model("ViT-B-32", image_size=0)
    with refused(KfacpackError, "abacus"):
        load_model("ViT-B-32", device="abacus")


def test_loading_prints_nothing_and_leaves_logging_alone(tiny_clip, bert_folder, capfd):
    before = logging.getLogger().handlers[:], logging.root.manager.disable
    load_model(tiny_clip, weights="random")
    load_model(f"hf:{bert_folder}")
    load_model("timm:test_vit", weights="random", image_size=32)
    assert (logging.getLogger().handlers, logging.root.manager.disable) == before
    assert capfd.readouterr() == ("", "")


def test_every_family_is_registered_by_its_prefix():
    assert {prefix: type(family).__name__ for prefix, family in FAMILIES.items()} == {
        "": "OpenClip",
        "timm": "Timm",
        "t5": "T5",
        "hf": "Encoder",
    }


def test_the_registry_waits_for_no_library():
    program = "import sys, kfacpack.models.families, kfacpack.tasks.registry\n"
    program += "assert not {'open_clip', 'timm', 'transformers', 'datasets', 'torchvision'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_torchvision_is_importable_and_stays_so():
    make_torchvision_importable()
    make_torchvision_importable()
    from torchvision.transforms.functional import pil_to_tensor

    assert callable(pil_to_tensor)
    assert torch.ops.torchvision.nms is not None


def test_a_torchvision_that_fits_is_left_alone(tmp_path):
    """A stand-in that registers its own operator on import, as a matching build's extension does."""
    (tmp_path / "torchvision").mkdir()
    schema = '"torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"'
    (tmp_path / "torchvision" / "__init__.py").write_text(f"import torch\ntorch.library.define({schema})\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    program += "from kfacpack._compat import make_torchvision_importable as make\n"
    program += "make(); make()\nimport torch, torchvision\n"
    program += f"assert torchvision.__file__.startswith({str(tmp_path)!r})\n"
    program += "assert not hasattr(torch.ops.torchvision, 'qnms')"
    subprocess.run([sys.executable, "-c", program], check=True)
