"""The command line with worker processes that are forked from it, which start at once.

A worker process of `kfacpack run --jobs` is a new interpreter, which needs seconds to import torch. In a process of
`processes.py`, which has imported it, the workers can be forked instead. They run the same program.

    Python("-m", "forked_workers", "run", "plan.yaml", "--jobs", 2)
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

from kfacpack.experiments import jobs, worker


class ForkedPopen:
    """What `subprocess.Popen` offers to the scheduler."""

    def __init__(self, arguments, *, stdin, stdout, stderr, bufsize, env):
        assert arguments[1:] == ["-m", "kfacpack.experiments.worker"]
        (child_in, to_child), (from_child, child_out) = os.pipe(), os.pipe()
        self.returncode = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            for number, descriptor in enumerate((child_in, child_out, stderr.fileno())):
                os.dup2(descriptor, number)
            os.closerange(3, 1024)
            sys.stdin = open(0, closefd=False)  # noqa: SIM115 - processes of multiprocessing have another one
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            with suppress(BaseException):
                worker._WorkerProcess().run()
            os._exit(1)
        os.close(child_in)
        os.close(child_out)
        self.stdin, self.stdout = os.fdopen(to_child, "wb", 0), os.fdopen(from_child, "rb", 0)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self):
        while self.poll() is None:
            time.sleep(0.01)
        return self.returncode

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)


jobs.subprocess.Popen = ForkedPopen

if __name__ == "__main__":
    from kfacpack_cli.main import run_app

    import kfacpack.experiments.report

    kfacpack.experiments.report.report = lambda folder, page: page  # drawing its figures takes seconds

    run_app()
