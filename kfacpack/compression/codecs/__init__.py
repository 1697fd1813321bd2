"""The codecs, one file each. A new one is a file and its line here."""

from kfacpack.compression.codecs.base import Codec
from kfacpack.compression.codecs.bf16 import Bf16
from kfacpack.compression.codecs.block import Block
from kfacpack.compression.codecs.fp16 import Fp16
from kfacpack.compression.codecs.int8 import Int8
from kfacpack.compression.codecs.prune import Prune
from kfacpack.compression.codecs.svd import Svd

CODECS: dict[str, type[Codec]] = {
    each.name: each
    for each in (
        Block,
        Svd,
        Prune,
        Int8,
        Fp16,
        Bf16,
    )
}

__all__ = ["CODECS", "Codec"]
