"""The methods, one file each."""

from kfacpack.vectors.methods.base import Input, Method
from kfacpack.vectors.methods.dare import Dare
from kfacpack.vectors.methods.iso import Iso
from kfacpack.vectors.methods.iso_cts import IsoCts
from kfacpack.vectors.methods.sum import Sum
from kfacpack.vectors.methods.ties import Ties
from kfacpack.vectors.methods.tsv import Tsv

METHODS: dict[str, type[Method]] = {
    each.name: each
    for each in (
        Sum,
        Ties,
        Dare,
        Tsv,
        Iso,
        IsoCts,
    )
}

__all__ = ["METHODS", "Input", "Method"]
