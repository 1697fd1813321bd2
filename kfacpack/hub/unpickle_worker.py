"""A program that converts files written by `torch.save` to safetensors in a process with limited resources.

    python -I unpickle_worker.py < request.json > answer.json

The program accepts only uncompressed zip archives. They are read by torch's restricted unpickler, which creates nothing
but tensors and containers. The tensors are mapped from the file and written as safetensors. Before the program opens a
file, it limits its own memory, CPU time, output size and number of processes. The module is started by `importer.py`
and never imported.
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


MAX_MEMBERS = 100_000
MAX_PICKLE_BYTES = 16 * 2**20
SPARE_MEMORY = 2**30
"""Memory in bytes that is allowed in addition to three times the size of the largest file."""
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,300}")


class RefusedError(Exception):
    """Raised if a file is rejected. The message states the reason."""


def main() -> None:
    """Reads the request from stdin, converts the files and writes the answer to stdout."""
    request = json.load(sys.stdin)
    sys.path.extend(request["packages"])
    import torch

    torch.set_num_threads(1)
    sizes = [Path(file["path"]).stat().st_size for file in request["files"]]
    limit(max(sizes), sum(sizes), request["seconds"])
    for number, file in enumerate(request["files"]):
        try:
            require_plain_zip(file["path"])
            write(file["target"], tensors_of(load(file["path"]), request["single"]))
        except RefusedError as error:
            answer(refused=number, why=str(error))
        except MemoryError:
            answer(refused=number, why="needs more memory than expected for a file of its size")
        except Exception as error:  # torch raises exceptions of many types for damaged files
            answer(refused=number, why=f"cannot be read: {(str(error) or type(error).__name__).splitlines()[0]}")
    answer(refused=None)


def answer(**fields: Any) -> None:
    """Writes the answer to stdout as a JSON object and exits."""
    sys.stdout.write(json.dumps(fields))
    sys.exit(0)


def limit(largest: int, total: int, seconds: int) -> None:
    """Limits the memory, CPU time and output size of this process, and prevents it from starting other processes.

    The memory limit is the amount of memory that is already mapped (mostly by torch), plus three times `largest`, plus
    `SPARE_MEMORY`.

    Args:
        largest: Size of the largest input file in bytes.
        total: Size of all input files in bytes.
        seconds: CPU time limit in seconds.
    """
    mapped = 0
    with contextlib.suppress(OSError):  # exists on Linux only
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
            with contextlib.suppress(ValueError, OSError):  # a stricter limit is set, or limits are not supported
                resource.setrlimit(getattr(resource, name), (value, value))


def require_plain_zip(path: str) -> None:
    """Rejects archives that are damaged or compressed, have too many members, or declare too much data."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise RefusedError(
            f"is not a complete archive written by torch.save: {error}. If it was downloaded, download it again"
        ) from error
    if len(members) > MAX_MEMBERS:
        raise RefusedError(f"the archive has {len(members)} members, expected at most {MAX_MEMBERS}")
    compressed = [member.filename for member in members if member.compress_type != zipfile.ZIP_STORED]
    if compressed:
        raise RefusedError(f"the member {compressed[0]!r} is compressed, which torch.save never does")
    size = Path(path).stat().st_size
    if (claimed := sum(member.file_size for member in members)) > size:
        raise RefusedError(
            f"the members of the archive declare {claimed} bytes in total, but the file has {size} bytes"
        )
    for member in members:
        if member.filename.endswith(".pkl") and member.file_size > MAX_PICKLE_BYTES:
            problem = f"the member {member.filename!r} has {member.file_size} bytes"
            raise RefusedError(f"{problem}, expected at most {MAX_PICKLE_BYTES} bytes")


def load(path: str) -> Any:
    """Loads a file with torch's restricted unpickler."""
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        blocked = re.search(r"GLOBAL ([\w.]+)", str(error))
        if blocked:
            problem = f"tries to run or create {blocked[1]}, which is not allowed in a file with factors"
            raise RefusedError(f"{problem}. Nothing was executed. Do not load the file by other means") from error
        raise


def tensors_of(loaded: Any, single: str) -> dict[str, Tensor]:
    """Checks that a file contains nothing but named tensors.

    Args:
        loaded: The content of the file.
        single: Name to use if the content is a single tensor instead of a dictionary.

    Returns:
        The tensors by name.

    Raises:
        RefusedError: If the file contains anything else, or if a tensor is larger than its storage.
    """
    import torch

    named = {single: loaded} if isinstance(loaded, torch.Tensor) else loaded
    if not isinstance(named, dict):
        raise RefusedError(f"contains an object of type {type(named).__name__}, expected a dictionary of tensors")
    for name, tensor in named.items():
        if not isinstance(name, str) or not NAME.fullmatch(name) or name == "__metadata__":
            raise RefusedError(f"has an entry with the key {str(name)[:80]!r}, expected the name of a parameter")
        if not isinstance(tensor, torch.Tensor):
            raise RefusedError(f"the entry {name!r} has type {type(tensor).__name__}, expected a tensor")
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise RefusedError(f"the entry {name!r} is not a dense CPU tensor")
        if tensor.dtype not in dtype_names():
            raise RefusedError(
                f"the entry {name!r} has dtype {tensor.dtype}, expected floating-point numbers or integers"
            )
        # With strides of zero, a tensor of any shape fits into a small storage, so its size must be checked.
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise RefusedError(
                f"the entry {name!r} has shape {list(tensor.shape)}, which requires more memory than its storage has"
            )
    return named


def dtype_names() -> dict[Any, str]:
    """Returns the supported dtypes with their names in safetensors files."""
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
    """Writes a safetensors file, one tensor at a time."""
    import torch

    end, entries, dtypes = 0, {}, dtype_names()
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": dtypes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with Path(target).open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors.values():
            stream.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


if __name__ == "__main__":
    main()
