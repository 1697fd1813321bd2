"""`save_pretrained`, `push_to_hub` and `from_pretrained`, the methods that curvatures and task vectors share."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class PretrainedMixin:
    """Methods that save to a directory, upload to the Hugging Face Hub, and load from both.

    They follow the conventions of huggingface_hub. The default file name is `curvature.kfac` for a curvature and
    `vector.safetensors` for a task vector.
    """

    def save_pretrained(self, directory: str | os.PathLike[str], *, filename: str | None = None) -> Path:
        """Saves the object to a directory, which is created if it does not exist.

        Args:
            directory: Target directory.
            filename: Name of the file. Defaults to `curvature.kfac` or `vector.safetensors`.

        Returns:
            The path of the file.

        Raises:
            KfacpackError: If `directory` is a file, or `filename` contains a path separator.
        """
        path: Path = _pretrained().save_pretrained(self, directory, filename=filename)
        return path

    def push_to_hub(self, repo_id: str, **settings: Any) -> Any:
        """Uploads the object and a model card to the Hugging Face Hub.

        Args:
            repo_id: Repository, `owner/repo`; created if it does not exist.
            **settings: `filename` (defaults to `curvature.kfac` or `vector.safetensors`), `revision`, `private`,
                `commit_message`, `license` and `base_model`; see `kfacpack.hub.pretrained.push_to_hub`.

        Returns:
            A description of the upload, including the commit id.

        Raises:
            HubError: If the repository cannot be written.
        """
        return _pretrained().push_to_hub(self, repo_id, **settings)

    @classmethod
    def from_pretrained(
        cls, repo_or_path: str | os.PathLike[str], *, revision: str | None = None, filename: str | None = None
    ) -> Self:
        """Loads a curvature or task vector from a local file or directory, or from the Hugging Face Hub.

        Args:
            repo_or_path: A directory or file, `owner/repo`, `owner/repo@revision`, or `hf://owner/repo/file`.
            revision: Branch, tag or commit of the repository. Defaults to the main branch.
            filename: Name of the file. Defaults to `curvature.kfac` or `vector.safetensors`, or else to the only file
                of this kind.

        Returns:
            An instance of this class. Its tensors are read when they are used.

        Raises:
            KfacpackError: If the source does not exist, or contains no file of this kind, or several.
            HubError: If the repository cannot be read.
        """
        instance: Self = _pretrained().from_pretrained(cls, repo_or_path, revision, filename)
        return instance


def _pretrained() -> Any:
    # Imported lazily: kfacpack.hub depends on both classes and is only needed when one of these methods is called.
    return import_module("kfacpack.hub.pretrained")
