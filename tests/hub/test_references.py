"""hf:// references are parsed as by huggingface_hub, and invalid ones are rejected."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from huggingface_hub.utils import parse_hf_uri
from kit import refused

import kfacpack as kp
from kfacpack.format.reference import Reference, is_reference, locate

GOOD = [
    "hf://owner/repo/t.kfac",
    "hf://owner/repo@main/t.kfac",
    "hf://owner/repo@v1.0/folder/t.kfac",
    "hf://owner/repo@0123456789abcdef0123456789abcdef01234567/t.safetensors",
    "hf://owner/repo@refs%2Fpr%2F1/t.kfac",
    "hf://owner/repo@refs/pr/1/t.kfac",
    "hf://owner/repo@my%2Fbranch/t.kfac",
    "hf://models/owner/repo/t.kfac",
    "hf://datasets/owner/repo@main/data/t.kfac",
]


@pytest.mark.parametrize("text", GOOD)
def test_references_are_parsed_as_by_huggingface_hub(text):
    ours, theirs = Reference.parse(text), parse_hf_uri(text)
    assert (ours.repository, ours.revision, ours.file, ours.kind) == (
        theirs.id, theirs.revision, theirs.path_in_repo, theirs.type,
    )  # fmt: skip
    assert Reference.parse(str(ours)) == ours
    assert parse_hf_uri(str(ours)) == theirs


@pytest.mark.parametrize(
    "text",
    ["hf://", "hf://owner", "hf://owner/repo", "hf://owner/repo@main", "hf://owner/repo/", "hf://owner/repo/../t.kfac",
     "hf://owner/repo//t.kfac", "hf://own er/repo/t.kfac", "hf://buckets/owner/repo/t.kfac"],
)  # fmt: skip
def test_invalid_references_are_rejected(text):
    with refused(kp.KfacpackError, text, "hf://owner/repo/FILE"):
        kp.load(text)


def test_a_path_object_is_still_a_reference():
    assert locate(Path("hf://owner/repo@main/t.kfac")) == Reference("owner/repo", "t.kfac", "main")
    assert not is_reference("folder/hf:/t.kfac")
    assert locate("t.kfac") == Path("t.kfac")


def test_references_can_be_pickled():
    reference = Reference.parse("hf://owner/repo@main/t.kfac")
    assert pickle.loads(pickle.dumps(reference)) == reference


def test_a_hub_error_from_another_process_is_still_unreachable():
    error = kp.HubError("hf://owner/repo", "the Hub cannot be reached", "Try again", unreachable=True)
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.target, copied.unreachable) == (str(error), error.target, True)
