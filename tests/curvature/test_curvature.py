"""A curvature multiplies as its dense block-diagonal matrix, in memory, from a file and on a device."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from hashlib import sha256

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import MATRIX_FORMS, dense_block, forge, linear_join, random_psd, random_tau, refused, small_curvature

import kfacpack as kp
from kfacpack.curvature.matrices.components import BundleTensors
from kfacpack.curvature.matrices.dense import Dense
from kfacpack.format.container import MAX_HEADER_BYTES, MAX_JSON_VALUES

seeds = st.integers(0, 2**16)


def joined(block: kp.CurvatureBlock, tau: dict[str, torch.Tensor]) -> torch.Tensor:
    """ΔW by hand, element by element."""
    delta = torch.full((block.join.rows, block.join.columns), torch.nan, dtype=torch.float64)
    for piece in block.join.pieces:
        values = tau[piece.parameter].double()
        values = values[piece.rows[0] : piece.rows[1]] if piece.rows else values
        if piece.view == "column" or values.dim() == 1:
            values = values.flatten()[:, None]
        elif piece.view == "transposed":
            values = values.T
        for i, row in enumerate(values.tolist()):
            for j, value in enumerate(row):
                delta[piece.at[0] + i, piece.at[1] + j] = value
    assert not delta.isnan().any()
    return delta


@pytest.mark.parametrize("stored_as", MATRIX_FORMS)
@given(seed=seeds)
def test_quadratic_and_apply_agree_with_the_dense_kronecker_product(stored_as, seed):
    curvature = small_curvature(stored_as, seed)
    tau = random_tau(curvature, seed)
    blocks = [(dense_block(block), joined(block, tau).flatten()) for block in curvature.blocks]
    expected = sum(float(v @ G @ v) for G, v in blocks)
    size = sum(float(v.abs() @ G.abs() @ v.abs()) for G, v in blocks)
    assert float(curvature.quadratic(tau)) == pytest.approx(expected, rel=1e-5, abs=1e-5 * size)

    applied = curvature.apply(tau)
    assert list(applied) == list(curvature.parameters)
    for (G, v), block in zip(blocks, curvature.blocks, strict=True):
        product = joined(block, applied).flatten()
        torch.testing.assert_close(product, G @ v, rtol=1e-5, atol=1e-5 * float((G.abs() @ v.abs()).max()))


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("stored_as", MATRIX_FORMS)
@given(seed=seeds)
def test_save_and_load(tmp_path_factory, stored_as, pack, seed):
    path = tmp_path_factory.mktemp("bundle") / "t.kfac"
    curvature = small_curvature(stored_as, seed)
    curvature.save(path, pack=pack)
    loaded = kp.load(path)
    tau = random_tau(curvature, seed)
    assert loaded.parameters == curvature.parameters
    assert loaded.about == curvature.about
    for old, new in zip(curvature.blocks, loaded.blocks, strict=True):
        assert (new.name, new.operation, new.join) == (old.name, old.operation, old.join)
        for (role, before), (_, after) in zip(old.structure.matrices(), new.structure.matrices(), strict=True):
            assert torch.equal(before.dense(torch.float64), after.dense(torch.float64)), role
    torch.testing.assert_close(loaded.quadratic(tau), curvature.quadratic(tau))
    torch.testing.assert_close(loaded.apply(tau), curvature.apply(tau))

    again = path.with_name("again.kfac")
    loaded.save(again, pack=pack)
    assert again.read_bytes() == path.read_bytes()


def test_the_same_curvature_gives_the_same_bytes(tmp_path):
    for name in ("a.kfac", "b.kfac"):
        small_curvature("block-int8").save(tmp_path / name)
    assert (tmp_path / "a.kfac").read_bytes() == (tmp_path / "b.kfac").read_bytes()


def test_a_shared_matrix_is_stored_and_counted_once(tmp_path):
    curvature = small_curvature("packed")
    curvature.save(tmp_path / "t.kfac")
    bundle = kp.Bundle(tmp_path / "t.kfac")
    one, two = bundle.manifest.blocks[:2]
    assert one.terms[0].A == two.terms[0].A == two.terms[1].A == "one.weight/A"
    assert curvature.nbytes == kp.load(tmp_path / "t.kfac").nbytes == sum(t.nbytes for t in bundle.tensors.values())
    loaded = kp.load(tmp_path / "t.kfac")
    assert loaded.blocks[0].structure.terms[0][1] is loaded.blocks[1].structure.terms[0][1]


def test_quadratic_is_the_exact_ggn_where_kfac_is_exact():
    """One linear layer, f = W x + b: G = I ⊗ E[a aᵀ], and the drift is E ‖ΔW a‖²."""
    torch.manual_seed(0)
    x = torch.randn(20, 4, dtype=torch.float64)
    a = torch.cat([x, torch.ones(20, 1)], dim=1)
    layer = torch.nn.Linear(4, 3).double()
    B, A = Dense.of(torch.eye(3, dtype=torch.float64)), Dense.of(a.T @ a / 20)
    about = kp.About(
        base=kp.identify(
            {"l.weight": layer.weight, "l.bias": layer.bias}, ["l.weight", "l.bias"], family="t", name="t"
        ),
        function=kp.Function(output="logits", normalized=False, width=3),
    )
    curvature = kp.Curvature([kp.CurvatureBlock("l", "linear", linear_join("l", 3, 4), kp.Kronecker.of(B, A))], about)
    tau = {"l.weight": torch.randn(3, 4, dtype=torch.float64), "l.bias": torch.randn(3, dtype=torch.float64)}
    drift = (x @ tau["l.weight"].T + tau["l.bias"]).square().sum(dim=1).mean()
    torch.testing.assert_close(curvature.quadratic(tau), drift)


def test_the_gradient_of_quadratic_is_twice_apply():
    curvature = small_curvature("block")
    tau = {name: value.requires_grad_() for name, value in random_tau(curvature, dtype=torch.float64).items()}
    grads = torch.autograd.grad(curvature.quadratic(tau), list(tau.values()))
    for name, grad in zip(tau, grads, strict=True):
        torch.testing.assert_close(grad, 2 * curvature.apply(tau)[name].detach())


@pytest.mark.parametrize("stored_as", ["dense", "packed", "block", "lowrank", "diagonal", "packed-int8"])
def test_functional_gradients(stored_as):
    curvature = small_curvature(stored_as)
    tau = random_tau(curvature, dtype=torch.float64)
    grads = torch.func.grad(curvature.quadratic)(tau)
    for name, value in curvature.apply(tau).items():
        torch.testing.assert_close(grads[name], 2 * value)


def test_autocast_has_no_effect():
    curvature = small_curvature()
    tau = random_tau(curvature)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(curvature.quadratic(tau), small_curvature().quadratic(tau))
        inside = curvature.quadratic(tau)
    assert torch.equal(inside, curvature.quadratic(tau))


def test_missing_parameters_count_as_zero():
    curvature = small_curvature()
    tau = random_tau(curvature)
    part = {"one.weight": tau["one.weight"], "norm.bias": tau["norm.bias"]}
    padded = {name: part.get(name, torch.zeros_like(value)) for name, value in tau.items()}
    torch.testing.assert_close(curvature.quadratic(part), curvature.quadratic(padded))
    applied, expected = curvature.apply(part), curvature.apply(padded)
    assert set(applied) == {"one.weight", "one.bias", "norm.weight", "norm.bias"}
    for name, value in expected.items():
        torch.testing.assert_close(applied.get(name, torch.zeros_like(value)), value)


def test_half_precision_vectors_are_computed_in_float32():
    curvature = small_curvature()
    tau = {name: value.bfloat16() for name, value in random_tau(curvature).items()}
    wide = {name: value.float() for name, value in tau.items()}
    assert curvature.quadratic(tau).dtype == torch.float32
    assert torch.equal(curvature.quadratic(tau), curvature.quadratic(wide))
    assert {value.dtype for value in curvature.apply(tau).values()} == {torch.bfloat16}


def test_a_task_vector_that_does_not_fit_is_refused():
    curvature = small_curvature()
    with refused(kp.TaskVectorError, "'one.wieght' is not in curvature.parameters", "did you mean 'one.weight'"):
        curvature.quadratic({"one.wieght": torch.zeros(5, 6)})
    with refused(kp.TaskVectorError, "one.weight", "[5, 6]", "[6, 5]"):
        curvature.apply({"one.weight": torch.zeros(6, 5)})
    with refused(kp.TaskVectorError, "'one.weight'", "a tensor", "list"):
        curvature.quadratic({"one.weight": [[0.0]]})
    with refused(kp.TaskVectorError, "empty"):
        curvature.quadratic({})
    for nothing in (None, [1]):
        with refused(kp.TaskVectorError, "mapping", type(nothing).__name__):
            curvature.quadratic(nothing)


def test_a_misspelt_field_is_refused():
    with refused(ValueError, "att", "extra_forbidden"):
        kp.Piece(parameter="one.bias", att=(0, 6))
    with refused(ValueError, "dataset_sise", "extra_forbidden"):
        kp.Source(task="toy", dataset_sise=3)


def test_opening_reads_no_tensor(tmp_path):
    """A bundle with all tensor bytes overwritten still opens; using a tensor raises an error that names it."""
    small_curvature("packed").save(tmp_path / "t.kfac")
    raw = bytearray((tmp_path / "t.kfac").read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    raw[start:] = b"\xaa" * (len(raw) - start)
    (tmp_path / "t.kfac").write_bytes(raw)
    curvature = kp.load(tmp_path / "t.kfac")
    assert curvature.nbytes > 0
    with refused(kp.CorruptTensor, "SHA-256", path=tmp_path / "t.kfac", where="tensor 'one.weight/A'"):
        curvature.quadratic({"one.weight": torch.zeros(5, 6)})


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_are_not_written(tmp_path, bad):
    curvature = small_curvature()
    curvature.blocks[0].structure.terms[0][0].components["data"][2, 2] = bad
    (tmp_path / "t.kfac").write_text("the old file")
    with refused(kp.BundleError, "NaN", where="tensor 'one.weight/B'"):
        curvature.save(tmp_path / "t.kfac")
    assert [p.name for p in tmp_path.iterdir()] == ["t.kfac"]
    assert (tmp_path / "t.kfac").read_text() == "the old file"


def test_an_asymmetric_matrix_of_a_file_is_neither_packed_nor_used(tmp_path):
    small_curvature("dense").save(tmp_path / "full.kfac", pack=False)

    def edit(header, manifest, data):
        start, stop = header["one.weight/B"]["data_offsets"]
        data[start : start + 8] = torch.tensor([1.0, 9.0]).numpy().tobytes()
        manifest["matrices"][0]["tensors"][0]["sha256"] = sha256(data[start:stop]).hexdigest()

    lopsided = kp.load(forge(tmp_path / "full.kfac", tmp_path / "lopsided.kfac", edit))
    for use in (lambda: lopsided.save(tmp_path / "t.kfac"), lambda: lopsided.quadratic(random_tau(lopsided))):
        with refused(kp.CorruptTensor, "symmetric", path=tmp_path / "lopsided.kfac", where="tensor 'one.weight/B'"):
            use()
    assert not (tmp_path / "t.kfac").exists()


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (lambda blocks: blocks[1:], ("parameter 'one.weight'", "covered exactly once", "[5, 6]")),
        (lambda blocks: [*blocks, blocks[0]], ("block 'one.weight'", "two blocks")),
        (
            lambda blocks: [replace(blocks[0], structure=blocks[1].structure), *blocks[1:]],
            ("block 'one.weight' of 5×7", "B of side length 5 and A of side length 7", "3 and 7"),
        ),
        (
            lambda blocks: [*blocks[:-1], replace(blocks[-1], structure=kp.Whole(Dense.of(random_psd(3, 0))))],
            ("block 'token' of 4×1", "side length 4", "3"),
        ),
    ],
)
def test_blocks_that_do_not_fit_the_parameters_are_refused(change, facts):
    curvature = small_curvature()
    with refused(kp.KfacpackError, *facts):
        kp.Curvature(change(list(curvature.blocks)), curvature.about)


def test_a_header_that_is_too_large_is_not_written(tmp_path):
    count = 11_000
    state = {f"p{k}": torch.zeros(1) for k in range(count)}
    blocks = [
        kp.CurvatureBlock(
            name,
            "scale",
            kp.Join(rows=1, columns=1, pieces=(kp.Piece(parameter=name),)),
            kp.Whole(kp.Diagonal.of(torch.ones(1))),
        )
        for name in state
    ]
    base = kp.identify(state, list(state), family="t", name="t")
    function = kp.Function(output="logits", normalized=False, width=3)
    with refused(kp.BundleError, "header", MAX_HEADER_BYTES, MAX_JSON_VALUES):
        kp.Curvature(blocks, kp.About(base=base, function=function)).save(tmp_path / "t.kfac")
    assert list(tmp_path.iterdir()) == []


def test_a_loaded_curvature_can_be_copied_and_pickled(tmp_path):
    small_curvature("packed").save(tmp_path / "t.kfac")
    loaded = kp.load(tmp_path / "t.kfac")
    tau = random_tau(loaded)
    for twin in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert torch.equal(twin.quadratic(tau), loaded.quadratic(tau))


def test_a_file_changed_in_place_is_refused_when_it_is_read_again(tmp_path):
    small_curvature("packed", 1).save(tmp_path / "t.kfac")
    small_curvature("packed", 2).save(tmp_path / "other.kfac")
    loaded = kp.load(tmp_path / "t.kfac")
    tau = random_tau(loaded)
    loaded.quadratic(tau)
    other = (tmp_path / "other.kfac").read_bytes()
    for changed in (other, other[:100]):
        (tmp_path / "t.kfac").write_bytes(changed)
        with refused(kp.BundleError, "modified in place", path=tmp_path / "t.kfac"):
            loaded.quadratic(tau)


def test_invalid_metadata_is_not_written(tmp_path):
    curvature = small_curvature()
    source = curvature.about.source.model_copy(update={"task": "../x"})
    edited = kp.Curvature(curvature.blocks, curvature.about.model_copy(update={"source": source}))
    with refused(kp.BundleError, "'../x'", where="source.task"):
        edited.save(tmp_path / "t.kfac")
    assert list(tmp_path.iterdir()) == []


def test_negative_int8_factors_are_refused(tmp_path):
    small_curvature("packed-int8").save(tmp_path / "good.kfac")

    def edit(header, manifest, data):
        start, stop = header["one.weight/B.scale"]["data_offsets"]
        data[start : start + 4] = torch.tensor([-1.0]).numpy().tobytes()
        manifest["matrices"][0]["tensors"][1]["sha256"] = sha256(data[start:stop]).hexdigest()

    forged = kp.load(forge(tmp_path / "good.kfac", tmp_path / "bad.kfac", edit))
    with refused(kp.CorruptTensor, "negative", path=tmp_path / "bad.kfac", where="tensor 'one.weight/B.scale'"):
        forged.quadratic(random_tau(forged))


@pytest.mark.parametrize("stored_as", MATRIX_FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_curvature_on_a_device_computes_the_same(stored_as, dtype):
    packed = small_curvature(stored_as)
    resident = packed.to("cpu", torch.promote_types(dtype, torch.float32))
    tau = random_tau(packed, dtype=dtype)
    for name, value in packed.apply(tau).items():
        torch.testing.assert_close(resident.apply(tau)[name], value)
    torch.testing.assert_close(resident.quadratic(tau), packed.quadratic(tau))
    if stored_as not in ("sparse", "sparse-int8"):  # which choose the faster kernel for each product
        assert torch.equal(resident.quadratic(tau), packed.quadratic(tau))


@pytest.mark.parametrize("stored_as", MATRIX_FORMS)
def test_a_curvature_on_a_device_reads_nothing_again(tmp_path, monkeypatch, stored_as):
    small_curvature(stored_as).save(tmp_path / "t.kfac")
    packed = kp.load(tmp_path / "t.kfac")
    tau = random_tau(packed)
    expected = packed.quadratic(tau)
    resident = packed.to("cpu")
    reads = []
    read = BundleTensors.__getitem__
    monkeypatch.setattr(BundleTensors, "__getitem__", lambda self, name: reads.append(name) or read(self, name))
    for _ in range(2):
        torch.testing.assert_close(resident.quadratic(tau), expected)
        resident.apply(tau)
    assert not reads
    # Another dtype is computed as by the packed curvature.
    wide = {name: value.double() for name, value in tau.items()}
    assert torch.equal(resident.quadratic(wide), packed.quadratic(wide))
    assert reads


def test_a_curvature_on_a_device_keeps_its_identity_and_can_be_saved(tmp_path):
    small_curvature("block-int8").save(tmp_path / "t.kfac")
    for packed in (small_curvature("block-int8"), kp.load(tmp_path / "t.kfac")):
        resident = packed.to("cpu")
        assert (resident.about, resident.digest, resident.nbytes) == (packed.about, packed.digest, packed.nbytes)
        resident.save(tmp_path / "again.kfac")
        assert (tmp_path / "again.kfac").read_bytes() == (tmp_path / "t.kfac").read_bytes()
        one, two = resident.blocks[:2]
        assert one.structure.terms[0][1] is two.structure.terms[0][1]
        tau = random_tau(packed)
        for twin in (copy.deepcopy(resident), pickle.loads(pickle.dumps(resident)), resident.to("cpu")):
            assert torch.equal(twin.quadratic(tau), packed.quadratic(tau))
        assert kp.compress(resident, "bf16").digest == kp.compress(packed, "bf16").digest


def test_a_curvature_on_a_device_is_differentiable():
    curvature = small_curvature("packed").to("cpu", torch.float64)
    tau = random_tau(curvature, dtype=torch.float64)
    grads = torch.func.grad(curvature.quadratic)(tau)
    for name, value in curvature.apply(tau).items():
        torch.testing.assert_close(grads[name], 2 * value)


def test_matrices_on_another_device_are_moved_there():
    """The meta device stands in for a GPU; task vectors on the CPU are computed as before."""
    packed = small_curvature("dense")
    resident = packed.to("meta")
    tau = random_tau(packed)
    assert torch.equal(resident.quadratic(tau), packed.quadratic(tau))
    for block in resident.blocks:
        for _, matrix in block.structure.matrices():
            operator = matrix.operator(torch.float32, torch.device("meta"))
            assert operator is matrix.operator(torch.float32, torch.device("meta"))
            assert all(tensor.is_meta for tensor in operator.tensors)


def test_a_device_dtype_below_float32_is_refused():
    with refused(kp.KfacpackError, "torch.bfloat16"):
        small_curvature().to("cpu", torch.bfloat16)
