"""Time of one optimizer step in a single process: Periodic Row-wise Muon, Muon, torch's own Muon and fused AdamW.

    python benchmarks/optimizer_step.py                  # DiT-S, B and L matrices, two blocks each; some minutes
    python benchmarks/optimizer_step.py --sizes S --json times.json

All contenders run in one process in turn, each with its own copy of the same weights, and the order is reversed every
other round; so a machine that is shared or that changes its clock moves all of them, and the ratios hold. A ratio is
the median, over rounds, of the ratio within a round. Reported are medians with quartiles.

Targets, each for the worst of the sizes: k3_over_k1 <= 0.40 (its limit is 1/3, where a row step costs nothing),
k1_over_torch_muon <= 1, row_over_adamw_fused <= 1. The latter is that of ``compile=True`` where there is a C++ compiler
(on CUDA: always), else the eager one; row_eager_over_adamw_fused is always the eager one and has no target.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from reporting import (
    HIDDEN_SIZES,
    RESULTS,
    Matrix,
    Spread,
    command_line,
    dit_matrices,
    machine,
    machine_line,
    table,
    write_results,
)
from torch import Tensor

import rowmuon

PERIOD = 3
TARGETS = {"k3_over_k1": 0.40, "k1_over_torch_muon": 1.0, "row_over_adamw_fused": 1.0}
MEANING = {
    "k3_over_k1": "K = 3 (mean of a whole period) over K = 1",
    "k1_over_torch_muon": "K = 1 over torch.optim.Muon",
    "row_over_adamw_fused": "a row step over AdamW(fused=True)",
    "row_eager_over_adamw_fused": "the same, eager",
}
MUON = {"lr": 1e-3, "weight_decay": 0.01, "adjust_lr_fn": "match_rms_adamw"}


def make_parameters(
    matrices: Sequence[Matrix], dtype: torch.dtype, device: str, *, split: bool
) -> list[torch.nn.Parameter]:
    """The same weights and gradients on every call; with ``split``, each chunk is a parameter of its own."""
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for matrix in matrices:
        values = torch.randn(2, matrix.num_rows, matrix.num_cols, generator=generator).to(device, dtype)
        num_parts = matrix.chunks if split else 1
        for weight, grad in zip(values[0].chunk(num_parts), values[1].chunk(num_parts), strict=True):
            parameter = torch.nn.Parameter(weight.clone() * 0.02)
            parameter.grad = grad.clone()
            parameters.append(parameter)
    return parameters


def muon_groups(matrices: Sequence[Matrix], parameters: Sequence[Tensor]) -> list[dict[str, object]]:
    """One group per number of chunks, for rowmuon."""
    groups: dict[int, list[Tensor]] = {}
    for matrix, parameter in zip(matrices, parameters, strict=True):
        groups.setdefault(matrix.chunks, []).append(parameter)
    return [{"params": params, "chunks": chunks} for chunks, params in groups.items()]


def can_compile(device: str) -> bool:
    return device != "cpu" or bool(shutil.which("g++") or shutil.which("clang++"))


def make_contenders(matrices: Sequence[Matrix], dtype: torch.dtype, device: str) -> dict[str, torch.optim.Optimizer]:
    def fresh(split: bool = False) -> list[torch.nn.Parameter]:
        return make_parameters(matrices, dtype, device, split=split)

    compiled = {
        "row_compiled": rowmuon.PeriodicRowMuon(muon_groups(matrices, fresh()), period=None, compile=True, **MUON)
    }
    return {
        "periodic": rowmuon.PeriodicRowMuon(muon_groups(matrices, fresh()), period=PERIOD, **MUON),
        "muon": rowmuon.Muon(muon_groups(matrices, fresh()), **MUON),
        # torch's Muon knows no chunks, so it gets them as separate parameters: the same arithmetic.
        "torch_muon": torch.optim.Muon(fresh(split=True), **MUON),
        "row_only": rowmuon.PeriodicRowMuon(muon_groups(matrices, fresh()), period=None, **MUON),
        "adamw_fused": torch.optim.AdamW(fresh(), lr=1e-3, weight_decay=0.01, betas=(0.9, 0.95), fused=True),
        **(compiled if can_compile(device) else {}),
    }


@dataclass
class Times:
    """Seconds of each timed step, by contender; ``periodic`` holds means over whole periods."""

    periodic: list[float] = field(default_factory=list)
    periodic_refresh: list[float] = field(default_factory=list)
    periodic_row: list[float] = field(default_factory=list)
    muon: list[float] = field(default_factory=list)
    torch_muon: list[float] = field(default_factory=list)
    row_only: list[float] = field(default_factory=list)
    adamw_fused: list[float] = field(default_factory=list)
    row_compiled: list[float] = field(default_factory=list)  # empty where nothing can be compiled

    def ratios(self) -> dict[str, Spread]:
        def paired(above: Iterable[float], below: Iterable[float]) -> Spread:
            return Spread.of(a / b for a, b in zip(above, below, strict=True))

        return {
            "k3_over_k1": paired(self.periodic, self.muon),
            "k1_over_torch_muon": paired(self.muon, self.torch_muon),
            "row_over_adamw_fused": paired(self.row_compiled or self.row_only, self.adamw_fused),
            "row_eager_over_adamw_fused": paired(self.row_only, self.adamw_fused),
        }


def timed_step(optimizer: torch.optim.Optimizer, device: str, kind: str | None = None) -> float:
    """Seconds of one step; ``kind`` is what a rowmuon optimizer must be about to do, so that nothing else is timed."""
    if kind is not None and optimizer.next_step_kind != kind:  # type: ignore[attr-defined]
        raise RuntimeError(f"about to time a {kind} step, but the next one is {optimizer.next_step_kind}")
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(contenders: dict[str, torch.optim.Optimizer], device: str, num_rounds: int, num_pairs: int) -> Times:
    """``num_rounds`` rounds of a period and of the two Muons, then ``num_pairs`` times a row step and an AdamW step."""
    times = Times()

    def period() -> None:
        steps = [timed_step(contenders["periodic"], device, "refresh" if i == 0 else "row") for i in range(PERIOD)]
        times.periodic.append(sum(steps) / PERIOD)
        times.periodic_refresh.append(steps[0])
        times.periodic_row.extend(steps[1:])

    for name, optimizer in contenders.items():
        for _ in range(PERIOD if name == "periodic" else 2):
            optimizer.step()
    in_turn(
        num_rounds,
        period,
        lambda: times.muon.append(timed_step(contenders["muon"], device, "refresh")),
        lambda: times.torch_muon.append(timed_step(contenders["torch_muon"], device)),
    )
    in_turn(
        num_pairs,
        lambda: times.row_only.append(timed_step(contenders["row_only"], device, "row")),
        lambda: times.adamw_fused.append(timed_step(contenders["adamw_fused"], device)),
        *(
            [lambda: times.row_compiled.append(timed_step(contenders["row_compiled"], device, "row"))]
            if "row_compiled" in contenders
            else []
        ),
    )
    return times


def in_turn(num_rounds: int, *actions: Callable[[], None]) -> None:
    """Runs all actions ``num_rounds`` times, in reversed order every other round."""
    for i in range(num_rounds):
        for action in actions if i % 2 == 0 else reversed(actions):
            action()


def report(sizes: dict[str, Times], options: argparse.Namespace) -> tuple[dict[str, object], str]:
    """Machine-readable results and the page, which says reached or not by comparing, never by hand."""
    ratios = {size: times.ratios() for size, times in sizes.items()}
    worst = {name: max(r[name].median for r in ratios.values()) for name in MEANING}
    facts = machine(options.device)
    data: dict[str, object] = {
        **worst,
        "targets": TARGETS,
        "command": command_line(),
        "machine": facts,
        "settings": {k: v for k, v in vars(options).items() if k not in ("save", "json")},
        "sizes": {
            size: {
                "ratios": {name: asdict(spread) for name, spread in ratios[size].items()},
                "seconds": {name: asdict(Spread.of(values)) for name, values in vars(times).items() if values},
            }
            for size, times in sizes.items()
        },
    }
    columns = [name for name in vars(Times()) if all(getattr(times, name) for times in sizes.values())]
    compiled = "compiled" if "row_compiled" in columns else "eager: there is no C++ compiler"
    seconds = table(
        ["ms per step", *columns],
        [[f"DiT-{size}", *(Spread.of(getattr(t, c)).show(1e3) for c in columns)] for size, t in sizes.items()],
    )
    verdicts = table(
        ["ratio", *(f"DiT-{size}" for size in sizes), "worst", "target", "reached"],
        [
            [
                f"{name}: {meaning}",
                *(ratios[size][name].show() for size in sizes),
                f"{worst[name]:.3f}",
                f"<= {TARGETS[name]:g}" if name in TARGETS else "",
                ("yes" if worst[name] <= TARGETS[name] else "**no**") if name in TARGETS else "",
            ]
            for name, meaning in MEANING.items()
        ],
    )
    chunks = "qkv in 3 and adaLN in 6 chunks" if options.chunked else "qkv and adaLN as one matrix each"
    text = f"""# Optimizer step, one process

