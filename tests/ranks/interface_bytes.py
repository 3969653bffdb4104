"""A rank of an emulated cluster: what the optimizer counts as sent, and what its interface has sent meanwhile.

Run by tests/system/test_interface_bytes.py through benchmarks/cluster.py, which imports neither torch nor this.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from cluster import SentBytes, report

from ranks.models import Spec, build, give_gradients, optimizer_on

SPECS = tuple(Spec(f"w{i}", (192, 256)) for i in range(6))
RUNS = {
    "exchange": ("3:S0", {"refresh": "exchange"}),
    "exchange in bf16": ("3:S0", {"refresh": "exchange", "comm_dtype": torch.bfloat16}),
    "gather": ("3:S0", {"refresh": "gather"}),
    "split rows": ("3:S1", {"refresh": "exchange"}),
    "replicas": ("3:plain", {"refresh": "exchange"}),
}


def sent_in(do: Any) -> int:
    """Bytes that leave the interface from one barrier to the next, while ``do`` runs."""
    dist.barrier()
    with SentBytes() as sent:
        do()
        dist.barrier()
    assert sent.value is not None
    return sent.value


def main() -> None:
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name, (layout, settings) in RUNS.items():
        params = build(SPECS, layout)
        optimizer = optimizer_on(params, SPECS, layout, **{"period": 2, **settings})
        give_gradients(params, SPECS, 0)
        optimizer.step()  # compares plans, and connects what isn't yet
        give_gradients(params, SPECS, 1)
        optimizer.step()
        optimizer.traffic.reset()
        give_gradients(params, SPECS, 2)
        refresh = sent_in(optimizer.step)
        give_gradients(params, SPECS, 3)
        row = sent_in(optimizer.step)
        traffic = {kind: asdict(counts) for kind, counts in optimizer.traffic.items()}
        results[name] = {"refresh": refresh, "row": row, "nothing": sent_in(lambda: None), "traffic": traffic}
    report(results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
