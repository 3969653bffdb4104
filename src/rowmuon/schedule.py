"""How far the pipeline of a refresh looks ahead, and how late it comes home."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rowmuon.buckets import Bucket, travels

__all__ = ["Schedule", "make_schedule"]


@dataclass(frozen=True)
class Schedule:
    """The same on all ranks.

    While bucket i is orthogonalised, those from ``applied[i]`` to i - 1 are on their way home and those from i + 1 to
    ``sent[i + 1] - 1`` on their way to their owners.

    sent: first, how many buckets set out at the beginning of the step; then, how many have set out before bucket i is
        orthogonalised, for every i.
    applied: how many buckets have been applied before bucket i is orthogonalised, for every i.
    """

    sent: tuple[int, ...]
    applied: tuple[int, ...]


def make_schedule(buckets: Sequence[Bucket], bucket_bytes: int) -> Schedule:
    """On each of the two ways there is at least one bucket, and as many as fit ``bucket_bytes`` together.

    A bucket of one shape may have fewer owners than there are ranks. By itself it leaves most links idle while everyone
    sends to the same few; several fill them.
    """
    out = [bucket.num_bytes if travels(bucket) else 0 for bucket in buckets]
    home = [bucket.num_bytes if bucket.kind == "exchange" else 0 for bucket in buckets]
    sent, end, held = [], 0, 0
    for i in range(len(buckets) + 1):  # what sets out before bucket i arrives; bucket i is i-th to be waited for
        while end < len(buckets) and (end <= i or held + out[end] <= bucket_bytes):
            held += out[end]
            end += 1
        sent.append(end)
        held -= out[i] if i < len(buckets) else 0
    applied, start, held = [], 0, 0
    for i in range(len(buckets)):
        while start < i - 1 and held > bucket_bytes:
            held -= home[start]
            start += 1
        applied.append(start)
        held += home[i]
    return Schedule(tuple(sent), tuple(applied))
