"""Models from open_clip, such as `ViT-B-32` or `ViT-B-16/laion2b_s34b_b88k`, and models included in kfacpack (`tiny`).

f is the normalised image embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kfacpack._compat import compiler_deferred, make_torchvision_importable, require, silence_logging
from kfacpack.demo import EMBEDDED_MODELS, register
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
    mismatched_tensors,
    safetensors_name,
    weights_error,
)

EMBEDDINGS = (
    "visual.conv1.weight",
    "visual.*positional_embedding",
    "visual.trunk.patch_embed.*",
    "visual.trunk.pos_embed",
)
"""fnmatch patterns of patch and position embeddings, for open_clip's own vision towers and those from timm."""
RESIZED = ("*positional_embedding", "*pos_embed")
"""fnmatch patterns of the tensors that open_clip resamples if the image size changes."""
DEFAULT_TAG = "openai"
"""Pretrained tag for names that do not contain a tag."""
TEXT_BATCH_SIZE = 256
"""Number of texts per batch."""
_PREPROCESSING = ("mean", "std", "interpolation", "resize_mode", "fill_color")


class OpenClipFamily:
    """Models from open_clip, and the models that are included in kfacpack."""

    prefix = ""
    name = "open_clip"
    form = "NAME or NAME/TAG of an open_clip model (ViT-B-32, ViT-B-16/laion2b_s34b_b88k)"
    takes_folder = False
    f = "the normalised image embedding"
    head = "text"
    prompt_styles: tuple[PromptStyle, ...] = ()

    def load(self, request: ModelRequest) -> Model:
        """Loads a model.

        A tag selects published weights, and the activation and preprocessing with which they were trained. If a weights
        file is given, the tag selects only the activation and the preprocessing, because the file does not record them.
        For example, `ViT-B-32` with a file uses the default activation of open_clip, whereas `ViT-B-32/openai` with a
        file uses QuickGELU, which OpenAI's weights need.
        """
        spec, weights, image_size, dtype, device, seed, *_ = request
        require("open_clip_torch")
        with compiler_deferred():
            make_torchvision_importable()
            import open_clip
            from open_clip.transform import PreprocessCfg, image_transform_v2

        register()
        name, pretrained, tokenizer, published = _open_clip_config(spec, needs_tag=weights is None)
        file, revision = published() if weights is None else (None, None)
        if isinstance(weights, Path):
            file = check_safetensors(weights)
        preprocessing = {key: pretrained[key] for key in _PREPROCESSING if key in pretrained}

        def build(file: Path | None) -> Any:
            return open_clip.create_model(
                name,
                pretrained=None if file is None else str(file),
                # open_clip only warns if a tag needs QuickGELU and the model config does not select it.
                force_quick_gelu=pretrained.get("quick_gelu", False),
                force_image_size=image_size,
                force_preprocess_cfg=preprocessing,
                pretrained_text=False,
            )

        def load_command(path: Path) -> str:
            if spec in EMBEDDED_MODELS or vision_only:
                return format_call("kfacpack.load_model", spec, weights=str(path), image_size=image_size)
            return format_call(
                "open_clip.create_model",
                name,
                pretrained=str(path),
                force_quick_gelu=pretrained.get("quick_gelu") or None,
                force_image_size=image_size,
                force_preprocess_cfg=preprocessing or None,
            )

        # If the file contains only the vision tower, the text tower is random and is neither used nor saved.
        vision_only = file is not None and _is_vision_only(file)
        with silence_logging(), seeded_rng(seed):
            if file is None:
                module = _build(build, name)
            else:
                module = _build_from_file(build, file, name, resized=image_size is not None)
        module = module.to(device=device, dtype=dtype).eval()
        setting = PreprocessCfg(**open_clip.get_model_preprocess_cfg(module))
        height, width = setting.input_size[1:]
        activation = "; QuickGELU" if _uses_quick_gelu(module) else ""

        def forward(images: Tensor) -> Tensor:
            f: Tensor = module.encode_image(images.to(device, dtype), normalize=True)
            return f

        return Model(
            family=self.name,
            name=name,
            revision=request.revision(revision),
            module=module,
            forward=forward,
            function=Function(
                output="embedding",
                normalized=True,
                width=int(open_clip.get_model_config(name)["embed_dim"]),
                detail=f"encode_image(x, normalize=True) of {height}x{width} pixels{activation}",
            ),
            frozen=(*EMBEDDINGS, *_patterns_outside_vision(module)),
            prepare=image_batches(image_transform_v2(setting, is_train=False), name),
            preprocessing=f"open_clip: RGB, resize ({setting.resize_mode}, {setting.interpolation}) "
            f"to {height}x{width}, normalize mean {list(setting.mean)} std {list(setting.std)}",
            checkpoint=CheckpointFile(module, load_command, prefix="visual." if vision_only else ""),
            encode_text=None if vision_only else _text_encoder(module, name, device, tokenizer),
            logit_scale=float(module.logit_scale.detach().exp()),
        )

    def downloaded_names(self, repository: CachedRepository) -> Iterator[str]:
        """Yields the names of the models whose weights are in a cached repository."""
        make_torchvision_importable()
        import open_clip

        for name, tag in open_clip.list_pretrained():
            hub_repository, filename = _hub_file(open_clip.get_pretrained_cfg(name, tag))
            same = hub_repository.partition("@")[0] == repository.name
            if same and safetensors_name(filename) in repository.files:
                yield f"{name}/{tag}"


