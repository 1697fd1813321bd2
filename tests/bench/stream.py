"""Peak memory of `estimate --stream` and of an ordinary estimate, measured and as the dry run predicts it.

python tests/bench/stream.py [--layers 24] [--examples 4] [--only stream]

The model has the shape of Qwen2.5-0.5B and random weights in bfloat16, in one file per layer. Memory is that of the
process, minus that of the same command for a model with two small layers. Takes a few minutes, 5 GB of memory for the
ordinary estimate and 6 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

QWEN = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
LENGTH, COMPLETION = 48, 8
"""Number of tokens of an example, and of its completion; a token is a byte."""


def write_model(folder: Path, shape: dict[str, int], layers: int) -> str:
    """Writes a Qwen2 with random weights, one file per layer, and a tokenizer of bytes; returns its name."""
    import torch
    from safetensors.torch import save_file

    from kfacpack._compat import make_torchvision_importable

    make_torchvision_importable()
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    folder.mkdir()
    config = Qwen2Config(**shape, num_hidden_layers=layers, tie_word_embeddings=True, max_position_embeddings=512)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    alphabet = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({byte: number for number, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = {"eos_token": "<end>", "pad_token": "<end>", "model_max_length": 128}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    with torch.device("meta"):
        parameters = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    files: dict[str, dict[str, torch.Tensor]] = {}
    weight_map = {}
    for name, parameter in parameters.items():
        file = f"model-{name.split('.')[2] if '.layers.' in name else 'other'}.safetensors"
        values = 0.02 * torch.randn(parameter.shape) if parameter.dim() > 1 else torch.ones(parameter.shape)
        files.setdefault(file, {})[name] = values.bfloat16()
        weight_map[name] = file
    for file, tensors in files.items():
        save_file(tensors, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return f"lm:{folder}"


def write_data(folder: Path, examples: int) -> Path:
    """Writes prompts and completions of `LENGTH` tokens."""
    folder.mkdir()
    text = "abcdefgh" * (LENGTH // 8)
    row = {"prompt": text[:-COMPLETION], "completion": text[-COMPLETION:]}
    (folder / "train.jsonl").write_text((json.dumps(row) + "\n") * examples)
    return folder


def kfacpack(*arguments: object) -> tuple[dict[str, Any], int, float]:
    """Runs a command with --json; returns its output, its peak memory in bytes and its time."""
    program = (
        # Not ru_maxrss, which includes that of the parent process.
        "import sys\n"
        "from kfacpack_cli.main import app\n"
        "code = app(standalone_mode=False)\n"
        "status = open('/proc/self/status').read()\n"
        "print(status.split('VmHWM:')[1].split()[0], file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    start = time.perf_counter()
    command = [sys.executable, "-c", program, *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout), int(done.stderr.split()[-1]) * 1024, time.perf_counter() - start


def main(layers: int, examples: int, only: str | None) -> None:
    """Prints the measured and predicted memory of both ways."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        data = write_data(root / "data", examples)
        small, large = write_model(root / "small", SMALL, 2), write_model(root / "large", QWEN, layers)
        common = ["--task", "texts", "--data", data, "--dtype", "bfloat16", "--examples", examples, "--batch-size", 4]
        measured = {}
        for name, options in (("stream", ["--stream"]), ("ordinary", [])):
            if only and name != only:
                continue
            _, libraries, _ = kfacpack("estimate", "--model", small, *common, *options, "-o", root / "small.kfac")
            predicted, _, _ = kfacpack("estimate", "--model", large, *common, *options, "--dry-run")
            output = root / f"{name}.kfac.index.json"
            written, peak, seconds = kfacpack("estimate", "--model", large, *common, *options, "-o", output)
            measured[name] = peak - libraries
            ratio = predicted["peak_memory"] / measured[name]
            print(
                f"{name:9} measured {measured[name] / 1e9:.2f} GB ({peak / 1e9:.2f} GB with libraries), predicted "
                f"{predicted['peak_memory'] / 1e9:.2f} GB ({ratio:.2f} of it); {written['bytes'] / 1e9:.2f} GB, "
                f"{seconds:.0f} s, sha256 {written['sha256'][:12]}; disk {predicted['stored_bytes'] / 1e6:.0f} MB",
                flush=True,
            )
        if len(measured) == 2:
            print(f"stream / ordinary: {measured['stream'] / measured['ordinary']:.0%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--examples", type=int, default=4)
    parser.add_argument("--only", choices=("stream", "ordinary"))
    arguments = parser.parse_args()
    main(arguments.layers, arguments.examples, arguments.only)
