"""What samples are compared with: features of real images, kept with a fingerprint of how they were made."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rowdit import streams
from rowdit.evaluate.features import FeatureNetwork
from rowdit.evaluate.fingerprint import check_same, digest, load_tensors, save_tensors
from rowdit.evaluate.frechet import FeatureStatistics, Moments, frechet_distance
from rowdit.evaluate.kid import NUM_SUBSETS, SUBSET_SIZE, kernel_distance
from rowdit.evaluate.score import Sampling, Score
from rowdit.evaluate.weights import file_hash

if TYPE_CHECKING:
    from rowdit.data.batch import Dataset

FORMAT = "rowdit.reference/1"
MAX_STORED_FEATURES = 10_000  # for the kernel distance, which needs features, not sums: 13 MB at 320 features
IMAGES_PER_FETCH = 1000

# How the distances are computed, as it stands in every score's fingerprint.
FRECHET = {"kind": "frechet", "covariance": "unbiased"}
KERNEL = {
    "kind": "kernel",
    "kernel": "(x.y / D + 1)^3",
    "subset_size": SUBSET_SIZE,
    "num_subsets": NUM_SUBSETS,
    "seed": 0,
}

Progress = Callable[[int, int], None]  # (images done, images in all)


@dataclass(frozen=True)
class Reference:
    """Statistics and features of real images.

    Args:
        statistics: of all the images.
        features: (N, D) float32 of the images, or of a random draw of MAX_STORED_FEATURES of them.
        fingerprint: network (with hash), dataset (with hash), image shape and number of images.
    """

    statistics: FeatureStatistics | Moments
    features: Tensor
    fingerprint: Mapping[str, Any]

    @property
    def hash(self) -> str:
        """Sha256 of the fingerprint."""
        return digest(self.fingerprint)

    def save(self, path: Path | str) -> None:
        """Write one safetensors file, whose header carries the fingerprint as JSON. Whole or not at all."""
        if isinstance(self.statistics, Moments):
            raise ValueError("moments that others published have no fingerprint to be kept with; name their own file")
        tensors = {**self.statistics.tensors(), "features": self.features}
        save_tensors(Path(path), tensors, FORMAT, self.fingerprint)

    @classmethod
    def load(cls, path: Path | str, expected: Mapping[str, Any] | None = None) -> Reference:
        """Read what `save` wrote.

        Args:
            path: the file.
            expected: the fingerprint that is wanted, from `reference_fingerprint`; None takes whatever is there.

        Raises:
            ValueError: the file isn't a reference, or its fingerprint isn't the expected one (both are shown).
        """
        tensors, fingerprint = load_tensors(Path(path), FORMAT)
        if expected is not None:
            check_same(f"the reference in {path}", fingerprint, "the one asked for", expected)
        return cls(FeatureStatistics.from_tensors(tensors), tensors["features"], fingerprint)


def reference_fingerprint(dataset: Dataset, network: FeatureNetwork, num_images: int | None = None) -> dict[str, Any]:
    """Return the fingerprint of the reference that `compute_reference` would make of the same arguments."""
    num_images = _num_images(dataset, num_images)
    return fingerprint_of(dataset.fingerprint, dataset.image_shape, num_images, network.fingerprint())


def fingerprint_of(
    dataset: str, image_shape: tuple[int, ...], num_images: int, network: Mapping[str, Any]
) -> dict[str, Any]:
    """What a reference is of, and which of its features are kept where not all are."""
    found = {"dataset": dataset, "image_shape": list(image_shape), "num_images": num_images, "network": dict(network)}
    drawn = {"features": f"a random {MAX_STORED_FEATURES}"} if num_images > MAX_STORED_FEATURES else {}
    return found | drawn


def compute_reference(
    dataset: Dataset, network: FeatureNetwork, num_images: int | None = None, progress: Progress | None = None
) -> Reference:
    """Compute features and statistics of a dataset's first `num_images` images (by default all).

    Raises:
        ValueError: the dataset has fewer images, or fewer than 2.
    """
    num_images = _num_images(dataset, num_images)
    statistics = FeatureStatistics(network.dim)
    kept = kept_features(num_images)
    stored: list[Tensor] = []
    for start in range(0, num_images, IMAGES_PER_FETCH):
        stop = min(start + IMAGES_PER_FETCH, num_images)
        features = _features_of(dataset, network, np.arange(start, stop))
        statistics.update(features)
        stored.append(features[torch.from_numpy(kept[(kept >= start) & (kept < stop)] - start)])
        if progress is not None:
            progress(stop, num_images)
    return Reference(statistics, torch.cat(stored), reference_fingerprint(dataset, network, num_images))


def kept_features(num_images: int) -> np.ndarray:
    """Which images' features a reference keeps: all, or a random draw of MAX_STORED_FEATURES in their order, for
    datasets are often sorted by class."""
    return np.sort(streams.permutation(0, "reference_features", 0, num_images)[:MAX_STORED_FEATURES])


def load_or_compute_reference(
    folder: Path | str,
    dataset: Dataset,
    network: FeatureNetwork,
    num_images: int | None = None,
    progress: Progress | None = None,
) -> Reference:
    """Return the reference from `folder`, computing and storing it first where it isn't there.

    The file's name holds the fingerprint's hash, so references of several datasets, sizes and networks live side by
    side.
    """
    fingerprint = reference_fingerprint(dataset, network, num_images)
    path = Path(folder) / f"reference-{network.name}-{digest(fingerprint)[:16]}.safetensors"
    if path.is_file():
        return Reference.load(path, fingerprint)
    reference = compute_reference(dataset, network, num_images, progress)
    reference.save(path)
    return reference


@dataclass(frozen=True)
class Floor:
    """What real images score against the reference: the best that a model can hope for at this number of images.

    Args:
        num_images: in each draw.
        frechet, kernel: distances of each draw of real images from the reference.
        source: fingerprint of the dataset that they were drawn from.
    """

    num_images: int
    frechet: tuple[float, ...]
    kernel: tuple[float, ...]
    source: str

    @property
    def frechet_mean(self) -> float:
        return float(np.mean(self.frechet))

    @property
    def kernel_mean(self) -> float:
        return float(np.mean(self.kernel))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def real_floor(
    reference: Reference,
    real: Dataset,
    network: FeatureNetwork,
    num_images: int,
    *,
    max_draws: int = 3,
    seed: int = 0,
) -> Floor:
    """Score real images that are not in the reference, as if they were samples: `num_images` against the reference.

    The draws are disjoint, from one random order of `real` (as a rule the training split); as many are taken as fit, at
    most `max_draws`. They aren't balanced over the classes: a perfect model with balanced labels may score a few per
    cent below the floor.

    Raises:
        ValueError: `real` has fewer than `num_images` images, is the reference's own dataset, or another image shape.
    """
    if real.fingerprint == reference.fingerprint["dataset"]:
        raise ValueError(
            "the floor needs real images that are not in the reference, but both are the dataset "
            f"{real.fingerprint!r}; give the training split"
        )
    if len(real) < num_images:
        raise ValueError(
            f"the floor at {num_images} images needs as many real ones, the dataset has {len(real)}; "
            "evaluate fewer samples"
        )
    order = streams.permutation(seed, "floor", 0, len(real))
    frechet, kernel = [], []
    for draw in range(min(max_draws, len(real) // num_images)):
        indices = np.sort(order[draw * num_images : (draw + 1) * num_images])
        images = torch.from_numpy(real.fetch(indices)[0])
        fd, kid = _distances(images, reference, network)
        frechet.append(fd)
        kernel.append(kid)
    return Floor(num_images, tuple(frechet), tuple(kernel), real.fingerprint)


def score_images(
    images: Tensor,
    reference: Reference,
    network: FeatureNetwork,
    *,
    floor: Floor | None = None,
    sampling: Sampling | None = None,
) -> tuple[Score, Score]:
    """Return the Frechet distance and the kernel distance of images from the reference, as `Score`s.

    Args:
        images: (N, C, H, W) uint8, of the reference's image shape.
        reference: made with the same network.
        network: the feature network.
        floor: from `real_floor`, at the same N.
        sampling: how the images were made; goes into the fingerprint.

    Raises:
        ValueError: image shape, network or the floor's number of images don't fit; both sides are shown.
    """
    floor_frechet, floor_kernel = None, None
    if floor is not None:
        if floor.num_images != len(images):
            raise ValueError(
                f"the floor was measured at {floor.num_images} images, the score is at {len(images)}; they must agree"
            )
        floor_frechet, floor_kernel = floor.frechet_mean, floor.kernel_mean
    frechet, kernel = _distances(images, reference, network)
    fingerprint = {
        "network": network.fingerprint(),
        "image_shape": list(images.shape[1:]),
        "num_images": len(images),
        "reference": {"hash": reference.hash, **{key: reference.fingerprint[key] for key in ("dataset", "num_images")}},
        "sampling": None if sampling is None else sampling.fingerprint(),
    }
    return (
        Score(f"fd_{network.name}", frechet, floor_frechet, fingerprint | {"distance": FRECHET}),
        Score(f"kid_{network.name}", kernel, floor_kernel, fingerprint | {"distance": KERNEL}),
    )


def _distances(images: Tensor, reference: Reference, network: FeatureNetwork) -> tuple[float, float]:
    found = {"network": network.fingerprint(), "image_shape": list(images.shape[1:])}
    check_fits("the images", found, reference)
    features = network(images)
    return frechet_from(features, reference), kernel_from(features, reference)


def published_moments(path: Path) -> Reference:
    """Mean and covariance as others publish them: `mu` and `sigma` in an npz file.

    Nothing in such a file says which network, which images and how many it is of; the caller vouches for them. There
    are no features in it, so a Frechet distance is all that can be measured.

    Raises:
        ValueError: it can't be read, or holds something else.
    """
    try:
        with np.load(path, allow_pickle=False) as content:
            missing = [name for name in ("mu", "sigma") if name not in content.files]
            if missing:
                raise ValueError(f"it holds {', '.join(content.files)}, but no {' and no '.join(missing)}")
            moments = Moments(*(torch.from_numpy(content[name].astype(np.float64)) for name in ("mu", "sigma")))
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} holds no moments (mu and sigma in an npz): {error}") from None
    fingerprint = {
        "dataset": f"moments:{path.name}:sha256-{file_hash(path)[:16]}",
        "image_shape": None,
        "num_images": None,
        "network": None,
    }
    return Reference(moments, torch.empty(0, moments.dim), fingerprint)


def check_fits(name: str, found: Mapping[str, Any], reference: Reference) -> None:
    """Raise a ValueError that shows both sides unless network and image shape are the reference's, as far as known."""
    wanted = {key: reference.fingerprint[key] for key in ("network", "image_shape")}
    wanted = {key: value for key, value in wanted.items() if value is not None}
    check_same(name, {key: found[key] for key in wanted}, "the reference", wanted)


def frechet_from(features: Tensor, reference: Reference) -> float:
    """The Frechet distance of (N, D) features from the reference."""
    return frechet_distance(FeatureStatistics.from_features(features), reference.statistics)


def kernel_from(features: Tensor, reference: Reference) -> float:
    """The kernel distance of (N, D) features from the reference's."""
    return kernel_distance(features, reference.features, subset_size=SUBSET_SIZE, num_subsets=NUM_SUBSETS, seed=0)


def _features_of(dataset: Dataset, network: FeatureNetwork, indices: np.ndarray) -> Tensor:
    images, _ = dataset.fetch(indices)
    return network(torch.from_numpy(images)).cpu()


def _num_images(dataset: Dataset, num_images: int | None) -> int:
    num_images = len(dataset) if num_images is None else num_images
    if not 2 <= num_images <= len(dataset):
        raise ValueError(f"num_images must be in 2..{len(dataset)} (the dataset's size), got {num_images}")
    return num_images
