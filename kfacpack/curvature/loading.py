"""A bundle into a curvature. Nothing but the header is read until a tensor is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfacpack.bundle.reader import Bundle
from kfacpack.curvature.block import STRUCTURES, CurvatureBlock
from kfacpack.curvature.curvature import Curvature
from kfacpack.curvature.matrices import FORMS
from kfacpack.curvature.matrices.components import InBundle

if TYPE_CHECKING:
    import os

    from kfacpack.curvature.matrices import Matrix


def load(path: str | os.PathLike[str]) -> Curvature:
    """Open a bundle. Its tensors are mapped, and read and checked when touched."""
    return from_bundle(Bundle(path))


def from_bundle(bundle: Bundle) -> Curvature:
    matrices = {name: matrix_of(bundle, name) for name in bundle.matrices}
    blocks = (
        CurvatureBlock(
            entry.name,
            entry.operation,
            entry.join,
            STRUCTURES[entry.structure].from_entry(entry, matrices),
            entry.losses,
        )
        for entry in bundle.manifest.blocks
    )
    return Curvature(blocks, bundle.manifest.about(), bundle=bundle)


def matrix_of(bundle: Bundle, name: str) -> Matrix:
    entry = bundle.matrices[name]
    components = InBundle(bundle, entry.components)
    return FORMS[entry.form](entry.side, components, psd=entry.psd, examples=entry.examples, positions=entry.positions)
