"""The tiny models of the tests of model families."""

from models.conftest import bert_folder, t5_folder, tiny_clip

__all__ = ["bert_folder", "t5_folder", "tiny_clip"]
