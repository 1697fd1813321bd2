"""Curvature of the size of a ViT-B's vision tower: 4 linear layers with their biases in each of its layers."""

from __future__ import annotations

from collections.abc import Callable

import torch

import kfacpack as kp
from kfacpack.curvature.matrices.matrix import Matrix

SHAPES = {
    "attn.in_proj_weight": (2304, 768),
    "attn.out_proj.weight": (768, 768),
    "mlp.c_fc.weight": (3072, 768),
    "mlp.c_proj.weight": (768, 3072),
}
SIDES = sorted({side for rows, columns in SHAPES.values() for side in (rows, columns + 1)})
"""Of the matrices: outputs, and inputs with the bias's."""


def tower(name: str, layers: int, matrix: Callable[[int], Matrix]) -> kp.Curvature:
    """`matrix` gives each factor, (side, side), by its side."""
    state, blocks = {}, []
    for layer in range(layers):
        for linear, (rows, columns) in SHAPES.items():
            weight = f"visual.transformer.resblocks.{layer}.{linear}"
            bias = weight.removesuffix("weight") + "bias"
            state |= {weight: torch.zeros(rows, columns), bias: torch.zeros(rows)}
            pieces = (kp.Piece(parameter=weight), kp.Piece(parameter=bias, at=(0, columns)))
            join = kp.Join(rows=rows, columns=columns + 1, pieces=pieces)
            factors = kp.Kronecker.of(matrix(rows), matrix(columns + 1))
            blocks.append(kp.CurvatureBlock(weight, "linear", join, factors))
    base = kp.identify(state, list(state), family="open_clip", name=name)
    function = kp.Function(output="embedding", normalized=True, width=512)
    return kp.Curvature(blocks, kp.About(base=base, function=function))
