"""Time and bytes of a sharded optimizer step on an emulated cluster: ours against vanilla Muon and public peers.

    python benchmarks/sharded_step.py                                           # 4 ranks at 200, 30 and 1000 Mbit/s
    python benchmarks/sharded_step.py --hidden 256 --depth 4 --no-adaln --rates none --peers DIR   # the peers' setting

Every rank is a host of its own (``cluster.py``) with one thread; the ranks hold row-sharded matrices of DiT blocks. All
contenders take their steps in turn in one run, each on its own copy of the parameters, in reversed order every other
round. A step's time is that of its slowest rank, from one barrier to where the step returns. "Logical" bytes are those
of the optimizer's own collectives that leave a rank, counted from the tensors handed to torch, padding included; "wire"
bytes are what the rank's interface sent meanwhile, headers and retransmissions included.

The baseline is ``vanilla.py``. Peers are used where they import: ``--peers DIR`` adds a folder to the ranks' path, as
``pip install --no-deps --target DIR muon-fsdp2==0.3.0`` makes it.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster import Cluster
from reporting import RESULTS, Spread, command_line, machine, machine_line, table, write_results

OURS = ("gather K=1", "gather K=3", "exchange K=1", "exchange K=3")
WITHOUT_OVERLAP = ("gather K=1 no-overlap", "exchange K=1 no-overlap")
PEERS = ("torch.optim.Muon", "muon-fsdp2")
METHODS = ("vanilla", *OURS, *WITHOUT_OVERLAP, *PEERS)

# The least reduction of time against vanilla, on four ranks at 200 Mbit/s.
TIME_TARGETS = {"gather K=3": 0.65, "exchange K=1": 0.75, "exchange K=3": 0.92}
TARGET_RANKS, TARGET_RATE = 4, 200.0
# The most time over muon-fsdp2's, in the peers' setting.
PEER_TARGETS = {"exchange K=1": 0.64, "exchange K=3": 0.24}
PADDING = 0.001


@dataclass(frozen=True)
class Measured:
    """One contender at one rate; times in seconds per step, bytes per rank and step (means over whole periods)."""

    name: str
    period: Spread  # mean step of a whole period
    refresh: Spread
    row: Spread | None
    logical: float | None  # mean over ranks
    logical_max: float | None  # the rank that sends most
    wire: float | None
    row_wire_max: float | None
    blocked: float | None  # seconds of a refresh spent in collectives; only where they don't overlap
    cosines: dict[str, float]
    difference: float | None  # of all weights from the first method's, over the change since the start; K = 1 alone

    @property
    def computes_whole(self) -> bool:
        """Whether the first step's update is the orthogonalisation of whole matrices (bf16 arithmetic allowed for)."""
        return self.cosines["whole"] > 0.99 and self.cosines["whole"] > self.cosines["shard"]


def summarize(name: str, ranks: Sequence[dict]) -> Measured:
    """``ranks``: what each rank reported of this contender, step by step."""
    period = ranks[0]["period"]
    per_step = list(zip(*(rank["steps"] for rank in ranks), strict=True))  # [step][rank]
    slowest = [max(step["seconds"] for step in steps) for steps in per_step]
    kinds = [steps[0]["kind"] for steps in per_step]

    def mean_bytes(key: str) -> list[float] | None:
        """Per rank, a step's mean."""
        if per_step[0][0][key] is None:
            return None
        return [statistics.fmean(steps[r][key] for steps in per_step) for r in range(len(ranks))]

    logical, wire = mean_bytes("logical_bytes"), mean_bytes("wire_bytes")
    rows = [t for t, kind in zip(slowest, kinds, strict=True) if kind == "row"]
    row_wire = [step["wire_bytes"] for steps in per_step for step in steps if step["kind"] == "row"]
    blocked = [step["blocked_seconds"] for steps in per_step for step in steps if step["kind"] == "refresh"]
    return Measured(
        name,
        period=Spread.of(statistics.fmean(slowest[i : i + period]) for i in range(0, len(slowest), period)),
        refresh=Spread.of(t for t, kind in zip(slowest, kinds, strict=True) if kind == "refresh"),
        row=Spread.of(rows) if rows else None,
        logical=statistics.fmean(logical) if logical else None,
        logical_max=max(logical) if logical else None,
        wire=statistics.fmean(wire) if wire else None,
        row_wire_max=max(row_wire) if row_wire and row_wire[0] is not None else None,
        blocked=None if blocked[0] is None else statistics.median(blocked),
        cosines=min((rank["cosines"] for rank in ranks), key=lambda c: c["whole"]),
        difference=ranks[0]["difference"],
    )


