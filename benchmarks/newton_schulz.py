"""Newton-Schulz alone against the best matrix product of its sizes: direct and Gram form, as torch computes them, with
the normalisation through torch.compile, with symmetric products by Triton, and with both; and symmetric products alone.

Meant for a GPU, where `kernels="triton"` is off until this has been run: it says from how many rows on it pays
(`_TRITON_LEAST_ROWS` of `rowmuon.symmetric`). On a CPU neither option makes a difference, so only the forms are timed,
and of symmetric products the halves that are computed there: a check that the script runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from reporting import RESULTS, Spread, command_line, machine, machine_line, table, write_results
from torch import Tensor

import rowmuon
from rowdit.bench.machine import best_product, synchronize
from rowmuon import symmetric

COEFFICIENTS = "keller_jordan"
NUM_STEPS = 5
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
FORMS = ("direct", "gram")
WAYS: dict[str, dict[str, Any]] = {
    "torch": {},
    "compiled": {"compile": True},
    "triton": {"kernels": "triton"},
    "triton, compiled": {"kernels": "triton", "compile": True},
}


def contenders(device: str, rows: int, cols: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> (form, other arguments of `newton_schulz`). A square matrix has no use for the Gram form."""
    ways = WAYS if device == "cuda" else {"torch": {}}
    forms = FORMS if rows != cols else FORMS[:1]
    return {f"{form}, {way}": (form, how) for form in forms for way, how in ways.items()}


