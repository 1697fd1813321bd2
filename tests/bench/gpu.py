"""What `make gpu` runs: the device tests and the costs of kfacpack on one device, as a page to attach to an issue.

    python tests/bench/gpu.py [--device cuda|mps|standin|cpu] [--out gpu] [--layers 12 --width 768] [--batch 128]

Writes report.md, report.html and report.json. The model is transformers' CLIP vision tower with random weights, of
ViT-B/32 size on a GPU, and small on the CPU and the stand-in, where only the program is tested. Without `--device`,
KFACPACK_TEST_DEVICE or the first GPU is used, and the stand-in if there is none. A step is the forward pass, a
cross-entropy, the gradient and AdamW. Times are medians of interleaved rounds, measured with CUDA events on CUDA and as
wall time between synchronisations elsewhere. Peak memory is that of one step, in addition to what was allocated before
it. Exits with 1 if a device test fails.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import logging
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import torch
from estimate import FROZEN, PIXELS, Embedding, transformers_tower
from peers import CONTENDERS, OUTPUT, linear_parameters
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

import kfacpack as kp
from kfacpack._compat import make_torchvision_importable
from kfacpack.experiments.report import render_page
from kfacpack.experiments.report_content import Cell, ReportContent, ReportTable, Section, text

ROOT = Path(__file__).resolve().parents[2]
CLASSES = 10
COLUMNS = ["", "time ratio", "milliseconds", "memory ratio", "peak memory"]


@dataclass(frozen=True)
class Sizes:
    """Shape of the model, and number of images per step."""

    layers: int
    width: int
    batch: int
    rounds: int


GPU, ELSEWHERE = Sizes(12, 768, 128, 20), Sizes(2, 64, 4, 5)


# Devices


def choose_device(requested: str | None) -> torch.device:
    """Returns the requested device, the first GPU, or the stand-in."""
    name = requested or os.environ.get("KFACPACK_TEST_DEVICE")
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "standin"
    if name == "standin":
        sys.path.insert(0, str(ROOT / "tests"))
        from devices import accelerator

        try:
            accelerator.load()
        except accelerator.UnavailableError as problem:
            sys.exit(f"{problem}; or use --device cpu")
    return torch.empty(0, device=name).device


@dataclass
class Meter:
    """Measures the time and the peak memory of calls on a device."""

    device: torch.device

    def seconds(self, run: Callable[[], object]) -> float:
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1000
        self.synchronize()
        before = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - before

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize()

    def peak(self, run: Callable[[], object]) -> int | None:
        """Returns the bytes allocated during a call, beyond those before it; None if the device does not tell."""
        module: Any = getattr(torch, self.device.type, None)
        if not hasattr(module, "max_memory_allocated"):
            return None
        gc.collect()
        module.reset_peak_memory_stats()
        before = module.max_memory_allocated()
        run()
        self.synchronize()
        peak: int = module.max_memory_allocated() - before
        return peak

    @property
    def description(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        names = {"mps": "Apple GPU", "standin": "stand-in for a GPU, computed by the CPU", "cpu": "CPU"}
        return f"{names.get(self.device.type, self.device.type)} ({platform.processor() or platform.machine()})"


# Training steps


class Steps:
    """The steps of all contenders at the same images, labels and weights."""

    def __init__(self, device: torch.device, sizes: Sizes, autocast: bool) -> None:
        torch.manual_seed(0)
        self.device, self.autocast = device, autocast
        self.model = Embedding(transformers_tower(sizes.layers, sizes.width)).eval().to(device)
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.x = torch.randn(sizes.batch, 3, PIXELS, PIXELS).to(device)
        self.labels = torch.randint(CLASSES, (sizes.batch,)).to(device)
        self.head = nn.functional.normalize(torch.randn(CLASSES, OUTPUT), dim=-1).to(device)
        self.curvature = kp.estimate(self.model, [self.x[:2]], params=linear_parameters(self.model))

    def context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()

    def cost(self, f: Tensor) -> Tensor:
        return cross_entropy(100 * f.float() @ self.head.T, self.labels)

    def optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.AdamW:
        # With a learning rate of 0, every step computes the same.
        return torch.optim.AdamW(list(parameters), lr=0.0, weight_decay=0.0, foreach=True)

    def ordinary(self) -> Callable[[], object]:
        optimizer = self.optimizer(self.trained.values())

        def step() -> None:
            optimizer.zero_grad()
            with self.context():
                f = self.model(self.x)
            self.cost(f).backward()
            optimizer.step()

        return step

    def on_tau(
        self, f: Callable[[dict[str, Tensor]], Tensor], regularizer: kp.Regularizer | None = None
    ) -> Callable[[], object]:
        """Returns a step on τ, through a function from τ to f."""
        generator = torch.Generator().manual_seed(1)
        tau = {
            name: (1e-3 * torch.randn(p.shape, generator=generator)).to(self.device).requires_grad_()
            for name, p in self.trained.items()
        }
        optimizer = self.optimizer(tau.values())

        def step() -> None:
            optimizer.zero_grad()
            with self.context():
                output = f(tau)
            self.cost(output).backward()
            if regularizer:
                regularizer.add_grad(tau)
            optimizer.step()

        return step

    def jvp(self) -> Callable[[], object]:
        base = {name: p.detach() for name, p in self.model.named_parameters()}

        def f(tau: dict[str, Tensor]) -> Tensor:
            def call(values: dict[str, Tensor]) -> Tensor:
                output: Tensor = torch.func.functional_call(self.model, {**base, **values}, (self.x,))
                return output

            with sdpa_kernel(SDPBackend.MATH):
                output, change = torch.func.jvp(call, ({name: base[name] for name in tau},), (tau,))
            return output + change

        return self.on_tau(f)

    def linearised(self, regularizer: kp.Regularizer | None = None, **settings: Any) -> Callable[[], object]:
        lin = kp.linearize(self.model, list(self.trained), **settings)
        return self.on_tau(lambda tau: lin(self.x, tau), regularizer)

    def penalised(self, codecs: str | None = None, **settings: Any) -> Callable[[], object]:
        curvature = kp.compress(self.curvature, codecs) if codecs else self.curvature
        return self.linearised(kp.Regularizer(curvature, 1.0, **settings))

    def contenders(self) -> dict[str, Callable[[], Callable[[], object]]]:
        """Returns functions that prepare the step of each contender."""
        contenders: dict[str, Callable[[], Callable[[], object]]] = {
            "ordinary step": self.ordinary,
            "torch.func.jvp": self.jvp,
            "kfacpack": self.linearised,
            "kfacpack, penalty": self.penalised,
            "kfacpack, penalty block:8": lambda: self.penalised("block:8"),
            "kfacpack, penalty block:8+int8": lambda: self.penalised("block:8+int8"),
            "kfacpack, penalty offloaded": lambda: self.penalised(offload=True),
        }
        if "compile" in inspect.signature(kp.linearize).parameters:
            contenders["kfacpack, compiled"] = lambda: self.linearised(compile=True)
        return contenders


@dataclass
class Results:
    """Seconds and peak bytes by contender, and why others could not run."""

    seconds: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, int | None] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def table(self, caption: str) -> ReportTable:
        """Returns ratios to the first contender, with the seconds and bytes that they come from."""
        reference = next(iter(self.seconds))
        rows = []
        for name, seconds in self.seconds.items():
            peak, base = self.peaks[name], self.peaks[reference]
            rows.append([
                text(name),
                Cell(kind="number", value=seconds / self.seconds[reference]),
                Cell(kind="number", value=1000 * seconds),
                Cell(kind="number", value=peak / base if peak is not None and base else None),
                Cell(kind="bytes", value=peak),
            ])  # fmt: skip
        rows += [[text(name), *[Cell(kind="number", value=None)] * 4] for name in self.failures]
        return ReportTable(caption=caption, columns=COLUMNS, rows=rows)

    def notes(self) -> str:
        return " ".join(f"{name} did not run: {reason}." for name, reason in self.failures.items())


def measure(meter: Meter, prepare: dict[str, Callable[[], Callable[[], object]]], rounds: int) -> Results:
    """Runs every contender once for its memory, then in interleaved rounds for its time."""
    results, runs = Results(), {}
    for name, make in prepare.items():
        try:
            run = make()
            for _ in range(2):
                run()
            results.peaks[name] = meter.peak(run)
        except (kp.KfacpackError, RuntimeError, AssertionError, ImportError, TypeError, ValueError) as error:
            # Other libraries and compilers do not support every device; the page says so.
            lines = str(error).strip().splitlines() or [""]
            results.failures[name] = f"{type(error).__name__}: {lines[0][:160].rstrip('.')}"
        else:
            runs[name] = run
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(meter.seconds(run))
    results.seconds = {name: median(values) for name, values in times.items()}
    return results


def estimates(meter: Meter, sizes: Sizes) -> Results:
    """Compares estimates with a plain pass and with other libraries, on the layers that all of them support."""
    torch.manual_seed(0)
    model = Embedding(transformers_tower(sizes.layers, sizes.width)).eval().to(meter.device)
    batches = [torch.randn(sizes.batch, 3, PIXELS, PIXELS).to(meter.device) for _ in range(2)]
    names = {
        "plain": "forward and backward pass",
        "kfacpack": "kfacpack",
        "curvlinops-hooks": "curvlinops",
        "kronfluence": "kronfluence",
    }

    def prepared(contender: str) -> Callable[[], Callable[[], object]]:
        return lambda: lambda: CONTENDERS[contender](model, batches)

    return measure(meter, {label: prepared(name) for name, label in names.items()}, max(2, sizes.rounds // 4))


# The page


def device_tests(device: torch.device) -> tuple[dict[str, int], str]:
    """Runs tests/devices on the device; returns the numbers of tests by outcome, and the names of those that failed."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "tests/devices", "-q", f"--junitxml={path}"]
        environment = {**os.environ, "KFACPACK_TEST_DEVICE": device.type}
        subprocess.run(command, cwd=ROOT, env=environment, check=False, stdout=sys.stderr)
        if not path.exists():
            sys.exit("the device tests did not run")
        suite = next(ElementTree.parse(path).getroot().iter("testsuite"))
    counts = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    failed = [case.get("name", "") for case in suite.iter("testcase") if case.find("failure") is not None]
    outcome = {"passed": counts["tests"] - sum(counts[key] for key in ("failures", "errors", "skipped"))}
    return {**outcome, "failed": counts["failures"] + counts["errors"], "skipped": counts["skipped"]}, "\n".join(failed)


