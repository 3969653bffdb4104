"""Ctrl-C as a request: the step under way is finished and the state saved before the program ends. And the end of
processes whose parent was killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

SAME_SECONDS = 2.0


class Interrupted(BaseException):
    """Raised by work that was told to stop and has nothing to save. As KeyboardInterrupt, it is no Exception."""


def end_with_parent() -> None:
    """Ends this process as soon as the one that started it is gone, however that ended; for workers, which would
    otherwise finish their work and then wait for more for ever, since a killed parent tells nobody."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class StopRequest:
    """Within the context, the first SIGINT or SIGTERM only sets a flag; a later one interrupts at once.

    What comes within `SAME_SECONDS` of the first is the same request: a cluster's scheduler signals every process, and
    torchrun passes the signal on to those that have had it already.

    Args:
        also: asked too; a parent process may want this one to stop.

    Example:
        >>> with StopRequest() as stop:
        ...     stop.requested
        False
    """

    def __init__(self, also: Callable[[], bool] = lambda: False) -> None:
        self._signalled: float | None = None
        self._also = also
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self._signalled is not None or self._also()

    def check(self) -> None:
        """Raises `Interrupted` if a stop was requested."""
        if self.requested:
            raise Interrupted

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signalled is None:
            self._signalled = now
        elif now - self._signalled > SAME_SECONDS:
            raise KeyboardInterrupt
