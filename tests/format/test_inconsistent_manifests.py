"""Bundles with a valid seal and an inconsistent manifest are rejected on opening; the error names the place."""

from __future__ import annotations

import json
import re

import pytest
from kit import data_start, error_message, forge, matrix_entry, rebased, write_sealed

import kfacpack as kp
from kfacpack.format.container import MANIFEST_KEY


@pytest.mark.parametrize("version", ["2.0", "0.9", "x", "", 1, "\x1b[31m" * 100_000])
def test_unsupported_format_versions_are_rejected(good, target, version):
    def edit(header, manifest, data):
        manifest["version"] = version
        # The version is reported even if the rest of the file is invalid.
        header["one.weight/B"]["dtype"] = "F4"

    assert error_message(forge(good, target, edit)).startswith(f"{target}: manifest: version: ")


def test_later_minor_versions_may_add_keys(good, target):
    def edit(header, manifest, data):
        manifest.update(version="1.7", mood="sunny")
        manifest["blocks"][0]["colour"] = "green"
        manifest["matrices"][0]["taste"] = ["sweet"]

    assert kp.verify(forge(good, target, edit)).holds


def test_unknown_required_features_are_rejected(good, target):
    """The feature is reported even if the rest of the manifest is invalid."""

    def edit(header, manifest, data):
        manifest["requires"] = ["quantum-factors"]
        del manifest["scaling"]

    message = error_message(forge(good, target, edit))
    assert "manifest: requires: " in message
    assert "'quantum-factors'" in message


@pytest.mark.parametrize(
    "shape",
    [[2**40, 2**40], [2**62], [-1, -1], [1.5], ["3"], [True], [10**400], [0], [1] * 9, 7, [[3]]],
    ids=lambda shape: str(shape)[:20],
)
def test_invalid_tensor_shapes_are_rejected(good, target, shape):
    def edit(header, manifest, data):
        header["one.weight/B"]["shape"] = shape

    assert "tensor 'one.weight/B'" in error_message(forge(good, target, edit))


@pytest.mark.parametrize("offsets", [[0, 2**60], [-8, 0], [8, 0], [0], "all", [2**63, 2**64], [0.0, 1.0]])
def test_invalid_tensor_offsets_are_rejected(good, target, offsets):
    def edit(header, manifest, data):
        header["one.weight/B"]["data_offsets"] = offsets

    assert "tensor '" in error_message(forge(good, target, edit))


def test_overlapping_tensors_are_rejected(good, target):
    def edit(header, manifest, data):
        header["two.weight/B.0"]["data_offsets"] = header["one.weight/B"]["data_offsets"]
        header["two.weight/B.0"]["shape"] = header["one.weight/B"]["shape"]

    message = error_message(forge(good, target, edit))
    assert re.search(r"tensor '.+': starts at byte \d+, expected byte \d+", message)


@pytest.mark.parametrize("dtype", ["F128", "I64", 3])
def test_unsupported_dtypes_are_rejected(good, target, dtype):
    def edit(header, manifest, data):
        header["one.weight/B"]["dtype"] = dtype

    assert "tensor 'one.weight/B'" in error_message(forge(good, target, edit))


@pytest.mark.parametrize("side", [0, -1, 4, 6, 10**9, 10**400, 2.5, "5", True])
def test_invalid_matrix_sides_are_rejected(good, target, side):
    def edit(header, manifest, data):
        matrix_entry(manifest)["side"] = side

    assert "one.weight/B" in error_message(forge(good, target, edit))


def test_parameters_larger_than_their_block_are_rejected(good, target):
    def edit(header, manifest, data):
        manifest["base"]["parameters"][0]["shape"] = [2**39, 2**39]
        rebased(manifest)

    assert "exceeds the 5×7 matrix" in error_message(forge(good, target, edit))


