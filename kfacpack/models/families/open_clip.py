"""open_clip's models, `ViT-B-32`, `ViT-B-16/laion2b_s34b_b88k`, and ours. f is the normalised embedding of an image."""

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

from kfacpack._compat import compiler_deferred, make_torchvision_importable, silence_logging
from kfacpack.demo.tiny_model import EMBEDDED_MODELS, register
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
    mismatched_tensors,
    refuse_weights,
    safe_name,
)

EMBEDDINGS = (
    "visual.conv1.weight",
    "visual.*positional_embedding",
    "visual.trunk.patch_embed.*",
    "visual.trunk.pos_embed",
)
"""Patch and position embeddings, of open_clip's own vision towers and of a timm trunk."""
RESIZED = ("*positional_embedding", "*pos_embed")
DEFAULT_TAG = "openai"
TEXTS_AT_ONCE = 256


class OpenClipFamily:
    prefix = ""
    name = "open_clip"
    form = "NAME or NAME/TAG of open_clip (ViT-B-32, ViT-B-16/laion2b_s34b_b88k)"
    takes_folder = False
    f = "the image embedding, normalised"
    head = "text"
    prompt_styles: tuple[PromptStyle, ...] = ()

    def load(self, asked: ModelRequest) -> Model:
        """A tag says where weights are and what they were trained with; with a weights file, only the latter counts.

        A file does not show which activation it was trained with, so `ViT-B-32` with a file is the architecture as
        open_clip configures it, and `ViT-B-32/openai` with a file has QuickGELU, as those weights need.
        """
        spec, weights, image_size, dtype, device, seed, _ = asked
        with compiler_deferred():
            make_torchvision_importable()
            import open_clip
            from open_clip.transform import PreprocessCfg, image_transform_v2

        register()
        name, trained, tokenizer, published = _entry(spec, needs_tag=weights is None)
        file, revision = published() if weights is None else (None, None)
        if isinstance(weights, Path):
            file = check_safetensors(weights)

        def build(file: Path | None) -> Any:
            return open_clip.create_model(
                name,
                pretrained=None if file is None else str(file),
                # Where a tag needs QuickGELU and the name's config says otherwise, open_clip only warns.
                force_quick_gelu=trained.get("quick_gelu", False),
                force_image_size=image_size,
                force_preprocess_cfg={key: trained[key] for key in _PREPROCESSING if key in trained},
                pretrained_text=False,
            )

        def how_to_load(path: Path) -> str:
            if spec in EMBEDDED_MODELS or alone:
                return as_call("kfacpack.load_model", spec, weights=str(path), image_size=image_size)
            return as_call(
                "open_clip.create_model",
                name,
                pretrained=str(path),
                force_quick_gelu=trained.get("quick_gelu") or None,
                force_image_size=image_size,
                force_preprocess_cfg={key: trained[key] for key in _PREPROCESSING if key in trained} or None,
            )

        # Beside a vision tower's weights alone, the text tower is random: it has nothing to say, and is not saved.
        alone = file is not None and _vision_alone(file)
        with silence_logging(), seeded_rng(seed):
            module = _built(build, name) if file is None else _loaded(build, file, name, resized=image_size is not None)
        module = module.to(device=device, dtype=dtype).eval()
        setting = PreprocessCfg(**open_clip.get_model_preprocess_cfg(module))
        height, width = setting.input_size[1:]
        activation = "; QuickGELU" if _quick_gelu(module) else ""

        def forward(images: Tensor) -> Tensor:
            f: Tensor = module.encode_image(images.to(device, dtype), normalize=True)
            return f

        return Model(
            family=self.name,
            name=name,
            revision=asked.revision(revision),
            module=module,
            forward=forward,
            function=Function(
                output="embedding",
                normalized=True,
                width=int(open_clip.get_model_config(name)["embed_dim"]),
                detail=f"encode_image(x, normalize=True) of {height}x{width} pixels{activation}",
            ),
            frozen=(*EMBEDDINGS, *_outside_vision(module)),
            prepare=image_batches(image_transform_v2(setting, is_train=False), name),
            preprocessing=f"open_clip: RGB, resize ({setting.resize_mode}, {setting.interpolation}) "
            f"to {height}x{width}, normalize mean {list(setting.mean)} std {list(setting.std)}",
            checkpoint=CheckpointFile(module, how_to_load, only="visual." if alone else ""),
            encode_text=None if alone else _text_encoder(module, name, device, tokenizer),
            logit_scale=float(module.logit_scale.detach().exp()),
        )

    def downloaded(self, repository: CachedRepository) -> Iterator[str]:
        make_torchvision_importable()
        import open_clip

        for name, tag in open_clip.list_pretrained():
            place, filename = _place(open_clip.get_pretrained_cfg(name, tag))
            if place.partition("@")[0] == repository.name and safe_name(filename) in repository.files:
                yield f"{name}/{tag}"


class OpenClipConfig(NamedTuple):
    """What a name stands for."""

    name: str
    trained: Mapping[str, Any]
    """What open_clip's registry says of its weights: their activation, their pictures, their place."""
    tokenizer: Mapping[str, Any]
    published: Callable[[], tuple[Path, str | None]]
    """The file of its weights, and which they are."""


