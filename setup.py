"""Packages: those found below `kfacpack`, and the folder `cli` under the name `kfacpack_cli`.

pyproject.toml can either find packages or rename one, not both.
"""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["kfacpack*"]), "kfacpack_cli"], package_dir={"kfacpack_cli": "cli"})
