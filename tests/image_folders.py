"""Writes folders of small test images: one noisy colour per class."""

from __future__ import annotations

import numpy as np
from PIL import Image

COLOURS = {"blue": (0, 0, 200), "green": (0, 200, 0), "red": (200, 0, 0)}


def write_images(folder, counts, seed=0):
    """Writes images into SPLIT/CLASS folders.

    Args:
        folder: Folder to write to.
        counts: Split to class to number of images. A class is named COLOUR or COLOUR_suffix.
        seed: Seed of the noise.
    """
    generator = np.random.default_rng(seed)
    for split, classes in counts.items():
        for name, count in classes.items():
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                noise = generator.integers(0, 56, (28, 28, 3))
                pixels = (noise + COLOURS[name.partition("_")[0]]).astype(np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number:03}.png")
    return folder
