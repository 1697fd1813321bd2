"""timm's models: `timm:vit_tiny_patch16_224`. f is the pooled feature before the classifier, normalised."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import normalize

from kfacpack._compat import compiler_deferred, make_torchvision_importable, silence_logging
from kfacpack.errors import KfacpackError, first_line
from kfacpack.format.container import Container
from kfacpack.format.manifest import Function
from kfacpack.models.data_loading import image_batches
from kfacpack.models.model import CachedRepository, Model, ModelRequest, seeded_rng, unknown_model
from kfacpack.models.prompts import PromptStyle
from kfacpack.models.weights import (
    LOCAL_WEIGHTS,
    CheckpointFile,
    as_call,
    check_safetensors,
    download_weights,
    refuse_weights,
    safe_name,
)

RESIZED = ("*pos_embed*",)


class TimmFamily:
    prefix = name = "timm"
    form = "timm:NAME"
    takes_folder = False
    f = "the pooled features before the classifier, normalised"
    head = "prototypes"
    prompt_styles: tuple[PromptStyle, ...] = ()

    def load(self, asked: ModelRequest) -> Model:
        name, weights, image_size, dtype, device, seed, _ = asked
        with compiler_deferred():
            make_torchvision_importable()
            from timm.data.config import resolve_model_data_config
            from timm.data.transforms_factory import create_transform

        trained = _trained(name)
        # Models that fix their input size take it as an argument; the others take pictures of any size.
        size = {"img_size": image_size} if image_size and trained.fixed_input_size else {}
        with silence_logging(), seeded_rng(seed):
            if weights == "random":
                module = _built(name, size)
            else:
                module = _loaded(
                    name, check_safetensors(weights) if weights else _published(trained, name), trained, size
                )
        module = module.to(device=device, dtype=dtype).eval()
        setting = resolve_model_data_config(module, {"img_size": image_size} if image_size else {})
        height, width = setting["input_size"][1:]

        def forward(images: Tensor) -> Tensor:
            features = module.forward_features(images.to(device, dtype))
            return normalize(module.forward_head(features, pre_logits=True), dim=-1)

        def how_to_load(path: Path) -> str:
            return as_call("timm.create_model", name, num_classes=module.num_classes, checkpoint_path=str(path), **size)

        tag = name.partition(".")[2] or (trained.tag if weights is None else "")
        return Model(
            family=self.name,
            name=name,
            revision=asked.revision(tag or None),
            module=module,
            forward=forward,
            function=Function(
                output="embedding",
                normalized=True,
                width=int(getattr(module, "head_hidden_size", module.num_features)),
                detail=f"normalize(forward_head(forward_features(x), pre_logits=True)) of {height}x{width} pixels",
            ),
            frozen=("patch_embed.*", "pos_embed", *(f"{head}.*" for head in _classifiers(trained))),
            prepare=image_batches(create_transform(**setting, is_training=False), name),
            preprocessing=f"timm: RGB, resize ({setting['interpolation']}) and crop ({setting['crop_mode']}, "
            f"{setting['crop_pct']}) to {height}x{width}, "
            f"normalize mean {list(setting['mean'])} std {list(setting['std'])}",
            checkpoint=CheckpointFile(module, how_to_load),
        )

    def downloaded(self, repository: CachedRepository) -> Iterator[str]:
        make_torchvision_importable()
        import timm

        for name in timm.list_pretrained():
            trained = timm.get_pretrained_cfg(name)
            if trained and trained.hf_hub_id == repository.name and safe_name(_filename(trained)) in repository.files:
                yield f"timm:{name}"


def _trained(name: str) -> Any:
    """What timm knows of a model's pretrained weights: their size, classifier, place on the Hub."""
    import timm

    base, _, tag = name.partition(".")
    if base not in (known := timm.list_models()):
        raise unknown_model("timm", base, known)
    tags = [each.partition(".")[2] for each in timm.list_pretrained(f"{base}.*")]
    if tag and tag not in tags:
        raise KfacpackError(f"{base} has no tag {tag!r} in timm; its tags are {', '.join(tags) or 'none'}")
    return timm.get_pretrained_cfg(name)


def _classifiers(trained: Any) -> tuple[str, ...]:
    heads = trained.classifier or ()
    return (heads,) if isinstance(heads, str) else tuple(heads)


def _published(trained: Any, name: str) -> Path:
    """The file behind a name. timm's own download falls back to a pickle, so only the safetensors is asked for."""
    if not trained.hf_hub_id:
        raise KfacpackError(f"timm:{name} stands for no weights that are on the Hub. {LOCAL_WEIGHTS}")
    return download_weights(trained.hf_hub_id, _filename(trained), f"timm:{name}")


def _filename(trained: Any) -> str:
    return trained.hf_hub_filename or "pytorch_model.bin"


def _built(name: str, size: dict[str, Any], **how: Any) -> Any:
    import timm

    try:
        return timm.create_model(name, **size, **how)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise KfacpackError(f"timm cannot build {name}: {first_line(error)}") from error


def _loaded(name: str, path: Path, trained: Any, size: dict[str, Any]) -> Any:
    """The model with a file's weights, its position embedding resampled by timm where the size asks for it."""
    import timm

    # The file may have another classifier, or none. timm would drop it and from then on forgive every missing key, so
    # the model is told to have the file's.
    heads = [Container(path).tensors.get(f"{head}.weight") for head in _classifiers(trained)]
    classes = next((head.shape[0] for head in heads if head is not None), 0)
    file = {"file": str(path), "num_classes": classes, "label_offset": 0, "custom_load": False}
    try:
        return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=file, **size)
    except (RuntimeError, KeyError, ValueError, TypeError, AssertionError) as error:
        plain = _built(name, size, num_classes=classes)
        raise refuse_weights(path, f"timm:{name}", error, plain.state_dict, RESIZED) from error
