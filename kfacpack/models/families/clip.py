"""CLIP models from transformers, such as `clip:openai/clip-vit-base-patch32` or `clip:DIR`.

f is the normalised image embedding. For the same weights, it equals f of the open_clip family. The names of the vision
tower's parameters start with `vision_model.`, as in published state dicts of `CLIPVisionModel`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, normalize

from kfacpack.errors import KfacpackError, first_line
from kfacpack.format.container import Container
from kfacpack.format.manifest import Function
from kfacpack.models.data_loading import image_batches
from kfacpack.models.families.transformers_loading import (
    load_components,
    load_pretrained,
    max_length,
    public_name,
    quiet_transformers,
)
from kfacpack.models.model import CachedRepository, Model, ModelRequest
from kfacpack.models.prompts import PromptStyle
from kfacpack.models.weights import CheckpointFolder, check_safetensors, format_call

POSITIONS = "vision_model.embeddings.position_embedding.weight"
"""Name of the position embedding, which is resampled if the image size changes."""
FROZEN = ("vision_model.embeddings.patch_embedding.*", "vision_model.embeddings.position_embedding.*")
"""fnmatch patterns of the patch and position embeddings of the vision tower."""
TEXT = ("text_model.", "text_projection.", "logit_scale")
"""Prefixes of the parameters that f does not depend on."""
PROJECTION = "visual_projection."
TEXT_BATCH_SIZE = 256
"""Number of texts per batch."""
VISION_CONFIG = "clip_vision_model"
"""`model_type` in the config of a vision tower."""


class ClipFamily:
    """CLIP models from transformers: whole models, and vision towers with or without the projection."""

    prefix = name = "clip"
    form = "clip:NAME_OR_DIR"
    takes_folder = True
    f = "the normalised image embedding of a CLIP model from transformers"
    head = "text"
    prompt_styles: tuple[PromptStyle, ...] = ()

    def load(self, request: ModelRequest) -> Model:
        """Loads a model.

        If the text tower is missing from the weights, no head can be built from texts. A folder that was saved by
        `CLIPVisionModel` contains no projection. In this case, f is the normalised pooled output of the vision tower,
        and manifests record this.
        """
        name, device, dtype = request.name, request.device, request.dtype
        (config,) = load_components(name, self.prefix, ("AutoConfig",), "config.json and model.safetensors")
        _check_config(config, name)
        setting = _preprocessing(name, _image_size(config, name), request.image_size)
        module, missing = _load_module(config, request, setting.crop)
        vision_only = config.model_type == VISION_CONFIG or bool(missing)
        projected = not any(key.startswith(PROJECTION) for key in missing)

        def forward(images: Tensor) -> Tensor:
            """Returns f, (N, C), for images (N, 3, height, width)."""
            pooled = module.vision_model(pixel_values=images.to(device, dtype)).pooler_output
            return normalize(module.visual_projection(pooled) if projected else pooled, dim=-1)

        vision = _vision_config(module.config)
        output = "visual_projection(pooler_output)" if projected else "pooler_output, without the projection,"
        tokenizer = _tokenizer(name)
        outside = ("text_model.*", "text_projection.*", "logit_scale") if config.model_type != VISION_CONFIG else ()
        return Model(
            family=self.name,
            name=public_name(name),
            revision=request.revision(getattr(config, "_commit_hash", None)),
            module=module,
            forward=forward,
            function=Function(
                output="embedding",
                normalized=True,
                width=module.visual_projection.out_features if projected else int(vision.hidden_size),
                detail=f"{output} of the vision tower, normalised, of {setting.crop}x{setting.crop} pixels; "
                f"{vision.hidden_act}",
            ),
            frozen=(*FROZEN, *outside, *(() if projected else (f"{PROJECTION}*",))),
            prepare=image_batches(setting.transform, name),
            preprocessing=f"transformers: RGB, {setting}",
            checkpoint=_checkpoint(module, missing, setting, tokenizer),
            encode_text=None if vision_only else _text_encoder(module, tokenizer, device),
            logit_scale=Model.logit_scale if vision_only else float(module.logit_scale.detach().exp()),
        )

    def downloaded_names(self, repository: CachedRepository) -> Iterator[str]:
        """Yields `clip:NAME` if the cached repository NAME contains a CLIP model or only its vision tower."""
        if repository.config.get("model_type") in ("clip", VISION_CONFIG) and repository.has_safetensors:
            yield f"clip:{repository.name}"


def _check_config(config: Any, name: str) -> None:
    if config.model_type not in ("clip", VISION_CONFIG):
        remedy = "use timm:NAME or an open_clip name for other vision models, and hf:NAME for text encoders"
        raise KfacpackError(f"clip:{name} is a {config.model_type!r} model, expected 'clip'; {remedy}")


def _vision_config(config: Any) -> Any:
    return config if config.model_type == VISION_CONFIG else config.vision_config


def _image_size(config: Any, name: str) -> int:
    size = _vision_config(config).image_size
    if not isinstance(size, int):
        raise KfacpackError(f"clip:{name}: image_size in config.json is {size}, expected a single number of pixels")
    return size


class ImagePreprocessing(NamedTuple):
    """The image preprocessing that preprocessor_config.json defines."""

    resize: int | tuple[int, int]
    """Size in pixels after resizing: length of the shorter edge, or (height, width)."""
    crop: int
    """Side length in pixels of the square that is cropped from the centre."""
    resample: int
    """Interpolation filter, as an integer value of `PIL.Image.Resampling`."""
    scale: float
    """Factor by which the pixel values are multiplied."""
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __str__(self) -> str:
        interpolation = Image.Resampling(self.resample).name.lower()
        size = f"shorter edge {self.resize}" if isinstance(self.resize, int) else "{}x{}".format(*self.resize)
        values = f"normalize mean {list(self.mean)} std {list(self.std)}"
        return f"resize ({interpolation}, {size}), crop to {self.crop}x{self.crop}, {values}"

    def transform(self, image: Image.Image) -> Tensor:
        """Returns the pixel values, (3, crop, crop), that transformers' image processor computes for an RGB image."""
        width, height = image.size
        if isinstance(self.resize, int):
            short, long = min(width, height), max(width, height)
            other = int(self.resize * long / short)
            size = (self.resize, other) if width <= height else (other, self.resize)
        else:
            size = self.resize[::-1]
        image = image.resize(size, Image.Resampling(self.resample))
        left, top = (size[0] - self.crop) // 2, (size[1] - self.crop) // 2
        image = image.crop((left, top, left + self.crop, top + self.crop))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() * self.scale
        return (pixels - torch.tensor(self.mean).view(3, 1, 1)) / torch.tensor(self.std).view(3, 1, 1)

    def config(self) -> dict[str, Any]:
        """Returns the content of preprocessor_config.json."""
        keys = ("height", "width")
        size = (
            {"shortest_edge": self.resize}
            if isinstance(self.resize, int)
            else dict(zip(keys, self.resize, strict=True))
        )
        return {
            "image_processor_type": "CLIPImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": size,
            "resample": self.resample,
            "do_center_crop": True,
            "crop_size": {"height": self.crop, "width": self.crop},
            "do_rescale": True,
            "rescale_factor": self.scale,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }


