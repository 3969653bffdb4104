"""`rowdit bench`: the optimizer step against peers."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rowdit.commands.limits import check_memory, check_processes
from rowdit.commands.outputs import check_file
from rowdit.commands.parsing import fail, parse, set_threads

if TYPE_CHECKING:
    from rowdit.bench.contender import Workplace


@dataclass(frozen=True)
class BenchOptions:
    """Times the optimizer step against torch's fused AdamW and Muon and against public Muons that are installed, all in
    one run. On several ranks: torchrun --nproc-per-node 4 -m rowdit bench, or --ranks 4 on this machine.

    Args:
        json: print the numbers as JSON and nothing else; the page goes to the error stream.
        sizes: DiT shapes: S B L XL, or 1.3B 2B 4B 9B 15B at a quarter of their width, or widths such as 512.
        peers: which of the peers: torch_muon, pytorch_optimizer, heavyball, muonium, muon_fsdp2; all by default.
        ranks: start that many ranks on this machine, one thread each, with the rows sharded over them.
        depth: DiT blocks.
        rounds: of the Muons.
        pairs: of row and AdamW steps.
        chunked: qkv in 3 and adaLN in 6 chunks instead of as one matrix each.
        dtype: of the parameters.
        device: where they lie.
        threads: processor threads; torch's own choice by default.
        guard: instead, hold counts and ratios of one DiT-S block against their limits; exit code 1 where one is passed.
        save: also write FILE.json and FILE.md, named without a suffix.
    """

    json: bool = False
    sizes: tuple[str, ...] = ("S", "B", "L")
    peers: tuple[str, ...] | None = None
    ranks: int | None = None
    depth: int = 2
    rounds: int = 5
    pairs: int = 20
    chunked: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int | None = None
    guard: bool = False
    save: Path | None = None


def run(arguments: list[str]) -> int:
    options = parse("bench", BenchOptions, arguments)
    try:
        _check(options)
    except ValueError as error:
        return fail(str(error))
    from rowdit.bench import ranks

    if options.guard:
        return _guard(options)
    if options.ranks is not None and not ranks.is_rank():
        return ranks.start_ranks(options.ranks, arguments)
    set_threads(options.threads)
    import torch
    import torch.distributed as dist

    from rowdit.bench.contender import Workplace

    if not ranks.is_rank():
        return _bench(options, Workplace(options.device, getattr(torch, options.dtype)), arguments)
    mesh = ranks.join(options.device)
    try:
        return _bench(options, Workplace(options.device, getattr(torch, options.dtype), mesh), arguments)
    finally:
        dist.destroy_process_group()


def _guard(options: BenchOptions) -> int:
    from rowdit.bench.guard import page, run_guard

    set_threads(options.threads or 1)
    with contextlib.redirect_stdout(sys.stderr):
        found, wrong = run_guard()
    print(json.dumps({"measured": found, "wrong": wrong}, indent=1) if options.json else page(found))
    return fail("worse than its limit: " + "; ".join(wrong), 1) if wrong else 0


def _check(options: BenchOptions) -> None:
    """Raises ValueError, of which a ConfigError is one."""
    from rowdit.bench.peers import PEERS
    from rowdit.bench.shapes import size_named

    for name in ("depth", "rounds", "pairs", "ranks"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}: must be at least 1")
    if options.ranks is not None:
        check_processes("--ranks", options.ranks)
    if options.save is not None:
        for suffix in (".json", ".md"):
            check_file(options.save.with_name(options.save.name + suffix), "--save")
    if not options.sizes:
        raise ValueError("--sizes is empty: give at least one")
    for name in options.sizes:
        numbers = 18 * options.depth * size_named(name).hidden ** 2
        if options.device == "cpu":  # weights, gradients and momentum in float32
            check_memory(f"--sizes {name} at --depth {options.depth}", 12 * numbers, "give a smaller size or depth")
    known = [peer.name for peer in PEERS]
    for peer in options.peers or ():
        if peer not in known:
            raise ValueError(f"peer {peer!r} is unknown: take some of {', '.join(known)}")


def _bench(options: BenchOptions, workplace: Workplace, arguments: list[str]) -> int:
    import torch

    from rowdit.bench.machine import machine
    from rowdit.bench.measure import find_peers, measure
    from rowdit.bench.peers import PEERS
    from rowdit.bench.report import Setup, as_data, as_page
    from rowdit.bench.shapes import dit_matrices, size_named

    is_first = workplace.mesh is None or workplace.mesh.get_rank() == 0
    with contextlib.redirect_stdout(sys.stderr):  # a peer may print
        wanted = [peer for peer in PEERS if options.peers is None or peer.name in options.peers]
        peers = find_peers(wanted, workplace)
        sizes, widths = {}, {}
        for name in options.sizes:
            size = size_named(name)
            label = f"{name}/{size.scaled_by}" if size.scaled_by > 1 else name
            if is_first:
                print(f"{label}: width {size.hidden}, {options.rounds} rounds ...", file=sys.stderr, flush=True)
            matrices = dit_matrices(size.hidden, options.depth, chunked=options.chunked)
            widths[label] = size.hidden
            sizes[label] = measure(
                matrices, size.hidden, workplace, peers, num_rounds=options.rounds, num_pairs=options.pairs
            )
    if not is_first:
        return 0
    setup = Setup(
        command=shlex.join(["rowdit", "bench", *arguments]),
        widths=widths,
        depth=options.depth,
        chunked=options.chunked,
        dtype=str(workplace.dtype).removeprefix("torch."),
        num_ranks=workplace.num_ranks,
        num_rounds=options.rounds,
        num_pairs=options.pairs,
        machine=machine(options.device) | {"num_threads": torch.get_num_threads()},
    )
    data, page = as_data(sizes, peers, setup), as_page(sizes, peers, setup)
    print(page, end="", file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps(data, indent=1))
    if options.save:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.with_name(options.save.name + ".json").write_text(json.dumps(data, indent=1) + "\n")
        options.save.with_name(options.save.name + ".md").write_text(page)
    return 0
