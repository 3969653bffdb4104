"""The row step's kernel alone against torch's fused AdamW, by the length of a row: eight fp32 matrices, one call each.

Memory alone would allow 5/7 of AdamW's time: five reads and writes of a matrix instead of seven. What is left out is
the rest of a step (groups, gradients, checks), which `rowdit bench` times with it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from reporting import RESULTS, Spread, command_line, machine, machine_line, table, write_results
from torch.optim.adamw import adamw

from rowmuon import native

LENGTHS = (384, 768, 1024, 1536, 2048, 3072, 4096, 5000)
LIMIT = 5 / 7


def measure(length: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each round, by contender."""
    num_rows = max(1, options.numel // length)
    tensors = [torch.randn(4, num_rows, length).unbind() for _ in range(options.matrices)]
    weights, momenta, grads, seconds = (list(column) for column in zip(*tensors, strict=True))
    seconds = [second.square_() for second in seconds]
    steps = [torch.ones(()) for _ in weights]

    def row_step() -> None:
        matrices = list(zip(weights, momenta, grads, strict=True))
        native.row_step_(
            matrices, [1e-3] * len(matrices), decay=1e-4, beta=0.95, nesterov=True, floor=1e-19, maximize=False
        )

    def adamw_fused() -> None:
        adamw(
            weights, grads, momenta, seconds, [], steps, fused=True, amsgrad=False, beta1=0.9, beta2=0.95, lr=1e-3,
            weight_decay=0.1, eps=1e-8, maximize=False,
        )  # fmt: skip

    contenders: dict[str, Callable[[], None]] = {"row step": row_step, "AdamW fused": adamw_fused}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with torch.no_grad():
        for index in range(options.rounds + 1):
            for name, run in contenders.items():
                start = time.perf_counter()
                run()
                if index:  # the first builds and touches the memory
                    times[name].append(time.perf_counter() - start)
    return times


def report(measured: dict[int, dict[str, list[float]]], options: argparse.Namespace) -> tuple[dict, str]:
    facts = machine()
    ratios = {length: Spread.of_ratio(times["row step"], times["AdamW fused"]) for length, times in measured.items()}
    rows = [
        [length, *(Spread.of(times[name]).show(1e3) for name in ("row step", "AdamW fused")), ratios[length].show()]
        for length, times in measured.items()
    ]
    text = f"""# The row step's kernel by the length of a row

`{command_line()}`

{machine_line(facts)}, {torch.get_num_threads()} threads. {options.matrices} matrices of about {options.numel:,} fp32
elements. Median [quartiles] of {options.rounds} rounds, in turn.

{table(["row", "row step, ms", "AdamW fused, ms", "row step / AdamW"], rows)}

Memory alone allows {LIMIT:.2f}.
"""
    data = {
        "command": command_line(),
        "machine": facts,
        "num_threads": torch.get_num_threads(),
        "seconds": {str(length): times for length, times in measured.items()},
        "row_over_adamw_fused": {str(length): ratio.median for length, ratio in ratios.items()},
    }
    return data, text


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--numel", type=int, default=3 << 20, help="elements of a matrix, about")
    parser.add_argument("--matrices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/row_kernel.json and .md")
    options = parser.parse_args(argv)
    for name in ("numel", "matrices", "rounds", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}; give at least 1")
    if min(options.lengths) < 1:
        parser.error(f"--lengths has {min(options.lengths)}; give at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    data, text = report({length: measure(length, options) for length in options.lengths}, options)
    print(text)
    if options.save:
        write_results(RESULTS / "row_kernel", data, text)


if __name__ == "__main__":
    main()