def compose(
    meter: Meter, sizes: Sizes, steps: dict[str, Results], estimated: Results, tests: tuple[dict[str, int], str] | None
) -> ReportContent:
    settings = {
        "device": meter.description,
        "torch": torch.__version__,
        "kfacpack": kp.__version__,
        "Python": platform.python_version(),
        "system": platform.platform(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "model": f"CLIP vision tower, {sizes.layers} layers of width {sizes.width}, images of {PIXELS} pixels",
        "frozen": ", ".join(FROZEN[:2]),
        "batch": f"{sizes.batch} images",
        "rounds": f"{sizes.rounds}, interleaved; medians",
        "times": "CUDA events" if meter.device.type == "cuda" else "wall time between synchronisations",
        "threads": str(torch.get_num_threads()),
    }
    first = next(iter(steps.values())).seconds
    ratio = first.get("kfacpack", float("nan")) / first["ordinary step"]
    how = "Forward pass, cross-entropy, gradient and AdamW. Ratios are to an ordinary step of fine-tuning. "
    how += "Peak memory is that of one step, beyond weights, τ, optimizer state and factors on the device. "
    if meter.device.type not in ("cuda", "mps"):
        how += "This run only tests the program: its ratios say nothing about a GPU. "
    sections = [
        Section(
            id="steps",
            title="Training steps",
            how_to_read=how + " ".join(filter(None, (result.notes() for result in steps.values()))),
            tables=[result.table(caption) for caption, result in steps.items()],
        ),
        Section(
            id="estimate",
            title="Estimate",
            how_to_read="Two batches, one probe per image. Ratios are to a forward and backward pass. "
            + estimated.notes(),
            tables=[estimated.table("All linear layers")],
        ),
    ]
    if tests:
        counts, failed = tests
        rows = [[text(outcome), Cell(kind="count", value=count)] for outcome, count in counts.items()]
        sections.append(
            Section(
                id="tests",
                title="Device tests",
                how_to_read="tests/devices on this device. Tests that count copies and waits need the stand-in.",
                tables=[ReportTable(caption="Tests", columns=["outcome", "tests"], rows=rows)],
                listings=[{"caption": "Failed", "text": failed}] if failed else [],
            )
        )
    rows = [[text(key), text(value)] for key, value in settings.items()]
    table = ReportTable(caption="Settings", columns=["", "value"], rows=rows)
    about = "This page was written by make gpu and can be attached to an issue."
    sections.append(Section(id="settings", title="Settings", how_to_read=about, tables=[table]))
    headline = [
        text("A linearised step takes"),
        Cell(kind="number", value=ratio),
        text(f"times as long as an ordinary one on this device: {meter.description}."),
    ]
    return ReportContent(title=f"kfacpack on {meter.device.type}", headline=headline, sections=sections)


def as_markdown(content: ReportContent) -> str:
    """Returns the page as Markdown for an issue."""
    lines = [f"# {content.title}", "", " ".join(cell.shown for cell in content.headline), ""]
    for section in content.sections:
        lines += [f"## {section.title}", "", section.how_to_read, ""]
        for table in section.tables:
            lines += [f"**{table.caption}**", "", f"| {' | '.join(table.columns)} |", "|---" * len(table.columns) + "|"]
            lines += [f"| {' | '.join(cell.shown for cell in row)} |" for row in table.rows]
            lines.append("")
        for listing in section.listings:
            lines += [f"{listing.caption}:", "", "```", listing.text, "```", ""]
    return "\n".join(lines)


def main(options: argparse.Namespace) -> int:
    device = choose_device(options.device)
    defaults = GPU if device.type in ("cuda", "mps") else ELSEWHERE
    requested = (options.layers, options.width, options.batch, options.rounds)
    present = (defaults.layers, defaults.width, defaults.batch, defaults.rounds)
    sizes = Sizes(*(wanted or default for wanted, default in zip(requested, present, strict=True)))
    meter = Meter(device)
    tests = None if options.skip_tests else device_tests(device)
    steps = {}
    for caption, autocast in (("float32", False), ("bfloat16 autocast", True)):
        print(f"{caption}: measuring training steps", file=sys.stderr)
        contenders = Steps(device, sizes, autocast).contenders()
        steps[caption] = measure(meter, contenders, sizes.rounds)
    print("measuring estimates", file=sys.stderr)
    content = compose(meter, sizes, steps, estimates(meter, sizes), tests)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.json").write_text(f"{content.model_dump_json(indent=1)}\n", encoding="utf-8")
    (options.out / "report.html").write_text(render_page(content, {}), encoding="utf-8")
    (options.out / "report.md").write_text(as_markdown(content), encoding="utf-8")
    print(as_markdown(content))
    print(f"written: {options.out / 'report.md'}, {options.out / 'report.html'}", file=sys.stderr)
    return 1 if tests and tests[0]["failed"] else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The device tests and the costs of kfacpack on one device.")
    parser.add_argument("--device", help="cuda, mps, standin or cpu")
    parser.add_argument("--out", type=Path, default=Path("gpu"))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, help="a multiple of 64")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--skip-tests", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    make_torchvision_importable()
    sys.exit(main(arguments()))