# ----------------------------------------------------------------------------------------------------- the report


def overview(measured: dict[str, Measured]) -> str:
    base = measured.get("vanilla")

    def less(part: float | None, whole: float | None) -> str:
        return "" if part is None or not whole else f"{100 * (1 - part / whole):.1f} %"

    def megabytes(value: float | None) -> str:
        return "" if value is None else f"{value / 1e6:.3f}"

    rows = [
        [
            m.name,
            m.period.show(1e3),
            less(m.period.median, base.period.median if base else None),
            m.refresh.show(1e3),
            m.row.show(1e3) if m.row else "",
            megabytes(m.logical),
            megabytes(m.logical_max),
            less(m.logical, base.logical if base else None),
            megabytes(m.wire),
            "yes" if m.computes_whole else f"**no** (cosine {m.cosines['whole']:.3f})",
            "" if m.difference is None else f"{m.difference:.3f}",
        ]
        for m in measured.values()
    ]
    headers = ["method", "ms a step", "less", "refresh ms", "row ms", "logical MB", "max", "less", "wire MB"]
    return table([*headers, "whole matrix", "apart"], rows)


def byte_target(name: str, num_ranks: int) -> tuple[float, float]:
    """(reduction that is possible, room below it): bf16 halves what is sent and a period of 3 takes a third of it.

    The gather still sends all of that to everyone; of the exchange's it is 2 / ranks, out and home together.
    """
    if name == "gather K=3":
        return 0.83, 0.0
    period = int(name.partition("K=")[2])
    return 1 - 1 / (num_ranks * period), PADDING


def verdicts(measured: dict[str, Measured], num_ranks: int, *, with_time: bool) -> list[dict[str, object]]:
    """Each target beside what was measured; "reached" is computed here and nowhere else. None: it doesn't apply."""
    found: list[dict[str, object]] = []

    def add(what: str, value: float, target: str, reached: bool | None) -> None:
        found.append({"what": what, "measured": value, "target": target, "reached": reached})

    base = measured.get("vanilla")
    for name, time_less in TIME_TARGETS.items():
        ours = measured.get(name)
        if base is None or ours is None:
            continue
        if with_time:
            value = 1 - ours.period.median / base.period.median
            add(f"{name}: less time than vanilla", value, f">= {time_less:.3f}", value >= time_less)
        value = 1 - ours.logical / base.logical
        bytes_less, room = byte_target(name, num_ranks)
        add(f"{name}: fewer logical bytes than vanilla", value, f">= {bytes_less:.3f}", value >= bytes_less - room)
    one, three = measured.get("gather K=1"), measured.get("gather K=3")
    if one and three:
        value = 1 - three.logical / one.logical
        add("gather K=3: fewer logical bytes than gather K=1", value, "= 2/3", abs(value - 2 / 3) < 1e-9)
    for name in ("gather", "exchange"):
        on, off = measured.get(f"{name} K=1"), measured.get(f"{name} K=1 no-overlap")
        if on and off and off.blocked:
            value = (off.refresh.median - on.refresh.median) / off.blocked
            # A computation that is shorter than the communication can't hide it.
            long_enough = off.refresh.median - off.blocked >= off.blocked
            add(f"{name}: communication hidden", value, ">= 0.5", value >= 0.5 if long_enough else None)
    return found


