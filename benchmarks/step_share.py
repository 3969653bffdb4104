"""The optimizer's share of a training step in one process: AdamW, Muon, and Periodic Row-wise Muon with K = 3.

    python benchmarks/step_share.py                      # DiT-S/2 at batch 16; a minute on two cores
    python benchmarks/step_share.py --preset B/4 --batch 8 --save

One model of the preset is run forward and backward; each optimizer then steps its own copy of the parameters with these
gradients. All in turn, round by round, in reversed order every other round. An optimizer's share is its mean step over
that plus the forward and backward pass. The target of this project is a share at K = 3 of at most 1.5 times AdamW's.
The page says beside it what that leaves for a refresh, and how long the refresh's FLOPs take at the best rate of matrix
products: under that no optimizer that orthogonalises comes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from reporting import RESULTS, Spread, command_line, machine, machine_line, table, write_results

import rowmuon
from rowdit.bench.machine import matmul_rate
from rowdit.flow.path import flow_loss
from rowdit.models.dit import DiT
from rowdit.models.presets import PRESETS, preset

PERIOD = 3
TARGET = 1.5
ADAMW = {"lr": 1e-4, "weight_decay": 0.01, "betas": (0.9, 0.95)}
MUON = {"lr": 1e-3, "weight_decay": 0.01}


def optimizers(model: DiT, compile: bool) -> dict[str, tuple[torch.optim.Optimizer, list[torch.nn.Parameter], int]]:
    """By name: the optimizer, its copies of the parameters in the model's order, and the steps of its period."""
    made = {}
    for name, period in (("AdamW fused", 0), ("Muon", 1), (f"K = {PERIOD}", PERIOD)):
        copy = DiT(model.config, seed=0)
        groups = rowmuon.param_groups(copy, rowmuon.rules.DIT, muon=MUON, adamw=ADAMW)
        if period:
            optimizer = rowmuon.PeriodicRowMuon(
                groups, lr=1e-3, adjust_lr_fn="match_rms_adamw", period=period, compile=compile
            )
        else:
            optimizer = torch.optim.AdamW([{"params": group["params"]} for group in groups], fused=True, **ADAMW)
        made[name] = (optimizer, list(copy.parameters()), max(period, 1))
    return made


def seconds_of(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds: "pass" of a forward and backward pass, else the mean step of a whole period."""
    model = DiT(preset(options.preset, learn_sigma=False), seed=0)
    config = model.config
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, config.in_channels, config.image_size, config.image_size)
    images, noise = torch.randn(2, *shape, generator=generator)
    labels = torch.randint(config.num_classes, (options.batch,), generator=generator)
    times = torch.rand(options.batch, generator=generator)
    contenders = optimizers(model, options.compile)
    seconds: dict[str, list[float]] = {"pass": [], **{name: [] for name in contenders}}

    def one_pass() -> None:
        model.zero_grad()
        flow_loss(model, images, labels, noise, times).mean().backward()

    def period_of(name: str) -> float:
        optimizer, params, num_steps = contenders[name]
        total = 0.0
        for _ in range(num_steps):
            for param, source in zip(params, model.parameters(), strict=True):
                param.grad = source.grad.clone()
            total += seconds_of(optimizer.step)
        return total / num_steps

    one_pass()
    for name in contenders:
        period_of(name)
    for index in range(options.rounds):
        seconds["pass"].append(seconds_of(one_pass))
        for name in list(contenders) if index % 2 == 0 else list(reversed(contenders)):
            seconds[name].append(period_of(name))
    return seconds


def report(
    seconds: dict[str, list[float]], num_flops: int, rate: float, options: argparse.Namespace
) -> tuple[dict[str, object], str]:
    """Everything as data, and the page."""
    spreads = {name: Spread.of(values) for name, values in seconds.items()}
    shares = {
        name: Spread.of(s / (s + p) for s, p in zip(seconds[name], seconds["pass"], strict=True))
        for name in seconds
        if name != "pass"
    }
    adamw = shares["AdamW fused"].median
    ratio = shares[f"K = {PERIOD}"].median / adamw
    least = num_flops / rate / PERIOD
    facts = machine()
    data = {
        "k3_share_over_adamw_share": ratio,
        "target": TARGET,
        "reached": ratio <= TARGET,
        "command": command_line(),
        "machine": facts,
        "seconds": {name: asdict(spread) for name, spread in spreads.items()},
        "shares": {name: asdict(spread) for name, spread in shares.items()},
        "refresh_flops": num_flops,
        "matmul_flops_per_second": rate,
    }
    adamw_step, verdict = spreads["AdamW fused"].median, "reached" if ratio <= TARGET else "**not reached**"
    rows = [
        [name, spreads[name].show(1e3), f"{100 * share.median:.2f} %", f"{share.median / adamw:.2f}"]
        for name, share in shares.items()
    ]
    text = f"""# The optimizer's share of a training step: DiT-{options.preset}, batch {options.batch}

`{command_line()}`

{machine_line(facts)}, {facts["num_threads"]} threads, fp32. Median [quartiles] of {options.rounds} rounds, in turn. A
forward and backward pass takes {spreads["pass"].show(1e3)} ms. Row steps with compile={options.compile}.

{table(["optimizer", "ms a step (mean of a period)", "share of the step", "over AdamW's"], rows)}

K = {PERIOD}: {ratio:.2f} times AdamW's share; target at most {TARGET:g}: {verdict}.

What bounds it: the {num_flops / 1e9:.1f} GFLOP of a refresh take {1e3 * num_flops / rate:.0f} ms at this machine's best
rate of bf16 products, {rate / 1e9:.0f} GFLOP/s, so {1e3 * least:.1f} ms a step with K = {PERIOD} if row steps cost
nothing. AdamW's whole step takes {1e3 * adamw_step:.1f} ms, so the step can't be under about
{least / adamw_step:.1f} times AdamW's here.
"""
    return data, text


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", choices=list(PRESETS), default="S/2")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--compile", action="store_true", help="row steps by a compiled kernel")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/step_share.json and .md")
    options = parser.parse_args(argv)
    for name in ("batch", "rounds", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}; give at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    model = DiT(preset(options.preset, learn_sigma=False), seed=0)
    groups = rowmuon.param_groups(model, rowmuon.rules.DIT, muon=MUON, adamw=ADAMW)
    num_flops = rowmuon.PeriodicRowMuon(groups, lr=1e-3).plan("refresh").num_flops(0)
    rate = matmul_rate(model.config.hidden_size, "cpu")
    data, text = report(measure(options), num_flops, rate, options)
    print(text)
    if options.save:
        write_results(RESULTS / "step_share", data, text)


if __name__ == "__main__":
    main()
