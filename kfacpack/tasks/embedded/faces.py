"""`faces`: 100 faces and 100 pieces of background, which scikit-image has from Labeled Faces in the Wild."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from numpy.typing import NDArray

from kfacpack.packages import Package
from kfacpack.tasks.embedded.base import Embedded
from kfacpack.tasks.embedded.pictures import Pictures, divided, labelled
from kfacpack.tasks.embedded.pixels import enlarged

SCIKIT_IMAGE = Package("scikit-image", "skimage", tested="0.25.2")
SIZES = {"train": 100, "validation": 20, "test": 80}


def load() -> Embedded:
    return Embedded(
        name="faces",
        classes=("face", "background"),
        templates=("a photo of a {}.", "a grey photo of a {}.", "a picture of a {}.", "a {}"),
        sizes=SIZES,
        source="Labeled Faces in the Wild, 200 pieces, with scikit-image",
        license="not stated (photographs from the news)",
        make=make,
        sha256="34879b68bba26044e9e25428aef6e4e8440ba2dadc2306078717d8b77e5dca92",
        package=SCIKIT_IMAGE,
    )


def make() -> Pictures:
    shades: NDArray[np.float64] = SCIKIT_IMAGE.read(
        "data/lfw_subset.npy", lambda data: np.load(BytesIO(data), allow_pickle=False)
    )
    pieces = np.floor(shades * 255 + 0.5).astype(np.int64)
    return divided(labelled(enlarged(pieces, 28, 255), np.repeat([0, 1], 100)), SIZES, "faces")
