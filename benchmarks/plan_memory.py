"""Memory of a rank: what `rowdit plan` predicts, beside what real ranks take.

    python benchmarks/plan_memory.py --out benchmarks/results/plan_memory.json
    python benchmarks/plan_memory.py --cases "wide, 2 ranks"                       # a table on standard output

Each configuration trains a few steps under FSDP2 on gloo processes of this machine, by the trainer's own functions, and
every rank reads its resident memory from the kernel: the peak over the steps, less what was resident before the model
was built (Python, torch, the process group, after a warm-up of the same kind on a tiny model). The figure is the
largest of all ranks. Linux only. Models are large enough for the libraries' own buffers not to matter, and small enough
for a laptop: a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from rowdit.cost import RankMesh, estimate
from rowdit.models import DiTConfig
from rowdit.models.parallel import ParallelConfig
from rowdit.train.config import OptimizerConfig, RunConfig, TrainConfig

SHAPE = {"image_size": 16, "in_channels": 4, "patch_size": 2, "num_classes": 10}
TINY = DiTConfig(**SHAPE, hidden_size=32, depth=2, num_heads=2)
WIDE = DiTConfig(**SHAPE, hidden_size=512, depth=6, num_heads=8)
DEEP = DiTConfig(**SHAPE, hidden_size=256, depth=16, num_heads=4)
NUM_STEPS = 4  # a refresh, two row steps, a refresh
MEGABYTE = 1 << 20


def run_of(model: DiTConfig, batch_size: int, micro_batch_size: int | None, name: str, **parallel: object) -> RunConfig:
    return RunConfig(
        model,
        optimizer=OptimizerConfig(name),  # type: ignore[arg-type]
        train=TrainConfig(batch_size=batch_size, micro_batch_size=micro_batch_size, steps=NUM_STEPS),
        parallel=ParallelConfig(**parallel),  # type: ignore[arg-type]
    )


CASES: dict[str, tuple[int, RunConfig]] = {
    "wide, 2 ranks": (2, run_of(WIDE, 16, None, "periodic")),
    "wide, 4 ranks": (4, run_of(WIDE, 16, None, "periodic")),
    "wide, 2 x 2 ranks (HSDP)": (4, run_of(WIDE, 16, None, "periodic", replicas=2)),
    "wide, 2 ranks, AdamW": (2, run_of(WIDE, 16, None, "adamw")),
    "wide, 2 ranks, weights stay gathered": (2, run_of(WIDE, 16, None, "periodic", reshard_after_forward=False)),
    "deep, 2 ranks": (2, run_of(DEEP, 32, None, "periodic")),
    "deep, 4 ranks, 2 micro-batches": (4, run_of(DEEP, 64, 8, "periodic")),
    "deep, 2 ranks, checkpointing": (2, run_of(DEEP, 32, None, "periodic", activation_checkpointing=True)),
}


# ---------------------------------------------------------------------------------------------------- on the ranks


def resident(kind: str) -> int:
    """Bytes: "VmRSS" is now, "VmHWM" the most since the last `reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {kind}")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def work(case: str, out: Path) -> None:
    """One rank: a tiny run to warm up, then the case; writes the peak."""
    from rowdit.train.world import join_world

    torch.set_num_threads(1)
    num_ranks, config = CASES[case]
    tiny = dataclasses.replace(config, model=TINY)
    with join_world(config.parallel) as world:
        train(tiny, world)
        base = resident("VmRSS")
        reset_peak()
        after_build, after_steps = train(config, world)
        result = {"resident": after_steps - base, "built": after_build - base, "peak": resident("VmHWM") - base}
        (out / f"{world.rank}.json").write_text(json.dumps(result))


def train(config: RunConfig, world: object) -> tuple[int, int]:
    """A few steps on random images; bytes resident after building and after the steps."""
    from rowdit.data.batch import Batch
    from rowdit.train.state import build_state
    from rowdit.train.step import train_step

    model = config.model
    state = build_state(config, world=world)  # type: ignore[arg-type]
    built = resident("VmRSS")
    count = config.train.batch_size // world.size  # type: ignore[attr-defined]
    for step in range(NUM_STEPS):
        positions = torch.arange(step * count, (step + 1) * count)
        images = torch.randn(count, model.in_channels, model.image_size, model.image_size)
        batch = Batch(images, torch.zeros(count, dtype=torch.int64), positions)
        train_step(state, batch, config, world)  # type: ignore[arg-type]
    return built, resident("VmRSS")


# ------------------------------------------------------------------------------------------------------ the report


def measure(case: str) -> dict[str, int]:
    """The largest of the ranks' figures."""
    num_ranks, _ = CASES[case]
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        environment = os.environ | {
            "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            # what is freed goes back at once, so that resident memory is what is alive
            "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1",
        }  # fmt: skip
        command = [sys.executable, __file__, "--worker", case, "--out", folder]
        ranks = [
            subprocess.Popen(command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(num_ranks)
        ]
        codes = [rank.wait(600) for rank in ranks]
        if any(codes):
            raise RuntimeError(f"{case}: exit codes {codes}")
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    return {key: max(result[key] for result in found) for key in found[0]}


def compare(case: str) -> dict[str, object]:
    num_ranks, config = CASES[case]
    memory = estimate(config, RankMesh(num_ranks, config.parallel.replicas), device="cpu").memory
    measured = measure(case)
    return {
        "case": case,
        "parts": memory.parts(),
        "predicted_peak": memory.peak,
        "measured_peak": measured["peak"],
        "predicted_over_measured": memory.peak / measured["peak"],
        "measured": measured,
    }


def table(rows: Sequence[dict]) -> str:
    head = "| run | predicted, MB | of it resident | activations | unsharded | measured, MB | predicted / measured |"
    lines = [head, "|---|---:|---:|---:|---:|---:|---:|"]
    for row in rows:
        parts = row["parts"]
        always = sum(parts[key] for key in ("weights", "gradients", "optimizer", "ema", "buffers"))
        numbers = (row["predicted_peak"], always, parts["activations"], parts["unsharded"], row["measured_peak"])
        cells = " | ".join(f"{value / MEGABYTE:,.1f}" for value in numbers)
        lines.append(f"| {row['case']} | {cells} | {row['predicted_over_measured']:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--out", type=Path, help="write everything there as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.out)
        return
    rows = []
    for case in options.cases:
        rows.append(compare(case))
        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
