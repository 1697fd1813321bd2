"""`python -m kfacpack_cli`, for launchers such as torchrun that start modules."""

from __future__ import annotations

from . import run

run()