`{data["command"]}`

{machine_line(facts)}, {facts["num_threads"]} threads. Matrices of {options.depth} DiT blocks,
{options.dtype}, {chunks}. Median [quartiles] of {options.rounds} rounds (the row steps and adamw_fused:
{options.pairs}), all in one run, in turn. `row_over_adamw_fused` is {compiled}.

{verdicts}

{seconds}

`periodic` is the mean over whole periods of K = {PERIOD}; `periodic_refresh` and `periodic_row` are its two kinds of
step, `row_only` the row steps of an optimizer that never refreshes again, `row_compiled` the same with `compile=True`
(after it has compiled), both run in turn with `adamw_fused`.
"""
    return data, text


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", nargs="+", choices=HIDDEN_SIZES, default=["S", "B", "L"])
    parser.add_argument("--hidden", type=int, help="one width of your own instead of --sizes")
    parser.add_argument("--depth", type=int, default=2, help="blocks (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the Muons (default 5)")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of row and AdamW steps (default 20)")
    parser.add_argument("--chunked", action="store_true", help="qkv in 3 and adaLN in 6 chunks (default: fused)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the parameters")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/optimizer_step.json and .md")
    options = parser.parse_args(argv)
    for name in ("depth", "rounds", "pairs", "hidden", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}; give at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    widths = (
        {f"{options.hidden} wide": options.hidden} if options.hidden else {s: HIDDEN_SIZES[s] for s in options.sizes}
    )
    sizes: dict[str, Times] = {}
    for size, hidden in widths.items():
        print(f"DiT-{size}: {options.rounds} rounds ...", flush=True)
        matrices = dit_matrices(hidden, options.depth, chunked=options.chunked)
        contenders = make_contenders(matrices, getattr(torch, options.dtype), options.device)
        sizes[size] = measure(contenders, options.device, options.rounds, options.pairs)
    data, text = report(sizes, options)
    print(f"\n{text}")
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    if options.save:
        suffix = "_chunked" if options.chunked else ""
        write_results(RESULTS / f"optimizer_step{suffix}", data, text)


if __name__ == "__main__":
    main()
