"""One rank of ``sharded_step.py``: makes the contenders, checks what each computes, times their steps in turn."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from cluster import SentBytes, report
from reporting import Matrix, dit_matrices
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from vanilla import VanillaMuon

import rowmuon
import rowmuon.runtime
from rowmuon.buckets import Route
from rowmuon.exchange import Exchange
from rowmuon.orthogonalize import resolve_coefficients
from rowmuon.traffic import StepTraffic

LR, WEIGHT_DECAY = 1e-3, 0.01
TRACED = ("gather K=1", "exchange K=1")
COLLECTIVES = (
    (dist, "all_gather_single"),
    (dist, "all_gather_into_tensor"),
    (Exchange, "send_out"),
    (Exchange, "send_back"),
)


@dataclass
class Contender:
    """An optimizer over its own copy of the parameters.

    ``around`` is entered around each step; ``blocked`` grows by the seconds spent waiting for collectives in it.
    """

    name: str
    optimizer: torch.optim.Optimizer
    params: list[DTensor]
    period: int = 1
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    steps: list[dict[str, object]] = field(default_factory=list)

    def next_kind(self) -> str:
        return getattr(self.optimizer, "next_step_kind", "refresh")

    def logical_bytes(self) -> int | None:
        """Counted bytes of the optimizer's own collectives that have left this rank; None where it doesn't count."""
        traffic = getattr(self.optimizer, "traffic", None)
        if traffic is not None:
            return sum(counts.bytes_sent for counts in traffic.values())
        return getattr(self.optimizer, "bytes_sent", None)


class Blocking:
    """Makes every collective wait until it's done: the same step without overlap. ``seconds`` is the time waited."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        originals = [(owner, name, getattr(owner, name)) for owner, name in COLLECTIVES if hasattr(owner, name)]

        def blocking(original: Callable[..., dist.Work | None]) -> Callable[..., dist.Work | None]:
            def call(*args: object, **kwargs: object) -> dist.Work | None:
                start = time.perf_counter()
                work = original(*args, **kwargs)
                if work is not None:
                    work.wait()
                self.seconds += time.perf_counter() - start
                return work

            return call

        try:
            for owner, name, original in originals:
                setattr(owner, name, blocking(original))
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)


# ---------------------------------------------------------------------------------------------------- contenders


def random_pair(matrix: Matrix, index: int) -> tuple[Tensor, Tensor]:
    """(weight, gradient) of a matrix, the same on every rank and for every contender."""
    generator = torch.Generator().manual_seed(index)
    weight, grad = torch.randn(2, matrix.num_rows, matrix.num_cols, generator=generator)
    return weight.mul_(0.02), grad


def make_params(matrices: Sequence[Matrix], mesh: DeviceMesh) -> list[DTensor]:
    params = []
    for index, matrix in enumerate(matrices):
        weight, grad = random_pair(matrix, index)
        param = torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None))
        param.grad = distribute_tensor(grad, mesh, [Shard(0)], src_data_rank=None)
        params.append(param)
    return params


def by_chunks(matrices: Sequence[Matrix], params: Sequence[DTensor]) -> list[dict[str, object]]:
    groups: dict[int, list[DTensor]] = {}
    for matrix, param in zip(matrices, params, strict=True):
        groups.setdefault(matrix.chunks, []).append(param)
    return [{"params": members, "chunks": chunks} for chunks, members in groups.items()]


