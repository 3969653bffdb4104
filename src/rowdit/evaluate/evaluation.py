"""From features to scores: which numbers, with which fingerprint, beside what real images score.

The images' own features and the reference's come from `rowdit.evaluate.extract`; nothing here knows of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rowdit.evaluate.extract import Extracted
from rowdit.evaluate.frechet import FeatureStatistics, Moments
from rowdit.evaluate.manifold import overlap
from rowdit.evaluate.reference import (
    FRECHET,
    KERNEL,
    Reference,
    check_fits,
    fingerprint_of,
    frechet_from,
    kept_features,
    kernel_from,
)
from rowdit.evaluate.score import Score

METRICS = ("fd", "kid", "precision", "recall", "density", "coverage")
HIGHER_IS_BETTER = ("precision", "recall", "density", "coverage")
NUM_NEIGHBOURS, NUM_NEIGHBOURS_DENSITY = 3, 5


def reference_of(extracted: Extracted) -> Reference:
    """The reference that these features make: statistics of all, and the features that it keeps."""
    num = len(extracted.features)
    statistics = FeatureStatistics.from_features(extracted.features)
    features = extracted.features[torch.from_numpy(kept_features(num))].contiguous()
    fingerprint = fingerprint_of(extracted.dataset, extracted.image_shape, num, extracted.network)
    return Reference(statistics, features, fingerprint)


def values(features: Tensor, reference: Reference, metrics: Sequence[str] = METRICS) -> dict[str, float]:
    """The metrics of (N, D) features against the reference.

    Raises:
        ValueError: an unknown metric, or too few images for one.
    """
    check_metrics(metrics)
    if isinstance(reference.statistics, Moments) and set(metrics) != {"fd"}:
        raise ValueError("moments that others published have no features: only fd can be measured, --metrics fd")
    found: dict[str, float] = {}
    if "fd" in metrics:
        check_enough(len(features), "images", features.shape[1], metrics)
        if reference.statistics.num is not None:
            check_enough(reference.statistics.num, "images of the reference", features.shape[1], metrics)
        found["fd"] = frechet_from(features, reference)
    if "kid" in metrics:
        found["kid"] = kernel_from(features, reference)
    manifold = [name for name in METRICS[2:] if name in metrics]
    if manifold:
        num = num_manifold(features, reference)
        result = overlap(reference.features[:num], features[:num], k=NUM_NEIGHBOURS, k_density=NUM_NEIGHBOURS_DENSITY)
        found |= {name: getattr(result, name) for name in manifold}
    return {name: found[name] for name in metrics}


def check_enough(num: int, what: str, dim: int, metrics: Sequence[str]) -> None:
    """Raise a ValueError where a Frechet distance is asked for and a covariance would be rank-deficient."""
    if "fd" in metrics and num <= dim:
        others = ",".join(name for name in metrics if name != "fd") or "kid"
        raise ValueError(
            f"{num} {what} are too few for a Frechet distance of {dim} features: a covariance needs more than {dim}. "
            f"Use more images, or leave it out: --metrics {others}"
        )


def num_manifold(features: Tensor, reference: Reference) -> int:
    """How many of either set the manifolds are made of: equally many."""
    return min(len(features), len(reference.features))


def check_metrics(metrics: Sequence[str]) -> None:
    """Raise a ValueError that names the first metric that there isn't."""
    for name in metrics:
        if name not in METRICS:
            raise ValueError(f"there is no metric {name!r}; there are {', '.join(METRICS)}")
    if not metrics:
        raise ValueError(f"no metric was asked for; there are {', '.join(METRICS)}")


def score(
    extracted: Extracted,
    reference: Reference,
    metrics: Sequence[str] = METRICS,
    *,
    floor: Mapping[str, float] | None = None,
    made_by: Mapping[str, Any] | None = None,
) -> list[Score]:
    """The scores of images, each with its fingerprint.

    Args:
        extracted: features of the images, by the reference's network.
        reference: what they are compared with.
        metrics: which, of METRICS.
        floor: what real images that aren't in the reference score at the same number, by metric.
        made_by: how the images were made, if they are samples; goes into the fingerprint as "sampling".

    Raises:
        ValueError: network or image shape aren't the reference's (both sides are shown), or too few images.
    """
    check_fits("the images", {"network": extracted.network, "image_shape": list(extracted.image_shape)}, reference)
    fingerprint = {
        "network": extracted.network,
        "image_shape": list(extracted.image_shape),
        "num_images": len(extracted.features),
        "reference": {"hash": reference.hash, **{k: reference.fingerprint[k] for k in ("dataset", "num_images")}},
        "sampling": None if made_by is None else dict(made_by),
    }
    manifold = {
        "kind": "manifold",
        "k": NUM_NEIGHBOURS,
        "k_density": NUM_NEIGHBOURS_DENSITY,
        "num_of_each": num_manifold(extracted.features, reference),
    }
    how = {"fd": FRECHET, "kid": KERNEL}
    name = extracted.network["name"]
    return [
        Score(
            f"{metric}_{name}",
            value,
            None if floor is None else floor.get(metric),
            fingerprint | {"distance": how.get(metric, manifold)},
        )
        for metric, value in values(extracted.features, reference, metrics).items()
    ]
