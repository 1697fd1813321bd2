"""Timings on a shared machine say nothing, so no deadline; the same examples every time, so a failure comes back.

Tasks are cached in a temporary folder, nothing is asked of the Hub, and one thread computes: `make test` runs two
processes at once. All of it holds in the commands that tests start too, so that what they write can be compared with
what is made here, byte by byte.
"""

import os
from tempfile import TemporaryDirectory

from hypothesis import settings

settings.register_profile("here", deadline=None, max_examples=15, derandomize=True)
settings.load_profile("here")


def pytest_configure(config):
    folder = TemporaryDirectory(prefix="kfacpack-cache-")
    config.add_cleanup(folder.cleanup)
    os.environ.update(KFACPACK_CACHE=folder.name, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
