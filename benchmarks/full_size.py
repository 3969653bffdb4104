"""The optimizer's real step at full size, without the hardware.

    python benchmarks/full_size.py                       # the table of docs/full-size.md
    python benchmarks/full_size.py --presets 15B --ranks 8 4096 --json

The parameters of a preset become DTensors of fake tensors, sharded by rows over a fake process group, and
`PeriodicRowMuon.step()` runs as it is. Nothing is computed and nothing is sent, but everything is counted: FLOPs by
torch's FlopCounterMode, bytes by the optimizer's own counter, memory by the storages that come and go.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary

import rowmuon
from rowdit.models.dit import DiT
from rowdit.models.presets import preset

PRESETS = ("1.3B", "2B", "4B", "9B", "15B")
RANKS = (8, 64, 256, 1024, 4096)


@dataclass(frozen=True)
class Row:
    """One configuration, on rank 0; what is counted beside what the plan says.

    Bytes and FLOPs are of one step; the mean over a period is (refresh + (K - 1) row) / K.
    """

    preset: str
    num_parameters: int
    num_ranks: int
    refresh: str
    period: int
    refresh_flops: int
    planned_refresh_flops: int
    refresh_bytes_sent: int
    planned_refresh_bytes_sent: int
    row_flops: int
    row_bytes_sent: int
    refresh_collectives: int
    mean_bytes_sent: float
    mean_flops: float
    peak_extra_bytes: int


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made under the mode that are alive, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage not in known and storage not in self._seen:
                    self._add(storage)
        return result

    def _add(self, storage: Any) -> None:
        import weakref

        size = storage.nbytes()
        self._seen[storage] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.now -= size


def fake_parameters(name: str, mesh: DeviceMesh) -> tuple[nn.Module, int]:
    """A preset's model whose parameters are fake DTensors, Shard(0) over all ranks. Call it under a fake mode."""
    with torch.device("meta"):
        model = DiT(preset(name))
    num_ranks = mesh.size()
    num_parameters = 0
    for module in model.modules():
        for key, value in list(module.named_parameters(recurse=False)):
            if not value.requires_grad:
                delattr(module, key)
                continue
            num_parameters += value.numel()
            rows = -(-value.shape[0] // num_ranks)
            local = torch.empty(min(rows, value.shape[0]), *value.shape[1:])
            shard = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride()
            )
            setattr(module, key, nn.Parameter(shard))
    return model, num_parameters


def measure(name: str, num_ranks: int, refresh: str, period: int) -> Row:
    """Runs one period under fake tensors. The default process group must be a fake one of ``num_ranks``."""
    mesh = init_device_mesh("cpu", (num_ranks,))  # its ranks are real numbers, so not under the fake mode
    with FakeTensorMode():
        model, num_parameters = fake_parameters(name, mesh)
        groups = rowmuon.param_groups(model, rowmuon.rules.DIT)
        optimizer = rowmuon.PeriodicRowMuon(
            groups, lr=1e-3, period=period, refresh=refresh, adjust_lr_fn="match_rms_adamw"
        )
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        plan = optimizer.plan("refresh")
        flops = {"refresh": 0, "row": 0}
        peak = 0
        for _ in range(min(period, 2)):
            kind = optimizer.next_step_kind
            with FlopCounterMode(display=False) as counter, LiveBytes() as live:
                optimizer.step()
            flops[kind] = counter.get_total_flops()
            peak = max(peak, live.peak)
        traffic = optimizer.traffic
    share = 1 / period
    return Row(
        name,
        num_parameters,
        num_ranks,
        refresh,
        period,
        flops["refresh"],
        plan.num_flops(0),
        traffic["refresh"].bytes_sent,
        plan.bytes_sent(0),
        flops["row"],
        traffic["row"].bytes_sent,
        traffic["refresh"].num_collectives,
        traffic["refresh"].bytes_sent * share + traffic["row"].bytes_sent * (1 - share),
        flops["refresh"] * share + flops["row"] * (1 - share),
        peak,
    )


def in_own_process(name: str, num_ranks: int) -> list[Row]:
    """All settings of one preset at one number of ranks: a fake process group can't change its size."""
    command = [sys.executable, __file__, "--presets", name, "--ranks", str(num_ranks), "--here"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return [Row(**row) for row in json.loads(done.stdout)]


def table(rows: list[Row]) -> str:
    """Markdown: one row per preset, ranks, refresh and period."""
    lines = [
        "| preset | ranks | refresh | K | sent per rank and step, mean (MB) | TFLOP per rank and step, mean | "
        "collectives of a refresh | peak extra memory (MB) |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.preset} | {row.num_ranks} | {row.refresh} | {row.period} | {row.mean_bytes_sent / 1e6:,.1f} | "
            f"{row.mean_flops / 1e12:,.2f} | {row.refresh_collectives} | {row.peak_extra_bytes / 1e6:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=list(PRESETS))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--json", action="store_true", help="JSON on standard output in place of the table")
    parser.add_argument("--out", type=Path, help="also write the rows there as JSON")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        (name,), (num_ranks,) = arguments.presets, arguments.ranks
        dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
        rows = [measure(name, num_ranks, refresh, k) for refresh in ("gather", "exchange") for k in (1, 3)]
        print(json.dumps([asdict(row) for row in rows]))
        return
    rows = []
    for name in arguments.presets:
        for num_ranks in arguments.ranks:
            print(f"{name} on {num_ranks} ranks", file=sys.stderr, flush=True)
            rows += in_own_process(name, num_ranks)
    if arguments.out:
        arguments.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(json.dumps([asdict(row) for row in rows]) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