class OpenClipConfig(NamedTuple):
    """The model config, weights and tokenizer that a model name selects."""

    name: str
    """Name of the model config in open_clip."""
    pretrained: Mapping[str, Any]
    """Entry in open_clip's registry of pretrained weights: activation, preprocessing and location on the Hub."""
    tokenizer: Mapping[str, Any]
    """Arguments for `open_clip.get_tokenizer`."""
    published: Callable[[], tuple[Path, str | None]]
    """Function that returns the weights file, which it downloads if necessary, and the revision of the weights."""


def _open_clip_config(spec: str, needs_tag: bool) -> OpenClipConfig:
    import open_clip

    if spec in EMBEDDED_MODELS:
        embedded = EMBEDDED_MODELS[spec]
        return OpenClipConfig(
            spec,
            embedded.pretrained,
            {"bpe_path": str(embedded.merges)},
            lambda: (check_safetensors(embedded.weights), embedded.revision),
        )
    name, tag = _name_and_tag(spec, needs_tag)
    pretrained = open_clip.get_pretrained_cfg(name, tag) if tag else {}
    return OpenClipConfig(name, pretrained, {}, lambda: (_download(pretrained, f"{name}/{tag}"), tag))


def _name_and_tag(spec: str, needs_tag: bool) -> tuple[str, str | None]:
    import open_clip

    name, _, tag = spec.partition("/")
    if name not in (names := open_clip.list_models()):
        raise unknown_model("open_clip", spec, names)
    tags = open_clip.list_pretrained_tags_by_model(name)
    if tag and not open_clip.is_pretrained_cfg(name, tag):
        raise KfacpackError(f"unknown open_clip tag {tag!r} for {name}; available tags: {', '.join(tags) or 'none'}")
    if tag or not needs_tag:
        return name, tag or None
    if DEFAULT_TAG in tags:
        return name, DEFAULT_TAG
    choice = (
        f"choose one of these names: {', '.join(f'{name}/{tag}' for tag in tags)}"
        if tags
        else "open_clip has no weights for this model"
    )
    raise KfacpackError(f"{name} has no default weights; {choice}. {LOCAL_WEIGHTS}")


def _download(pretrained: Mapping[str, Any], model: str) -> Path:
    """Downloads a tag's safetensors file. open_clip's own download may fall back to a pickle, so it is not used."""
    repository, filename = _hub_file(pretrained)
    if not repository:
        raise KfacpackError(f"{model} is not published as safetensors on the Hub. {LOCAL_WEIGHTS}")
    return download_weights(repository, filename, model)


