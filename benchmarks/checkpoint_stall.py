"""How long training stands still for a checkpoint: written between two steps, or beside them.

A DiT of the shape S with AdamW's state and one average: four fp32 copies of its weights. `synchronous` is the time of a
save that is written, flushed and renamed before the next step; `asynchronous` is what the loop waits until its copy on
the CPU is made, and `until complete` how long the writing then takes beside idle (training would share the cores).

    python benchmarks/checkpoint_stall.py --save
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from reporting import RESULTS, Spread, command_line, machine, machine_line, table, write_results

from rowdit.models import preset
from rowdit.train.checkpoint import Saver
from rowdit.train.config import OptimizerConfig, RunConfig, TrainConfig
from rowdit.train.state import build_state, tensors_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder by default")
    parser.add_argument("--save", action="store_true", help=f"write into {RESULTS.name}/")
    options = parser.parse_args()
    config = RunConfig(preset("S/2", learn_sigma=False), optimizer=OptimizerConfig("adamw"), train=TrainConfig())
    state = build_state(config)
    for p in state.model.parameters():
        p.grad = torch.zeros_like(p)
    state.optimizer.step()
    megabytes = sum(t.numel() * t.element_size() for t in tensors_of(state).values()) / 1e6
    seconds: dict[str, list[float]] = {"synchronous": [], "asynchronous": [], "until complete": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        savers = {kind: Saver(Path(folder) / kind, asynchronous=kind == "asynchronous") for kind in list(seconds)[:2]}
        for repeat in range(options.repeats + 1):  # the first has first touches
            state.step = repeat
            for kind, saver in savers.items():
                start = time.perf_counter()
                saver.save(state, config)
                stall = time.perf_counter() - start
                saver.wait()
                if repeat:
                    seconds[kind].append(stall)
                    if kind == "asynchronous":
                        seconds["until complete"].append(time.perf_counter() - start)
    spreads = {kind: Spread.of(values) for kind, values in seconds.items()}
    rows = [[kind, spread.show(), f"{megabytes / spread.median:.0f}"] for kind, spread in spreads.items()]
    page = (
        f"# Checkpoints: how long training stands still\n\n    {command_line()}\n\n{machine_line(machine())}\n\n"
        f"DiT-S/2 with AdamW's state and one average, {megabytes:.0f} MB, one process; {options.repeats} saves.\n\n"
        + table(["save", "seconds [quartiles]", "MB/s"], rows)
    )
    print(page)
    if options.save:
        data = {"command": command_line(), "machine": machine(), "seconds": seconds}
        write_results(RESULTS / "checkpoint_stall", data, page)


if __name__ == "__main__":
    main()
