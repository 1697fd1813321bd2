"""Models from timm, such as `timm:vit_tiny_patch16_224`. f is the normalised vector of pooled features."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import normalize

from kfacpack._compat import compiler_deferred, make_torchvision_importable, require, silence_logging
from kfacpack.errors import KfacpackError, first_line
from kfacpack.format.container import Container
from kfacpack.format.manifest import Function
from kfacpack.models.data_loading import image_batches
from kfacpack.models.model import CachedRepository, Model, ModelRequest, seeded_rng, unknown_model
from kfacpack.models.prompts import PromptStyle
from kfacpack.models.weights import (
    LOCAL_WEIGHTS,
    CheckpointFile,
    check_safetensors,
    download_weights,
    format_call,
    safetensors_name,
    weights_error,
)

RESIZED = ("*pos_embed*",)
"""fnmatch patterns of the tensors that timm resamples if the image size changes."""


class TimmFamily:
    """Models from timm."""

    prefix = name = "timm"
    form = "timm:NAME"
    takes_folder = False
    f = "the normalised pooled features before the classifier"
    head = "prototypes"
    prompt_styles: tuple[PromptStyle, ...] = ()

    def load(self, request: ModelRequest) -> Model:
        """Loads a model. The classifier in a weights file may be missing or differ from the published classifier."""
        name, weights, image_size, dtype, device, seed, *_ = request
        require(extra="timm", feature=f"timm:{name}")
        with compiler_deferred():
            make_torchvision_importable()
            from timm.data.config import resolve_model_data_config
            from timm.data.transforms_factory import create_transform

        pretrained = _pretrained_config(name)
        # Models with a fixed input size take it as an argument; the others accept images of any size.
        size = {"img_size": image_size} if image_size and pretrained.fixed_input_size else {}
        with silence_logging(), seeded_rng(seed):
            if weights == "random":
                module = _build(name, size)
            else:
                file = check_safetensors(weights) if weights else _download(pretrained, name)
                module = _build_from_file(name, file, pretrained, size)
        module = module.to(device=device, dtype=dtype).eval()
        setting = resolve_model_data_config(module, {"img_size": image_size} if image_size else {})
        height, width = setting["input_size"][1:]

        def forward(images: Tensor) -> Tensor:
            features = module.forward_features(images.to(device, dtype))
            return normalize(module.forward_head(features, pre_logits=True), dim=-1)

        def load_command(path: Path) -> str:
            return format_call(
                "timm.create_model", name, num_classes=module.num_classes, checkpoint_path=str(path), **size
            )

        tag = name.partition(".")[2] or (pretrained.tag if weights is None else "")
        return Model(
            family=self.name,
            name=name,
            revision=request.revision(tag or None),
            module=module,
            forward=forward,
            function=Function(
                output="embedding",
                normalized=True,
                width=int(getattr(module, "head_hidden_size", module.num_features)),
                detail=f"normalize(forward_head(forward_features(x), pre_logits=True)) of {height}x{width} pixels",
            ),
            frozen=("patch_embed.*", "pos_embed", *(f"{head}.*" for head in _classifiers(pretrained))),
            prepare=image_batches(create_transform(**setting, is_training=False), name),
            preprocessing=f"timm: RGB, resize ({setting['interpolation']}) and crop ({setting['crop_mode']}, "
            f"{setting['crop_pct']}) to {height}x{width}, "
            f"normalize mean {list(setting['mean'])} std {list(setting['std'])}",
            checkpoint=CheckpointFile(module, load_command),
        )

    def downloaded_names(self, repository: CachedRepository) -> Iterator[str]:
        """Yields the names of the models whose weights are in a cached repository."""
        make_torchvision_importable()
        import timm

        for name in timm.list_pretrained():
            pretrained = timm.get_pretrained_cfg(name)
            same = pretrained and pretrained.hf_hub_id == repository.name
            if same and safetensors_name(_filename(pretrained)) in repository.files:
                yield f"timm:{name}"


def _pretrained_config(name: str) -> Any:
    """Returns timm's config for a model's pretrained weights: input size, classifier and location on the Hub."""
    import timm

    base, _, tag = name.partition(".")
    if base not in (names := timm.list_models()):
        raise unknown_model("timm", base, names)
    tags = [model.partition(".")[2] for model in timm.list_pretrained(f"{base}.*")]
    if tag and tag not in tags:
        raise KfacpackError(f"unknown timm tag {tag!r} for {base}; available tags: {', '.join(tags) or 'none'}")
    return timm.get_pretrained_cfg(name)


def _classifiers(pretrained: Any) -> tuple[str, ...]:
    heads = pretrained.classifier or ()
    return (heads,) if isinstance(heads, str) else tuple(heads)


def _download(pretrained: Any, name: str) -> Path:
    """Downloads a model's safetensors file. timm's own download may fall back to a pickle, so it is not used."""
    if not pretrained.hf_hub_id:
        raise KfacpackError(f"timm:{name} has no published weights on the Hub. {LOCAL_WEIGHTS}")
    return download_weights(pretrained.hf_hub_id, _filename(pretrained), f"timm:{name}")


def _filename(pretrained: Any) -> str:
    return pretrained.hf_hub_filename or "pytorch_model.bin"


def _build(name: str, size: dict[str, Any], **options: Any) -> Any:
    import timm

    try:
        return timm.create_model(name, **size, **options)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise KfacpackError(f"timm cannot build {name}: {first_line(error)}") from error


def _build_from_file(name: str, path: Path, pretrained: Any, size: dict[str, Any]) -> Any:
    """Builds the model with the weights in a file. timm resamples the position embedding to the image size."""
    import timm

    # The file may have a different classifier, or none. timm would drop a different classifier and then ignore every
    # missing key, so the model is built with the number of classes in the file.
    heads = [Container(path).tensors.get(f"{head}.weight") for head in _classifiers(pretrained)]
    classes = next((head.shape[0] for head in heads if head is not None), 0)
    overlay = {"file": str(path), "num_classes": classes, "label_offset": 0, "custom_load": False}
    try:
        return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **size)
    except (RuntimeError, KeyError, ValueError, TypeError, AssertionError) as error:
        untrained = _build(name, size, num_classes=classes)
        raise weights_error(path, f"timm:{name}", error, untrained.state_dict, RESIZED) from error
