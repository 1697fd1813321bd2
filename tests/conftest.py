"""Timings on a shared machine say nothing, so no deadline; the same examples every time, so a failure comes back.

Tasks are cached in a temporary folder, in the commands that tests start as well.
"""

import os
from tempfile import TemporaryDirectory

from hypothesis import settings

settings.register_profile("here", deadline=None, max_examples=15, derandomize=True)
settings.load_profile("here")


def pytest_configure(config):
    folder = TemporaryDirectory(prefix="kfacpack-cache-")
    config.add_cleanup(folder.cleanup)
    os.environ["KFACPACK_CACHE"] = folder.name