_DEFAULTS = {
    "resample": int(Image.Resampling.BICUBIC),
    "rescale_factor": 1 / 255,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
"""Values that `CLIPImageProcessor` uses for keys missing from preprocessor_config.json."""


def _preprocessing(name: str, own_size: int, image_size: int | None) -> ImagePreprocessing:
    """Reads preprocessor_config.json. If this file is missing, the defaults of `CLIPImageProcessor` are used.

    Args:
        name: Folder or Hub repository.
        own_size: Image size in the model's config.
        image_size: Requested image size, to which the sizes in the file are scaled; None to use `own_size`.
    """
    config = {**_DEFAULTS, **_preprocessor_config(name)}
    where = f"clip:{name}: preprocessor_config.json"
    size, crop = config.get("size", own_size), config.get("crop_size", own_size)
    shorter = size.get("shortest_edge") if isinstance(size, dict) else size
    resize = shorter if shorter is not None else (size.get("height"), size.get("width"))
    if not config.get("do_center_crop", True):
        crop = size  # only possible if the image is resized to a square
    sides: tuple[Any, Any] = (crop.get("height"), crop.get("width")) if isinstance(crop, dict) else (crop, crop)
    unsupported = [key for key in ("do_resize", "do_rescale") if not config.get(key, True)]
    integers = all(isinstance(side, int) for side in (*sides, *(resize if isinstance(resize, tuple) else (resize,))))
    if unsupported or not integers or sides[0] != sides[1]:
        cropping = f"crop_size is {crop}" if config.get("do_center_crop", True) else "do_center_crop is false"
        actual = f"{unsupported[0]} is false" if unsupported else f"size is {size} and {cropping}"
        expected = "expected a config that resizes images, crops them to a square and rescales pixel values"
        raise KfacpackError(f"{where}: {actual}; {expected}")
    side = int(sides[0])
    if image_size is None and side != own_size:
        problem = f"produces images of {side}x{side} pixels, but the model expects {own_size}x{own_size} pixels"
        raise KfacpackError(f"{where} {problem}. Correct crop_size, or choose a size with --image-size (image_size)")
    if image_size is not None and image_size != side:
        resize = (
            tuple(n * image_size // side for n in resize) if isinstance(resize, tuple) else resize * image_size // side
        )
        side = image_size
    if min(resize if isinstance(resize, tuple) else (resize,)) < side:
        problem = f"images are resized to {resize} pixels, which is less than the crop size {side}"
        raise KfacpackError(f"{where}: {problem}; increase size or reduce crop_size")
    values = config if config.get("do_normalize", True) else {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    mean, std = tuple(values["image_mean"]), tuple(values["image_std"])
    return ImagePreprocessing(resize, side, int(config["resample"]), float(config["rescale_factor"]), mean, std)


def _preprocessor_config(name: str) -> dict[str, Any]:
    files = ("preprocessor_config.json", "processor_config.json")  # transformers 5 writes the second one
    if Path(name).is_dir() and not any((Path(name) / file).exists() for file in files):
        return {}
    with quiet_transformers():
        from transformers.image_processing_base import ImageProcessingMixin

        try:
            return dict(ImageProcessingMixin.get_image_processor_dict(name)[0])
        except OSError as error:
            if not Path(name).is_dir() and all(_is_absent(name, file) for file in files):
                return {}
            problem = f"clip:{name}: {files[0]} cannot be read: {first_line(error)}"
            raise KfacpackError(problem) from error


def _is_absent(repository: str, file: str) -> bool:
    """Returns whether the cache or the Hub reports that a repository does not contain a file."""
    from huggingface_hub import _CACHED_NO_EXIST, file_exists, try_to_load_from_cache

    if try_to_load_from_cache(repository, file) is _CACHED_NO_EXIST:
        return True
    try:
        return not file_exists(repository, file)
    except Exception:  # errors of the Hub and the network have no common base class
        return False


def _load_module(config: Any, request: ModelRequest, image_size: int) -> tuple[Any, frozenset[str]]:
    """Returns the module for an image size, and the names of the parameters that are missing from the weights."""
    from transformers import CLIPModel, CLIPVisionModelWithProjection

    vision = _vision_config(config)
    if image_size < vision.patch_size:
        raise KfacpackError(
            f"clip:{request.name}: image size {image_size} is less than the patch size {vision.patch_size}"
        )
    if request.weights == "random":
        vision.image_size = image_size
    elif request.weights is not None and request.image_size is not None:
        vision.image_size = _size_in_file(request.weights, vision)
    whole = config.model_type != VISION_CONFIG
    module, missing = load_pretrained(
        CLIPModel if whole else CLIPVisionModelWithProjection, config, request, unused=TEXT if whole else (PROJECTION,)
    )
    tower = {name for name in module.state_dict() if name.startswith(TEXT)} if whole else missing
    if missing and missing != tower:
        problem = f"contains only part of the text tower: {min(missing)!r} is missing"
        raise KfacpackError(f"{request.weights or request.name}: {problem}")
    return (module if vision.image_size == image_size else _resize(module, image_size)), missing


def _size_in_file(path: Path, vision: Any) -> int:
    """Returns the image size for which the position embedding in a weights file was trained.

    If the file contains no position embedding, the size in the config is returned.
    """
    tensors = Container(check_safetensors(path)).tensors
    spec = tensors.get(POSITIONS) or tensors.get(POSITIONS.partition(".")[2])
    return isqrt(spec.shape[0] - 1) * int(vision.patch_size) if spec else int(vision.image_size)


def _resize(module: Any, image_size: int) -> Any:
    """Returns a copy of the module for another image size. Position embeddings are resampled as in open_clip."""
    config = copy.deepcopy(module.config)
    _vision_config(config).image_size = image_size
    state = module.state_dict()
    positions = state[POSITIONS]
    grid, width = isqrt(len(positions) - 1), positions.shape[1]
    patches = positions[1:].float().reshape(1, grid, grid, width).permute(0, 3, 1, 2)
    side = image_size // _vision_config(config).patch_size
    patches = interpolate(patches, size=(side, side), mode="bicubic", antialias=True, align_corners=False)
    patches = patches.permute(0, 2, 3, 1).reshape(side * side, width)
    state[POSITIONS] = torch.cat([positions[:1], patches.to(positions.dtype)])
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        resized = type(module)(config).to(positions.device, positions.dtype)
    resized.load_state_dict(state)
    return resized.eval()


def _tokenizer(name: str) -> Callable[[], Any]:
    @cache
    def tokenizer() -> Any:
        """Loads the tokenizer on first use, because f does not need it."""
        with quiet_transformers():
            from transformers import AutoTokenizer

            try:
                vocabulary = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
                if len(vocabulary) <= len(vocabulary.all_special_tokens):
                    # transformers 5 builds an empty tokenizer if the tokenizer files are missing.
                    raise OSError("its vocabulary is missing")
                return vocabulary
            except Exception as error:  # errors of the Hub, transformers and tokenizers have no common base class
                problem = f"clip:{name}: the tokenizer cannot be loaded: {first_line(error)}"
                remedy = "Use --head prototypes (head='prototypes' or kind='prototypes'), which needs no tokenizer"
                raise KfacpackError(f"{problem}. {remedy}") from error

    return tokenizer


def _text_encoder(module: Any, tokenizer: Callable[[], Any], device: torch.device) -> Callable[[Sequence[str]], Tensor]:
    @torch.no_grad()
    def encode_text(texts: Sequence[str]) -> Tensor:
        limit = max_length(tokenizer(), module.config.text_config)
        options = {"padding": True, "truncation": True, "max_length": limit, "return_tensors": "pt"}
        embeddings = []
        for start in range(0, len(texts), TEXT_BATCH_SIZE):
            tokens = tokenizer()(list(texts[start : start + TEXT_BATCH_SIZE]), **options)
            inputs = {key: tokens[key].to(device) for key in ("input_ids", "attention_mask")}
            embeddings.append(normalize(module.text_projection(module.text_model(**inputs).pooler_output), dim=-1))
        return torch.cat(embeddings)

    return encode_text


def _checkpoint(
    module: Any, missing: frozenset[str], setting: ImagePreprocessing, tokenizer: Callable[[], Any]
) -> CheckpointFolder:
    """Returns a checkpoint in transformers' layout, with a tokenizer if the model has one."""

    def fill(folder: Path) -> None:
        with quiet_transformers():
            state = {name: value for name, value in module.state_dict().items() if name not in missing}
            module.save_pretrained(folder, state_dict=state if missing else None)
            (folder / "preprocessor_config.json").write_text(json.dumps(setting.config(), indent=2) + "\n")
            if not missing and module.config.model_type != VISION_CONFIG:
                try:
                    vocabulary = tokenizer()
                except KfacpackError:
                    return
                vocabulary.save_pretrained(folder)

    return CheckpointFolder(
        fill, lambda path: format_call(f"transformers.{type(module).__name__}.from_pretrained", str(path))
    )
