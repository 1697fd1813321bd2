"""A valid bundle, and a path for a modified copy of it."""

import pytest
from kit import small_curvature


@pytest.fixture(scope="package")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("attacks") / "good.kfac"
    small_curvature("block-int8").save(path)
    return path


@pytest.fixture
def target(tmp_path):
    return tmp_path / "bad.kfac"
