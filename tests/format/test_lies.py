"""Bundles that are whole, sealed, and lie. Each is refused when it is opened, by the name of what is wrong."""

from __future__ import annotations

import json

import pytest
from kit import complaint, data_start, forge, matrix_entry, rebased, write_sealed

import kfacpack as kp
from kfacpack.format.container import MANIFEST_KEY


@pytest.mark.parametrize("version", ["2.0", "0.9", "x", "", 1, "\x1b[31m" * 100_000])
def test_a_version_that_is_not_ours(good, target, version):
    def edit(header, manifest, data):
        manifest["version"] = version

        header["one.weight/B"]["dtype"] = "F4"

    assert "manifest: version: is format version" in complaint(forge(good, target, edit))


def test_a_later_minor_version_may_say_more(good, target):
    def edit(header, manifest, data):
        manifest.update(version="1.7", mood="sunny")
        manifest["blocks"][0]["colour"] = "green"
        manifest["matrices"][0]["taste"] = ["sweet"]

    assert kp.verify(forge(good, target, edit)).holds


def test_a_required_feature_that_is_not_ours(good, target):
    """Whatever else such a file does differently, that is what it is refused for."""

    def edit(header, manifest, data):
        manifest["requires"] = ["quantum-factors"]
        del manifest["scaling"]

    assert "needs the feature 'quantum-factors'" in complaint(forge(good, target, edit))


@pytest.mark.parametrize(
    "shape",
    [[2**40, 2**40], [2**62], [-1, -1], [1.5], ["3"], [True], [10**400], [0], [1] * 9, 7, [[3]]],
    ids=lambda shape: str(shape)[:20],
)
def test_absurd_shapes_of_a_tensor(good, target, shape):
    def edit(header, manifest, data):
        header["one.weight/B"]["shape"] = shape

    assert "tensor 'one.weight/B'" in complaint(forge(good, target, edit))


@pytest.mark.parametrize("offsets", [[0, 2**60], [-8, 0], [8, 0], [0], "all", [2**63, 2**64], [0.0, 1.0]])
def test_absurd_offsets_of_a_tensor(good, target, offsets):
    def edit(header, manifest, data):
        header["one.weight/B"]["data_offsets"] = offsets

    assert "tensor '" in complaint(forge(good, target, edit))


def test_overlapping_tensors(good, target):
    def edit(header, manifest, data):
        header["two.weight/B.0"]["data_offsets"] = header["one.weight/B"]["data_offsets"]
        header["two.weight/B.0"]["shape"] = header["one.weight/B"]["shape"]

    assert "right behind" in complaint(forge(good, target, edit))


@pytest.mark.parametrize("dtype", ["F128", "I64", 3])
def test_a_dtype_that_is_not_ours(good, target, dtype):
    def edit(header, manifest, data):
        header["one.weight/B"]["dtype"] = dtype

    assert "tensor 'one.weight/B'" in complaint(forge(good, target, edit))


@pytest.mark.parametrize("side", [0, -1, 4, 6, 10**9, 10**400, 2.5, "5", True])
def test_absurd_sides_of_a_matrix(good, target, side):
    def edit(header, manifest, data):
        matrix_entry(manifest)["side"] = side

    assert "one.weight/B" in complaint(forge(good, target, edit))


def test_absurd_parameters(good, target):
    def edit(header, manifest, data):
        manifest["base"]["parameters"][0]["shape"] = [2**39, 2**39]
        rebased(manifest)

    assert "leaves the 5×7 matrix" in complaint(forge(good, target, edit))


@pytest.mark.parametrize(("place", "where"), [("header", "header"), ("manifest", "manifest")])
def test_duplicate_keys(good, target, place, where):
    raw = good.read_bytes()
    start = data_start(raw)
    header = json.loads(raw[8:start])
    if place == "manifest":
        header["__metadata__"][MANIFEST_KEY] = header["__metadata__"][MANIFEST_KEY][:-1] + ',"version":"1.0"}'
        text = json.dumps(header)
    else:
        text = json.dumps(header)[:-1] + ',"one.weight/B":' + json.dumps(header["one.weight/B"]) + "}"
    message = complaint(write_sealed(target, text, raw[start:]))
    assert f"{where}: cannot be read as JSON: the key" in message
    assert "twice" in message


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_weight_that_is_no_number(good, target, constant):
    raw = good.read_bytes()
    start = data_start(raw)
    header = json.loads(raw[8:start])
    text = header["__metadata__"][MANIFEST_KEY]
    assert '"weight":0.5' in text
    header["__metadata__"][MANIFEST_KEY] = text.replace('"weight":0.5', f'"weight":{constant}')
    assert "manifest" in complaint(write_sealed(target, json.dumps(header), raw[start:]))


