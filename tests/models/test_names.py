"""Model names: families, tags, suggestions for unknown names, and import side effects."""

from __future__ import annotations

import logging
import re
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
        ("ViT-B/32", "unknown open_clip model 'ViT-B/32'; did you mean 'ViT-B-32'"),
        ("vit-b-16", "did you mean 'ViT-B-16'"),
        ("ViT-B-32/opnai", "tag 'opnai' for ViT-B-32; available tags: openai, laion400m_e31"),
        ("ViT-B-32-256", "no default weights; choose one of these names: ViT-B-32-256/datacomp_s34b_b86k"),
        ("timm:vit_tiny_patch16_225", "unknown timm model 'vit_tiny_patch16_225'; did you mean 'vit_tiny_patch16_224'"),
        ("timm:vit_tiny_patch16_224.best", "tag 'best' for vit_tiny_patch16_224; available tags: augreg_in21k, augreg"),
        ("keras:resnet", "unknown model 'keras:resnet'. Expected one of: tiny, NAME or NAME/TAG of an open_clip model"),
        ("tim:vit_tiny_patch16_224", "unknown model 'tim:vit_tiny_patch16_224'; did you mean 'timm:'?"),
        ("tinny", "unknown open_clip model 'tinny'; did you mean 'tiny'"),
        ("timm:", "'timm:' does not contain a model name"),
        ("", "'' does not contain a model name"),
        ("t5:./no/such/folder", "no such folder"),
        ("hf:~nobody-of-that-name/folder", "~nobody-of-that-name/folder: the home directory of this user"),
        ("clip:nobody/nothing", "the config cannot be loaded"),
        ("hf:nobody/nothing", "config and tokenizer cannot be loaded"),
        ("nonsense", "timm:NAME, clip:NAME_OR_DIR, t5:NAME_OR_DIR, lm:NAME_OR_DIR, hf:NAME_OR_DIR"),
    ],
)
def test_an_unknown_name_suggests_the_closest_ones(spec, answer):
    with pytest.raises(KfacpackError, match=re.escape(answer)):
        load_model(spec)


@pytest.mark.parametrize(
    ("spec", "file"),
    [
        ("ViT-B-32", "ViT-B-32/openai: open_clip_model.safetensors"),
        ("ViT-B-16/laion2b_s34b_b88k", "ViT-B-16/laion2b_s34b_b88k: open_clip_model.safetensors"),
        ("timm:vit_tiny_patch16_224", "timm:vit_tiny_patch16_224: model.safetensors"),
    ],
)
def test_without_network_the_error_names_the_local_options(spec, file):
    with refused(KfacpackError, file, "not in the cache", "HF_HUB_OFFLINE", "--weights FILE", "--weights random"):
        load_model(spec)


def test_a_tag_determines_activation_and_preprocessing(tiny_clip, monkeypatch):
    from open_clip import pretrained

    setting = {"quick_gelu": True, "mean": (0.1, 0.2, 0.3), "std": (1.0, 1.0, 1.0), "resize_mode": "squash"}
    monkeypatch.setitem(pretrained._PRETRAINED, tiny_clip, {"quick": setting})
    tagged, plain = (load_model(name, weights="random") for name in (f"{tiny_clip}/quick", tiny_clip))
    for model, quick in ((tagged, True), (plain, False)):
        assert quick == any(type(child).__name__ == "QuickGELU" for child in model.module.modules())
        assert quick == ("QuickGELU" in model.function.detail)
    picture = [{"image": Image.new("RGB", (50, 20), (255, 255, 255))}]
    white = torch.tensor([0.9, 0.8, 0.7]).reshape(1, 3, 1, 1).expand(1, 3, 32, 32)
    torch.testing.assert_close(tagged.prepare(picture, "any"), white)


def test_bad_sizes_and_devices_are_refused():
    with refused(KfacpackError, "image size 0"):
        load_model("ViT-B-32", image_size=0)
    with refused(KfacpackError, "device 'abacus'"):
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
        "": "OpenClipFamily",
        "timm": "TimmFamily",
        "clip": "ClipFamily",
        "t5": "T5Family",
        "lm": "CausalLMFamily",
        "hf": "EncoderFamily",
    }


def test_the_registries_import_no_heavy_library():
    program = "import sys, kfacpack.models.families, kfacpack.tasks.registry\n"
    program += "assert not {'open_clip', 'timm', 'transformers', 'datasets', 'torchvision'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_torchvision_is_importable_and_stays_so():
    make_torchvision_importable()
    make_torchvision_importable()
    from torchvision.transforms.functional import pil_to_tensor

    assert callable(pil_to_tensor)
    assert torch.ops.torchvision.nms is not None


def test_a_matching_torchvision_is_not_changed(tmp_path):
    """A stand-in that registers its own operator on import, as the extension of a matching build does."""
    (tmp_path / "torchvision").mkdir()
    schema = '"torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"'
    (tmp_path / "torchvision" / "__init__.py").write_text(f"import torch\ntorch.library.define({schema})\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    program += "from kfacpack._compat import make_torchvision_importable as make\n"
    program += "make(); make()\nimport torch, torchvision\n"
    program += f"assert torchvision.__file__.startswith({str(tmp_path)!r})\n"
    program += "assert not hasattr(torch.ops.torchvision, 'qnms')"
    subprocess.run([sys.executable, "-c", program], check=True)
