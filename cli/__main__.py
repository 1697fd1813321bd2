"""`python -m kfacpack_cli`, for launchers that start modules rather than commands."""

from . import run

run()
