"""How near a cheap step comes to the spectral step that it stands for: cosines while a model trains under Muon.

    python benchmarks/cheap_steps.py            # case S of the study; a minute on one core
    python benchmarks/cheap_steps.py --save

At some steps of the run everything that a refresh would leave behind is kept of every matrix: its direction, its Gram
matrices. One, two and nine steps later each cheap step makes its direction of that and of the momentum as it is then,
and is compared with Newton-Schulz of that momentum: <D, O> / (|D| |O|), the mean over the matrices. A cosine isn't
quality: docs/evidence.md sets both side by side.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from reporting import RESULTS, command_line, machine, table, write_results
from torch import Tensor, nn

import rowmuon
from rowdit.data import open_dataset
from rowdit.recipes.study_small import study
from rowdit.study.spectra import layer_kind
from rowdit.study.steps import (
    blocks_direction,
    build_optimizer,
    gram_direction,
    gram_factor,
)
from rowdit.study.task import change
from rowdit.train.config import OptimizerConfig
from rowdit.train.loop import train
from rowmuon.factors import gram_block
from rowmuon.gram import add_gram_, factorize_, largest_entry
from rowmuon.layout import local_layout

SNAPSHOTS = (60, 150, 300, 450, 570)
AGES = (1, 2, 9)
DAMPING = 1e-3
Cosines = dict[tuple[str, int, str], list[float]]
"""(layer kind, steps since the snapshot, cheap step) -> cosines."""


def spectral(U_mn: Tensor) -> Tensor:
    return rowmuon.newton_schulz(U_mn, "keller_jordan", dtype=torch.float32)


def rows(U_mn: Tensor) -> Tensor:
    return U_mn / torch.linalg.vector_norm(U_mn, dim=1, keepdim=True).clamp_min(torch.finfo(U_mn.dtype).tiny)


def unit(D_mn: Tensor) -> Tensor:
    return D_mn / torch.linalg.vector_norm(D_mn).clamp_min(torch.finfo(D_mn.dtype).tiny)


def input_side(whole: Tensor, num_chunks: int) -> Tensor:
    """The factor of a Gram row step, (num_blocks, b, b), after this refresh alone."""
    block = gram_block(local_layout(tuple(whole.shape), stack_dims=0, chunks=num_chunks))
    total = whole.new_zeros(whole.shape[1] // block, block, block)
    add_gram_(
        total, whole, None, largest_entry(whole, None, nesterov=False, dtype=total.dtype), beta=0.0, nesterov=False
    )
    traces = total.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    return factorize_(total / traces.clamp_min(torch.finfo(total.dtype).tiny), DAMPING)


class Snapshot:
    """What a refresh of one chunk would leave behind."""

    def __init__(self, U_mn: Tensor, whole: Tensor, num_chunks: int) -> None:
        self.spectral = spectral(U_mn)
        self.small_side = gram_factor(U_mn, DAMPING)
        self.input_side = input_side(whole, num_chunks)

    def directions(self, U_mn: Tensor) -> dict[str, Tensor]:
        """What each cheap step would do with the momentum as it is now."""
        row = rows(U_mn)
        gram = gram_direction(U_mn, self.small_side)
        return {
            "row step": row,
            "sign": U_mn.sign(),
            "the last refresh's direction": self.spectral,
            "that and a row step": unit(row) + unit(self.spectral),
            "gram, small side": gram,
            "gram, small side, then rows": rows(gram),
            "gram_row": rows(
                torch.cat(
                    [U @ Q for U, Q in zip(U_mn.split(len(self.input_side[0]), 1), self.input_side, strict=True)], 1
                )
            ),
            "4 blocks": blocks_direction(U_mn, 4, spectral),
        }


class Recorder:
    """Builds the optimizer that trains, with the comparison hooked in after its steps."""

    def __init__(self) -> None:
        self.found: Cosines = {}

    def build(self, model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
        optimizer = build_optimizer(model, config)
        names = {parameter: name for name, parameter in model.named_parameters()}
        kept: dict[tuple[Tensor, int], Snapshot] = {}
        step = 0

        @torch.no_grad()
        def after(optimizer: Any, *_: Any) -> None:
            nonlocal step
            start = max((s for s in SNAPSHOTS if s <= step), default=None)
            age = None if start is None else step - start
            step += 1
            if age != 0 and age not in AGES:
                return
            for group in optimizer.param_groups:
                for parameter in group["params"] if group["algorithm"] == "muon" else ():
                    M, mu = optimizer.state[parameter]["momentum_buffer"], group["momentum"]
                    whole = torch.lerp(parameter.grad, M, mu)
                    for i, U_mn in enumerate(whole.chunk(group["chunks"])):
                        if age == 0 and U_mn.any():
                            kept[parameter, i] = Snapshot(U_mn, whole, group["chunks"])
                        elif age and (parameter, i) in kept:
                            self._compare(layer_kind(names[parameter]), age, kept[parameter, i], U_mn)

        optimizer.register_step_post_hook(after)
        return optimizer

    def _compare(self, kind: str, age: int, snapshot: Snapshot, U_mn: Tensor) -> None:
        wanted = unit(spectral(U_mn))
        for name, D_mn in snapshot.directions(U_mn).items():
            cosine = float((unit(D_mn) * wanted).sum())
            self.found.setdefault((kind, age, name), []).append(cosine)


def record(options: argparse.Namespace) -> Cosines:
    """Trains one run of the study's case S under Muon, and compares on the way."""
    comparison = change(study({}).cases[0].comparison, "muon", {"lr": options.lr, "momentum": options.momentum})
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        data = open_dataset("bundled", "train", comparison.model.image_size)
        train(comparison.run_config("muon", options.seed), data, Path(folder), build=recorder.build)
    return recorder.found


def means(found: Cosines) -> list[dict[str, Any]]:
    """A row a cheap step: the mean over all matrices at each age, then at age 1 by layer kind."""
    kinds = sorted({kind for kind, _, _ in found})
    lines = []
    for name in dict.fromkeys(name for _, _, name in found):
        by_age = {
            f"after {age}": statistics.fmean(
                c for (_, a, n), own in found.items() if (a, n) == (age, name) for c in own
            )
            for age in AGES
        }
        by_kind = {kind: statistics.fmean(found[kind, 1, name]) for kind in kinds}
        lines.append({"cheap step": name} | by_age | by_kind)
    return lines


def report(lines: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> str:
    head = list(lines[0])
    body = [[line[key] if isinstance(line[key], str) else f"{line[key]:.2f}" for key in head] for line in lines]
    return f"""# Cosine of cheap steps and the spectral step

`{command_line()}`

One run of the study's case S under Muon, lr {options.lr:g}, momentum {options.momentum:g}, seed {options.seed}, torch
{torch.__version__}; snapshots at steps {", ".join(map(str, SNAPSHOTS))}. The mean over all matrices so many steps after
the snapshot; then, one step after it, by layer kind.

{table(head, body)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=0.016)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--save", action="store_true", help=f"write the page and the figures into {RESULTS}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = means(record(options))
    page = report(lines, options)
    print(page)
    if options.save:
        write_results(RESULTS / "cheap_steps", {"command": command_line(), "machine": machine(), "rows": lines}, page)


if __name__ == "__main__":
    main()
