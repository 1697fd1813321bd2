"""Methods to merge task vectors, one file each."""

from __future__ import annotations

from kfacpack.vectors.methods.curvature import ActMatMethod, CurvatureMethod, FisherMethod, RegMeanMethod
from kfacpack.vectors.methods.dare import DareMethod
from kfacpack.vectors.methods.iso import IsoCtsMethod, IsoMethod
from kfacpack.vectors.methods.method import MergeMethod, SumMethod
from kfacpack.vectors.methods.ties import TiesMethod
from kfacpack.vectors.methods.tsv import TsvMethod

METHODS: dict[str, type[MergeMethod]] = {
    method.name: method
    for method in (
        SumMethod,
        TiesMethod,
        DareMethod,
        TsvMethod,
        IsoMethod,
        IsoCtsMethod,
        CurvatureMethod,
        RegMeanMethod,
        FisherMethod,
        ActMatMethod,
    )
}
"""Merge methods by name."""

__all__ = ["METHODS"]