def _hub_file(pretrained: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the Hub repository and file name of a tag's weights. The repository is "" if they are not on the Hub."""
    repository, _, filename = pretrained.get("hf_hub", "").rpartition("/")
    return repository, filename or "open_clip_pytorch_model.bin"


def _build(build: Callable[[Path | None], Any], name: str) -> Any:
    try:
        return build(None)
    except (RuntimeError, ValueError, AssertionError, OSError) as error:
        raise KfacpackError(f"open_clip cannot build {name}: {first_line(error)}") from error


def _build_from_file(build: Callable[[Path | None], Any], path: Path, name: str, resized: bool) -> Any:
    """Builds the model with the weights in a file, which may lack the text tower."""
    if _is_vision_only(path):
        return _load_vision_tower(_build(build, name), path, name)
    try:
        with _resizable(path) if resized else nullcontext(path) as file:
            return build(file)
    except (RuntimeError, KeyError, ValueError, AssertionError, OSError) as error:
        raise weights_error(path, name, error, lambda: _build(build, name).state_dict(), RESIZED) from error


@contextmanager
def _resizable(path: Path) -> Iterator[Path]:
    """Context manager that yields the path of a file whose position embeddings can be resampled on a CPU.

    The result is `path`, or a temporary copy in float32 if the file contains half-precision tensors.
    """
    if all(spec.dtype not in ("F16", "BF16") for spec in Container(path).tensors.values()):
        yield path
        return
    with TemporaryDirectory(prefix="kfacpack-") as folder:
        copy = Path(folder) / path.name
        save_file(_load_float32(path), copy)
        yield copy


def _load_float32(path: Path) -> dict[str, Tensor]:
    return {name: value.float() if value.is_floating_point() else value for name, value in load_file(path).items()}


def _is_vision_only(path: Path) -> bool:
    return all(key.startswith("visual.") for key in Container(path).tensors)


def _load_vision_tower(module: Any, path: Path, name: str) -> Any:
    from open_clip.model import resize_pos_embed

    initial = module.state_dict()
    vision = {key: tensor for key, tensor in initial.items() if key.startswith("visual.")}
    if problem := mismatched_tensors(path, vision, RESIZED):
        raise KfacpackError(f"{path}: does not contain the weights of {name}'s vision tower: {problem}")
    state = _load_float32(path)
    resize_pos_embed(state, module)
    try:
        module.load_state_dict({**initial, **state})
    except RuntimeError as error:
        raise weights_error(path, name, error, lambda: vision) from error
    return module


def _text_encoder(
    module: Any, name: str, device: torch.device, options: Mapping[str, Any]
) -> Callable[[Sequence[str]], Tensor]:
    @cache
    def tokenizer() -> Any:
        """Loads the tokenizer on first use, because some tokenizers are downloaded from the Hub."""
        import open_clip

        with silence_logging():
            try:
                return open_clip.get_tokenizer(name, **options)
            except Exception as error:  # errors of the Hub, transformers and tokenizers have no common base class
                problem = f"{name}: the tokenizer cannot be loaded: {first_line(error)}"
                remedy = "Use --head prototypes (head='prototypes' or kind='prototypes'), which needs no tokenizer"
                raise KfacpackError(f"{problem}. {remedy}") from error

    @torch.no_grad()
    def encode_text(texts: Sequence[str]) -> Tensor:
        batches = tokenizer()(list(texts)).split(TEXT_BATCH_SIZE)
        return torch.cat([module.encode_text(tokens.to(device), normalize=True) for tokens in batches])

    return encode_text


def _patterns_outside_vision(module: nn.Module) -> tuple[str, ...]:
    """Returns fnmatch patterns that match all tensors outside the vision tower and no tensors inside it."""
    tops = dict.fromkeys(name.partition(".")[::2] for name in module.state_dict() if not name.startswith("visual."))
    return tuple(dict.fromkeys(f"{top}.*" if rest else top for top, rest in tops))


def _uses_quick_gelu(module: nn.Module) -> bool:
    return any(type(child).__name__ == "QuickGELU" for child in module.modules())
