"""`python -m kfacpack_cli`, for launchers that start modules rather than commands."""

from __future__ import annotations

from . import run

run()
