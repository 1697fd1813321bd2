"""A reader of kfac bundles that needs only numpy. It refuses a bad file with a ValueError naming path and place."""

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "I8": "i1"}
FORMS = ("dense", "packed", "block", "lowrank", "sparse", "diagonal")


@contextmanager
def refusals(where: str) -> Iterator[None]:
    """Whatever a bad file provokes, a missing key as well as a full stack or memory, is one kind of refusal."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, MemoryError) as e:
        raise ValueError(f"{where}: {e if isinstance(e, ValueError) else repr(e)}") from e


def check(holds: object, fault: str) -> None:
    if not holds:
        raise ValueError(fault)


def integers(found: Any, most: int = 2**40) -> list[int]:
    valid = type(found) is list and all(type(item) is int and 0 <= item <= most for item in found)
    check(valid, f"found {found!r:.99}, expected integers from 0 to {most}")
    return list(found)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = sorted(key for key, _ in pairs)
    check(len(set(keys)) == len(keys), f"keys found twice: {[a for a, b in zip(keys, keys[1:]) if a == b]}")
    return dict(pairs)


def parse(text: str) -> Any:
    check(sum(map(text.count, ",[{")) < 524_289, "more than 524288 of ',', '[' and '{'")
    return json.loads(text, object_pairs_hook=unique, parse_constant=lambda word: check(False, f"{word} found"))


def joined(join: Any, indices: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
    """Section 5: ΔW, made of indices into all parameters, so that it serves to gather and to scatter."""
    whole = np.full(integers([join["rows"], join["columns"]]), -1)
    for piece in join["pieces"]:
        part, view, (top, left) = indices[piece["parameter"]], piece.get("view"), integers(piece.get("at", [0, 0]))
        if "rows" in piece:
            start, stop = integers(piece["rows"], len(part))
            part = part[start:stop]
        part = part.reshape(-1, 1) if view == "column" else part.reshape(len(part), -1)
        part = {"column": part, "matrix": part, None: part, "transposed": part.T}[view]
        place = whole[top : top + len(part), left : left + part.shape[1]]
        check(place.shape == part.shape and (place == -1).all(), f"piece {piece}: overlap, or outside of the join")
        place[...] = part
    check((whole >= 0).all(), "join: gap between the pieces")
    return whole


def multiply(form: str, n: int, part: Mapping[str, Array], x: Array) -> Array:
    """Section 4: the matrix times x. Only `sparse` is made dense; `diagonal` is taken for n blocks of side 1."""
    data, scale = part["data"], part.get("scale", np.ones(n))
    if form == "dense":
        check(data.shape == (n, n) and np.abs(data - data.T).max() <= 0.01 * np.abs(data).max(), "not symmetric")
        return data @ x
    if form == "lowrank":
        check(data.shape == (n, len(part["weights"])) and scale.shape == (n,), "shapes do not agree")
        data = data * scale[:, None]
        return data @ (part["weights"][:, None] * (data.T @ x))
    if form == "sparse":
        row, column = part["rows"].astype(np.int64), part["columns"].astype(np.int64)
        check(row.shape == column.shape == data.shape and scale.shape == (n,), "shapes do not agree")
        ordered = (np.diff(row * n + column) > 0).all() and ((0 <= column) & (column <= row) & (row < n)).all()
        check(ordered, "rows and columns not ordered, or outside of the lower triangle")
        full = np.zeros((n, n))
        full[row, column] = full[column, row] = data * scale[row]
        return full @ x
    count = {"packed": 1, "diagonal": n}.get(form, len(data))
    (short, longer), block = divmod(n, count), np.arange(count)[:, None]
    side = short + (longer > 0)
    row, column = np.tril_indices(side)
    shapes = [(count, len(row)), (count, side)] if form == "block" else [(count * len(row),), (n,)]
    scale = part.get("scale", np.ones(shapes[1]))
    check(count <= n and [data.shape, scale.shape] == shapes, f"shapes {data.shape}, {scale.shape}, not {shapes}")
    squares = np.zeros((count, side, side))
    lower = data.reshape(count, -1) * scale.reshape(count, side)[:, row]
    squares[:, row, column] = squares[:, column, row] = lower
    used = np.arange(side) < short + (block < longer)
    index = block * short + np.minimum(block, longer) + np.arange(side)
    check(not squares[~used].any(), "padding is not zero")
    result = np.empty_like(x)
    result[index[used]] = (squares @ x[np.minimum(index, n - 1)])[used]
    return result


class Bundle:
    """`manifest`, `digest` and `parameters` (names in order) of a file whose header has been checked."""

    def __init__(self, path: str) -> None:
        self.path = path
        with refusals(path), open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            check(length <= min(size - 8, 2**24), f"header: {length} bytes long, in a file of {size}")
            raw = file.read(length)
            check(raw.startswith(b"{"), "header: does not begin with {")
            self.tensors = parse(raw.decode())
            metadata = self.tensors.pop("__metadata__")
            self.digest: str = metadata["kfac.sha256"]
            sealed = prefix + raw.replace(self.digest.encode(), b"0" * 64)
            intact = raw.count(self.digest.encode()) == 1 and hashlib.sha256(sealed).hexdigest() == self.digest
            check(intact, f"kfac.sha256: {self.digest!r:.80} is not the header's seal")
            self.manifest: dict[str, Any] = parse(metadata["kfac"])
            major, _, minor = self.manifest["version"].partition(".")
            check(major == "1" and minor.isdecimal(), f"version: found {self.manifest['version']!r}, expected 1.x")
            check(self.manifest.get("requires", []) == [], f"requires: unknown {self.manifest.get('requires')}")
            self.start, end = 8 + length, 0
            for name, entry in sorted(self.tensors.items(), key=lambda item: item[1]["data_offsets"]):
                with refusals(f"tensor {name!r}"):
                    stop = end + math.prod(integers(entry["shape"])) * np.dtype(DTYPES[entry["dtype"]]).itemsize
                    found = integers(entry["data_offsets"], size)
                    check(found == [end, stop] and len(entry["shape"]) <= 8, f"at {found}, expected {[end, stop]}")
                    end = stop
            check(self.start + end == size, f"data: {size - self.start} bytes, expected {end}")
            matrices = self.manifest["matrices"].values()
            check(all(m["form"] in FORMS and m.get("version", 1) == 1 for m in matrices), "matrices: unknown form")
            used = sorted(name for matrix in matrices for name in matrix["tensors"].values())
            check(used == sorted(self.tensors) == sorted(self.manifest["tensors"]), "tensors: not each is used once")
            self.parameters = [entry["name"] for entry in self.manifest["base"]["parameters"]]

    def _numbers(self, name: str) -> NDArray[Any]:
        with refusals(f"tensor {name!r}"), open(self.path, "rb") as file:
            entry = self.tensors[name]
            start, stop = entry["data_offsets"]
            file.seek(self.start + start)
            raw = file.read(stop - start)
            check(hashlib.sha256(raw).hexdigest() == self.manifest["tensors"][name], "SHA-256 differs")
            numbers = np.frombuffer(raw, DTYPES[entry["dtype"]]).reshape(entry["shape"])
            if entry["dtype"] == "BF16":
                numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
            check(np.isfinite(numbers).all(), "not finite")
            return numbers.astype(np.float64)

    def _times(self, identifier: str, x: Array) -> Array:
        with refusals(f"matrix {identifier!r}"):
            matrix = self.manifest["matrices"][identifier]
            parts = {component: self._numbers(name) for component, name in matrix["tensors"].items()}
            check(len(x) == matrix["side"], f"side {matrix['side']}, expected {len(x)}")
            return multiply(matrix["form"], len(x), parts, x)

    def matrix(self, identifier: str) -> Array:
        with refusals(self.path):
            return self._times(identifier, np.eye(self.manifest["matrices"][identifier]["side"]))

    def apply(self, tau: Mapping[str, ArrayLike]) -> dict[str, Array]:
        """G τ; a parameter that τ lacks counts as zero."""
        with refusals(self.path):
            ...
