"""Factors that others published, into a bundle: a layout of theirs is one file and one line here."""

from __future__ import annotations

from kfacpack.importing.imported import Importer
from kfacpack.importing.mammoth import import_mammoth

IMPORTERS: dict[str, Importer] = {"mammoth": import_mammoth}
"""By what `kfacpack import` calls the layout."""
