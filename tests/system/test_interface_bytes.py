"""`optimizer.traffic` against the kernel's own counter: each rank a host of its own on an emulated network."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from cluster import Cluster  # noqa: E402

NUM_RANKS = 3
RUNS = ("exchange", "exchange in bf16", "gather", "split rows", "replicas")


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What each rank reports. Skips, with the reason, where network namespaces can't be had."""
    path = os.pathsep.join(str(ROOT / part) for part in ("src", "tests", "benchmarks"))
    try:
        with Cluster(NUM_RANKS, timeout_s=120, fallback=False, echo_ranks=()) as cluster:
            return cluster.run(ROOT / "tests" / "ranks" / "interface_bytes.py", env={"PYTHONPATH": path})
    except RuntimeError as error:
        if "no emulated cluster" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize("name", RUNS)
def test_what_is_counted_is_what_leaves_the_interface(results, name: str, rank: int) -> None:
    run = results[rank][name]
    for kind in ("refresh", "row"):
        counted = run["traffic"][kind]
        assert counted["num_steps"] == 1
        # Beyond the payload: a header of some 66 bytes in a packet of 1500 at worst, acknowledgements of what others
        # send (as much, at one in two packets or fewer), and what two barriers take, with gloo's own preambles.
        found = run[kind] - run["nothing"]
        spare = 4096 + 1024 * counted["num_collectives"]
        assert counted["bytes_sent"] - 4096 <= found <= 1.12 * counted["bytes_sent"] + spare, (kind, found, counted)


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_the_payloads_are_large_enough_to_tell(results, rank: int) -> None:
    sent = {name: results[rank][name]["traffic"]["refresh"]["bytes_sent"] for name in RUNS}
    assert min(sent.values()) > 100_000
    assert sent["exchange in bf16"] == sent["exchange"] / 2
    for name in RUNS:
        row = results[rank][name]["traffic"]["row"]
        assert (row["num_collectives"], row["bytes_sent"] > 0) == ((1, True) if name == "split rows" else (0, False))
