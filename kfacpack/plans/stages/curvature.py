"""Each task's curvature, and the others' merged for it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from kfacpack.bundle.reader import Bundle
from kfacpack.estimation.job import Job
from kfacpack.estimation.options import Options, Structure
from kfacpack.merging.merge import merge_and_report
from kfacpack.merging.rules import RULES
from kfacpack.plans.commands import command, for_model, for_task
from kfacpack.plans.stages.base import Sealed, Stage, Watch
from kfacpack.tasks.sampling import how_many


@dataclass(frozen=True, eq=False)
class Estimate(Sealed):
    kind: ClassVar[str] = "bundles"
    suffix: ClassVar[str] = ".kfac"
    opens = Bundle
    why: ClassVar[str] = "each task's curvature, from its own data: what its owner would publish"

    task: str
    structure: Structure
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}.{self.structure}.seed-{self.seed}"

    @property
    def options(self) -> Options:
        said = self.shop.plan.curvature
        compress = said.compress if self.structure == "kronecker" else None
        return Options(said.fisher, said.samples, said.probe, self.seed, structure=self.structure, compress=compress)

    def settings(self) -> dict[str, Any]:
        said = self.shop.plan.curvature
        return {
            **asdict(self.options),
            "task": self.task,
            "data": self.shop.data_key(self.task, "train"),
            "examples": said.examples,
            "batch_size": said.batch_size,
        }

    def make(self, watch: Watch) -> None:
        said = self.shop.plan.curvature
        job = Job(self.shop.model, self.shop.task(self.task), self.options, said.examples, said.batch_size)
        job.run(self.path, resume=True, on_progress=watch.counted, stopped=watch.stopped)

    def cost(self) -> float:
        said = self.shop.plan.curvature
        return 8.0 * how_many(said.examples, self.shop.task(self.task).sizes["train"]) * said.samples

    def command(self) -> str:
        said, options = self.shop.plan.curvature, self.options
        return command(
            "estimate",
            *for_model(self.shop.plan, self.root),
            *for_task(self.shop.plan, self.task, self.root),
            *("--examples", said.examples, "--fisher", options.fisher, "--samples", options.samples),
            *("--probe", options.probe, "--structure", options.structure, "--batch-size", said.batch_size),
            *(("--compress", options.compress) if options.compress else ()),
            *("--seed", self.seed, "-o", self.path.relative_to(self.root)),
        )


@dataclass(frozen=True, eq=False)
class Merge(Sealed):
    kind: ClassVar[str] = "merged"
    suffix: ClassVar[str] = ".kfac"
    opens = Bundle
    why: ClassVar[str] = "for each task, the others' curvature in one bundle: what training must not disturb"

    without: str
    bundles: tuple[Estimate, ...]
    rule: str
    rank: int

    @property
    def name(self) -> str:
        first = self.bundles[0]
        rank = f"-{self.rank}" if self.rank > 1 else ""
        return f"not-{self.without}.{first.structure}.{self.rule}{rank}.seed-{first.seed}"

    @property
    def inputs(self) -> tuple[Stage, ...]:
        return self.bundles

    def settings(self) -> dict[str, Any]:
        return {"rule": self.rule, "rank": self.rank}

    def make(self, watch: Watch) -> None:
        paths, watch = [each.path for each in self.bundles], watch.of_one_piece()
        merged = merge_and_report(paths, self.rule, self.rank, progress=watch.counted)
        merged.curvature.save(self.path, progress=watch.counted)

    def cost(self) -> float:
        return 50.0 * len(self.bundles)

    def error(self) -> float | None:
        """Of the merged curvature, relative to the sum."""
        return RULES[self.rule](self.rank).error_in(Bundle(self.path).manifest.losses)

    def command(self) -> str:
        paths = [each.path.relative_to(self.root) for each in self.bundles]
        rank = ("--rank", self.rank) if self.rank > 1 else ()
        return command("merge", *paths, "--rule", self.rule, *rank, "-o", self.path.relative_to(self.root))
