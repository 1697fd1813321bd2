"""Pretrains `tiny`, the CLIP model included in kfacpack, from a seed.

    python examples/pretrain_tiny.py OUTPUT_FOLDER

Writes tiny.safetensors and merges.txt.gz to the folder. If interrupted, the same command resumes from the last
checkpoint.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
import typer
from rich.progress import Progress
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from kfacpack._compat import make_torchvision_importable, silence_logging
from kfacpack.demo import EMBEDDED_MODELS, register
from tiny.captions import SUBJECT
from tiny.pictures import Batch, batch
from tiny.subjects import SUBJECTS
from tiny.words import write_merges

make_torchvision_importable()
import open_clip  # noqa: E402 - imports torchvision

SEED = 0
STEPS = 3600
BATCH = 128
WARM_UP = 150
RATE = 1.5e-3
DECAY = 0.05
CHECKPOINT_EVERY = 100
CAPTION_BATCHES = 120
"""Number of batches whose captions the vocabulary is built from."""


class PretrainingModel(nn.Module):
    """The CLIP model and an auxiliary classifier of the subjects, which speeds up training and is discarded."""

    def __init__(self) -> None:
        super().__init__()
        with silence_logging():
            self.clip = open_clip.create_model("tiny")
        self.subject = nn.Linear(self.clip.visual.output_dim, len(SUBJECTS))


class Batches(Dataset[tuple[Tensor, Tensor, Tensor, Tensor]]):
    """The batches of all steps, by number: pictures, tokens, which caption fits which picture, and subjects."""

    def __init__(self, seed: int, steps: range, tokenizer: open_clip.SimpleTokenizer):
        self.seed, self.steps, self.tokenizer = seed, steps, tokenizer

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        drawn: Batch = batch(self.seed, self.steps[index], BATCH)
        pictures = torch.from_numpy(drawn.pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
        subjects = torch.from_numpy(drawn.shown[:, SUBJECT])
        return pictures, self.tokenizer(drawn.captions), torch.from_numpy(drawn.true).float(), subjects


def main(
    output: Path = typer.Argument(..., help="Folder for the weights, the vocabulary and the checkpoint."),
    seed: int = typer.Option(SEED, help="Seed of the pictures, the captions and the initial weights."),
    steps: int = typer.Option(STEPS, help="Number of training steps."),
) -> None:
    """Pretrains the model."""
    output.mkdir(parents=True, exist_ok=True)
    merges = output / "merges.txt.gz"
    write_merges((text for number in range(CAPTION_BATCHES) for text in batch(seed, number, BATCH).captions), merges)
    register()
    tokenizer = open_clip.get_tokenizer("tiny", bpe_path=str(merges))
    vocab_size = EMBEDDED_MODELS["tiny"].architecture["text_cfg"]["vocab_size"]
    if tokenizer.vocab_size > vocab_size:
        raise SystemExit(
            f"the captions need {tokenizer.vocab_size} tokens; the vocabulary of the model has {vocab_size}"
        )
    torch.manual_seed(seed)
    model = PretrainingModel()
    optimizer = _optimizer(model)
    checkpoint = output / "checkpoint.safetensors"
    done = _restore(checkpoint, model, optimizer, {"seed": seed, "steps": steps})
    loader = DataLoader(Batches(seed, range(done, steps), tokenizer), batch_size=None, num_workers=1, prefetch_factor=4)
    with Progress(transient=True) as bar, (output / "log.jsonl").open("a") as log:
        progress = bar.add_task("pretraining", total=steps, completed=done)
        start = time.perf_counter()
        recent: list[tuple[float, float]] = []
        for step, examples in enumerate(loader, start=done):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min((step + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * step / steps))
            recent.append(_step(model, optimizer, *examples))
            if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
                _store(checkpoint, model, optimizer, {"seed": seed, "steps": steps, "done": step + 1})
                loss, right = (sum(values) / len(recent) for values in zip(*recent, strict=True))
                recent.clear()
                entry = {"step": step + 1, "loss": loss, "right": right, "seconds": time.perf_counter() - start}
                print(json.dumps(entry), file=log, flush=True)
            bar.update(progress, advance=1)
    _save(output / "tiny.safetensors", {name: value.half() for name, value in model.clip.state_dict().items()}, {})


def _step(
    model: PretrainingModel,
    optimizer: torch.optim.Optimizer,
    pictures: Tensor,
    tokens: Tensor,
    true: Tensor,
    subjects: Tensor,
) -> tuple[float, float]:
    """Trains one step; returns the contrastive loss and the share of pictures whose best caption fits them."""
    f, g = model.clip.encode_image(pictures), model.clip.encode_text(tokens, normalize=True)
    logits = model.clip.logit_scale.exp() * F.normalize(f, dim=-1) @ g.T
    contrast = (
        F.cross_entropy(logits, true / true.sum(dim=1, keepdim=True))
        + F.cross_entropy(logits.T, (true / true.sum(dim=0)).T)
    ) / 2
    optimizer.zero_grad()
    (contrast + F.cross_entropy(model.subject(f), subjects)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        model.clip.logit_scale.clamp_(0, math.log(100))
        right = true[torch.arange(len(true)), logits.argmax(dim=1)].mean()
    return contrast.item(), right.item()


def _optimizer(model: nn.Module) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), eps=1e-6)


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, Tensor]]:
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state[parameter].items():
            yield name, moment, value


def _store(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, metadata: dict[str, int]) -> None:
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    tensors |= {f"{moment}/{name}": value for name, moment, value in _moments(model, optimizer)}
    _save(path, tensors, {key: str(value) for key, value in metadata.items()})


def _restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, expected: dict[str, int]) -> int:
    """Restores weights and moments from a checkpoint; returns the number of steps done, 0 without a checkpoint."""
    if not path.exists():
        return 0
    with safe_open(path, framework="pt") as file:
        metadata = {key: int(value) for key, value in file.metadata().items()}
    for key, value in expected.items():
        if metadata[key] != value:
            raise SystemExit(f"{path}: written with {key} {metadata[key]}, expected {value}; remove it to start over")
    tensors = load_file(path)
    model.load_state_dict(
        {name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")}
    )
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            moment: tensors[f"{moment}/{name}"] for moment in ("step", "exp_avg", "exp_avg_sq")
        }
    return metadata["done"]


def _save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    unfinished = path.with_suffix(".unfinished")
    save_file({name: value.contiguous() for name, value in tensors.items()}, unfinished, metadata=metadata)
    unfinished.replace(path)


if __name__ == "__main__":
    typer.run(main)
