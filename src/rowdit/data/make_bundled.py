"""Remakes the bundled subset of Fashion-MNIST from the full set.

    python -m rowdit.data.make_bundled [--source FOLDER] [--destination FOLDER]

The rule: of each class the first images in the published order (1,200 of the training set, 200 of the test set), dealt
class by class, so that image i is the (i // 10)-th of class i % 10. They are kept as one grey PNG sheet, read row by
row. The compressed bytes depend on the version of zlib, the pixels don't; it is their sha256 that is kept and checked.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import numpy as np
from PIL import Image

from rowdit.data.fashion_mnist import CLASS_NAMES, SHEETS, SIZE, full


def select(images: np.ndarray, labels: np.ndarray, num_per_class: int) -> np.ndarray:
    """The first ``num_per_class`` images of each class, (num_per_class * 10, 1, 28, 28), class i % 10 at place i."""
    places = [np.flatnonzero(labels == label)[:num_per_class] for label in range(len(CLASS_NAMES))]
    return images[np.stack(places, axis=1).reshape(-1)]


def sheet(images: np.ndarray, num_columns: int) -> np.ndarray:
    """Images (N, 1, 28, 28) side by side in rows of ``num_columns``: (N / num_columns * 28, num_columns * 28)."""
    rows = images.reshape(-1, num_columns, SIZE, SIZE).swapaxes(1, 2)
    return rows.reshape(-1, num_columns * SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(description="Remake the bundled subset of Fashion-MNIST from the full set.")
    parser.add_argument("--source", help="folder with the four .gz files (default: where the full set is looked for)")
    parser.add_argument("--destination", type=Path, default=Path(__file__).parent / "assets")
    arguments = parser.parse_args()
    for split, (name, num_columns, num_per_class, sha256) in SHEETS.items():
        source = full(arguments.source, split=split)
        images = select(source.images, source.labels, num_per_class)
        digest = hashlib.sha256(np.ascontiguousarray(images).data).hexdigest()
        Image.fromarray(sheet(images, num_columns)).save(arguments.destination / name, optimize=True)
        print(f"{arguments.destination / name}: {len(images)} images, sha256 of the pixels {digest}")
        if digest != sha256:
            print(f"  differs from the {sha256} that fashion_mnist.py expects")


if __name__ == "__main__":
    main()
