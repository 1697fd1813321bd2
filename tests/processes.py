"""New Python processes that start quickly, for tests that need one.

Importing torch and the libraries of models takes seconds of computation in every new interpreter. These processes are
forked from a server, an interpreter of its own that has imported them and has done nothing else. Each process gets the
current environment and working directory of the test; variables that torch reads when it is imported have no effect.
Tests of what a command imports start an interpreter with `subprocess` instead.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory

SERVER = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Starts the server of this test process, unless it is running."""
    SERVER.set_forkserver_preload(["preloaded"])
    before = os.environ.get("PYTHONPATH")
    # Python 3.10 to 3.12 do not give the server the module search path of its parent.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before]))
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


class Python:
    """A running process with the arguments of `python`: `-m MODULE`, `-c PROGRAM` or a script, and its arguments.

    Used as a context, it kills the process at the end.
    """

    def __init__(self, *arguments: object, env: Mapping[str, str] | None = None, new_session: bool = False):
        start_server()
        self._folder = TemporaryDirectory()
        self._streams = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        words, streams = [*map(str, arguments)], [*map(str, self._streams)]
        self._process = SERVER.Process(
            target=_run, args=(words, dict(env or os.environ), Path.cwd(), streams, new_session)
        )
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Waits for the end of the process and returns its exit code and output."""
        self._process.join(timeout)
        assert self.returncode is not None, f"still running after {timeout} s"
        output = [path.read_text() if path.exists() else "" for path in self._streams]
        return subprocess.CompletedProcess([], self.returncode, *output)

    def __enter__(self) -> Python:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._folder.cleanup()


def python(*arguments: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a process to its end; see `Python` for the arguments."""
    with Python(*arguments, env=env) as process:
        return process.wait()


def python_twice(*arguments: object) -> list[subprocess.CompletedProcess[str]]:
    """Runs two processes of a distributed computation, with the environment variables that torchrun sets."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [{**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    with Python(*arguments, env=ranks[0]) as first, Python(*arguments, env=ranks[1]) as second:
        return [first.wait(), second.wait()]


def _run(
    arguments: list[str], environment: dict[str, str], folder: Path, streams: list[str], new_session: bool
) -> None:
    """Runs in the new process."""
    if new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    option, *rest = arguments
    if option == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif option == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(option).parent))
        runpy.run_path(option, run_name="__main__")
