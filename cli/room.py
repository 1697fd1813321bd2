"""Where `kfacpack eval` has exams taken, in every way it can be asked to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from .console import out, percent
from .options import HeadKind
from .progress import examples_bar
from .scores import print_negation, print_result, print_sweep, rows

if TYPE_CHECKING:
    from kfacpack.evaluation.accuracy import Exam, Score
    from kfacpack.heads import Head
    from kfacpack.models import Model
    from kfacpack.tasks import Task
    from kfacpack.vectors.vector import TaskVector


@dataclass(frozen=True)
class Found:
    """What was measured, in every form it may be asked for."""

    as_json: dict[str, Any]
    rows: list[list[Any]]
    print: Callable[[], None]


@dataclass(frozen=True)
class Room:
    """Where exams are taken: a model that is loaded once, whatever vectors come and go."""

    model: Model
    kind: HeadKind
    batch_size: int
    show: bool

    def head(self, task: Task, vector: TaskVector | None) -> Head:
        """Of the kind that was asked for; if none was, the vector's own."""
        from kfacpack.evaluation.accuracy import own_head
        from kfacpack.heads import head_for

        if self.kind == "auto" and (own := own_head(task, vector)):
            return own
        with examples_bar(f"{task.name}: head", show=self.show) as advance:
            return head_for(self.model, task, self.kind, batch_size=self.batch_size, on_progress=advance)

    def accuracies(self, known: Mapping[str, float | TaskVector], exams: Mapping[str, Exam]) -> dict[str, float]:
        """Of the individual vectors, on the same examples at α = 1."""
        return {
            name: found
            if isinstance(found, float)
            else self._scores(f"{name} alone", self.head(exams[name].task, found), exams[name], found, [1.0])[
                0
            ].accuracy
            for name, found in known.items()
        }

    def sweep(
        self,
        heads: Mapping[str, Head],
        exams: Mapping[str, Exam],
        vector: TaskVector | None,
        alphas: Sequence[float],
        individual: Mapping[str, float],
        split: str,
    ) -> Found:
        """Every task at every α."""
        from kfacpack.evaluation.sweep import best

        found = {name: self._scores(name, heads[name], exam, vector, alphas) for name, exam in exams.items()}
        told = _told(found, individual, heads)
        lines = _rows(told, split, alphas if vector else [None])
        if len(alphas) == 1:
            return Found(told[0], lines, lambda: print_result(told[0]))
        where = best(alphas, list(found.values()))
        largest = {"alpha": alphas[where], "split": split, "mean": told[where]["mean"]}
        return Found(
            {"sweep": _listed(told, alphas), "best": largest}, lines, lambda: print_sweep(alphas, told, where, split)
        )

    def choice(
        self,
        heads: Mapping[str, Head],
        validation: Mapping[str, Exam],
        test: Mapping[str, Exam],
        vector: TaskVector,
        alphas: Sequence[float],
        individual: Mapping[str, float],
    ) -> Found:
        from kfacpack.evaluation.choice import Subject, choose
        from kfacpack.evaluation.results import result
        from kfacpack.evaluation.sweep import mean

        subjects = [Subject(heads[name], validation[name], test[name]) for name in test]
        with examples_bar("choosing α", show=self.show) as advance:
            made = choose(self.model, subjects, vector, alphas, batch_size=self.batch_size, on_progress=advance)
        before = _told(made.validation, {}, heads)
        after = result(made.test, individual, {name: each.origin for name, each in heads.items()})
        at = alphas.index(made.alpha)
        best = {
            "alpha": made.alpha,
            "validation": before[at]["mean"]["accuracy"],
            "test": mean(list(made.test.values())),
        }

        def show() -> None:
            words = f"α = {made.alpha:g}, chosen from {len(alphas)} on validation: {percent(best['validation'])} there"
            out.print(Text(f"{words}; on test:"))
            print_result(after)

        lines = [*_rows(before, "validation", alphas), *rows(after, "test", made.alpha)]
        return Found({**after, "best": best, "validation": {"sweep": _listed(before, alphas)}}, lines, show)

    def negation(
        self,
        heads: Mapping[str, Head],
        validation: Mapping[str, Exam],
        test: Mapping[str, Exam],
        vector: TaskVector,
        alphas: Sequence[float],
        keep: float,
    ) -> Found:
        """The control is the last of the tasks."""
        from kfacpack.evaluation.choice import Subject
        from kfacpack.evaluation.negation import negate

        *targets, control = (Subject(heads[name], validation[name], test[name]) for name in test)
        with examples_bar("choosing α", show=self.show) as advance:
            found = negate(
                self.model,
                targets,
                control,
                vector,
                alphas,
                keep=keep,
                batch_size=self.batch_size,
                on_progress=advance,
            )
        lines: list[list[Any]] = []
        for each in [*targets, control]:
            entry = found["tasks"].get(each.name) or next(iter(found["tasks"].values()))
            keys = ("before", "accuracy") if each is not control else ("control_before", "control")
            for key, alpha in zip(keys, (0.0, 0.0 - entry["alpha"]), strict=True):
                lines.append([each.name, "test", alpha, entry[key], None, len(each.test.numbers), each.head.origin])
        return Found({"negation": found}, lines, lambda: print_negation(found))

    def _scores(
        self, words: str, head: Head, exam: Exam, vector: TaskVector | None, alphas: Sequence[float]
    ) -> list[Score]:
        from kfacpack.evaluation.accuracy import scores

        with examples_bar(words, show=self.show) as advance:
            return scores(self.model, head, exam, vector, alphas, batch_size=self.batch_size, on_progress=advance)


def _told(
    found: Mapping[str, Sequence[Score]], individual: Mapping[str, float], heads: Mapping[str, Head]
) -> list[dict[str, Any]]:
    """The result at each α, from each task's scores at every one of them."""
    from kfacpack.evaluation.results import result

    origins = {name: each.origin for name, each in heads.items()}
    count = len(next(iter(found.values())))
    return [result({name: each[k] for name, each in found.items()}, individual, origins) for k in range(count)]


def _listed(told: Sequence[dict[str, Any]], alphas: Sequence[float]) -> list[dict[str, Any]]:
    """The results at each α, as JSON."""
    return [{"alpha": alpha, **each} for alpha, each in zip(alphas, told, strict=True)]


def _rows(told: Sequence[dict[str, Any]], split: str, alphas: Sequence[float | None]) -> list[list[Any]]:
    """The same as rows for a spreadsheet."""
    return [row for alpha, each in zip(alphas, told, strict=True) for row in rows(each, split, alpha)]
