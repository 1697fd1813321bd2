"""Hypothesis has no deadline, because the machine may be busy, and the same examples in every run.

Tasks are cached in a temporary folder that the worker processes of `make test` share, the Hub is not contacted, and
each process computes with one thread. Commands that tests start inherit these settings, so that their files can be
compared byte by byte with those of the test process. The test process does not wait for the disk: a power failure
may damage temporary files. Those of `make test` are in memory, if there is enough.
"""

import os

# The conftest.py of a subfolder imports torch before `pytest_configure` is called.
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")

import shutil
import tempfile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings

settings.register_profile("here", deadline=None, max_examples=15, derandomize=True)
settings.load_profile("here")


MEMORY = Path("/dev/shm")
"""Folder of files in memory, on Linux. On a disk, the many small files of the tests take longer."""


def enough_memory():
    return MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 8 * 2**30


def pytest_configure(config):
    os.fsync = lambda descriptor: None
    # pytest-xdist sets COLUMNS in its workers, from which the console of the commands would take its width.
    os.environ.pop("COLUMNS", None)
    import kfacpack_cli.console  # noqa: F401

    if not hasattr(config, "workerinput"):  # which pytest-xdist sets in workers; they inherit the environment
        if config.getoption("numprocesses", None) and enough_memory():
            files = TemporaryDirectory(prefix="kfacpack-tests-", dir=MEMORY, ignore_cleanup_errors=True)
            config.add_cleanup(files.cleanup)
            os.environ["TMPDIR"] = tempfile.tempdir = files.name
        folder = TemporaryDirectory(prefix="kfacpack-cache-")
        config.add_cleanup(folder.cleanup)
        os.environ["KFACPACK_CACHE"] = folder.name


@pytest.fixture(autouse=True)
def no_workers():
    """Commands that run in the test process choose the number of worker processes, which would affect later tests."""
    yield
    from kfacpack.models.data_loading import use_workers

    use_workers(0)
