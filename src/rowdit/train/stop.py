"""Ctrl-C as a request: the step under way is finished and the state saved before the program ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupted(BaseException):
    """Raised by work that was told to stop and has nothing to save. As KeyboardInterrupt, it is no Exception."""


class StopRequest:
    """Within the context, the first SIGINT or SIGTERM only sets a flag; a second one interrupts at once.

    Args:
        also: asked too; a parent process may want this one to stop.

    Example:
        >>> with StopRequest() as stop:
        ...     stop.requested
        False
    """

    def __init__(self, also: Callable[[], bool] = lambda: False) -> None:
        self._signalled = False
        self._also = also
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self._signalled or self._also()

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
        if self._signalled:
            raise KeyboardInterrupt
        self._signalled = True
