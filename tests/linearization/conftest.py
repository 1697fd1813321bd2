"""The fixtures of tests/models with small models of every family."""

from models.conftest import _no_network, bert_folder, pairs, pictures, t5_folder, tiny_clip  # noqa: F401
