"""Reads kfac bundles (README.md) with numpy. Checks only what its results depend on."""

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FORMS = {(form, 1) for form in ("dense", "packed", "block", "lowrank", "sparse", "diagonal")}
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "I8": "i1"}


@contextmanager
def errors_at(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # invalid files cause various errors: missing keys, deeply nested JSON, too large sides
        text = f"{error}" if isinstance(error, ValueError) else repr(error)
        raise ValueError(text if text.startswith(where) else f"{where}: {text}") from error


def check(condition: object, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def parse(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        bad = len(values := dict(pairs)) < len(pairs) or any(v in (None, math.inf, -math.inf) for v in values.values())
        check(not bad, f"duplicate key, or null or infinite value, among the keys {list(values)}")
        return values

    check(sum(map(text.count, ",[{")) <= 2**18, "header or manifest: more than 262144 of ',', '[' and '{'")
    return json.loads(text, object_pairs_hook=unique, parse_constant=lambda word: check(False, word))


def joined(join: dict[str, Any], indices: dict[str, Array]) -> Array:
    """Returns ΔW (section 5), filled with indices into the concatenation of all parameters."""
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
    """Returns the matrix of side n (section 4) with these components; for the form `diagonal`, only the diagonal."""
    data, count = part["data"], len(part["data"]) if form == "block" else 1
    side = -(-n // count)
    scale = part.get("scale", np.ones(count * side)).reshape(count, side)
    check((data.dtype == np.int64) == ("scale" in part) and (scale >= 0).all(), "scale: negative, or not with I8 data")
    if form in ("dense", "diagonal"):
        check(data.shape == ((n, n) if form == "dense" else (n,)) and len(part) == 1, f"shape {data.shape}")
        return data
    if form == "lowrank":
        check(data.shape == (n, *part["weights"].shape), f"shape {data.shape}")
        return np.asarray((data * scale.T * part["weights"]) @ (data * scale.T).T)
    lower = np.zeros((n, n))
    if form == "sparse":
        row, column = part["rows"], part["columns"]
        valid = (np.diff(row * n + column) > 0).all() and (column >= 0).all() and (column <= row).all()
        check(valid and row.shape == column.shape == data.shape, "rows and columns: invalid order or bounds")
        lower[row, column] = data * scale[0, row]
    else:
        check(form in ("packed", "block") and data.size == count * math.comb(side + 1, 2), "invalid form or shape")
        for k, group in enumerate(np.array_split(np.arange(n), count)):
            row, column = np.tril_indices(len(group))
            lower[group[row], group[column]] = data.reshape(count, -1)[k, : len(row)] * scale[k, row]
    return np.asarray(lower + np.tril(lower, -1).T)


class Bundle:
    def __init__(self, path: str | Path) -> None:
        self.path, raw = str(path), Path(path).read_bytes()
        with errors_at(self.path):
            start = 8 + int.from_bytes(raw[:8], "little")
            check(start <= min(len(raw), 8 + 2**23) and raw[8:9] == b"{", f"header: invalid length {start - 8}")
            head, self.data, self.tensors, end = raw[:start], memoryview(raw)[start:], parse(raw[8:start].decode()), 0
            self.digest: str = self.tensors["__metadata__"]["kfac.sha256"]
            seal = hashlib.sha256(head.replace(self.digest.encode(), b"0" * 64)).hexdigest()
            check(seal == self.digest and head.count(seal.encode()) == 1, "kfac.sha256: does not match the header")
            self.manifest: dict[str, Any] = parse(self.tensors.pop("__metadata__")["kfac"])
            version, unknown = self.manifest["version"], {*self.manifest.get("requires", ())} - {"metric"}
            check(version.startswith("1.") and not unknown, "version or requires: not supported by this reader")
            self.metric: str = self.manifest.get("metric", "l2")  # section 3.2
            for name, entry in sorted(self.tensors.items(), key=lambda item: item[1]["data_offsets"]):
                start, end = end, end + math.prod(entry["shape"]) * np.dtype(DTYPES[entry["dtype"]]).itemsize
                check(entry["data_offsets"] == [start, end], f"tensor {name!r}: {entry}, expected {start}, {end}")
            self.matrices = {matrix["name"]: matrix for matrix in self.manifest["matrices"]}
            listed = sorted(tensor["name"] for matrix in self.matrices.values() for tensor in matrix["tensors"])
            check(listed == sorted(self.tensors) and end == len(self.data), "tensors: do not match the manifest")
            unknown = {n for n, m in self.matrices.items() if (m["form"], m.get("version", 1)) not in FORMS}
            check(not unknown, f"matrices {unknown}: unknown form")

    def _numbers(self, name: str, sha256: str) -> Array:
        dtype, raw = self.tensors[name]["dtype"], self.data[slice(*self.tensors[name]["data_offsets"])]
        check(hashlib.sha256(raw).hexdigest() == sha256, f"tensor {name!r}: SHA-256 differs from the manifest's")
        values: Array = np.frombuffer(raw, DTYPES[dtype]).reshape(self.tensors[name]["shape"])
        values = (values.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else values
        check(np.isfinite(values).all(), f"tensor {name!r}: contains NaN or Inf")
        return np.asarray(values, np.int64 if dtype in ("I32", "I8") else np.float64)

    def matrix(self, name: str, expand: bool = True) -> Array:  # a long diagonal would not fit in memory as a matrix
        with errors_at(self.path), errors_at(f"matrix {name!r}"):
            entry = self.matrices[name]
            part = {item["component"]: self._numbers(item["name"], item["sha256"]) for item in entry["tensors"]}
            values = decoded(entry["form"], entry["side"], part)
            return np.diag(values) if expand and values.ndim == 1 else values

    def apply(self, tau: dict[str, Array]) -> dict[str, Array]:
        with errors_at(self.path):
            indices, total, blocks = {}, 0, self.manifest["blocks"]
            for entry in self.manifest["base"]["parameters"]:
                start, total = total, total + math.prod(entry["shape"])
                indices[entry["name"]] = np.arange(start, total).reshape(entry["shape"])
            places = [joined(block["join"], indices) for block in blocks]
            check(np.array_equal(np.sort(np.concatenate(places, None)), np.arange(total)), "blocks: invalid join")
            flat, result = np.zeros((2, total))  # parameters that are not in tau are zero
            for name, value in tau.items():
                check(np.shape(value) == indices[name].shape, f"tau: {name!r} must have shape {indices[name].shape}")
                flat[indices[name]] = value
            for block, place in zip(blocks, places, strict=True):
                if block["structure"] == "kronecker":
                    for term in block["terms"]:
                        product = self.matrix(term["B"]) @ flat[place] @ self.matrix(term["A"])
                        result[place] += term.get("weight", 1) * product
                else:
                    dense = {"dense": True, "diagonal": False}[block["structure"]]
                    G, vector = self.matrix(block["matrix"], expand=dense), flat[place].ravel()
                    check(G.ndim == 1 + dense, f"block {block['name']!r}: the matrix is not {block['structure']!r}")
                    result[place] = (G @ vector if dense else G * vector).reshape(place.shape)
            return {name: result[index, ...] for name, index in indices.items()}

    def output_scale(self) -> dict[str, float] | None:
        scale: dict[str, float] | None = self.manifest.get("output_scale")  # section 3.3
        check(scale is None or min(scale["mean_square"], scale["variance"]) >= 0, f"output_scale: {scale}")
        return scale

    def quadratic(self, tau: dict[str, Array]) -> float:
        return float(sum(np.vdot(tau[name], value) for name, value in self.apply(tau).items() if name in tau))
