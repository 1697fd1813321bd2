"""Helpers for tests: small curvatures in every matrix form, forged files, and checks of errors and warnings."""

from __future__ import annotations

import json
import pickle
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kfacpack as kp
from kfacpack.curvature.matrices.components import InMemoryTensors
from kfacpack.curvature.matrices.dense import Dense, Packed
from kfacpack.curvature.matrices.matrix import Matrix
from kfacpack.curvature.matrices.structured import BlockDiagonal, Diagonal, LowRank, Sparse
from kfacpack.format.container import MANIFEST_KEY, SEAL_KEY, UNSEALED, seal
from kfacpack.format.manifest import Parameter, base_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor


@contextmanager
def refused(error: type[Exception], *facts: object, **fields: object) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expects `error` with each fact in its message, whatever the wording, and with the given attributes.

    The facts (a file, a name, a number found or expected) and the attributes (`path`, `where`, `target`) distinguish
    the error from all others of its class.
    """
    with pytest.raises(error) as caught:
        yield caught
    for fact in facts:
        assert str(fact) in str(caught.value), f"{fact!r} is not in {str(caught.value)!r}"
    for name, value in fields.items():
        assert str(getattr(caught.value, name)) == str(value), name


@contextmanager
def warned(category: type[Warning], *facts: object) -> Iterator[None]:
    """Expects a warning of `category` with each fact in its message."""
    with pytest.warns(category) as caught:
        yield
    messages = [str(warning.message) for warning in caught if issubclass(warning.category, category)]
    assert any(all(str(fact) in message for fact in facts) for message in messages), (facts, messages)


def random_psd(side: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a random positive semi-definite matrix, symmetric to the last bit."""
    factor = torch.randn(side, side + 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    full = factor @ factor.T / (side + 2)
    return ((full + full.T) / 2).to(dtype)


def _block(m: Tensor) -> Matrix:
    return BlockDiagonal.from_dense(m, count=min(3, len(m)))


def _lowrank(m: Tensor) -> Matrix:
    return LowRank.from_dense(m, rank=(len(m) + 1) // 2)


def _sparse(m: Tensor) -> Matrix:
    return Sparse.from_dense(m, fraction=0.6)


def _packed_as(dtype: torch.dtype) -> Callable[[Tensor], Matrix]:
    return lambda m: Packed.from_dense(m.to(dtype))


MATRIX_FORMS: dict[str, Callable[[Tensor], Matrix]] = {
    "dense": Dense.of,
    "packed": Packed.from_dense,
    "block": _block,
    "lowrank": _lowrank,
    "sparse": _sparse,
    "diagonal": lambda m: Diagonal.of(m.diag().clone()),
    "packed-int8": lambda m: Packed.from_dense(m).quantized(),
    "block-int8": lambda m: _block(m).quantized(),
    "lowrank-int8": lambda m: _lowrank(m).quantized(),
    "sparse-int8": lambda m: _sparse(m).quantized(),
    "packed-f64": _packed_as(torch.float64),
    "packed-f16": _packed_as(torch.float16),
    "packed-bf16": _packed_as(torch.bfloat16),
    "block-bf16": lambda m: _block(m.bfloat16()),
    "lowrank-signed": lambda m: LowRank(
        len(m),
        InMemoryTensors(data=m[:, :2].contiguous(), weights=torch.linspace(-1, 1, m[:, :2].shape[1])),
        psd=False,
    ),
}
"""Every matrix form and dtype, by a name for test ids: dense tensor -> Matrix."""


def about(state: dict[str, Tensor], **more: Any) -> kp.About:
    base = kp.identify(state, list(state), family="test", name="small")
    return kp.About(
        base=base,
        function=kp.Function(output="embedding", normalized=True, width=4),
        estimate=kp.Estimate(fisher="mc", probe="orthogonal", probes=2, seed=7),
        source=kp.Source(task="toy", dataset="nobody/toy", split="train", examples=12, dataset_size=100),
        **more,
    )


def linear_join(name: str, out: int, inputs: int, bias: bool = True) -> kp.Join:
    pieces = [kp.Piece(parameter=f"{name}.weight")]
    if bias:
        pieces.append(kp.Piece(parameter=f"{name}.bias", at=(0, inputs)))
    return kp.Join(rows=out, columns=inputs + bias, pieces=tuple(pieces))


def small_curvature(stored_as: str = "dense", seed: int = 0, out: int = 5, inputs: int = 6) -> kp.Curvature:
    """Two layers that share A, a fused projection in two blocks, a norm, a bare `x @ W`, a scale and a token."""
    make = MATRIX_FORMS[stored_as]
    generator = torch.Generator().manual_seed(seed)
    state = {
        "one.weight": torch.randn(out, inputs, generator=generator),
        "one.bias": torch.randn(out, generator=generator),
        "two.weight": torch.randn(3, inputs, generator=generator),
        "two.bias": torch.randn(3, generator=generator),
        "attn.in_proj_weight": torch.randn(4, 3, generator=generator),
        "norm.weight": torch.randn(3, generator=generator),
        "norm.bias": torch.randn(3, generator=generator),
        "proj": torch.randn(3, 2, generator=generator),
        "scale": torch.randn((), generator=generator),
        "token": torch.randn(1, 4, generator=generator),
    }
    shared, other = make(random_psd(inputs + 1, seed + 1)), make(random_psd(3, seed + 2))
    rows = [(0, 2), (2, 4)]
    blocks = [
        kp.CurvatureBlock(
            "one.weight",
            "linear",
            linear_join("one", out, inputs),
            kp.Kronecker.of(make(random_psd(out, seed + 3)), shared),
        ),
        kp.CurvatureBlock(
            "two.weight",
            "linear",
            linear_join("two", 3, inputs),
            kp.Kronecker(((make(random_psd(3, seed + 4)), shared, 0.5), (other, shared, 1.5))),
        ),
        *(
            kp.CurvatureBlock(
                f"attn.in_proj_weight[{start}:{stop}]",
                "linear",
                kp.Join(rows=2, columns=3, pieces=(kp.Piece(parameter="attn.in_proj_weight", rows=(start, stop)),)),
                kp.Kronecker.of(make(random_psd(2, seed + 5 + start)), other),
            )
            for start, stop in rows
        ),
        kp.CurvatureBlock(
            "norm",
            "layer_norm",
            kp.Join(
                rows=3,
                columns=2,
                pieces=(kp.Piece(parameter="norm.weight"), kp.Piece(parameter="norm.bias", at=(0, 1))),
            ),
            kp.Whole(make(random_psd(6, seed + 9))),
        ),
        kp.CurvatureBlock(
            "proj",
            "matmul",
            kp.Join(rows=2, columns=3, pieces=(kp.Piece(parameter="proj", view="transposed"),)),
            kp.Kronecker.of(make(random_psd(2, seed + 10)), other),
        ),
        kp.CurvatureBlock(
            "scale",
            "multiply",
            kp.Join(rows=1, columns=1, pieces=(kp.Piece(parameter="scale", view="column"),)),
            kp.Whole(Diagonal.of(torch.tensor([0.25]))),
        ),
        kp.CurvatureBlock(
            "token",
            "add",
            kp.Join(rows=4, columns=1, pieces=(kp.Piece(parameter="token", view="column"),)),
            kp.Whole(make(random_psd(4, seed + 11))),
        ),
    ]
    return kp.Curvature(blocks, about(state))


def of_task(task: str, size: int | None = 100, seed: int = 0, stored_as: str = "packed") -> kp.Curvature:
    """Returns the curvature of the same model on a task; the factors depend on the seed."""
    model, factors = small_curvature(stored_as), small_curvature(stored_as, seed)
    source = kp.Source(task=task, examples=12, dataset_size=size)
    return kp.Curvature(factors.blocks, model.about.model_copy(update={"source": source}))


def dense_block(block: kp.CurvatureBlock) -> Tensor:
    """Returns G of one block over the flattened ΔW (row-major), by building every Kronecker product."""
    if isinstance(block.structure, kp.Whole):
        return block.structure.matrix.dense(torch.float64)
    terms = block.structure.terms
    return sum(weight * torch.kron(B.dense(torch.float64), A.dense(torch.float64)) for B, A, weight in terms)


def random_tau(curvature: kp.Curvature, seed: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {p.name: p.shape for p in curvature.about.base.parameters}
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def forge(source: Path, target: Path, edit: Callable[[dict[str, Any], dict[str, Any], bytearray], None]) -> Path:
    """Writes a copy of a bundle after `edit(header, manifest, data)`, with a valid seal."""
    raw = source.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])
    manifest = json.loads(header["__metadata__"][MANIFEST_KEY])
    edit(header, manifest, data)
    header["__metadata__"][MANIFEST_KEY] = json.dumps(manifest)
    return write_sealed(target, json.dumps(header), bytes(data))


def write_sealed(target: Path, header: str, data: bytes) -> Path:
    """Writes a file with this header text and data, and a valid seal (the 64 digits after its key)."""
    key = header.index(f'"{SEAL_KEY}"') + len(SEAL_KEY) + 2
    start = header.index('"', key) + 1
    blank = (header[:start] + UNSEALED + header[start + 64 :]).encode()
    blank = len(blank).to_bytes(8, "little") + blank
    target.write_bytes(blank.replace(UNSEALED.encode(), seal(blank).encode(), 1) + data)
    return target


def rebased(manifest: dict[str, Any]) -> None:
    """Recomputes base.sha256 from the parameters."""
    parameters = tuple(Parameter.model_validate(parameter) for parameter in manifest["base"]["parameters"])
    manifest["base"]["sha256"] = base_digest(parameters)


def error_message(path: Path) -> str:
    """Returns the message of the BundleError from opening a file and reading all its tensors; fails without one."""
    with pytest.raises(kp.BundleError) as caught:
        bundle = kp.Bundle(path)
        for name in bundle.tensors:
            bundle.bytes_of(name)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 1500
    assert str(caught.value).isprintable()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return str(caught.value)


def matrix_entry(manifest: dict[str, Any], name: str = "one.weight/B") -> Any:
    """Returns the entry of a matrix in a manifest."""
    return next(entry for entry in manifest["matrices"] if entry["name"] == name)


def data_start(raw: bytes) -> int:
    """Returns the offset of the first tensor of a file."""
    return 8 + int.from_bytes(raw[:8], "little")
