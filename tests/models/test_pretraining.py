"""The script that trains `tiny` gives the same bytes whether it is interrupted or not."""

from __future__ import annotations

import pytest
from kit import refused
from safetensors.torch import load_file

import pretrain_tiny  # makes open_clip importable
from kfacpack.demo import EMBEDDED_MODELS
from kfacpack.models.families import load_model
from tiny.words import write_merges

open_clip = pretrain_tiny.open_clip


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(pretrain_tiny, "BATCH", 16)
    monkeypatch.setattr(pretrain_tiny, "CAPTION_BATCHES", 2)
    monkeypatch.setattr(pretrain_tiny, "CHECKPOINT_EVERY", 2)


def test_an_interrupted_run_ends_in_the_same_bytes(short, tmp_path, monkeypatch):
    pretrain_tiny.main(tmp_path / "whole", seed=3, steps=4)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pretrain_tiny, "_step", interrupted(pretrain_tiny._step, iter(range(3))))
        pretrain_tiny.main(tmp_path / "cut", seed=3, steps=4)
    pretrain_tiny.main(tmp_path / "cut", seed=3, steps=4)
    for name in ("tiny.safetensors", "merges.txt.gz"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    with refused(SystemExit, "seed 3", "expected 4"):
        pretrain_tiny.main(tmp_path / "cut", seed=4, steps=4)


def interrupted(step, left):
    """Returns `step`, which raises KeyboardInterrupt once `left` is exhausted."""

    def stop(*arguments):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return step(*arguments)

    return stop


def test_its_weights_fit_the_model(short, tmp_path):
    pretrain_tiny.main(tmp_path, seed=0, steps=1)
    model = load_model("tiny", weights=tmp_path / "tiny.safetensors")
    assert {name: tuple(value.shape) for name, value in load_file(tmp_path / "tiny.safetensors").items()} == {
        name: tuple(value.shape) for name, value in model.module.state_dict().items()
    }


def test_the_vocabulary_keeps_known_words_whole_and_fits_the_model(tmp_path):
    write_merges(["the digit seven", "the digit eight"] * 3, tmp_path / "merges.txt.gz")
    tokenizer = open_clip.SimpleTokenizer(str(tmp_path / "merges.txt.gz"), context_length=24)
    assert [tokenizer.decoder[token] for token in tokenizer.encode("the Seven")] == ["the</w>", "seven</w>"]
    assert tokenizer.decode(tokenizer.encode("unheard of")) == "unheard of "
    shipped = EMBEDDED_MODELS["tiny"]
    assert open_clip.SimpleTokenizer(str(shipped.merges)).vocab_size <= shipped.architecture["text_cfg"]["vocab_size"]
