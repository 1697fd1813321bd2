"""`kfacpack models`, as a shell sees it."""

from __future__ import annotations

import json

import pytest
from kfacpack_cli.main import app
from typer.testing import CliRunner

from kfacpack.models import EMBEDDED, FAMILIES, load_model


def run(*arguments, code=0):
    done = CliRunner().invoke(app, ["models", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


def test_every_family_and_every_embedded_model_is_listed():
    found = json.loads(run("--json").stdout)
    assert [each["family"] for each in found["families"]] == [family.name for family in FAMILIES.values()]
    assert {each["family"]: each["head"] for each in found["families"]}["open_clip"] == "text"
    tiny = found["embedded"][0]
    assert tiny["name"] == "tiny"
    assert tiny["bytes"] == EMBEDDED["tiny"].weights.stat().st_size
    assert tiny["parameters"] == sum(each.numel() for each in load_model("tiny").module.parameters())
    shown = run().stdout
    for words in ("tiny", f"{tiny['parameters']:,}", "timm:NAME", "t5:NAME_OR_DIR", "prototypes"):
        assert words in shown


def test_a_models_family_is_the_one_that_is_listed():
    for spec in ("tiny", "timm:test_vit"):
        model = load_model(spec, weights="random")
        assert model.family in {family.name for family in FAMILIES.values()}


def test_one_model_is_shown():
    found = json.loads(run("timm:test_vit", "--weights", "random", "--image-size", 32, "--json").stdout)
    assert (found["family"], found["revision"], found["width"], found["head"]) == ("timm", "random-0", 64, "prototypes")
    assert "pos_embed" in found["frozen"]
    shown = run("tiny").stdout
    for words in ("tiny (open_clip)", EMBEDDED["tiny"].revision, "of width 128", "visual.conv1.weight", "text"):
        assert words in shown


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["ViT-B-33"], "close to it are ViT-B-32"),
        (["--weights", "random"], "belong to a model"),
        (["--image-size", "28"], "belong to a model"),
        (["tiny", "--weights", "/no/such.safetensors"], "/no/such.safetensors"),
    ],
)
def test_wrong_input_is_told(wrong, words):
    done = run(*wrong, code=2)
    assert words in done.stderr
    assert not done.stdout
