"""Environments of their own, for the checks of the wheel and of the versions of other packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Environment:
    """A virtual environment without the packages of the system.

    Args:
        folder: Folder of the environment.
        clear: Whether to remove the packages of an existing environment.
    """

    def __init__(self, folder: Path, *, clear: bool):
        self.folder = folder.absolute()
        subprocess.run([sys.executable, "-m", "venv", *(["--clear"] if clear else []), str(folder)], check=True)

    def install(self, *arguments: str) -> None:
        """Installs packages with pip. Modules are compiled when they are first imported, which takes less time."""
        options = ("--quiet", "--disable-pip-version-check", "--no-compile")
        self.run("python", "-m", "pip", "install", *options, *arguments).check_returncode()

    def run(
        self, program: str, *arguments: str, capture: bool = False, cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment, without contact to the Hub."""
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONNOUSERSITE": "1", **variables}
        command = [str(self.folder / "bin" / program), *arguments]
        return subprocess.run(command, capture_output=capture, text=True, check=False, cwd=cwd, env=variables)

    def versions(self) -> dict[str, str]:
        """Returns the installed packages, by lower-case name with hyphens."""
        listed = self.run("python", "-m", "pip", "--disable-pip-version-check", "list", "--format=json", capture=True)
        listed.check_returncode()
        return {normalize(package["name"]): package["version"] for package in json.loads(listed.stdout)}

    @property
    def python(self) -> str:
        """Version of Python."""
        return self.run(
            "python", "-c", "import platform; print(platform.python_version())", capture=True
        ).stdout.strip()


def normalize(name: str) -> str:
    """Returns the name of a package in lower case with hyphens."""
    return name.lower().replace("_", "-").replace(".", "-")