@pytest.mark.parametrize(("where", "key"), [("header", "one.weight/B"), ("manifest", "version")])
def test_duplicate_keys_are_rejected(good, target, where, key):
    raw = good.read_bytes()
    start = data_start(raw)
    header = json.loads(raw[8:start])
    if where == "manifest":
        header["__metadata__"][MANIFEST_KEY] = header["__metadata__"][MANIFEST_KEY][:-1] + ',"version":"1.0"}'
        text = json.dumps(header)
    else:
        text = json.dumps(header)[:-1] + ',"one.weight/B":' + json.dumps(header["one.weight/B"]) + "}"
    assert f"{where}: invalid JSON: duplicate key {key!r}" in error_message(write_sealed(target, text, raw[start:]))


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_weights_that_are_not_finite_are_rejected(good, target, constant):
    raw = good.read_bytes()
    start = data_start(raw)
    header = json.loads(raw[8:start])
    text = header["__metadata__"][MANIFEST_KEY]
    assert '"weight":0.5' in text
    header["__metadata__"][MANIFEST_KEY] = text.replace('"weight":0.5', f'"weight":{constant}')
    assert "manifest" in error_message(write_sealed(target, json.dumps(header), raw[start:]))


NAMES = [
    "../../etc/passwd", "..", "a/../b", "a/..", "./a", "/etc/passwd", "C:\\Windows\\system32", "C:/Windows", "a\\b",
    "nul\0", "line\nbreak", "\x1b[31mred", "\x9b31m", "reversed \u202e", "half \ud800", "", "x" * 513,
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_that_are_unsafe_in_paths_or_terminals_are_rejected(good, target, name):
    def rename_tensor(header, manifest, data):
        header[name] = header.pop("one.weight/B")
        matrix_entry(manifest)["tensors"][0]["name"] = name

    def rename_task(header, manifest, data):
        manifest["source"]["task"] = name

    def rename_parameter(header, manifest, data):
        manifest["base"]["parameters"][0]["name"] = name
        manifest["blocks"][0]["join"]["pieces"][0]["parameter"] = name

    for edit in (rename_tensor, rename_task, rename_parameter):
        message = error_message(forge(good, target, edit))
        assert "is not a valid name" in message
        assert message.isprintable()
        assert len(message) < 1000


def test_names_of_real_models_and_tasks_are_accepted():
    for name in (
        "visual.transformer.resblocks.0.attn.in_proj_weight",
        "digits@1/5",
        "naïve…",
        "a..b",
        "T5 (base)",
        "timm:vit",
    ):
        assert kp.Source(task=name).task == name


def test_a_seal_that_occurs_twice_is_rejected(good, target):
    raw = good.read_bytes()
    digest = kp.Bundle(good).digest
    start = data_start(raw)
    text = raw[8:start].decode().replace('"dtype"', f'"note":"{digest}","dtype"', 1).encode()
    target.write_bytes(len(text).to_bytes(8, "little") + text + raw[start:])
    message = error_message(target)
    assert "header: " in message
    assert digest in message


INCONSISTENCIES = {
    "base.sha256": (
        lambda h, m: m["base"].update(sha256="0" * 64),
        f"sha256 is {'0' * 64}, but the listed parameters have",
    ),
    "a digest too short": (lambda h, m: m["base"].update(sha256="abc"), "base.sha256"),
    "a parameter twice": (
        lambda h, m: (m["base"]["parameters"].append(m["base"]["parameters"][0]), rebased(m)),
        "'one.weight' is listed twice",
    ),
    "a parameter without block": (
        lambda h, m: (
            m["base"]["parameters"].append({**m["base"]["parameters"][0], "name": "extra"}),
            rebased(m),
        ),
        "parameter 'extra': must be covered exactly once",
    ),
    "a block of a missing parameter": (
        lambda h, m: m["blocks"][0]["join"]["pieces"][0].update(parameter="ghost"),
        "block 'one.weight': covers 'ghost'",
    ),
    "overlapping pieces": (
        lambda h, m: m["blocks"][0]["join"]["pieces"][1].update(at=[0, 0]),
        "block 'one.weight': 'one.bias' and 'one.weight' overlap",
    ),
    "a missing matrix": (
        lambda h, m: m["blocks"][0]["terms"][0].update(A="ghost"),
        "block 'one.weight': refers to the missing matrix 'ghost'",
    ),
    "a missing tensor": (
        lambda h, m: matrix_entry(m)["tensors"].append({"component": "more", "name": "ghost", "sha256": "0" * 64}),
        "tensor 'ghost': is listed as 'more' of matrix 'one.weight/B'",
    ),
    "a tensor without digest": (lambda h, m: matrix_entry(m)["tensors"][0].pop("sha256"), "sha256: Field required"),
    "an unknown form": (
        lambda h, m: matrix_entry(m).update(form="wavelet"),
        "matrix 'one.weight/B': has the form 'wavelet', version 1; expected one of dense 1",
    ),
    "an unknown version of a form": (
        lambda h, m: matrix_entry(m).update(version=2),
        "matrix 'one.weight/B': has the form 'block', version 2;",
    ),
    "int8 without scale": (
        lambda h, m: matrix_entry(m)["tensors"].pop(),
        "tensor 'one.weight/B.scale': the manifest lists it 0 times",
    ),
    "a tensor in two matrices": (
        lambda h, m: matrix_entry(m, "one.weight/A")["tensors"][0].update(name="one.weight/B"),
        "the manifest lists it",
    ),
    "a component twice": (
        lambda h, m: matrix_entry(m)["tensors"][1].update(component="data"),
        "matrix 'one.weight/B': has two tensors for 'data'",
    ),
    "half a pair of rows": (
        lambda h, m: m["blocks"][0]["join"]["pieces"][0].update(rows=[1]),
        "manifest: blocks.0 'one.weight'",
    ),
    "a wrong formula": (
        lambda h, m: m["scaling"].update(formula="A = sum a a^T"),
        "the formula for the sharing 'expand' must be",
    ),
    "no scaling": (lambda h, m: m.pop("scaling"), "manifest: scaling: Field required"),
    "probes without mc": (
        lambda h, m: m["estimate"].update(fisher="exact"),
        "fisher 'exact' allows neither",
    ),
    "null": (lambda h, m: m["source"].update(license=None), "the key 'license' is null"),
    "an infinite number under an unknown key": (
        lambda h, m: m.update(unknown=float("inf")),
        "is not a finite number",
    ),
    "mc without probes": (lambda h, m: m["estimate"].pop("probes"), "'mc' requires probe and probes"),
    "a parent twice": (
        lambda h, m: m.update(merge={"rule": "tak", "parents": [{"sha256": "a" * 64, "weight": 1.0}] * 2}),
        f"the parent {'a' * 64} is listed twice",
    ),
    "too many pieces": (
        lambda h, m: m["blocks"][0]["join"].update(pieces=[m["blocks"][0]["join"]["pieces"][0]] * 65),
        "at most 64 items",
    ),
    "a diagonal block with a dense matrix": (
        lambda h, m: m["blocks"][-1].update(structure="diagonal"),
        "is diagonal, but the matrix 'token/G'",
    ),
    "an unknown structure": (
        lambda h, m: m["blocks"][0].update(structure="circulant"),
        "manifest: blocks.0",
    ),
    "a name twice": (lambda h, m: m["blocks"][1].update(name="one.weight"), "two blocks with this name"),
    "metadata that is not text": (
        lambda h, m: h["__metadata__"].update(more=3),
        "is not a JSON object whose values are strings",
    ),
}


@pytest.mark.parametrize("case", INCONSISTENCIES)
def test_inconsistent_manifests_are_rejected(good, target, case):
    edit, expected = INCONSISTENCIES[case]
    forge(good, target, lambda header, manifest, data: edit(header, manifest) and None)
    assert expected in error_message(target)


def test_a_manifest_that_is_not_an_object_is_rejected(target):
    text = '{"__metadata__":{"kfac.sha256":"' + "0" * 64 + '","kfac":"[1]"}}'
    assert "manifest: expected a JSON object, got list" in error_message(write_sealed(target, text, b""))
