"""The command line: stdout, stderr and exit codes of the commands, help, completion and suggestions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from hashlib import sha256

import numpy as np
import pytest
import torch
from kfacpack_cli.main import app
from kit import forge, small_curvature
from safetensors.torch import save_file
from typer.main import get_command
from typer.testing import CliRunner

import kfacpack as kp


@pytest.fixture
def bundle(tmp_path):
    small_curvature("packed").save(tmp_path / "toy.kfac")
    return tmp_path / "toy.kfac"


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


def test_inspect_shows_a_summary(bundle):
    result = run("inspect", bundle)
    assert result.exit_code == 0
    for fact in (
        "toy",
        "nobody/toy",
        "12 of 100",
        "small (test)",
        "normalised embedding of width 4",
        "2 orthogonal probes",
    ):
        assert fact in result.stdout
    assert kp.Bundle(bundle).digest[:50] in result.stdout.replace("\n", "")


def test_inspect_lists_blocks(bundle):
    result = run("inspect", bundle, "--blocks")
    for block in kp.load(bundle).blocks:
        assert block.name in result.stdout
    assert "+ one.bias" in result.stdout
    assert "+ attn.in_proj_weight" not in result.stdout


def test_inspect_json_has_the_whole_manifest(bundle):
    result = run("inspect", bundle, "--json")
    output = json.loads(result.stdout)
    assert output["sha256"] == kp.Bundle(bundle).digest
    assert output["bytes"] == bundle.stat().st_size
    assert set(output) == {"path", "sha256", "bytes", "dense_bytes", "weights", "manifest"}
    assert output["manifest"]["source"]["task"] == "toy"
    assert len(output["manifest"]["blocks"]) == len(kp.load(bundle).blocks)


def test_names_with_markup_are_printed_literally(tmp_path, bundle):
    forged = forge(bundle, tmp_path / "m.kfac", lambda h, m, d: m["source"].update(task="[red]not red[/red]"))
    assert "[red]not red[/red]" in run("inspect", forged).stdout


def test_verify_of_a_valid_bundle(bundle):
    result = run("verify", bundle)
    assert result.exit_code == 0
    assert "passed" in result.stdout
    for check in ("sha256", "finite", "symmetry", "psd"):
        assert check in result.stdout


def test_verify_counts_matrices_that_need_not_be_psd(tmp_path):
    small_curvature("packed-int8").save(tmp_path / "toy.kfac")
    assert "psd (1; 9 not checked)" in run("verify", tmp_path / "toy.kfac").stdout
    assert "1 of 10 matrices" in run("inspect", tmp_path / "toy.kfac").stdout


def test_a_closed_pipe_is_not_an_error(bundle):
    program = f"{sys.executable} -c 'from kfacpack_cli import run; run()' inspect '{bundle}' --json | head -1"
    result = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "{\n", "")


def test_a_full_disk_is_an_error_with_code_2(bundle):
    program = f"{sys.executable} -c 'from kfacpack_cli import run; run()' inspect '{bundle}' > /dev/full"
    result = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "error: could not write the output: No space left on device\n"


def test_the_help_on_a_full_disk_is_an_error_with_code_2():
    program = f"{sys.executable} -c 'from kfacpack_cli import run; run()' --help > /dev/full"
    result = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (2, "error: could not write the output: No space left on device\n")


def test_a_closed_stdout_is_not_an_error(bundle):
    program = f"{sys.executable} -c 'from kfacpack_cli import run; run()' inspect '{bundle}' >&-"
    result = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_connection_that_is_closed_does_not_end_the_process():
    """With the default action of SIGPIPE, it would end without a message, for example during an upload."""
    program = (
        "import socket, sys; from kfacpack_cli import run; sys.argv[1:] = ['--version']\n"
        "try: run()\n"
        "except SystemExit: pass\n"
        "one, two = socket.socketpair(); two.close()\n"
        "try: one.send(b'x')\n"
        "except BrokenPipeError: print('refused')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "refused")


def test_verify_quiet_prints_nothing(bundle):
    result = run("verify", "--quiet", bundle)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def damaged(bundle, target, name, values):
    """Returns a bundle with other values at the start of tensor `name` and correct hashes."""

    def edit(header, manifest, data):
        start, stop = header[name]["data_offsets"]
        data[start : start + values.nbytes] = values.tobytes()
        digest = sha256(data[start:stop]).hexdigest()
        for matrix in manifest["matrices"]:
            for tensor in matrix["tensors"]:
                tensor["sha256"] = digest if tensor["name"] == name else tensor["sha256"]

    return forge(bundle, target, edit)


def test_verify_names_the_tensor_that_was_damaged(bundle):
    raw = bytearray(bundle.read_bytes())
    spec = kp.Bundle(bundle).tensors["proj/B"]
    raw[spec.start + 2] ^= 4
    bundle.write_bytes(raw)
    result = run("verify", bundle)
    assert result.exit_code == 1
    assert "tensor 'proj/B': its bytes have SHA-256" in result.stderr
    assert "failed" in result.stdout


def test_verify_names_the_tensor_that_is_not_finite(bundle, tmp_path):
    result = run("verify", damaged(bundle, tmp_path / "bad.kfac", "proj/B", np.float32([np.nan])))
    assert result.exit_code == 1
    assert "tensor 'proj/B': element 0 is not a finite number" in result.stderr


def test_verify_names_the_tensor_that_is_not_positive_semi_definite(bundle, tmp_path):
    result = run("verify", damaged(bundle, tmp_path / "bad.kfac", "proj/B", np.float32([-1.0])))
    assert result.exit_code == 1
    assert "tensor 'proj/B': is not positive semi-definite: it has an eigenvalue below -" in result.stderr


def test_verify_names_the_tensor_that_is_not_symmetric(tmp_path):
    small_curvature("dense").save(tmp_path / "toy.kfac", pack=False)
    bad = damaged(tmp_path / "toy.kfac", tmp_path / "bad.kfac", "proj/B", np.float32([1.0, 0.5, 0.7]))
    result = run("verify", bad)
    assert result.exit_code == 1
    assert "tensor 'proj/B': is not symmetric" in result.stderr


def test_verify_against_weights(bundle, tmp_path):
    shapes = {p.name: p.shape for p in kp.load(bundle).about.base.parameters}
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shapes[name], generator=generator) for name in shapes}
    save_file(state, tmp_path / "right.safetensors")
    save_file({**state, "proj": torch.zeros(3, 2)}, tmp_path / "wrong.safetensors")
    assert run("verify", bundle, "--model", tmp_path / "right.safetensors").exit_code == 0
    result = run("verify", bundle, "--model", tmp_path / "wrong.safetensors")
    assert result.exit_code == 1
    assert "parameter 'proj': has sha256" in result.stderr
    result = run("verify", bundle, "--model", "no-such-model")
    assert result.exit_code == 2
    assert "no-such-model" in result.stderr


def test_verify_checks_every_file(bundle, tmp_path):
    (tmp_path / "cut.kfac").write_bytes(bundle.read_bytes()[:-5])
    result = run("verify", tmp_path / "cut.kfac", bundle, "--json")
    assert result.exit_code == 2
    output = json.loads(result.stdout)
    assert [entry["holds"] for entry in output["bundles"]] == [True]
    assert output["unreadable"][0]["path"] == str(tmp_path / "cut.kfac")
    assert "ends at byte" in output["unreadable"][0]["error"]
    assert set(output["bundles"][0]) == {"path", "sha256", "holds", "checks"}
    assert set(output["bundles"][0]["checks"][0]) == {"name", "checked", "failures", "exempt"}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_encodings_without_all_characters(bundle, encoding):
    command = [sys.executable, "-c", "from kfacpack_cli import run; run()", "inspect", str(bundle), "--blocks"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    result = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"one.weight" in result.stdout


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("name", ["nowhere.kfac", "."])
def test_missing_files(tmp_path, command, name):
    result = run(command, tmp_path / name)
    assert result.exit_code == 2
    assert "error: " in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [["inspect"], ["verify"], ["inspct", "x"], ["inspect", "--frobnicate", "x"]])
def test_wrong_usage(arguments):
    assert run(*arguments).exit_code == 2


def test_an_interruption_exits_with_130(bundle, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("kfacpack_cli.inspect.Bundle", interrupted)
    assert run("inspect", bundle).exit_code == 130


def test_sigterm_exits_with_130_and_removes_temporary_files(bundle, tmp_path):
    program = (
        "import os, signal, tempfile, kfacpack_cli.inspect as module\n"
        "def terminated(*arguments):\n"
        "    with tempfile.TemporaryDirectory(dir=os.environ['FOLDER']):\n"
        "        os.kill(os.getpid(), signal.SIGTERM); signal.pause()\n"
        "module.Bundle = terminated\n"
        "from kfacpack_cli import run; run()"
    )
    (tmp_path / "temporary").mkdir()
    environment = os.environ | {"FOLDER": str(tmp_path / "temporary")}
    words = [sys.executable, "-c", program, "inspect", str(bundle)]
    result = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=60)
    assert result.returncode == 130, result.stderr
    assert "Traceback" not in result.stderr
    assert list((tmp_path / "temporary").iterdir()) == []


def test_version():
    assert run("--version").stdout == f"kfacpack {kp.__version__}\n"


def test_inspect_does_not_wait_for_torch(bundle):
    program = "import sys; from kfacpack_cli.main import app; app(['inspect', sys.argv[1]], standalone_mode=False); "
    program += "assert 'torch' not in sys.modules, 'torch was imported'"
    result = subprocess.run([sys.executable, "-c", program, str(bundle)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_command_has_help():
    commands = get_command(app).commands
    assert {"estimate", "train", "push"} <= set(commands)
    for name in commands:
        result = CliRunner().invoke(app, [name, "--help"], catch_exceptions=False)
        assert result.exit_code == 0
        assert f"kfacpack {name}" in result.stdout or f" {name} " in result.stdout


def test_usage_lines():
    """They show metavars of arguments; flags have no value."""
    for name in ["merge", "eval", "push", "pull", "measure"]:
        text = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "120"}).stdout
        assert "bool" not in text
        assert not any(odd in text.split("\n")[1] for odd in ("{", "......", "None"))
    usage = CliRunner().invoke(app, ["push", "--help"], env={"COLUMNS": "120"}).stdout.split("\n")[1]
    assert usage.split("[OPTIONS]")[1].strip() == "FILE... OWNER/REPO"


PANELS = {
    "Curvature": ["estimate", "inspect", "verify", "compress", "merge", "import", "export"],
    "Task vectors": ["train", "extract", "add", "negate", "refine", "eval", "measure"],
    "Experiments": ["run", "report", "demo"],
    "Hub": ["push", "pull", "search"],
    "Lists": ["models", "tasks"],
}


def test_commands_are_grouped_in_panels():
    panels, current = {}, None
    for line in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).stdout.splitlines():
        if line.startswith("╭─"):
            current = panels.setdefault(line.strip("╭─╮ "), [])
        elif line.startswith("│ ") and line[2] != " ":
            current.append(line.split()[1])
    assert {panel: panels[panel] for panel in PANELS} == PANELS
    assert set(panels) - set(PANELS) == {"Options"}
    assert sorted(name for names in PANELS.values() for name in names) == sorted(get_command(app).commands)


def test_every_option_has_a_help_text():
    for name, command in get_command(app).commands.items():
        for parameter in command.params:
            assert parameter.help, f"{name}: {parameter.name}"


def test_brackets_in_help_texts_are_shown():
    """rich would take them for markup."""
    shown = CliRunner().invoke(app, ["estimate", "--help"], env={"COLUMNS": "200"}).stdout
    assert "OWNER/REPO[@REVISION][/CONFIG]" in shown
    assert "[default: chosen by name or type]" in shown


@pytest.mark.parametrize(
    ("arguments", "suggestion"), [(["inspct", "x"], "'inspect'"), (["inspect", "--blcks", "x"], "--blocks")]
)
def test_misspelt_commands_and_options_are_corrected(arguments, suggestion):
    result = run(*arguments)
    assert result.exit_code == 2
    assert suggestion in result.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("kfacpack comp", {"compress"}),
        ("kfacpack estimate --fisher ", {"exact", "mc"}),
        ("kfacpack merge --ru", {"--rule"}),
    ],
)
def test_completion_in_bash(words, expected):
    environment = {**os.environ, "_KFACPACK_COMPLETE": "complete_bash", "COMP_WORDS": words}
    environment["COMP_CWORD"] = str(len(words.split(" ")) - 1)
    command = [sys.executable, "-m", "kfacpack_cli"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert set(result.stdout.split()) == expected


def test_the_next_command_is_shown(bundle, tmp_path):
    small = tmp_path / "small one.kfac"
    command = ["compress", bundle, "int8", "-o", small]
    line = run(*command).stdout.splitlines()[-1]
    assert line.startswith("next: kfacpack train ")
    assert f"--reg '{small}'" in line, "quoted for the shell"
    for silent in ("--json", "--quiet"):
        assert "next:" not in run(*command, silent).output
    assert "next:" not in run("compress", bundle, "int8", "--dry-run").output
    assert "next: " in run("export", bundle, "-o", tmp_path / "factors.safetensors").stdout


def test_help_does_not_import_torch():
    command = [sys.executable, "-X", "importtime", "-m", "kfacpack_cli", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "transformers", "open_clip", "timm", "datasets", "matplotlib"}
