"""Published files stay readable, by the library and by the reader that needs no torch."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch

import kfacpack as kp
from kfacpack.curvature.curvature import matrix_of
from kfacpack.format.schema import LAYOUTS

spec = importlib.util.spec_from_file_location("golden", Path(__file__).with_name("golden.py"))
golden = importlib.util.module_from_spec(spec)
spec.loader.exec_module(golden)

READER = golden.ROOT / "spec" / "reader.py"
EXPECTED = json.loads(golden.EXPECTED.read_text())
FILES = sorted(path.name for path in golden.GOLDEN.glob("*.kfac"))
REFUSED = sorted((golden.GOLDEN / "refused").glob("*.kfac"))


def test_every_golden_file_has_expected_numbers():
    assert set(EXPECTED) == set(FILES)


def test_golden_files_cover_every_form_structure_and_dtype():
    bundles = [kp.Bundle(golden.GOLDEN / name) for name in FILES]
    assert {m.form for bundle in bundles for m in bundle.manifest.matrices} == set(LAYOUTS)
    assert {b.structure for bundle in bundles for b in bundle.manifest.blocks} == {
        "kronecker",
        "dense",
        "diagonal",
    }
    assert {t.dtype for bundle in bundles for t in bundle.tensors.values()} == {
        "F64",
        "F32",
        "F16",
        "BF16",
        "I32",
        "I8",
    }


@pytest.mark.parametrize("name", FILES)
def test_the_library_computes_the_golden_numbers(name):
    expected = EXPECTED[name]
    bundle, curvature = kp.Bundle(golden.GOLDEN / name), kp.load(golden.GOLDEN / name)
    shapes = [(p.name, p.shape) for p in curvature.about.base.parameters]
    tau = {key: torch.from_numpy(value) for key, value in golden.golden_tau(shapes).items()}
    assert bundle.digest == expected["sha256"]
    assert float(curvature.quadratic(tau)) == pytest.approx(expected["quadratic"], rel=1e-12)
    assert curvature.about.metric == expected.get("metric")
    scale = curvature.about.output_scale
    assert (scale.model_dump() if scale else None) == expected.get("output_scale")
    applied = curvature.apply(tau)
    assert list(applied) == list(expected["apply"])
    for key, values in expected["apply"].items():
        np.testing.assert_allclose(applied[key].flatten().numpy(), values, rtol=1e-9, atol=1e-12)
    assert set(expected["matrices"]) == set(bundle.matrices)
    for key, values in expected["matrices"].items():
        dense = matrix_of(bundle, key).dense(torch.float64)
        assert {"trace": float(dense.trace()), "norm": float(dense.norm())} == pytest.approx(values, rel=1e-9)


def test_a_bundle_in_several_files_is_the_bundle_in_one(tmp_path):
    whole, index = golden.GOLDEN / "sharded.kfac", golden.SHARDED
    assert kp.Bundle(index).digest == kp.Bundle(whole).digest == EXPECTED["sharded.kfac"]["sha256"]
    assert kp.verify(index).holds
    joined = tmp_path / "joined.kfac"
    subprocess.run([sys.executable, golden.ROOT / "spec" / "shards.py", index, joined], check=True, timeout=60)
    assert joined.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("name", FILES)
def test_golden_files_still_verify(name):
    assert kp.verify(golden.GOLDEN / name).holds


@pytest.mark.parametrize("path", REFUSED, ids=lambda path: path.stem)
def test_the_library_rejects_invalid_golden_files(path):
    with pytest.raises(kp.BundleError, match=path.name):
        torch.stack(
            [
                block.structure.apply(torch.zeros(block.join.rows, block.join.columns)).sum()
                for block in kp.load(path).blocks
            ]
        )


WITHOUT_TORCH = """
import importlib.util, json, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "safetensors", "kfacpack", "pydantic"):
            raise ImportError(f"{name} is not importable here")

sys.meta_path.insert(0, NoTorch())