def peer_verdicts(measured: dict[str, Measured]) -> list[dict[str, object]]:
    peer = measured.get("muon-fsdp2")
    found = []
    for name, most in PEER_TARGETS.items():
        if peer and name in measured:
            value = measured[name].period.median / peer.period.median
            what = f"{name}: time over muon-fsdp2's"
            found.append({"what": what, "measured": value, "target": f"<= {most:g}", "reached": value <= most})
    return found


def verdict_table(found: Sequence[dict[str, object]]) -> str:
    words = {True: "yes", False: "**no**", None: "computation too short to hide it"}
    return table(
        ["target", "measured", "wanted", "reached"],
        [[v["what"], f"{v['measured']:.3f}", v["target"], words[v["reached"]]] for v in found],
    )


def page(options: argparse.Namespace, runs: Sequence[dict], facts: dict[str, object]) -> str:
    first = runs[0]
    parts = [
        f"# Sharded optimizer step: {options.ranks} ranks",
        f"`{command_line()}`",
        f"{machine_line(facts)}. {options.ranks} ranks with one thread each share these cores, so only ratios mean "
        f"something. Parameters: {first['num_parameters'] / 1e6:.2f} M, {options.depth} DiT blocks of width "
        f"{options.hidden}, {'without adaLN, ' if options.no_adaln else ''}fp32, rows sharded"
        f"{', qkv in 3 and adaLN in 6 chunks' if options.chunked else ''}. "
        f"Median [quartiles] of {options.rounds} whole periods, all methods in turn in one run.",
        "`vanilla` gathers each matrix in fp32 synchronously and orthogonalises everything on every rank. Bytes are "
        "per rank and step, means over whole periods: logical (mean over ranks, and of the rank that sends most) and "
        "on the wire. `no-overlap` is the same step with every collective waited for at once. `whole matrix`: whether "
        "the first update is the orthogonalisation of the whole matrices. `apart`: distance of the weights from the "
        "first method's after the same number of steps, over the distance gone (bf16 arithmetic leaves some).",
    ]
    for run in runs:
        achieved = ", ".join(f"{name} {rate:.0f}" for name, rate in run["link_mbit"].items())
        parts += [
            f"## {run['title']}",
            f"Mbit/s that leave a rank in large collectives by themselves: {achieved or 'one rank, none'}.",
            run["overview"],
        ]
        if run["verdicts"]:
            parts.append(verdict_table(run["verdicts"]))
        parts += trace_lines(run)
    return "\n\n".join(parts)


def trace_lines(run: dict) -> list[str]:
    return [_trace_line(name, counts) for name, counts in run["traces"].items()]


def _trace_line(name: str, counts: dict) -> str:
    start = f"Profiled refresh of `{name}` on rank 0: "
    if counts["collectives"]:
        return start + (
            f"{counts['spanned']} of {counts['orthogonalizations']} orthogonalised stacks were computed from start to "
            f"end while one of its {counts['collectives']} collectives was under way."
        )
    if not counts["sent"]:
        return start + "it sends single messages, and what of them overlapped is seen on an emulated link only."
    return start + (
        f"{counts['sent_meanwhile'] / 1e6:.1f} of {counts['sent'] / 1e6:.1f} MB left its interface while it computed "
        f"its {counts['orthogonalizations']} orthogonalised stacks."
    )


# ------------------------------------------------------------------------------------------------------ the runs


