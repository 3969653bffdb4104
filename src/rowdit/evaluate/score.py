"""A score with everything that is needed to compare it, or to refuse to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rowdit.evaluate.fingerprint import canonical_json, check_same


@dataclass(frozen=True)
class Sampling:
    """How images were made: what, beside the model, decides a score.

    Args:
        sampler: "euler", "heun" or "dpm".
        num_steps: steps of the sampler.
        guidance: scale of classifier-free guidance; 1 is none.
        seed: of the samples' noise.
        first_index: number of the first image.
        ema: decay of the averaged weights that were sampled from; None for the weights as trained.
        guidance_interval: the times (low, high) at which to guide; None guides at all.
        time_shift: of the sampler's time grid; 1 is the even grid.
        precision: of the model's products: "float32", or "bfloat16" through autocast.
    """

    sampler: str
    num_steps: int
    guidance: float
    seed: int
    first_index: int = 0
    ema: float | None = None
    guidance_interval: tuple[float, float] | None = None
    time_shift: float = 1.0
    precision: str = "float32"

    def fingerprint(self) -> dict[str, Any]:
        """Plain data. What was added later and has its default is left out, so that older fingerprints stay equal."""
        late = ("guidance_interval", "time_shift", "precision")
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in late or getattr(self, f.name) != f.default
        }


def caution(fingerprint: Mapping[str, Any]) -> str:
    """What a reader of a Frechet distance with this fingerprint must know; empty if nothing.

    A covariance of D features from no more than D images is singular: it misses directions that the images would vary
    in, so the distance is far too large, and another set of as few images gives another one.

    >>> network = {"name": "effnet_lite0", "dim": 320}
    >>> caution({"network": network, "num_images": 1000, "reference": {"num_images": 200}})
    '200 images of the reference are too few for a Frechet distance of 320 features: it is far too large, and unsteady'
    >>> caution({"network": network, "num_images": 1000, "reference": {"num_images": 2000}})
    ''
    """
    network, reference = fingerprint.get("network"), fingerprint.get("reference")
    dim = network.get("dim") if isinstance(network, Mapping) else None
    if not isinstance(dim, int) or fingerprint.get("distance", {}).get("kind", "frechet") != "frechet":
        return ""
    of_reference = reference.get("num_images") if isinstance(reference, Mapping) else None
    numbers = {"images of the reference": of_reference, "samples": fingerprint.get("num_images")}
    few = [f"{num} {what}" for what, num in numbers.items() if isinstance(num, int) and num <= dim]
    if not few:
        return ""
    return (
        f"{' and '.join(few)} are too few for a Frechet distance of {dim} features: it is far too large, and unsteady"
    )


@dataclass(frozen=True)
class Score:
    """One number and where it comes from. Lower is better for all distances.

    Args:
        name: such as "fd_effnet_lite0" or "kid_effnet_lite0": the distance and the feature network. Never "FID", which
            is another network's.
        value: the distance.
        floor: what real images that are not in the reference score, at the same number of images; None if not measured.
        fingerprint: plain data: network, image shape, number of images, reference, sampling.
    """

    name: str
    value: float
    floor: float | None
    fingerprint: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dump`; `from_json` undoes it. Where there is a `caution`, it says so."""
        said = {"caution": warning} if (warning := caution(self.fingerprint)) else {}
        return asdict(self) | {"fingerprint": json.loads(canonical_json(self.fingerprint))} | said

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Score:
        """The inverse of `to_json`."""
        return cls(**{key: value for key, value in data.items() if key != "caution"})

    def check_comparable(self, other: Score) -> None:
        """Raise unless the two scores may be compared: all but the model and the samples' seed must be the same.

        Raises:
            ValueError: names the entries that differ, with both values.
        """
        ours = {"name": self.name, **self.fingerprint}
        theirs = {"name": other.name, **other.fingerprint}
        check_same("the first score", ours, "the second score", theirs, ("sampling.seed", "sampling.first_index"))
