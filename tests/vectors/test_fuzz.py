"""Opening a sealed task vector with arbitrary JSON in its manifest succeeds or raises a KfacpackError, nothing else."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from format.test_fuzz import mutate
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import rebased
from pydantic import ValidationError
from vectors.small_vectors import forge, vector
from vectors.test_storage import save_every_form

import kfacpack as kp
from kfacpack.format.container import VECTOR
from kfacpack.hub.repository import Artifact


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A merged vector, whose manifest has tasks, heads, training settings, addends and a method."""
    path = tmp_path_factory.mktemp("fuzz") / "good.safetensors"
    kp.add([vector("one", 1), vector("two", 2)], "ties", keep=0.5).save(path)
    return path


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A vector with factors, a change of zero and a remainder."""
    path = tmp_path_factory.mktemp("fuzz") / "stored.safetensors"
    save_every_form(path)
    return path


def error_of(path) -> kp.KfacpackError | None:
    """Reads and uses all of a task vector. Any exception but KfacpackError is an error of the test."""
    try:
        tau = kp.TaskVector.load(path)
        _ = dict(tau), tau.heads, repr(tau), [(tau.factors(name), tau.remainder(name)) for name in tau]
        doubled = 2 * tau
        _ = doubled.about, doubled.digest
        artifact = Artifact.of(path, path.name)
        _ = artifact.summary, artifact.base, artifact.tasks, artifact.commands("hf://owner/repo/v.safetensors")
    except kp.KfacpackError as error:
        return error
    return None


@settings(max_examples=300)
@given(data=st.data())
def test_random_changes_of_the_manifest(good, data):
    check_random_changes(good, data)


@settings(max_examples=300)
@given(data=st.data())
def test_random_changes_of_a_manifest_with_factors_and_remainders(stored, data):
    check_random_changes(stored, data)


def check_random_changes(good, data) -> None:
    raw = good.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    changed = json.loads(header["__metadata__"][VECTOR.manifest])
    for _ in range(data.draw(st.integers(1, 2), label="changes")):
        mutate(data, changed)
    if data.draw(st.booleans(), label="repair the base digest"):
        # Otherwise a changed base would hide everything that is checked after its digest.
        with suppress(ValidationError, KeyError, TypeError):
            rebased(changed)

    def edit(header, manifest):
        manifest.clear()
        manifest.update(changed)

    fuzzed = good.with_name("fuzzed.safetensors")
    fuzzed.write_bytes(raw)
    forge(fuzzed, edit)
    if error := error_of(fuzzed):
        assert str(error).isprintable()
        assert len(str(error)) < 1500


@pytest.mark.parametrize("requires", [[["x"]], [{}], [3], {"x": 1}, "x", 3, True, [None]], ids=repr)
def test_requirements_of_any_type_are_refused(good, tmp_path, requires):
    path = tmp_path / "forged.safetensors"
    path.write_bytes(good.read_bytes())
    forge(path, lambda header, manifest: manifest.update(requires=requires))
    with pytest.raises(kp.BundleError) as caught:
        kp.TaskVector.load(path)
    assert caught.value.where == "manifest: requires"
