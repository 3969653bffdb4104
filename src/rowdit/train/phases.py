"""How long the parts of a step take: by the host's clock on the CPU, by events on a CUDA device."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Phases:
    """A stop-watch for one step, started when it is made.

    Args:
        device: where the work is done. On CUDA the phases are measured between events, and `finish` waits for the
            device once; the phases themselves wait for nothing.

    Example:
        >>> phases = Phases(torch.device("cpu"))
        >>> with phases("forward"):
        ...     pass
        >>> sorted(phases.finish())
        ['forward', 'whole']
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the time within the context to the phase `name`."""
        if self._device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            yield
            after.record()
            self._events.append((name, before, after))
        else:
            start = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - start

    def finish(self) -> dict[str, float]:
        """Seconds by phase, and of the `whole` since the start."""
        if self._events:
            torch.cuda.synchronize(self._device)
            for name, before, after in self._events:
                self._seconds[name] += before.elapsed_time(after) / 1000
        return {**self._seconds, "whole": time.perf_counter() - self._start}
