"""Tensors out of what torch.save wrote: a program of its own, which a limited process runs; never imported.

    python -I unpickle.py < request.json > answer.json

It takes a zip whose members are stored as they are, lets torch's restricted unpickler build nothing but tensors and
containers, maps their numbers from the file, and writes them as safetensors. Before it looks at a file it gives up the
right to more memory, time, file size and processes than that takes. `unpickling.py` starts it.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import resource
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


MEMBERS = 100_000
PICKLE_BYTES = 16 * 2**20
SPARE_MEMORY = 2**30
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,300}")


class RefusedError(Exception):
    """Why a file is not taken, in words."""


def main() -> None:
    asked = json.load(sys.stdin)
    sys.path.extend(asked["packages"])
    import torch

    torch.set_num_threads(1)
    sizes = [Path(each["path"]).stat().st_size for each in asked["files"]]
    limit(max(sizes), sum(sizes), asked["seconds"])
    for number, each in enumerate(asked["files"]):
        try:
            require_plain_zip(each["path"])
            write(each["target"], tensors_of(load(each["path"]), asked["single"]))
        except RefusedError as error:
            answer(refused=number, why=str(error))
        except MemoryError:
            answer(refused=number, why="needs more memory than a file of its size should")
        except Exception as error:  # whatever torch makes of a damaged file
            answer(refused=number, why=f"cannot be read: {(str(error) or type(error).__name__).splitlines()[0]}")
    answer(refused=None)


def answer(**what: Any) -> None:
    sys.stdout.write(json.dumps(what))
    sys.exit(0)


def limit(largest: int, total: int, seconds: int) -> None:
    """No more from here on. What this process has mapped already, torch itself for the most part, goes on top."""
    mapped = 0
    with contextlib.suppress(OSError):  # there is no such file but on Linux
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = {
        "RLIMIT_AS": mapped + 3 * largest + SPARE_MEMORY if mapped else None,
        "RLIMIT_CPU": seconds,
        "RLIMIT_FSIZE": total + 2**20,
        "RLIMIT_NPROC": 0,
        "RLIMIT_CORE": 0,
    }
    for name, value in limits.items():
        if value is not None and hasattr(resource, name):
            with contextlib.suppress(ValueError, OSError):  # a stricter one is in force, or the system has none
                resource.setrlimit(getattr(resource, name), (value, value))


def require_plain_zip(path: str) -> None:
    """Refuse all that would unfold to more than the file has."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise RefusedError(
            f"is no whole archive of torch.save: {error}. If it was downloaded, fetch it again"
        ) from error
    if len(members) > MEMBERS:
        raise RefusedError(f"has {len(members)} members, at most {MEMBERS} are read")
    packed = [each.filename for each in members if each.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise RefusedError(f"its member {packed[0]!r} is compressed, which torch.save never does")
    size = Path(path).stat().st_size
    if (claimed := sum(each.file_size for each in members)) > size:
        raise RefusedError(f"its members claim {claimed} bytes, the file has {size}")
    for each in members:
        if each.filename.endswith(".pkl") and each.file_size > PICKLE_BYTES:
            raise RefusedError(f"its {each.filename!r} has {each.file_size} bytes, at most {PICKLE_BYTES} are read")


def load(path: str) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found:
            problem = f"asks for {found[1]} to be run or built, which no file of factors needs"
            raise RefusedError(f"{problem}. Nothing of it was run. Do not load it by other means") from error
        raise


def tensors_of(loaded: Any, single: str) -> dict[str, Tensor]:
    """By name; a tensor that is in no dictionary goes by `single`."""
    import torch

    named = {single: loaded} if isinstance(loaded, torch.Tensor) else loaded
    if not isinstance(named, dict):
        raise RefusedError(f"holds a {type(named).__name__}, expected a dictionary of tensors")
    for name, tensor in named.items():
        if not isinstance(name, str) or not NAME.fullmatch(name) or name == "__metadata__":
            raise RefusedError(f"has an entry called {str(name)[:80]!r}, expected names of parameters")
        if not isinstance(tensor, torch.Tensor):
            raise RefusedError(f"its entry {name!r} is a {type(tensor).__name__}, expected a tensor")
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise RefusedError(f"its entry {name!r} is no plain tensor")
        if tensor.dtype not in names_of_types():
            raise RefusedError(f"its entry {name!r} is of {tensor.dtype}, expected floating-point or whole numbers")
        # A tensor may claim any shape by strides of zero: what it unfolds to is no larger than what is stored.
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise RefusedError(f"its entry {name!r} claims the shape {list(tensor.shape)}, more than is stored")
    return named


def names_of_types() -> dict[Any, str]:
    """safetensors' words."""
    import torch

    return {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.int64: "I64",
        torch.int32: "I32",
    }


def write(target: str, tensors: dict[str, Tensor]) -> None:
    """A safetensors file, a tensor at a time."""
    import torch

    end, entries, words = 0, {}, names_of_types()
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": words[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with Path(target).open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors.values():
            stream.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


if __name__ == "__main__":
    main()
