"""A reader of kfac bundles (see README.md) that needs only numpy: `open_bundle(path).quadratic(tau)`."""

import hashlib
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "I8": "i1"}


@contextmanager
def refusals(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as fault:  # bad files provoke any: a key missing, JSON too deep, a side beyond memory
        text = str(fault) if isinstance(fault, ValueError) else repr(fault)
        raise ValueError(text if text.startswith(where) else f"{where}: {text}") from fault


def check(holds: object, fault: str) -> None:
    if not holds:
        raise ValueError(fault)


def parse(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        check(len(dict(pairs)) == len(pairs), f"a key occurs twice among {[key for key, _ in pairs]}")
        return dict(pairs)

    check(sum(map(text.count, ",[{")) < 524_289, "header or manifest: more than 524288 of ',', '[' and '{'")
    return json.loads(text, object_pairs_hook=unique, parse_constant=lambda word: check(False, word))


def joined(join: dict[str, Any], indices: dict[str, Array]) -> Array:
    """ΔW (section 5), but of indices into all parameters laid end to end: it can gather and scatter."""
    whole = np.full((join["rows"], join["columns"]), -1)
    for piece in join["pieces"]:
        part, (top, left) = np.atleast_1d(indices[piece["parameter"]]), piece.get("at", (0, 0))
        start, stop = piece.get("rows", (0, len(part)))
        check(0 <= start < stop <= len(part) and min(top, left) >= 0, f"piece {piece}: out of bounds")
        column, matrix = part[start:stop].reshape(-1, 1), part[start:stop].reshape(stop - start, -1)
        part = {"matrix": matrix, "transposed": matrix.T, "column": column}[piece.get("view", "matrix")]
        whole[top : top + part.shape[0], left : left + part.shape[1]] = part
    return whole


def decoded(form: str, n: int, part: dict[str, Array]) -> Array:
    """The matrix of side n (section 4) made of these components; of form `diagonal`, just the diagonal."""
    data, count = part["data"], len(part["data"]) if form == "block" else 1
    side = -(-n // count)
    scale = part.get("scale", np.ones(count * side)).reshape(count, side)
    check((data.dtype == np.int64) == ("scale" in part) and (scale >= 0).all(), "scale: not as I8 needs it")
    if form in ("dense", "diagonal"):
        check(data.shape == ((n, n) if form == "dense" else (n,)) and len(part) == 1, f"shape {data.shape}")
        return data
    if form == "lowrank":
        check(data.shape == (n, *part["weights"].shape), f"shape {data.shape}")
        return np.asarray((data * scale.T * part["weights"]) @ (data * scale.T).T)
    lower = np.zeros((n, n))
    if form == "sparse":
        row, column = part["rows"], part["columns"]
        sound = (np.diff(row * n + column) > 0).all() and (column >= 0).all() and (column <= row).all()
        check(sound and row.shape == column.shape == data.shape, "rows and columns: bad order or bounds")
        lower[row, column] = data * scale[0, row]
    else:
        check(form in ("packed", "block") and data.size == count * math.comb(side + 1, 2), "form or shape")
        for k, group in enumerate(np.array_split(np.arange(n), count)):
            row, column = np.tril_indices(len(group))
            lower[group[row], group[column]] = data.reshape(count, -1)[k, : len(row)] * scale[k, row]
    return lower + np.tril(lower, -1).T


class Bundle:
    def __init__(self, path: str | Path) -> None:
        self.path, raw = str(path), Path(path).read_bytes()
        with refusals(self.path):
            start = 8 + int.from_bytes(raw[:8], "little")
            check(start <= min(len(raw), 8 + 2**24) and raw[8:9] == b"{", f"header: no {start - 8} bytes of JSON")
            head, self.data, end = raw[:start], memoryview(raw)[start:], 0
            self.tensors = parse(head[8:].decode())
            self.digest: str = self.tensors["__metadata__"]["kfac.sha256"]
            seal = hashlib.sha256(head.replace(self.digest.encode(), b"0" * 64)).hexdigest()
            check(seal == self.digest and head.count(seal.encode()) == 1, "kfac.sha256: the seal is broken")
            self.manifest: dict[str, Any] = parse(self.tensors.pop("__metadata__")["kfac"])
            version, requires = self.manifest["version"], self.manifest.get("requires", [])
            check(version.split(".")[0] == "1" and requires == [], f"unknown {version=} or {requires=}")
            for name, entry in sorted(self.tensors.items(), key=lambda item: item[1]["data_offsets"]):
                start, end = end, end + math.prod(entry["shape"]) * np.dtype(DTYPES[entry["dtype"]]).itemsize
                check(entry["data_offsets"] == [start, end], f"tensor {name!r}: {entry}, not {start}, {end}")
            listed = self.tensors.keys() == self.manifest["tensors"].keys()
            check(listed and end == len(self.data), "tensors: not those of the manifest, or more data")
            self.parameters: list[str] = [entry["name"] for entry in self.manifest["base"]["parameters"]]

    def _numbers(self, name: str, dtype: str, shape: list[int], data_offsets: list[int]) -> Array:
        raw = self.data[slice(*data_offsets)]
        check(hashlib.sha256(raw).hexdigest() == self.manifest["tensors"][name], f"tensor {name!r}: bad SHA-256")
        found = np.frombuffer(raw, DTYPES[dtype]).reshape(shape)
        numbers = (found.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else found
        check(np.isfinite(numbers).all(), f"tensor {name!r}: not finite")
        return numbers.astype(np.int64 if dtype in ("I32", "I8") else np.float64)

    def matrix(self, identifier: str, expand: bool = True) -> Array:  # long diagonals must not expand
        with refusals(self.path), refusals(f"matrix {identifier!r}"):
            entry = self.manifest["matrices"][identifier]
            check(entry.get("version", 1) == 1, f"unknown version of form {entry['form']!r}")
            part = {key: self._numbers(name, **self.tensors[name]) for key, name in entry["tensors"].items()}
            found = decoded(entry["form"], entry["side"], part)
            return np.diag(found) if expand and found.ndim == 1 else found

    def apply(self, tau: dict[str, Array]) -> dict[str, Array]:
        with refusals(self.path):
            indices, total, blocks = {}, 0, self.manifest["blocks"]
            for entry in self.manifest["base"]["parameters"]:
                start, total = total, total + math.prod(entry["shape"])
                indices[entry["name"]] = np.arange(start, total).reshape(entry["shape"])
            places = [joined(block["join"], indices) for block in blocks]
            check(np.array_equal(np.sort(np.concatenate(places, None)), np.arange(total)), "blocks: bad join")
            flat, result = np.zeros((2, total))  # a parameter that tau lacks counts as zero
            for name, value in tau.items():
                check(np.shape(value) == indices[name].shape, f"tau: {name!r} must be {indices[name].shape}")
                flat[indices[name]] = value
            for block, place in zip(blocks, places, strict=True):
                if block["structure"] == "kronecker":
                    for term in block["terms"]:
                        product = self.matrix(term["B"]) @ flat[place] @ self.matrix(term["A"])
                        result[place] += term.get("weight", 1) * product
                else:
                    multiply = {"dense": np.matmul, "diagonal": np.multiply}[block["structure"]]
                    matrix = self.matrix(block["matrix"], multiply is np.matmul).reshape(place.size, -1)
                    result[place] = multiply(matrix, flat[place].reshape(-1, 1)).reshape(place.shape)
            return {name: result[index, ...] for name, index in indices.items()}

    def quadratic(self, tau: dict[str, Array]) -> float:
        return float(sum(np.vdot(tau[name], value) for name, value in self.apply(tau).items() if name in tau))


open_bundle = Bundle
if __name__ == "__main__":
    bundle = open_bundle(sys.argv[1])
    print(bundle.manifest.get("source", {}).get("task"), bundle.manifest["base"].get("name"), bundle.digest)
    for block in bundle.manifest["blocks"]:
        print(f"{block['name']!r}: {block['structure']} {block['join']['rows']} x {block['join']['columns']}")
