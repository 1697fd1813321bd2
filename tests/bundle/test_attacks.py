"""Files that are damaged or lie. Each is refused with a clear error that names the file, and costs next to nothing."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kit import forge, rebased, small_curvature, write_sealed

import kfacpack as kp
from kfacpack.bundle.container import MAX_JSON_VALUES
from kfacpack.bundle.seal import MANIFEST_KEY


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("attacks") / "good.kfac"
    small_curvature("block-int8").save(path)
    return path


@pytest.fixture
def target(tmp_path):
    return tmp_path / "bad.kfac"


def complaint(path) -> str:
    """What opening a file and checking all of its bytes complains about. Anything but a BundleError is a failure."""
    with pytest.raises(kp.BundleError) as caught:
        bundle = kp.Bundle(path)
        for name in bundle.tensors:
            bundle.bytes_of(name)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 1500
    assert str(caught.value).isprintable()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return str(caught.value)


def matrix(manifest, name="one.weight/B"):
    return next(entry for entry in manifest["matrices"] if entry["name"] == name)


def header_of(raw: bytes) -> int:
    return 8 + int.from_bytes(raw[:8], "little")


def test_the_file_under_attack_is_good(good):
    assert kp.verify(good).holds


def test_truncated_anywhere(good, target):
    raw = good.read_bytes()
    start = header_of(raw)
    offsets = sorted(
        {
            0,
            1,
            7,
            8,
            9,
            start - 1,
            start,
            start + 1,
            len(raw) - 1,
            *random.Random(0).sample(range(len(raw)), 200),
        }
    )
    for offset in offsets:
        target.write_bytes(raw[:offset])
        message = complaint(target)
        assert "ends at" in message or "bytes long" in message, (offset, message)
        if offset >= start:
            assert "tensor '" in message, (offset, message)


def test_something_appended(good, target):
    target.write_bytes(good.read_bytes() + b"\0")
    assert "1 bytes follow" in complaint(target)


def test_any_flipped_byte_of_the_header(good, target):
    """Every byte, once by any other value and once by the bit that tells a from A and { from [ in many a place."""
    raw = bytearray(good.read_bytes())
    chosen = random.Random(0)
    for position in range(header_of(raw)):
        for mask in (0x20, chosen.randrange(1, 256)):
            raw[position] ^= mask
            target.write_bytes(raw)
            complaint(target)
            raw[position] ^= mask


def test_flipped_bytes_in_every_tensor(good, target):
    raw = good.read_bytes()
    chosen = random.Random(1)
    for name, spec in kp.Bundle(good).tensors.items():
        for position in {spec.start, spec.stop - 1, chosen.randrange(spec.start, spec.stop)}:
            damaged = bytearray(raw)
            damaged[position] ^= 1 << chosen.randrange(8)
            target.write_bytes(damaged)
            message = complaint(target)
            assert f"tensor {name!r}" in message
            assert "SHA-256" in message


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
        matrix(manifest)["side"] = side

    assert "one.weight/B" in complaint(forge(good, target, edit))


def test_absurd_parameters(good, target):
    def edit(header, manifest, data):
        manifest["base"]["parameters"][0]["shape"] = [2**39, 2**39]
        rebased(manifest)

    assert "leaves the 5×7 matrix" in complaint(forge(good, target, edit))


@pytest.mark.parametrize(("place", "where"), [("header", "header"), ("manifest", "manifest")])
def test_duplicate_keys(good, target, place, where):
    raw = good.read_bytes()
    start = header_of(raw)
    header = json.loads(raw[8:start])
    if place == "manifest":
        header["__metadata__"][MANIFEST_KEY] = header["__metadata__"][MANIFEST_KEY][:-1] + ',"version":"1.0"}'
        text = json.dumps(header)
    else:
        text = json.dumps(header)[:-1] + ',"one.weight/B":' + json.dumps(header["one.weight/B"]) + "}"
    message = complaint(write_sealed(target, text, raw[start:]))
    assert f"{where}: not valid JSON: the key" in message
    assert "twice" in message


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none(good, target, bad):
    def edit(header, manifest, data):
        from hashlib import sha256

        start, stop = header["one.weight/B.scale"]["data_offsets"]
        data[start : start + 4] = np.float32(bad).tobytes()
        matrix(manifest)["tensors"][1]["sha256"] = sha256(data[start:stop]).hexdigest()

    message = complaint(forge(good, target, edit))
    assert "tensor 'one.weight/B.scale'" in message
    assert "element 0 is not a finite number" in message


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_weight_that_is_no_number(good, target, constant):
    raw = good.read_bytes()
    start = header_of(raw)
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
        matrix(manifest)["tensors"][0]["name"] = name

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


class Explode:
    def __reduce__(self):
        return os.system, ("touch exploded",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_in_disguise(target, tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    target.write_bytes(pickle.dumps({"A": Explode(), "pad": list(range(1000))}, protocol))
    assert "never loaded" in complaint(target)
    assert not (tmp_path / "exploded").exists()


def test_other_files_are_no_bundles(target, tmp_path):
    import torch
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(3)}, target)
    assert "is a safetensors file, but no bundle: its metadata has no 'kfac'" in complaint(target)
    torch.save({"weight": torch.zeros(3)}, target)
    assert "looks like an archive made by torch.save" in complaint(target)
    target.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "is a Git LFS pointer" in complaint(target)
    target.write_text("<html><title>404</title></html>")
    assert "looks like a web page" in complaint(target)
    target.write_bytes(b"")
    assert "only 0 bytes long" in complaint(target)
    assert "No such file" in complaint(tmp_path / "nowhere.kfac")
    assert "is not a regular file" in complaint(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in complaint(tmp_path / "pipe")


def test_headers_made_to_hurt(target):
    """Deep nesting, a sea of values, a header longer than allowed, text that is not UTF-8, numbers of many digits."""
    metadata = '{"__metadata__":{"kfac.sha256":"' + "0" * 64 + '","kfac":"%s"}%s}'
    deep = metadata % ("[" * 100_000, "")
    assert "not valid JSON" in complaint(write_sealed(target, deep, b""))
    deep = metadata % ("", ',"x":' + "[" * 100_000 + "]" * 100_000)
    assert "nested too deeply" in complaint(write_sealed(target, deep, b""))
    sea = metadata % ("", ',"x":[' + "[]," * 2**20 + "0]")
    assert "JSON values" in complaint(write_sealed(target, sea, b""))
    hidden = metadata % ('{\\"x\\":[' + "\\u005b\\u005d\\u002c" * 2**18 + "0]}", "")
    assert "JSON values" in complaint(write_sealed(target, hidden, b""))
    digits = metadata % ('{\\"version\\":' + "9" * 10_000 + "}", "")
    complaint(write_sealed(target, digits, b""))
    surrogate = metadata % ("\\ud800", "")
    complaint(write_sealed(target, surrogate, b""))
    target.write_bytes((2**23 + 1).to_bytes(8, "little") + b"{" + b" " * 2**23)
    assert "at most 8388608 are allowed" in complaint(target)
    target.write_bytes((100).to_bytes(8, "little") + b"{" + b"\xff" * 99)
    assert "not valid JSON" in complaint(target)
    target.write_bytes((100).to_bytes(8, "little") + '{"a":1}'.encode("utf-16-le").ljust(100))
    complaint(target)


def test_a_seal_that_stands_twice(good, target):
    raw = good.read_bytes()
    digest = kp.Bundle(good).digest
    start = header_of(raw)
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
        lambda h, m: matrix(m)["tensors"].append({"component": "more", "name": "ghost", "sha256": "0" * 64}),
        "tensor 'ghost': is 'more' of matrix 'one.weight/B', but not in the file",
    ),
    "a tensor without digest": (lambda h, m: matrix(m)["tensors"][0].pop("sha256"), "sha256: Field required"),
    "a form that is not ours": (
        lambda h, m: matrix(m).update(form="wavelet"),
        "matrix 'one.weight/B': is held as 'wavelet' version 1; known here:",
    ),
    "a form's version that is not ours": (
        lambda h, m: matrix(m).update(version=2),
        "is held as 'block' version 2",
    ),
    "int8 without scale": (
        lambda h, m: matrix(m)["tensors"].pop(),
        "tensor 'one.weight/B.scale': the manifest lists it 0 times",
    ),
    "a tensor in two matrices": (
        lambda h, m: matrix(m, "one.weight/A")["tensors"][0].update(name="one.weight/B"),
        "the manifest lists it",
    ),
    "a component twice": (
        lambda h, m: matrix(m)["tensors"][1].update(component="data"),
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


def test_sparse_coordinates_out_of_bounds_never_reach_a_kernel(tmp_path):
    from hashlib import sha256

    import torch

    small_curvature("sparse").save(tmp_path / "good.kfac")

    def edit(header, manifest, data):
        start, stop = header["one.weight/B.rows"]["data_offsets"]
        data[start : start + 4] = np.int32(2**30).tobytes()
        matrix(manifest)["tensors"][1]["sha256"] = sha256(data[start:stop]).hexdigest()

    forged = forge(tmp_path / "good.kfac", tmp_path / "bad.kfac", edit)
    with pytest.raises(kp.CorruptTensor, match=r"tensor 'one\.weight/B\.rows': .* leave the lower triangle of side 5"):
        kp.load(forged).quadratic({"one.weight": torch.ones(5, 6)})
    failures = [failure for check in kp.verify(forged).checks for failure in check.failures]
    assert failures[0].subject == "tensor 'one.weight/B.rows'"


MEASURE = """
import sys
from pathlib import Path
from kfacpack_cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    # The peak since this program began; ru_maxrss would count what the parent process had when it forked.
    print(end.code, Path("/proc/self/status").read_text().split("VmHWM:")[1].split("kB")[0])
"""


def floods() -> dict[str, str]:
    """Manifests as full of entries as the limits allow: right ones, wrong ones, and ones at the wrong place."""

    def full_of(item: str, cost: int) -> str:
        return ",".join([item] * (MAX_JSON_VALUES // cost - 9))

    def manifest(text: str) -> str:
        quoted = json.dumps('{"version":"1.0",' + text + "}")
        return '{"__metadata__":{"kfac.sha256":"' + "0" * 64 + '","kfac":' + quoted + "}}"

    tensor = '{"component":"data","name":"t","sha256":"' + "a" * 64 + '"}'
    parameter = '{"name":"p","dtype":"F","shape":[],"sha256":"' + "a" * 64 + '"}'
    values = full_of('{"a":1}', 2)
    return {
        "matrices": manifest(
            '"matrices":[' + full_of('{"name":"m","form":"f","side":1,"tensors":[' + tensor + "]}", 9) + "]"
        ),
        "wrong-matrices": manifest('"matrices":[' + full_of('{"name":3}', 2) + "]"),
        "blocks": manifest('"blocks":[' + full_of('{"structure":"dense"}', 2) + "]"),
        "parameters": manifest('"base":{"parameters":[' + full_of(parameter, 6) + "]}"),
        "requires": manifest('"requires":[' + full_of('"feature"', 1) + "]"),
        "unknown": manifest('"unknown":[' + values + "]"),
        "header": '{"__metadata__":{"kfac.sha256":"' + "0" * 64 + '","kfac":"{}"},"x":[' + values + "]}",
    }


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_hostile_files_cost_less_than_200_mb(good, tmp_path, command):
    """The whole process, interpreter and all, through the command line."""
    raw = good.read_bytes()
    for name, text in floods().items():
        write_sealed(tmp_path / f"{name}.kfac", text, b"")
    forge(good, tmp_path / "shape.kfac", lambda h, m, d: h["one.weight/B"].update(shape=[2**40]))
    forge(good, tmp_path / "side.kfac", lambda h, m, d: matrix(m).update(side=2**24))
    forge(
        good,
        tmp_path / "parameter.kfac",
        lambda h, m, d: m["base"]["parameters"][0].update(shape=[2**40] * 8),
    )
    (tmp_path / "long.kfac").write_bytes((2**63).to_bytes(8, "little") + raw[8:])
    (tmp_path / "cut.kfac").write_bytes(raw[:-1])
    for path in sorted(tmp_path.iterdir()):
        arguments = [sys.executable, "-c", MEASURE, command, str(path)]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
        code, peak = map(int, done.stdout.split())
        assert code == 2, done.stderr
        assert peak < 200 * 1024, path.name
        assert "Traceback" not in done.stderr