def run_at(rate: float | None, options: argparse.Namespace) -> dict[str, object]:
    """All methods at one rate."""
    flags = [name for name in ("chunked", "no_adaln") if getattr(options, name)]
    arguments = [
        *("--hidden", str(options.hidden), "--depth", str(options.depth), "--rounds", str(options.rounds)),
        *("--bucket-bytes", str(options.bucket_bytes)),
        *(f"--{flag.replace('_', '-')}" for flag in flags),
        *(["--trace", str(options.trace)] if options.trace else []),
        *("--methods", *options.methods),
    ]
    source = Path(__file__).resolve().parents[1] / "src"
    path = [str(source), *([str(options.peers)] if options.peers else []), os.environ.get("PYTHONPATH", "")]
    with Cluster(options.ranks, rate, timeout_s=options.timeout) as cluster:
        worker = Path(__file__).with_name("sharded_worker.py")
        ranks = cluster.run(worker, arguments, env={"PYTHONPATH": os.pathsep.join(p for p in path if p)})
        network = cluster.network
    by_name = {name: [rank["contenders"][name] for rank in ranks] for name in ranks[0]["contenders"]}
    measured = {name: summarize(name, of_ranks) for name, of_ranks in by_name.items()}
    peers_setting = options.no_adaln and rate is None
    at_target = (network.num_ranks, network.rate_mbit) == (TARGET_RANKS, TARGET_RATE)
    found = peer_verdicts(measured) if peers_setting else verdicts(measured, options.ranks, with_time=at_target)
    return {
        "title": network.describe(),
        "network": asdict(network),
        "link_mbit": ranks[0]["link_mbit"],
        "num_parameters": ranks[0]["num_parameters"],
        "methods": {name: {**asdict(m), "computes_whole": m.computes_whole} for name, m in measured.items()},
        "overview": overview(measured),
        "traces": ranks[0]["traces"],
        "verdicts": found,
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def rate(text: str) -> float | None:
        return None if text == "none" else float(text)

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rates", type=rate, nargs="+", default=[200.0, 30.0, 1000.0], help="Mbit/s a link, or none")
    parser.add_argument("--hidden", type=int, default=768, help="width (default 768: DiT-B)")
    parser.add_argument("--depth", type=int, default=2, help="blocks (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="whole periods of each method (default 5)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="default: all, without the peers if --chunked")
    parser.add_argument("--chunked", action="store_true", help="qkv in 3 and adaLN in 6 chunks (default: fused)")
    parser.add_argument("--no-adaln", action="store_true", help="leave the modulation's weights out")
    parser.add_argument("--bucket-bytes", type=int, default=64 << 20)
    parser.add_argument("--peers", type=Path, help="folder that peers were installed into")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one rate (default 3600)")
    parser.add_argument("--trace", type=Path, help="also write a timeline of a refresh, gather and exchange, into here")
    parser.add_argument("--save", metavar="NAME", help=f"write {RESULTS.name}/NAME.json and .md")
    options = parser.parse_args(argv)
    for name in ("ranks", "hidden", "depth", "rounds", "bucket_bytes"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; give at least 1")
    if options.trace:
        options.trace = options.trace.resolve()
        options.trace.mkdir(parents=True, exist_ok=True)
    if options.peers and not options.peers.is_dir():
        parser.error(f"--peers {options.peers} isn't a folder; make it with pip install --no-deps --target")
    if options.methods is None:
        # The peers know no chunks: they would orthogonalise something else.
        options.methods = [name for name in METHODS if not (options.chunked and name in PEERS)]
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    runs = []
    for rate in options.rates:
        print(f"--- {options.ranks} ranks, {'no limit' if rate is None else f'{rate:g} Mbit/s'}", flush=True)
        run = run_at(rate, options)
        print(f"\n{run['overview']}\n\n{verdict_table(run['verdicts'])}\n", flush=True)
        print("\n".join(trace_lines(run)) + "\n", flush=True)
        runs.append(run)
    facts = machine()
    if options.save:
        settings = {key: value for key, value in vars(options).items() if key not in ("save", "peers", "trace")}
        data = {
            "command": command_line(),
            "machine": facts,
            "settings": settings,
            "runs": [{key: value for key, value in run.items() if key != "overview"} for run in runs],
        }
        write_results(RESULTS / options.save, data, page(options, runs, facts))


if __name__ == "__main__":
    main()
