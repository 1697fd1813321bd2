"""Opening a bundle with arbitrary JSON behind a valid seal either succeeds or raises BundleError."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import data_start, forge, rebased, write_sealed
from pydantic import ValidationError

import kfacpack as kp
from kfacpack.format.container import MANIFEST_KEY, SEAL_KEY

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10),
    st.sampled_from([2**24, 2**31, 2**53, 2**63, 2**64, 10**400, -(10**400)]),
    st.floats(),
    st.text(st.characters(), max_size=5),
    st.sampled_from(["", "1.0", "9.9", "\ud800", "\0", "a" * 5000, "f" * 64, "I8", "column", "transposed", "diagonal"]),
)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


def paths(value: Any, prefix: tuple[int | str, ...] = ()) -> list[tuple[int | str, ...]]:
    """The paths (keys and indices) of all values inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, inner in items for path in ((*prefix, key), *paths(inner, (*prefix, key)))]


def value_at(value: Any, path: tuple[int | str, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def mutate(data: st.DataObject, document: dict[str, Any], protected: tuple[str, ...] = ()) -> None:
    """Replaces, copies or deletes one random value of a JSON document in place."""
    choices = [path for path in paths(document) if path[0] not in protected]
    path = data.draw(st.sampled_from(choices), label="path")
    action = data.draw(st.sampled_from(["replace", "copy", "delete"]), label="action")
    parent = value_at(document, path[:-1])
    if action == "delete":
        del parent[path[-1]]
    elif action == "copy":
        source = data.draw(st.sampled_from(choices), label="source")
        parent[path[-1]] = copy.deepcopy(value_at(document, source))
    else:
        parent[path[-1]] = data.draw(json_values, label="value")


def error_of(path) -> kp.BundleError | None:
    """Opens a bundle and reads all of it. Returns the BundleError that this raises; all other exceptions propagate."""
    try:
        bundle = kp.Bundle(path)
        for name in bundle.tensors:
            bundle.bytes_of(name)
        kp.load(path)
    except kp.BundleError as error:
        return error
    return None


def open_or_refuse(path) -> None:
    """Fails if opening a bundle raises anything but a BundleError with a short, printable message."""
    if error := error_of(path):
        assert error.path == str(path)
        assert str(error).startswith(str(path))
        assert str(error).isprintable()
        assert len(str(error)) < 1500


def original(path) -> tuple[dict[str, Any], dict[str, Any]]:
    raw = path.read_bytes()
    header = json.loads(raw[8 : data_start(raw)])
    return header, json.loads(header["__metadata__"][MANIFEST_KEY])


@settings(max_examples=300)
@given(data=st.data())
def test_random_changes_of_the_manifest(good, data):
    _, changed = original(good)
    for _ in range(data.draw(st.integers(1, 2), label="changes")):
        mutate(data, changed)
    if data.draw(st.booleans(), label="repair the base digest"):
        # Otherwise a changed base would hide everything that is checked after its digest.
        with suppress(ValidationError, KeyError, TypeError):
            rebased(changed)

    def edit(header, manifest, tensors):
        manifest.clear()
        manifest.update(changed)

    open_or_refuse(forge(good, good.with_name("fuzzed.kfac"), edit))


@settings(max_examples=100)
@given(data=st.data())
def test_random_changes_of_the_header(good, data):
    changed, _ = original(good)
    mutate(data, changed, protected=("__metadata__",))

    def edit(header, manifest, tensors):
        header.clear()
        header.update(changed)

    open_or_refuse(forge(good, good.with_name("fuzzed.kfac"), edit))


@pytest.mark.parametrize("requires", [[["x"]], [{}], [{"x": 1}], [3], {"x": 1}, "x", 3, True, [None], [[[]]]], ids=repr)
def test_requirements_of_any_type_are_refused(good, target, requires):
    def edit(header, manifest, tensors):
        manifest["requires"] = requires

    with pytest.raises(kp.BundleError) as caught:
        kp.Bundle(forge(good, target, edit))
    assert caught.value.path == str(target)
    assert caught.value.where == "manifest: requires"


@pytest.mark.parametrize("key", ["requires", "version", "producer", "blocks", "unknown"])
@pytest.mark.parametrize("depth", [30, 300, 600, 800, 900, 950, 990, 5000])
def test_deeply_nested_values(good, target, key, depth):
    """Neither parsing such a value nor showing it in a message exceeds the recursion limit."""
    raw = good.read_bytes()
    header, manifest = original(good)
    manifest[key] = "NESTED"
    nested = "[" * depth + "]" * depth
    header["__metadata__"][MANIFEST_KEY] = json.dumps(manifest).replace('"NESTED"', nested)
    open_or_refuse(write_sealed(target, json.dumps(header), raw[data_start(raw) :]))


def test_a_seal_that_cannot_be_encoded(good, target):
    """The seal ends in a surrogate, and the bytes that a lossy encoding would give occur once in the header."""
    raw = good.read_bytes()
    header, _ = original(good)
    header["__metadata__"][SEAL_KEY] = "a" * 63 + "\ud800"
    header["__metadata__"]["decoy"] = "a" * 63 + "?"
    text = json.dumps(header).encode()
    target.write_bytes(len(text).to_bytes(8, "little") + text + raw[data_start(raw) :])
    with pytest.raises(kp.BundleError) as caught:
        kp.Bundle(target)
    assert caught.value.where == "header"
