"""An error that all ranks meet is told once: by rank 0, and by another rank only if its own is another one.

Ranks that fail may not have met in a process group yet, so they use the store that torchrun's agent keeps for them. The
message also goes where torchrun looks for the reason, so its closing report names that instead of a missing traceback.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE = timedelta(seconds=20)
"""How long another rank waits for rank 0 to have told its error; it may still be importing, from a slow disk."""
USAGE = "usage"
"""What stands for an error of the arguments, which the parser has told on rank 0."""


def rank() -> int:
    """Of this process among those that torchrun started; 0 where it didn't."""
    return int(os.environ.get("RANK", "0"))


def num_ranks() -> int:
    """That torchrun started; 1 where it didn't."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def tell(message: str) -> None:
    """Prints an error for the user, unless rank 0 has told the same."""
    if rank() == 0:
        if message != USAGE:
            print(f"rowdit: {message}", file=sys.stderr, flush=True)
        _announce(message)
    elif told_by_first() != message:
        print(f"rowdit: rank {rank()}: {message}", file=sys.stderr, flush=True)
    _leave_for_torchrun(message)


def told_by_first(patience: timedelta = PATIENCE) -> str | None:
    """What rank 0 has told before it ended; None where that can't be known, or after this time."""
    store = _store(patience)
    try:
        return None if store is None else store.get(_key()).decode()
    except RuntimeError:  # a time-out, or the agent is gone
        return None


def _announce(message: str) -> None:
    store = _store(timedelta(seconds=5))
    try:
        if store is not None:
            store.set(_key(), message)
    except RuntimeError:
        pass


def _key() -> str:
    return f"rowdit/error/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _store(patience: timedelta) -> Store | None:
    """That of torchrun's agent, which outlives the ranks; None where there is none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or num_ranks() == 1:
        return None
    from torch.distributed import TCPStore

    try:
        return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=patience)
    except (KeyError, ValueError, RuntimeError):
        return None


def _leave_for_torchrun(message: str) -> None:
    """As `torch.distributed.elastic.multiprocessing.errors` reads it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    text = f"rowdit: {message}"
    reason = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": reason}, file)
    except OSError:
        pass
