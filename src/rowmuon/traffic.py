"""What this rank has done, counted where it happens."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["StepTraffic", "Traffic"]


@dataclass
class StepTraffic:
    """Totals over all steps of one kind, on this rank.

    num_steps: optimizer steps of this kind.
    num_collectives: collectives entered (skip decisions and the comparison of plans are no part of a step's plan and
        aren't counted).
    bytes_sent: bytes handed to torch that leave this rank: its own part excluded, padding included; an all-reduce
        counts 2 (N-1)/N of its buffer.
    num_orthogonalizations: matrices put through Newton-Schulz.
    """

    num_steps: int = 0
    num_collectives: int = 0
    bytes_sent: int = 0
    num_orthogonalizations: int = 0


class Traffic(dict[str, StepTraffic]):
    """``traffic["refresh"]``, ``traffic["row"]`` and ``traffic["mixed"]`` (staggered steps)."""

    def __init__(self) -> None:
        super().__init__((kind, StepTraffic()) for kind in ("refresh", "row", "mixed"))

    def reset(self) -> None:
        """Sets every count to zero."""
        self.update(Traffic())

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Plain data, for logs."""
        return {kind: asdict(counts) for kind, counts in self.items()}
