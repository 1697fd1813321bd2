"""A fake Hub on the loopback interface for huggingface_hub's client, with a cache and tokens of its own."""

from __future__ import annotations

import socket

import pytest
from hub.fake_hub import FakeHub
from huggingface_hub import constants, file_download
from kit import of_task, small_curvature
from vectors.small_vectors import vector

import kfacpack as kp


def set_endpoint(monkeypatch, endpoint):
    """Has the same effect as HF_ENDPOINT when huggingface_hub is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    # huggingface_hub before 1.0 has a copy there.
    monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A fake Hub without a logged-in user; see `log_in`."""
    server = FakeHub()
    set_endpoint(monkeypatch, server.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def disconnect(monkeypatch):
    """A function that disconnects the Hub: from then on, no server answers."""

    def use_closed_port():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            set_endpoint(monkeypatch, f"http://127.0.0.1:{free.getsockname()[1]}")

    return use_closed_port


@pytest.fixture
def log_in(monkeypatch):
    """A function that logs a user in."""

    def as_user(name="owner"):
        monkeypatch.setenv("HF_TOKEN", f"hf_{name}")

    return as_user


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory):
    """Files to share: bundles of two tasks, their merge, a large bundle, two vectors and their sum."""
    folder = tmp_path_factory.mktemp("artifacts")
    one, two = of_task("one"), of_task("two", seed=20)
    source = one.about.source.model_copy(update={"dataset": "nobody/one", "license": "CC BY 4.0"})
    kp.Curvature(one.blocks, one.about.model_copy(update={"source": source})).save(folder / "one.kfac")
    two.save(folder / "two.kfac")
    kp.merge([folder / "one.kfac", folder / "two.kfac"]).save(folder / "both.kfac")
    small_curvature("dense", out=300, inputs=300).save(folder / "large.kfac")
    vector("one").save(folder / "one.safetensors")
    vector("two", seed=2).save(folder / "two.safetensors")
    kp.add([folder / "one.safetensors", folder / "two.safetensors"]).save(folder / "sum.safetensors")
    return folder
