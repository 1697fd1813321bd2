"""Damaged files and files of other formats are rejected with an error that names the file and the tensor."""

from __future__ import annotations

import os
import pickle
import random
from hashlib import sha256

import numpy as np
import pytest
import torch
from kit import data_start, error_message, forge, matrix_entry, refused, small_curvature
from safetensors.torch import save_file

import kfacpack as kp


def test_the_undamaged_file_is_valid(good):
    assert kp.verify(good).holds


def test_truncated_files_are_rejected(good, target):
    raw = good.read_bytes()
    start = data_start(raw)
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
        message = error_message(target)
        assert "ends at" in message or "is too short" in message, (offset, message)
        if offset >= start:
            assert "tensor '" in message, (offset, message)


def test_appended_bytes_are_rejected(good, target):
    target.write_bytes(good.read_bytes() + b"\0")
    size = good.stat().st_size
    assert f"ends at byte {size + 1}, but should end at byte {size}" in error_message(target)


def test_any_changed_byte_of_the_header_is_detected(good, target):
    """Every byte, once with a random change and once with the bit that distinguishes a from A and { from [."""
    raw = good.read_bytes()
    chosen = random.Random(0)
    target.write_bytes(raw)
    # Bytes are changed in place, because truncating a file can take milliseconds.
    with target.open("r+b", buffering=0) as file:
        for position in range(data_start(raw)):
            for mask in (0x20, chosen.randrange(1, 256), 0):
                os.pwrite(file.fileno(), bytes([raw[position] ^ mask]), position)
                if mask:
                    error_message(target)
    assert target.read_bytes() == raw


def test_changed_bytes_of_any_tensor_are_detected(good, target):
    raw = good.read_bytes()
    chosen = random.Random(1)
    for name, spec in kp.Bundle(good).tensors.items():
        for position in {spec.start, spec.stop - 1, chosen.randrange(spec.start, spec.stop)}:
            damaged = bytearray(raw)
            damaged[position] ^= 1 << chosen.randrange(8)
            target.write_bytes(damaged)
            message = error_message(target)
            assert f"tensor {name!r}" in message
            assert "SHA-256" in message


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_are_rejected(good, target, bad):
    def edit(header, manifest, data):
        start, stop = header["one.weight/B.scale"]["data_offsets"]
        data[start : start + 4] = np.float32(bad).tobytes()
        matrix_entry(manifest)["tensors"][1]["sha256"] = sha256(data[start:stop]).hexdigest()

    message = error_message(forge(good, target, edit))
    assert "tensor 'one.weight/B.scale'" in message
    assert "element 0 is not a finite number" in message


class Explode:
    def __reduce__(self):
        return os.system, ("touch exploded",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_never_loaded(target, tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    target.write_bytes(pickle.dumps({"A": Explode(), "pad": list(range(1000))}, protocol))
    assert "never loaded" in error_message(target)
    assert not (tmp_path / "exploded").exists()


def test_files_of_other_formats_are_rejected(target, tmp_path):
    save_file({"weight": torch.zeros(3)}, target)
    assert "is a safetensors file, but not a bundle: its metadata has no 'kfac'" in error_message(target)
    torch.save({"weight": torch.zeros(3)}, target)
    assert "looks like an archive made by torch.save" in error_message(target)
    target.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "is a Git LFS pointer" in error_message(target)
    target.write_text("<html><title>404</title></html>")
    assert "looks like a web page" in error_message(target)
    target.write_bytes(b"")
    assert "expected at least 8 bytes, got 0" in error_message(target)
    assert "No such file" in error_message(tmp_path / "nowhere.kfac")
    assert "is a folder" in error_message(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in error_message(tmp_path / "pipe")


def test_sparse_coordinates_out_of_bounds_never_reach_a_kernel(tmp_path):
    small_curvature("sparse").save(tmp_path / "good.kfac")

    def edit(header, manifest, data):
        start, stop = header["one.weight/B.rows"]["data_offsets"]
        data[start : start + 4] = np.int32(2**30).tobytes()
        matrix_entry(manifest)["tensors"][1]["sha256"] = sha256(data[start:stop]).hexdigest()

    forged = forge(tmp_path / "good.kfac", tmp_path / "bad.kfac", edit)
    with refused(kp.CorruptTensor, "lower triangle of side length 5", where="tensor 'one.weight/B.rows'"):
        kp.load(forged).quadratic({"one.weight": torch.ones(5, 6)})
    failures = [failure for check in kp.verify(forged).checks for failure in check.failures]
    assert failures[0].subject == "tensor 'one.weight/B.rows'"
