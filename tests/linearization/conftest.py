"""The small models of every family that tests/models has."""

from models.conftest import _no_network, bert_folder, pairs, pictures, t5_folder, tiny_clip  # noqa: F401
