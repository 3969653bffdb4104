"""A score with everything that is needed to compare it, or to refuse to."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sampling:
    """How images were made: what, beside the model, decides a score.

    Args:
        sampler: "euler", "heun".
        num_steps: steps of the sampler.
        guidance: scale of classifier-free guidance; 1 is none.
        seed: of the samples' noise.
        first_index: number of the first image.
        ema: decay of the averaged weights that were sampled from; None for the weights as trained.
    """

    sampler: str
    num_steps: int
    guidance: float
    seed: int
    first_index: int = 0
    ema: float | None = None


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
        """Plain data for `json.dump`; `from_json` undoes it."""
        return asdict(self) | {"fingerprint": json.loads(canonical_json(self.fingerprint))}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Score:
        """The inverse of `to_json`."""
        return cls(**data)

    def check_comparable(self, other: Score) -> None:
        """Raise unless the two scores may be compared: all but the model and the samples' seed must be the same.

        Raises:
            ValueError: names the entries that differ, with both values.
        """
        ours = {"name": self.name, **flatten(self.fingerprint)}
        theirs = {"name": other.name, **flatten(other.fingerprint)}
        check_equal("scores", ours, theirs, ignore=("sampling.seed", "sampling.first_index"))


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested mappings to one level, with dots: {"a": {"b": 1}} to {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def check_equal(what: str, found: Mapping[str, Any], wanted: Mapping[str, Any], ignore: tuple[str, ...] = ()) -> None:
    """Raise a ValueError that shows both fingerprints and marks what differs."""
    found, wanted = flatten(found), flatten(wanted)
    names = [name for name in dict.fromkeys([*wanted, *found]) if name not in ignore]
    differing = [name for name in names if _plain(found.get(name)) != _plain(wanted.get(name))]
    if differing:
        lines = [f"  {name}: {found.get(name)!r} and {wanted.get(name)!r}" for name in differing]
        raise ValueError(
            f"{what} can't be compared, they differ in {', '.join(differing)}:\n" + "\n".join(lines) + "\n"
            f"  first fingerprint:  {canonical_json(found)}\n  second fingerprint: {canonical_json(wanted)}"
        )


def _plain(value: Any) -> Any:
    """JSON knows no tuples: (1, 28, 28) and [1, 28, 28] are the same."""
    return json.loads(canonical_json(value))


def canonical_json(data: Any) -> str:
    """One text per value: sorted keys, no spaces."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def digest(data: Any) -> str:
    """Sha256 of the canonical JSON, as hex."""
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that is either whole or not there, whatever happens meanwhile (a full disk, a kill)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
