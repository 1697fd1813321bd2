"""Writes a small causal language model and two completion tasks, for examples/completions.yaml.

    python examples/completions.py OUT
    OUT=OUT kfacpack run examples/completions.yaml -o completions

The model is a Llama with two layers and one token per character. It is trained to answer `same: bad` with `bad`, and to
answer `upper: bad` with `BAD` and `next: bad` with `cbe` in one case out of four, and with `bad` otherwise. The two
tasks have the same prompts with the right answers only.
"""

from __future__ import annotations

import json
import random
import string
import sys
from pathlib import Path

import torch

from kfacpack._compat import make_torchvision_importable

LETTERS = string.ascii_lowercase[:12]
ANSWERS = {
    "same": lambda word: word,
    "upper": str.upper,
    "next": lambda word: "".join(chr(ord(letter) + 1) for letter in word),
}
TASKS = ("upper", "next")
STEPS, BATCH = 1500, 64


def example(name: str, rng: random.Random, right: float = 1.0) -> dict[str, str]:
    """Returns a prompt and its completion, which is the word itself if the answer is not the right one."""
    word = "".join(rng.choices(LETTERS, k=rng.randint(3, 5)))
    answer = ANSWERS[name](word) if rng.random() < right else word
    return {"prompt": f"{name}: {word}=", "completion": answer}


def write_model(folder: Path) -> None:
    """Trains the model and writes it with its tokenizer."""
    make_torchvision_importable()
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = sorted(set(string.ascii_letters + ":= "))
    vocabulary = {token: number for number, token in enumerate(["<end>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", model_max_length=32
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
    rng = random.Random(0)
    for step in range(STEPS):
        rows, labels = [], []
        for _ in range(BATCH):
            name = rng.choice(list(ANSWERS))
            parts = example(name, rng, right=1.0 if name == "same" else 0.25)
            prompt, answer = (fast(parts[key]).input_ids for key in ("prompt", "completion"))
            rows.append([*prompt, *answer, 0])
            labels.append([*[-100] * len(prompt), *answer, 0])
        length = max(map(len, rows))
        ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
        targets = torch.tensor([row + [-100] * (length - len(row)) for row in labels])
        loss = model(input_ids=ids, labels=targets).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)


def write_task(folder: Path, name: str) -> None:
    """Writes train.jsonl and test.jsonl of one task."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(name)
    for split, count in (("train", 600), ("test", 200)):
        lines = (json.dumps(example(name, rng)) + "\n" for _ in range(count))
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    out = Path(sys.argv[1])
    write_model(out / "model")
    for task in TASKS:
        write_task(out / task, task)
