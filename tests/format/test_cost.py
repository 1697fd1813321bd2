"""Malicious files are rejected at bounded cost in time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kit import error_message, forge, matrix_entry, write_sealed

from kfacpack.format.container import MAX_JSON_VALUES


def test_malicious_headers_are_rejected(target):
    """Deep nesting, too many values, a header that is too long, text that is not UTF-8, numbers of many digits."""
    metadata = '{"__metadata__":{"kfac.sha256":"' + "0" * 64 + '","kfac":"%s"}%s}'
    deep = metadata % ("[" * 100_000, "")
    assert "invalid JSON" in error_message(write_sealed(target, deep, b""))
    deep = metadata % ("", ',"x":' + "[" * 100_000 + "]" * 100_000)
    assert "nested too deeply" in error_message(write_sealed(target, deep, b""))
    flood = metadata % ("", ',"x":[' + "[]," * 2**20 + "0]")
    assert "JSON values" in error_message(write_sealed(target, flood, b""))
    hidden = metadata % ('{\\"x\\":[' + "\\u005b\\u005d\\u002c" * 2**18 + "0]}", "")
    assert "JSON values" in error_message(write_sealed(target, hidden, b""))
    digits = metadata % ('{\\"version\\":' + "9" * 10_000 + "}", "")
    error_message(write_sealed(target, digits, b""))
    surrogate = metadata % ("\\ud800", "")
    error_message(write_sealed(target, surrogate, b""))
    target.write_bytes((2**23 + 1).to_bytes(8, "little") + b"{" + b" " * 2**23)
    assert "at most 8388608 are allowed" in error_message(target)
    target.write_bytes((100).to_bytes(8, "little") + b"{" + b"\xff" * 99)
    assert "invalid JSON" in error_message(target)
    target.write_bytes((100).to_bytes(8, "little") + '{"a":1}'.encode("utf-16-le").ljust(100))
    error_message(target)


MEASURE = """
import os, sys
from pathlib import Path
from kfacpack_cli.main import app
command, *paths = sys.argv[1:]
for path in paths:
    # Every file is read in a forked process, whose peak memory includes the interpreter and the imports.
    if os.fork():
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        continue
    try:
        app([command, path])
    except SystemExit as end:
        # ru_maxrss would include the peak of the parent process before the fork.
        print(end.code, Path("/proc/self/status").read_text().split("VmHWM:")[1].split("kB")[0], flush=True)
        os._exit(0)
"""


def floods() -> dict[str, str]:
    """Manifests with as many entries as the limits allow: valid, invalid and misplaced ones."""

    def full_of(item: str, cost: int) -> str:
        return ",".join([item] * (MAX_JSON_VALUES // cost - 9))

    def manifest(text: str) -> str:
        quoted = json.dumps('{"version":"1.0",' + text + "}")
        return '{"__metadata__":{"kfac.sha256":"' + "0" * 64 + '","kfac":' + quoted + "}}"

    tensor = '{"component":"data","name":"t","sha256":"' + "a" * 64 + '"}'
    parameter = '{"name":"p","dtype":"F","shape":[],"sha256":"' + "a" * 64 + '"}'
    values = full_of('{"a":1}', 2)
    return {
        "matrices": manifest(
            '"matrices":[' + full_of('{"name":"m","form":"f","side":1,"tensors":[' + tensor + "]}", 9) + "]"
        ),
        "wrong-matrices": manifest('"matrices":[' + full_of('{"name":3}', 2) + "]"),
        "blocks": manifest('"blocks":[' + full_of('{"structure":"dense"}', 2) + "]"),
        "parameters": manifest('"base":{"parameters":[' + full_of(parameter, 6) + "]}"),
        "requires": manifest('"requires":[' + full_of('"feature"', 1) + "]"),
        "unknown": manifest('"unknown":[' + values + "]"),
        "header": '{"__metadata__":{"kfac.sha256":"' + "0" * 64 + '","kfac":"{}"},"x":[' + values + "]}",
    }


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_malicious_files_take_less_than_200_mb(good, tmp_path, command):
    """Measured for the whole process of the command line, including the interpreter."""
    raw = good.read_bytes()
    for name, text in floods().items():
        write_sealed(tmp_path / f"{name}.kfac", text, b"")
    forge(good, tmp_path / "shape.kfac", lambda h, m, d: h["one.weight/B"].update(shape=[2**40]))
    forge(good, tmp_path / "side.kfac", lambda h, m, d: matrix_entry(m).update(side=2**24))
    forge(
        good,
        tmp_path / "parameter.kfac",
        lambda h, m, d: m["base"]["parameters"][0].update(shape=[2**40] * 8),
    )
    (tmp_path / "long.kfac").write_bytes((2**63).to_bytes(8, "little") + raw[8:])
    (tmp_path / "cut.kfac").write_bytes(raw[:-1])
    paths = sorted(tmp_path.iterdir())
    arguments = [sys.executable, "-c", MEASURE, command, *map(str, paths)]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60 * len(paths))
    assert result.returncode == 0, result.stderr
    for path, line in zip(paths, result.stdout.splitlines(), strict=True):
        code, peak = map(int, line.split())
        assert code == 2, path.name
        assert peak < 200 * 1024, path.name
    assert result.stderr.count("error: ") == len(paths)
    assert "Traceback" not in result.stderr
