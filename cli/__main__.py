"""Runs the `kfacpack` command as `python -m kfacpack_cli`, for launchers such as torchrun."""

from __future__ import annotations

from . import run

run()