def _entry(spec: str, needs_tag: bool) -> OpenClipConfig:
    import open_clip

    if spec in EMBEDDED_MODELS:
        own = EMBEDDED_MODELS[spec]
        return OpenClipConfig(
            spec, own.trained, {"bpe_path": str(own.merges)}, lambda: (check_safetensors(own.weights), own.revision)
        )
    name, tag = _name_and_tag(spec, needs_tag)
    trained = open_clip.get_pretrained_cfg(name, tag) if tag else {}
    return OpenClipConfig(name, trained, {}, lambda: (_published(trained, f"{name}/{tag}"), tag))


_PREPROCESSING = ("mean", "std", "interpolation", "resize_mode", "fill_color")


def _name_and_tag(spec: str, needs_tag: bool) -> tuple[str, str | None]:
    import open_clip

    name, _, tag = spec.partition("/")
    if name not in (known := open_clip.list_models()):
        raise unknown_model("open_clip", spec, known)
    tags = open_clip.list_pretrained_tags_by_model(name)
    if tag and not open_clip.is_pretrained_cfg(name, tag):
        raise KfacpackError(f"{name} has no tag {tag!r} in open_clip; its tags are {', '.join(tags) or 'none'}")
    if tag or not needs_tag:
        return name, tag or None
    if DEFAULT_TAG in tags:
        return name, DEFAULT_TAG
    choice = f"choose one: {', '.join(f'{name}/{each}' for each in tags)}" if tags else "none is published"
    raise KfacpackError(f"{name} stands for no weights by itself; {choice}. {LOCAL_WEIGHTS}")


def _published(trained: Mapping[str, Any], model: str) -> Path:
    """The file behind a tag. open_clip's own download falls back to a pickle, so only the safetensors is asked for."""
    repository, filename = _place(trained)
    if not repository:
        raise KfacpackError(f"{model} is not published as safetensors on the Hub. {LOCAL_WEIGHTS}")
    return download_weights(repository, filename, model)


def _place(trained: Mapping[str, Any]) -> tuple[str, str]:
    """The repository of a tag's weights, or nothing, and their file there."""
    repository, _, filename = trained.get("hf_hub", "").rpartition("/")
    return repository, filename or "open_clip_pytorch_model.bin"


def _built(build: Callable[[Path | None], Any], name: str) -> Any:
    try:
        return build(None)
    except (RuntimeError, ValueError, AssertionError, OSError) as error:
        raise KfacpackError(f"open_clip cannot build {name}: {first_line(error)}") from error


def _loaded(build: Callable[[Path | None], Any], path: Path, name: str, resized: bool) -> Any:
    """The model with a file's weights: all of them, or the vision tower's, the text tower then staying random."""
    if _vision_alone(path):
        return _with_vision(_built(build, name), path, name)
    try:
        with _resizable(path) if resized else nullcontext(path) as file:
            return build(file)
    except (RuntimeError, KeyError, ValueError, AssertionError, OSError) as error:
        raise refuse_weights(path, name, error, lambda: _built(build, name).state_dict(), RESIZED) from error


@contextmanager
def _resizable(path: Path) -> Iterator[Path]:
    """The file, or a copy of it in float32: on a CPU, torch resamples nothing in half precision."""
    if all(spec.dtype not in ("F16", "BF16") for spec in Container(path).tensors.values()):
        yield path
        return
    with TemporaryDirectory(prefix="kfacpack-") as folder:
        copy = Path(folder) / path.name
        save_file(_in_float32(path), copy)
        yield copy


def _in_float32(path: Path) -> dict[str, Tensor]:
    return {name: value.float() if value.is_floating_point() else value for name, value in load_file(path).items()}


def _vision_alone(path: Path) -> bool:
    return all(key.startswith("visual.") for key in Container(path).tensors)


def _with_vision(module: Any, path: Path, name: str) -> Any:
    from open_clip.model import resize_pos_embed

    own = module.state_dict()
    vision = {key: tensor for key, tensor in own.items() if key.startswith("visual.")}
    if problem := mismatched_tensors(path, vision, RESIZED):
        raise KfacpackError(f"{path}: these are not the weights of {name}'s vision tower: {problem}")
    state = _in_float32(path)
    resize_pos_embed(state, module)
    try:
        module.load_state_dict({**own, **state})
    except RuntimeError as error:
        raise refuse_weights(path, name, error, lambda: vision) from error
    return module


def _text_encoder(
    module: Any, name: str, device: torch.device, options: Mapping[str, Any]
) -> Callable[[Sequence[str]], Tensor]:
    @cache
    def tokenizer() -> Any:
        """Not before it is needed: some models' tokenizers are on the Hub."""
        import open_clip

        with silence_logging():
            try:
                return open_clip.get_tokenizer(name, **options)
            except Exception as error:  # the Hub's, transformers' and tokenizers' errors have no common base
                problem = f"{name}: its tokenizer cannot be loaded: {first_line(error)}"
                raise KfacpackError(f"{problem}. Without texts, classes have prototypes: --head prototypes") from error

    @torch.no_grad()
    def encode_text(texts: Sequence[str]) -> Tensor:
        tokens = tokenizer()(list(texts)).split(TEXTS_AT_ONCE)
        return torch.cat([module.encode_text(each.to(device), normalize=True) for each in tokens])

    return encode_text


def _outside_vision(module: nn.Module) -> tuple[str, ...]:
    """Patterns for all that is no part of f."""
    tops = dict.fromkeys(name.partition(".")[::2] for name in module.state_dict() if not name.startswith("visual."))
    return tuple(dict.fromkeys(f"{top}.*" if rest else top for top, rest in tops))


def _quick_gelu(module: nn.Module) -> bool:
    return any(type(each).__name__ == "QuickGELU" for each in module.modules())