NAMES = [
    "../../etc/passwd", "..", "a/../b", "a/..", "./a", "/etc/passwd", "C:\\Windows\\system32", "C:/Windows", "a\\b",
    "nul\0", "line\nbreak", "\x1b[31mred", "\x9b31m", "reversed \u202e", "half \ud800", "", "x" * 513,
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_that_a_file_system_or_terminal_would_follow(good, target, name):
    def rename_tensor(header, manifest, data):
        header[name] = header.pop("one.weight/B")
        matrix_entry(manifest)["tensors"][0]["name"] = name

    def rename_task(header, manifest, data):
        manifest["source"]["task"] = name

    def rename_parameter(header, manifest, data):
        manifest["base"]["parameters"][0]["name"] = name
        manifest["blocks"][0]["join"]["pieces"][0]["parameter"] = name

    for edit in (rename_tensor, rename_task, rename_parameter):
        message = complaint(forge(good, target, edit))
        assert "not allowed as a name" in message
        assert message.isprintable()
        assert len(message) < 1000


def test_names_of_real_models_and_tasks_are_fine():
    for name in (
        "visual.transformer.resblocks.0.attn.in_proj_weight",
        "digits@1/5",
        "naïve…",
        "a..b",
        "T5 (base)",
        "timm:vit",
    ):
        assert kp.Source(task=name).task == name


def test_a_seal_that_stands_twice(good, target):
    raw = good.read_bytes()
    digest = kp.Bundle(good).digest
    start = data_start(raw)
    text = raw[8:start].decode().replace('"dtype"', f'"note":"{digest}","dtype"', 1).encode()
    target.write_bytes(len(text).to_bytes(8, "little") + text + raw[start:])
    assert "header: its bytes do not give the SHA-256" in complaint(target)


LIES = {
    "base.sha256": (lambda h, m: m["base"].update(sha256="0" * 64), "the listed parameters give"),
    "a digest too short": (lambda h, m: m["base"].update(sha256="abc"), "base.sha256"),
    "a parameter twice": (
        lambda h, m: (m["base"]["parameters"].append(m["base"]["parameters"][0]), rebased(m)),
        "'one.weight' is listed twice",
    ),
    "a parameter nobody covers": (
        lambda h, m: (
            m["base"]["parameters"].append({**m["base"]["parameters"][0], "name": "extra"}),
            rebased(m),
        ),
        "parameter 'extra': must be covered once and whole",
    ),
    "a block of a parameter that is not there": (
        lambda h, m: m["blocks"][0]["join"]["pieces"][0].update(parameter="ghost"),
        "block 'one.weight': covers 'ghost'",
    ),
    "pieces that overlap": (
        lambda h, m: m["blocks"][0]["join"]["pieces"][1].update(at=[0, 0]),
        "block 'one.weight': 'one.bias' and 'one.weight' overlap",
    ),
    "a matrix that is not there": (
        lambda h, m: m["blocks"][0]["terms"][0].update(A="ghost"),
        "block 'one.weight': refers to the matrix 'ghost'",
    ),
    "a tensor that is not in the file": (
        lambda h, m: matrix_entry(m)["tensors"].append({"component": "more", "name": "ghost", "sha256": "0" * 64}),
        "tensor 'ghost': is 'more' of matrix 'one.weight/B', but not in the file",
    ),
    "a tensor without digest": (lambda h, m: matrix_entry(m)["tensors"][0].pop("sha256"), "sha256: Field required"),
    "a form that is not ours": (
        lambda h, m: matrix_entry(m).update(form="wavelet"),
        "matrix 'one.weight/B': is held as 'wavelet' version 1; known here:",
    ),
    "a form's version that is not ours": (
        lambda h, m: matrix_entry(m).update(version=2),
        "is held as 'block' version 2",
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
        "for 'expand' the formula must read",
    ),
    "no scaling": (lambda h, m: m.pop("scaling"), "manifest: scaling: Field required"),
    "probes without mc": (
        lambda h, m: m["estimate"].update(fisher="exact"),
        "fisher 'exact' has neither",
    ),
    "null": (lambda h, m: m["source"].update(license=None), "the key 'license' is null, expected it to be left out"),
    "a number beyond binary64 where nobody looks": (
        lambda h, m: m.update(unknown=float("inf")),
        "is not a finite number",
    ),
    "mc without probes": (lambda h, m: m["estimate"].pop("probes"), "'mc' needs probe and probes"),
    "a parent twice": (
        lambda h, m: m.update(merge={"rule": "tak", "parents": [{"sha256": "a" * 64, "weight": 1.0}] * 2}),
        f"the parent {'a' * 64} is there twice",
    ),
    "too many pieces": (
        lambda h, m: m["blocks"][0]["join"].update(pieces=[m["blocks"][0]["join"]["pieces"][0]] * 65),
        "at most 64 items",
    ),
    "a diagonal that is none": (
        lambda h, m: m["blocks"][-1].update(structure="diagonal"),
        "is diagonal, but 'token/G'",
    ),
    "a structure that is not ours": (
        lambda h, m: m["blocks"][0].update(structure="circulant"),
        "manifest: blocks.0",
    ),
    "a name twice": (lambda h, m: m["blocks"][1].update(name="one.weight"), "two blocks of this name"),
    "metadata that is no text": (
        lambda h, m: h["__metadata__"].update(more=3),
        "expected an object of strings",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_manifests_that_contradict_themselves(good, target, lie):
    edit, expected = LIES[lie]
    forge(good, target, lambda header, manifest, data: edit(header, manifest) and None)
    assert expected in complaint(target)


def test_a_manifest_that_is_no_object(target):
    text = '{"__metadata__":{"kfac.sha256":"' + "0" * 64 + '","kfac":"[1]"}}'
    assert "manifest: expected a JSON object, found list" in complaint(write_sealed(target, text, b""))