def make_contenders(
    names: Sequence[str], matrices: Sequence[Matrix], mesh: DeviceMesh, bucket_bytes: int
) -> list[Contender]:
    """``names`` as in ``sharded_step.METHODS``. A peer that isn't installed is left out, with a line."""
    contenders = []
    for name in names:
        params = make_params(matrices, mesh)
        if name == "vanilla":
            optimizer = VanillaMuon(by_chunks(matrices, params), lr=LR, weight_decay=WEIGHT_DECAY)
            contenders.append(Contender(name, optimizer, params))
        elif name == "torch.optim.Muon":
            optimizer = torch.optim.Muon(params, lr=LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
            contenders.append(Contender(name, optimizer, params))
        elif name == "muon-fsdp2":
            try:
                peer = importlib.import_module("muon_fsdp2")
            except ImportError as reason:
                if dist.get_rank() == 0:
                    print(f"{name} is left out: {reason}", flush=True)
                continue
            group = {"params": params, "lr": LR, "weight_decay": WEIGHT_DECAY, "use_muon": True}
            contenders.append(Contender(name, peer.Muon([group]), params))
        else:
            refresh, k, *rest = name.split()
            settings = {"lr": LR, "weight_decay": WEIGHT_DECAY, "adjust_lr_fn": "match_rms_adamw"}
            optimizer = rowmuon.PeriodicRowMuon(
                by_chunks(matrices, params),
                period=int(k.removeprefix("K=")),
                refresh=refresh,
                bucket_bytes=bucket_bytes,
                **settings,
            )
            around = Blocking() if rest == ["no-overlap"] else nullcontext
            contenders.append(Contender(name, optimizer, params, int(k.removeprefix("K=")), around))
    return contenders


# ----------------------------------------------------------------------------------------------------- measuring


def expected_directions(matrices: Sequence[Matrix], mesh: DeviceMesh) -> dict[str, list[Tensor]]:
    """This rank's rows of each matrix's gradient, orthogonalised in fp32; the ranks divide the whole ones.

    "whole": the matrix as it is, or its chunks. "shard": each rank's rows by themselves, which is a known fault.
    """
    coefficients = resolve_coefficients("keller_jordan", 5)
    rank, num_ranks = dist.get_rank(), mesh.size()

    def direction(matrix: Tensor) -> Tensor:
        return rowmuon.newton_schulz(matrix, coefficients, dtype=torch.float32)

    grads = [random_pair(matrix, index)[1] for index, matrix in enumerate(matrices)]
    whole = [
        torch.cat([direction(part) for part in grad.chunk(matrix.chunks)])
        if index % num_ranks == rank
        else torch.empty_like(grad)
        for index, (matrix, grad) in enumerate(zip(matrices, grads, strict=True))
    ]
    return {
        "whole": [
            distribute_tensor(found, mesh, [Shard(0)], src_data_rank=index % num_ranks).to_local().clone()
            for index, found in enumerate(whole)
        ],
        "shard": [direction(grad.chunk(num_ranks)[rank]) for grad in grads],
    }


def direction_cosines(
    contender: Contender, matrices: Sequence[Matrix], expected: dict[str, list[Tensor]]
) -> dict[str, float]:
    """Takes the first step and compares its update's direction with each of the expected ones.

    From zero momentum the direction is the gradient's for any kind of momentum, and a cosine knows no scale; so this
    holds for optimizers of any convention. Returned are the smallest cosines over the matrices.
    """
    before = [param.detach().to_local().clone() for param in contender.params]
    one_step(contender)
    products = torch.zeros(len(expected), len(matrices), 3, dtype=torch.float64)
    for index, (old, param) in enumerate(zip(before, contender.params, strict=True)):
        update = (old * (1 - LR * WEIGHT_DECAY) - param.detach().to_local()).double()
        for products_of_kind, directions in zip(products, expected.values(), strict=True):
            direction = directions[index].double()
            products_of_kind[index] += torch.stack(
                [(update * direction).sum(), update.square().sum(), direction.square().sum()]
            )
    dist.all_reduce(products)
    cosines = products[..., 0] / (products[..., 1] * products[..., 2]).sqrt()
    return dict(zip(expected, cosines.amin(1).tolist(), strict=True))


def one_step(contender: Contender) -> dict[str, object]:
    """One step from fresh gradients, and what it took. Some peers overwrite the gradients, so they are made anew."""
    for index, param in enumerate(contender.params):
        if param.grad is None or contender.name == "muon-fsdp2":
            matrix = Matrix("", *param.shape)
            grad = random_pair(matrix, index)[1]
            param.grad = distribute_tensor(grad, param.device_mesh, [Shard(0)], src_data_rank=None)
    kind, logical = contender.next_kind(), contender.logical_bytes()
    blocked = contender.around.seconds if isinstance(contender.around, Blocking) else 0.0
    dist.barrier()
    with SentBytes() as wire:
        with contender.around():
            start = time.perf_counter()
            contender.optimizer.step()
            seconds = time.perf_counter() - start
        dist.barrier()  # its few hundred bytes are counted; without it, bytes still in the queue would not be
    after = contender.logical_bytes()
    return {
        "kind": kind,
        "seconds": seconds,
        "wire_bytes": wire.value,
        "logical_bytes": None if after is None or logical is None else after - logical,
        "blocked_seconds": contender.around.seconds - blocked if isinstance(contender.around, Blocking) else None,
    }


def one_period(contender: Contender) -> list[dict[str, object]]:
    steps = [one_step(contender) for _ in range(contender.period)]
    expected = ["refresh"] + ["row"] * (contender.period - 1)
    kinds = [step["kind"] for step in steps]
    if kinds != expected:
        raise RuntimeError(f"{contender.name}: about to report a period of {kinds}, expected {expected}")
    return steps


def differences(contenders: Sequence[Contender], matrices: Sequence[Matrix]) -> dict[str, float]:
    """How far each contender with K = 1 has come apart from the first: ||W - W_first|| / ||W_first - W_0||.

    All have taken the same number of steps from the same start; what is left is the rounding of bf16 arithmetic.
    """
    first = contenders[0]
    if first.period != 1:
        return {}
    names = [c.name for c in contenders if c.period == 1]
    squares = torch.zeros(len(names) + 1, dtype=torch.float64)
    for index, matrix in enumerate(matrices):
        param = first.params[index]
        start = distribute_tensor(random_pair(matrix, index)[0], param.device_mesh, [Shard(0)], src_data_rank=None)
        base = param.detach().to_local().double()
        squares[-1] += (base - start.to_local()).square().sum()
        for position, contender in enumerate(c for c in contenders if c.period == 1):
            squares[position] += (contender.params[index].detach().to_local() - base).square().sum()
    dist.all_reduce(squares)
    return {name: float((square / squares[-1]).sqrt()) for name, square in zip(names, squares, strict=False)}


def trace_refresh(contender: Contender, path: Path) -> dict[str, int | None]:
    """Profiles a refresh on every rank, writes rank 0's timeline, and counts what overlapped in it.

    "spanned": orthogonalisations that ran, from start to end, while one collective was under way. Single messages don't
    count: a timeline has them until somebody waits for them, and not until they have come. What of them overlaps is
    seen in "sent_meanwhile" of "sent": bytes that left the rank's interface during its orthogonalisations, and in all.
    """
    original = rowmuon.runtime.newton_schulz
    sent_meanwhile = 0

    def named(*args: object, **kwargs: object) -> Tensor:
        nonlocal sent_meanwhile
        with SentBytes() as sent, torch.profiler.record_function("newton_schulz"):
            result = original(*args, **kwargs)
        sent_meanwhile += sent.value or 0
        return result

    rowmuon.runtime.newton_schulz = named
    try:
        dist.barrier()
        with SentBytes() as sent:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                contender.optimizer.step()
            dist.barrier()
    finally:
        rowmuon.runtime.newton_schulz = original
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(str(path))
    ranges = {"gloo:": [], "newton_schulz": []}
    for event in profiler.events():
        for prefix, found in ranges.items():
            if event.name.startswith(prefix) and event.name not in ("gloo:send", "gloo:recv"):
                found.append((event.time_range.start, event.time_range.end))
    collectives, computed = ranges.values()
    spanned = sum(any(start <= a and b <= end for start, end in collectives) for a, b in computed)
    return {
        "collectives": len(collectives),
        "orthogonalizations": len(computed),
        "spanned": spanned,
        "sent": sent.value,
        "sent_meanwhile": None if sent.value is None else sent_meanwhile,
    }


def link_rates() -> dict[str, float]:
    """Mbit/s that leave a rank in large collectives: what the limit, TCP and gloo leave of the rate."""
    if dist.get_world_size() == 1:
        return {}
    num_ranks, part = dist.get_world_size(), torch.zeros(1 << 19)
    whole, other = (part.new_zeros(part.numel() * num_ranks) for _ in range(2))
    counts = (part.numel(),) * num_ranks
    route = Route(tuple(range(num_ranks)), (), counts, counts, (), (), ())

    def exchange() -> None:
        """Out alone."""
        both = Exchange(whole, route, dist.get_rank(), dist.group.WORLD)
        both.expect(other, comes_back=False)
        both.send_out(StepTraffic()).wait()
        both.finish_sending()

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    collectives = {
        "all-gather": lambda: gather(whole, part),
        "exchange": exchange,
        "gloo's all-to-all": lambda: dist.all_to_all_single(whole, other),
    }
    rates = {}
    for name, collective in collectives.items():
        collective()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(3):
            collective()
        dist.barrier()
        seconds = time.perf_counter() - start
        rates[name] = 3 * (num_ranks - 1) * part.numel() * part.element_size() * 8 / seconds / 1e6
    return rates


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--bucket-bytes", type=int, required=True)
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--chunked", action="store_true")
    parser.add_argument("--no-adaln", action="store_true")
    parser.add_argument("--trace", type=Path, help="folder for a timeline of each overlapping method's refresh")
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    matrices = dit_matrices(options.hidden, options.depth, chunked=options.chunked, adaln=not options.no_adaln)
    rates = link_rates()
    contenders = make_contenders(options.methods, matrices, mesh, options.bucket_bytes)
    cosines = {}
    expected = expected_directions(matrices, mesh)
    for contender in contenders:  # also warms up: the first steps make plans, connections and compiled functions
        cosines[contender.name] = direction_cosines(contender, matrices, expected)
        for _ in range(contender.period - 1):
            one_step(contender)
        one_period(contender)
    for index in range(options.rounds):
        start = time.perf_counter()
        for contender in contenders if index % 2 == 0 else reversed(contenders):
            contender.steps.extend(one_period(contender))
        if dist.get_rank() == 0:
            print(f"round {index + 1} of {options.rounds}: {time.perf_counter() - start:.1f} s", flush=True)
    apart = differences(contenders, matrices)
    traces = {}
    for contender in contenders:
        if options.trace and contender.name in TRACED:
            file = options.trace / f"{contender.name.split()[0]}.json.gz"
            traces[contender.name] = trace_refresh(contender, file)
    results = {
        c.name: {
            "period": c.period,
            "cosines": cosines[c.name],
            "difference": apart.get(c.name),
            "steps": c.steps,
        }
        for c in contenders
    }
    num_parameters = sum(matrix.num_rows * matrix.num_cols for matrix in matrices)
    report({"link_mbit": rates, "num_parameters": num_parameters, "contenders": results, "traces": traces})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