def time_in_turns(
    calls: Mapping[str, Callable[[], object]], device: str, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of a call in each round; one round warms up, every other one goes backwards."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(options.rounds + 1):
        for name in list(calls)[:: -1 if number % 2 else 1]:
            synchronize(device)
            start = time.perf_counter()
            for _ in range(options.calls):
                calls[name]()
            synchronize(device)
            seconds[name].append((time.perf_counter() - start) / options.calls)
    return {name: times[1:] for name, times in seconds.items()}


def measure(rows: int, cols: int, dtype: torch.dtype, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each contender on a stack of `options.num` matrices: seconds, FLOP/s over the best product's, error."""
    device = options.device
    stack = torch.randn(options.num, rows, cols, device=device).to(dtype)
    exact = rowmuon.newton_schulz(stack[0], COEFFICIENTS, dtype=torch.float64)
    product = best_product(rows, device, dtype)
    made = contenders(device, rows, cols)
    calls: dict[str, Callable[[], object]] = {
        name: lambda form=form, how=how: rowmuon.newton_schulz(stack, COEFFICIENTS, dtype=dtype, form=form, **how)
        for name, (form, how) in made.items()
    }
    full = options.num * rowmuon.newton_schulz_flops(rows, cols, NUM_STEPS)
    calls["matmul"] = lambda: product.seconds(full / options.calls)
    seconds = time_in_turns(calls, device, options)
    seconds["matmul"] = [options.calls * s for s in seconds["matmul"]]  # each did a part of one orthogonalisation
    found = []
    for name, (form, how) in made.items():
        flops = options.num * rowmuon.newton_schulz_flops(
            rows, cols, NUM_STEPS, form, device_type=device, kernels=how.get("kernels", "torch")
        )
        result = rowmuon.newton_schulz(stack[0], COEFFICIENTS, dtype=dtype, form=form, **how).double()
        found.append(
            {
                "rows": rows,
                "cols": cols,
                "dtype": str(dtype).removeprefix("torch."),
                "contender": name,
                "seconds": Spread.of(seconds[name]).median,
                "over_direct": Spread.of_ratio(seconds[name], seconds["direct, torch"]).__dict__,
                "rate_over_matmul": Spread.of(
                    m * flops / full / s for m, s in zip(seconds["matmul"], seconds[name], strict=True)
                ).__dict__,
                "error": float((result - exact).norm() / exact.norm()),
            }
        )
    return found


def measure_product(rows: int, num: int, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    """b R + c R R of `num` matrices: the half that is computed on this device over the whole product."""
    device = options.device
    R = torch.randn(num, rows, rows, device=device).to(dtype)
    R = (R + R.mT) / rows**0.5
    out, other = torch.empty_like(R), torch.empty_like(R)
    way: symmetric.Way = "triton" if device == "cuda" else "halves"

    def multiply(way: symmetric.Way, out: Tensor) -> None:
        symmetric.symmetric_product_(R, R, out, way, add=R, beta=-4.775, alpha=2.0315)

    least, symmetric._TRITON_LEAST_ROWS = symmetric._TRITON_LEAST_ROWS, 1
    try:
        calls = {"half": lambda: multiply(way, out), "full": lambda: multiply("full", other)}
        seconds = time_in_turns(calls, device, options)
    finally:
        symmetric._TRITON_LEAST_ROWS = least
    ratio = Spread.of_ratio(seconds["half"], seconds["full"])
    difference = float((out.double() - other.double()).norm() / other.double().norm())
    name = str(dtype).removeprefix("torch.")
    return {"rows": rows, "num": num, "dtype": name, "half_over_full": ratio.__dict__, "difference": difference}


def report(
    found: Sequence[dict[str, Any]], products: Sequence[dict[str, Any]], options: argparse.Namespace
) -> tuple[dict[str, Any], str]:
    facts = machine(options.device)
    data = {"command": command_line(), "machine": facts, "newton_schulz": found, "products": products}
    rows = [
        (
            f"{f['rows']} x {f['cols']}",
            f["dtype"],
            f["contender"],
            f"{1e3 * f['seconds']:.3g}",
            Spread(**f["over_direct"]).show(),
            Spread(**f["rate_over_matmul"]).show(),
            f"{f['error']:.1e}",
        )
        for f in found
    ]
    headers = ("matrices", "dtype", "contender", "ms", "over direct, torch", "FLOP/s over matmul", "error")
    half = [
        (p["rows"], p["num"], p["dtype"], Spread(**p["half_over_full"]).show(), f"{p['difference']:.1e}")
        for p in products
    ]
    text = f"""# Newton-Schulz on {facts["device"]}

`{data["command"]}`: {machine_line(facts)}. {options.num} matrices a call, five steps, medians and quartiles of
{options.rounds} rounds in turn; float32 multiplied in {options.float32}. FLOPs are those that are really computed: of
symmetric products only what isn't mirrored. The error is against the direct form in float64.

{table(headers, rows)}

Symmetric products alone, b R + c R R: the computed half, mirrored, over the whole product. Under 1 it pays.

{table(("rows", "matrices", "dtype", "half over full", "difference"), half)}
"""
    return data, text


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--widths", type=int, nargs="+", default=(1024, 1536, 2048, 4096), help="r of r x r and r x 4r")
    parser.add_argument("--products", type=int, nargs="+", default=(512, 1024, 2048, 4096), help="rows of products")
    parser.add_argument("--num", type=int, default=4, help="matrices in a call")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=tuple(DTYPES))
    parser.add_argument(
        "--float32", choices=("ieee", "tf32"), default="tf32", help="how float32 is multiplied on a GPU"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=5, help="calls in a round")
    parser.add_argument("--save", action="store_true", help="write results/newton_schulz_DEVICE.md and .json")
    options = parser.parse_args(argv)
    if min(*options.widths, *options.products, options.num, options.rounds, options.calls) < 1:
        parser.error("give at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here; --device cpu checks that the script runs")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    torch.set_float32_matmul_precision("high" if options.float32 == "tf32" else "highest")
    dtypes = [DTYPES[name] for name in options.dtypes]
    found = [
        line
        for dtype in dtypes
        for width in options.widths
        for cols in (width, 4 * width)
        for line in measure(width, cols, dtype, options)
    ]
    nums = sorted({1, options.num})
    products = [
        measure_product(rows, num, dtype, options) for dtype in dtypes for rows in options.products for num in nums
    ]
    data, text = report(found, products, options)
    print(text)
    if options.save:
        write_results(RESULTS / f"newton_schulz_{options.device}", data, text)


if __name__ == "__main__":
    main()