def module(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

import numpy as np
reader, golden = module("reader", sys.argv[1]), module("golden", sys.argv[2])
results = {}
for path in sys.argv[3:]:
    try:
        bundle = reader.Bundle(path)
        shapes = [(p["name"], tuple(p["shape"])) for p in bundle.manifest["base"]["parameters"]]
        tau = golden.golden_tau(shapes)
        dense = {name: bundle.matrix(name) for name in (m["name"] for m in bundle.manifest["matrices"])}
        results[path] = {
            "sha256": bundle.digest,
            "quadratic": float(bundle.quadratic(tau)),
            "metric": bundle.metric,
            "output_scale": bundle.output_scale(),
            "apply": {name: value.ravel().tolist() for name, value in bundle.apply(tau).items()},
            "matrices": {n: {"trace": float(m.trace()), "norm": float(np.linalg.norm(m))} for n, m in dense.items()},
        }
    except ValueError as error:
        results[path] = str(error)
assert not {"torch", "safetensors", "kfacpack", "pydantic"} & set(sys.modules)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def read_without_torch():
    """The numbers of all golden files, computed in a process that cannot import torch."""
    paths = [*(str(golden.GOLDEN / name) for name in FILES), *map(str, REFUSED)]
    arguments = [sys.executable, "-c", WITHOUT_TORCH, str(READER), golden.__file__, *paths]
    process = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.parametrize("name", FILES)
def test_the_torch_free_reader_computes_the_golden_numbers(read_without_torch, name):
    numbers, expected = read_without_torch[str(golden.GOLDEN / name)], EXPECTED[name]
    assert numbers["sha256"] == expected["sha256"]
    assert numbers["quadratic"] == pytest.approx(expected["quadratic"], rel=1e-12)
    assert numbers["output_scale"] == expected.get("output_scale")
    assert numbers["metric"] == expected.get("metric", "l2")
    assert set(numbers["apply"]) == set(expected["apply"])
    for key, values in expected["apply"].items():
        np.testing.assert_allclose(numbers["apply"][key], values, rtol=1e-9, atol=1e-12)
    for key, values in expected["matrices"].items():
        assert numbers["matrices"][key] == pytest.approx(values, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("path", REFUSED, ids=lambda path: path.stem)
def test_the_torch_free_reader_rejects_invalid_golden_files(read_without_torch, path):
    assert isinstance(read_without_torch[str(path)], str)
    assert read_without_torch[str(path)].startswith(str(path))


def test_the_torch_free_reader_is_short_and_stands_alone():
    text = READER.read_text()
    assert len(text.splitlines()) <= 150
    imports = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imports <= {"numpy", *sys.stdlib_module_names}


def test_the_schema_file_is_up_to_date():
    assert golden.SCHEMA.read_text("utf-8") == golden.schema_text(), "run 'make golden'"


@pytest.mark.parametrize("name", FILES)
def test_golden_manifests_follow_the_schema(name):
    raw = (golden.GOLDEN / name).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    jsonschema.validate(json.loads(header["__metadata__"]["kfac"]), json.loads(golden.SCHEMA.read_text("utf-8")))


def test_the_example_in_the_text_follows_the_schema():
    text = (golden.ROOT / "spec" / "README.md").read_text("utf-8")
    example = text.split("```json\n")[1].split("```")[0]
    for short in set(re.findall(r'"sha256": "(..…)"', example)):
        example = example.replace(short, "0" * 64)
    jsonschema.validate(json.loads(example), json.loads(golden.SCHEMA.read_text("utf-8")))


@pytest.mark.parametrize("change", [{"version": 1}, {"source": None}, {"blocks": [{"structure": "circulant"}]}])
def test_the_schema_rejects_invalid_manifests(change):
    manifest = kp.Bundle(golden.GOLDEN / "packed.kfac").manifest_json
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**manifest, **change}, json.loads(golden.SCHEMA.read_text("utf-8")))
