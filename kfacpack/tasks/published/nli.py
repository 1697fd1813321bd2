"""Six tasks of natural language inference. The classes' names are what T5 says for them, and are left as they are."""

from __future__ import annotations

from kfacpack.tasks.published.base import HIDDEN, Published

PREMISE, HYPOTHESIS = ("premise", "sentence1"), ("hypothesis", "sentence2")
PAIR = {"premise": PREMISE, "hypothesis": HYPOTHESIS}
LABEL = ("label", "gold_label")


def snli() -> Published:
    return Published(
        name="snli",
        repository="stanfordnlp/snli",
        config="plain_text",
        license="CC BY-SA 4.0",
        classes=3,
        stored={"train": 549367, "validation": 9842, "test": 9824},
        inputs=PAIR,
        label=LABEL,
        words=tuple,
        drops_unlabelled=True,  # those on which the annotators did not agree: 785, 158 and 176
    )


def mnli() -> Published:
    return Published(
        name="mnli",
        repository="nyu-mll/glue",
        config="mnli",
        license="several, see the corpus",
        classes=3,
        stored={"train": 392702, "test": 9815},
        inputs=PAIR,
        label=LABEL,
        splits={**HIDDEN, "test": ("validation_matched", "validation", "test")},
        words=tuple,
    )


def sick() -> Published:
    return Published(
        name="sick",
        repository="RobZamp/sick",
        revision="refs/convert/parquet",  # the repository itself has a program to download it
        config="default",
        license="CC BY-NC-SA 3.0",
        classes=3,
        stored={"train": 4439, "validation": 495, "test": 4906},
        inputs={"sentence_A": ("sentence_A", *PREMISE), "sentence_B": ("sentence_B", *HYPOTHESIS)},
        label=LABEL,
        words=tuple,
    )


def scitail() -> Published:
    return Published(
        name="scitail",
        repository="allenai/scitail",
        config="tsv_format",
        license=None,
        classes=2,
        stored={"train": 23097, "validation": 1304, "test": 2126},
        inputs=PAIR,
        label=LABEL,
        words=tuple,
    )


def rte() -> Published:
    return Published(
        name="rte",
        repository="nyu-mll/glue",
        config="rte",
        license="several, see the corpus",
        classes=2,
        stored={"train": 2490, "test": 277},
        inputs={"sentence1": ("sentence1", "premise"), "sentence2": ("sentence2", "hypothesis")},
        label=LABEL,
        splits=HIDDEN,
        words=tuple,
    )


def qnli() -> Published:
    return Published(
        name="qnli",
        repository="nyu-mll/glue",
        config="qnli",
        license="CC BY-SA 4.0",
        classes=2,
        stored={"train": 104743, "test": 5463},
        inputs={"question": ("question",), "sentence": ("sentence",)},
        label=LABEL,
        splits=HIDDEN,
        words=tuple,
    )
