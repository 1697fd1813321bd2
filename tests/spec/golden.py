"""Writes the JSON Schema and the golden files that do not exist yet. Existing golden files are never overwritten.

    python tests/spec/golden.py

The files in `spec/golden` are published: every later version must read them and compute the same numbers.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "spec" / "golden"
SCHEMA = ROOT / "spec" / "kfac-1.3.schema.json"
EXPECTED = GOLDEN / "expected.json"
SHARDED = GOLDEN / "shards" / "sharded.kfac.index.json"


def schema_text() -> str:
    """Returns the JSON Schema of the manifest."""
    from kfacpack.format.manifest import Manifest

    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **_for_files(Manifest.model_json_schema())}
    schema["title"] = "Manifest of a kfac bundle, format 1.3"
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _for_files(schema: Any) -> Any:
    """Adapts pydantic's schema to files: unknown keys are allowed, no key is null, and there are no Python examples."""
    if isinstance(schema, list):
        return [_for_files(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    python_only = (("default", None), ("additionalProperties", False))
    adapted = {key: _for_files(value) for key, value in schema.items() if (key, value) not in python_only}
    if {"type": "null"} in adapted.get("anyOf", []):
        (only,) = (option for option in adapted.pop("anyOf") if option != {"type": "null"})
        adapted |= only
    if isinstance(description := adapted.get("description"), str):
        adapted["description"] = description.split("\n\nExample:")[0]
    return adapted


def golden_tau(parameters: list[tuple[str, tuple[int, ...]]]) -> dict[str, np.ndarray]:
    """Returns a reproducible task vector: element k of parameter i is ((37 k + 11 i) mod 101 - 50) / 64."""
    return {
        name: (((37 * np.arange(np.prod(shape, dtype=int)) + 11 * i) % 101 - 50) / 64).reshape(shape)
        for i, (name, shape) in enumerate(parameters)
    }


def expected_numbers(path: Path) -> dict[str, object]:
    """Returns the numbers that a reader must compute from a bundle, in float64."""
    import torch

    import kfacpack as kp
    from kfacpack.curvature.curvature import matrix_of

    bundle, curvature = kp.Bundle(path), kp.load(path)
    tau = golden_tau([(p.name, p.shape) for p in curvature.about.base.parameters])
    wide = {name: torch.from_numpy(value) for name, value in tau.items()}
    dense = {name: matrix_of(bundle, name).dense(torch.float64) for name in bundle.matrices}
    return {
        "sha256": bundle.digest,
        "quadratic": float(curvature.quadratic(wide)),
        **({"metric": curvature.about.metric} if curvature.about.metric else {}),
        **({"output_scale": scale.model_dump()} if (scale := curvature.about.output_scale) else {}),
        "apply": {name: value.flatten().tolist() for name, value in curvature.apply(wide).items()},
        "matrices": {name: {"trace": float(m.trace()), "norm": float(m.norm())} for name, m in dense.items()},
    }


def write_good() -> None:
    """Writes the missing golden files that readers must accept."""
    sys.path.insert(0, str(ROOT / "tests"))
    from kit import MATRIX_FORMS, small_curvature

    from kfacpack import Curvature
    from kfacpack.format.manifest import REDUCE, Loss, Merge, OutputScale, Parent

    for stored_as in MATRIX_FORMS:
        if not (target := GOLDEN / f"{stored_as}.kfac").exists():
            small_curvature(stored_as, seed=len(stored_as)).save(target, pack=stored_as != "dense")
    if not (target := GOLDEN / "output-scale.kfac").exists():
        plain = small_curvature("packed", seed=9)
        function = plain.about.function.model_copy(update={"output": "hidden-state", "normalized": False})
        scale = OutputScale(mean_square=600.5, variance=21.25)
        about = plain.about.model_copy(update={"function": function, "output_scale": scale})
        Curvature(plain.blocks, about).save(target)
    if not (target := GOLDEN / "metric.kfac").exists():
        plain = small_curvature("packed", seed=3)
        function = plain.about.function.model_copy(update={"output": "hidden-state", "normalized": False})
        Curvature(plain.blocks, plain.about.model_copy(update={"function": function, "metric": "kl"})).save(target)
    if not (target := SHARDED).exists():
        target.parent.mkdir(exist_ok=True)
        small_curvature("packed", seed=7).save(GOLDEN / "sharded.kfac")
        small_curvature("packed", seed=7).save(target, max_shard_size=200)
    if not (target := GOLDEN / "merged.kfac").exists():
        plain = small_curvature("block", seed=5)
        parents = tuple(
            Parent(sha256=digit * 64, weight=weight, task=f"toy@{digit}/2", dataset_size=50)
            for digit, weight in (("1", 0.5), ("2", 1.5))
        )
        about = plain.about.model_copy(
            update={
                "merge": Merge(rule="optimal", rank=2, parents=parents),
                "scaling": REDUCE,
                "source": None,
            }
        )
        losses = (Loss(step="optimal", frobenius=0.25), Loss(step="block:3", frobenius=0.5, quadratic=0.125))
        blocks = [replace(block, losses=losses) for block in plain.blocks]
        Curvature(blocks, about).save(target)


def write_vector() -> None:
    """Writes the golden task vector, with sparse changes, if it is missing."""
    sys.path.insert(0, str(ROOT / "tests"))
    from vectors.test_sparse_vectors import sparse

    if not (target := GOLDEN / "sparse.safetensors").exists():
        sparse().save(target)


def write_refused() -> None:
    """Writes the missing golden files that every reader must reject, named after the reason."""
    sys.path.insert(0, str(ROOT / "tests"))
    from kit import forge, rebased

    source, folder = GOLDEN / "packed.kfac", GOLDEN / "refused"
    folder.mkdir(exist_ok=True)
    raw = source.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    flipped = bytearray(raw)
    flipped[len(raw) // 2 + start // 2] ^= 1
    header = bytearray(raw)
    header[start // 2] ^= 1

    def nan(h, m, d):  # type: ignore[no-untyped-def]
        from hashlib import sha256

        begin, end = h["proj/B"]["data_offsets"]
        d[begin : begin + 4] = np.float32(np.nan).tobytes()
        entry = next(entry for entry in m["matrices"] if entry["name"] == "proj/B")
        entry["tensors"][0]["sha256"] = sha256(d[begin:end]).hexdigest()

    damaged = {
        "truncated": raw[:-3],
        "tensor-byte-flipped": bytes(flipped),
        "header-byte-flipped": bytes(header),
    }

    def uncovered(h, m, d):  # type: ignore[no-untyped-def]
        m["base"]["parameters"].append({"name": "extra", "dtype": "F32", "shape": [1], "sha256": "0" * 64})
        rebased(m)

    def gap(h, m, d):  # type: ignore[no-untyped-def]
        last = max((name for name in h if name != "__metadata__"), key=lambda name: h[name]["data_offsets"])
        h[last]["data_offsets"] = [offset + 4 for offset in h[last]["data_offsets"]]
        d.extend(bytes(4))

    edits = {
        "parameter-not-covered": uncovered,
        "gap-between-tensors": gap,
        "factor-of-the-wrong-side": lambda h, m, d: m["blocks"][0]["join"].update(rows=4),
        "infinite-weight": lambda h, m, d: m["blocks"][1]["terms"][0].update(weight=float("1e308") * 10),
        "null": lambda h, m, d: m.update(producer=None),
        "major-version-2": lambda h, m, d: m.update(version="2.0"),
        "unknown-feature": lambda h, m, d: m.update(requires=["not-yet-invented"]),
        "unknown-form": lambda h, m, d: m["matrices"][0].update(form="not-yet-invented"),
        "not-a-number": nan,
    }
    for name, data in damaged.items():
        if not (folder / f"{name}.kfac").exists():
            (folder / f"{name}.kfac").write_bytes(data)
    for name, edit in edits.items():
        if not (folder / f"{name}.kfac").exists():
            forge(source, folder / f"{name}.kfac", edit)


def main() -> None:
    """Writes all files."""
    GOLDEN.mkdir(exist_ok=True)
    SCHEMA.write_text(schema_text(), encoding="utf-8")
    write_good()
    write_vector()
    write_refused()
    expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    for path in sorted(GOLDEN.glob("*.kfac")):
        expected.setdefault(path.name, expected_numbers(path))
    EXPECTED.write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
