"""What `rowdit bench` says: one dictionary for machines, one page for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rowdit.bench.machine import machine_line
from rowdit.bench.measure import PERIOD, Measured, Peers
from rowdit.bench.peers import PEERS
from rowdit.bench.spread import digits, table

__all__ = ["TARGETS", "Setup", "as_data", "as_page"]

# What this project wants to reach on two CPU cores, each for the worst size; k3_over_k1 can't be less than a third.
TARGETS = {
    "row_over_adamw_fused": 0.70,
    "k1_over_torch_muon": 0.75,
    "k3_over_k1": 0.36,
    "refresh_over_matmul": 0.80,
}
_AT_LEAST = {"refresh_over_matmul"}
_MEANING = {
    "row_over_adamw_fused": "a row step over AdamW(fused=True)",
    "row_eager_over_adamw_fused": "the same with compile=False",
    "k3_over_k1": "K = 3 (mean of a period) over K = 1",
    "refresh_over_matmul": "FLOP/s of a whole step with K = 1 over the best matrix product's",
}
_BAR_WIDTH = 40


@dataclass(frozen=True)
class Setup:
    """What was measured where. `widths`: hidden size by name."""

    command: str
    widths: Mapping[str, int]
    depth: int
    chunked: bool
    dtype: str
    num_ranks: int
    num_rounds: int
    num_pairs: int
    machine: Mapping[str, object]


def meaning(ratio: str) -> str:
    if ratio in _MEANING:
        return _MEANING[ratio]
    k, _, peer = ratio.partition("_over_")
    return f"K = {k[1:]} over {'torch.optim.Muon' if peer == 'torch_muon' else peer}"


def worst_ratios(sizes: Mapping[str, Measured]) -> dict[str, float]:
    """Each ratio where it is worst, over the sizes."""
    names: dict[str, None] = {}
    for measured in sizes.values():
        names |= dict.fromkeys(measured.ratios())
    return {
        name: (min if name in _AT_LEAST else max)(m.ratios()[name].median for m in sizes.values()) for name in names
    }


def reached(ratio: str, value: float) -> bool | None:
    """None where there is no target."""
    if ratio not in TARGETS:
        return None
    return value >= TARGETS[ratio] if ratio in _AT_LEAST else value <= TARGETS[ratio]


def as_data(sizes: Mapping[str, Measured], peers: Peers, setup: Setup) -> dict[str, object]:
    """Everything, the worst ratios at the top."""
    worst = worst_ratios(sizes)
    return {
        **worst,
        "targets": TARGETS,
        "reached": {name: reached(name, value) for name, value in worst.items() if name in TARGETS},
        "fastest_setting": {size: f"compile={m.setting == 'compiled'}" for size, m in sizes.items()},
        "peers": {
            name: {"version": peers.versions[name], "correct": check.correct, "update": check.verdict, **asdict(check)}
            for name, check in peers.checks.items()
        },
        "skipped": peers.skipped,
        "setup": asdict(setup) | {"period": PERIOD},
        "sizes": {
            size: {
                "ratios": {name: asdict(spread) for name, spread in m.ratios().items()},
                "seconds": {name: asdict(m.spread(name)) for name in m.seconds},
                "refresh_gflops": m.refresh_flops / m.spread("k1").median / 1e9,
                "matmul_gflops": m.refresh_flops / m.spread("matmul").median / 1e9 if "matmul" in m.seconds else None,
            }
            for size, m in sizes.items()
        },
    }


def as_page(sizes: Mapping[str, Measured], peers: Peers, setup: Setup) -> str:
    """Markdown: ratios with their verdicts, milliseconds, a bar for each contender, who the peers are."""
    chunks = "qkv in 3 and adaLN in 6 chunks" if setup.chunked else "qkv and adaLN as one matrix each"
    ranks = f"{setup.num_ranks} ranks, rows sharded over them" if setup.num_ranks > 1 else "one process"
    settings = ", ".join(f"{size}: compile={m.setting == 'compiled'}" for size, m in sizes.items())
    return f"""# Optimizer step, {ranks}

`{setup.command}`

{machine_line(setup.machine)}, {setup.machine["num_threads"]} threads a process. Matrices of {setup.depth} DiT blocks,
{setup.dtype}, {chunks}; gradients written anew before each step. Median [quartiles] of {setup.num_rounds} rounds (row
steps and adamw_fused: {setup.num_pairs}), all in one run, in turn. Setting of rowmuon, the faster one in its row step:
{settings}.

{_ratio_table(sizes)}

{_times_table(sizes)}

`k3` is the mean over whole periods of K = {PERIOD}; `k3 refresh` and `k3 row` are its two kinds of step. `row eager`
and `row compiled` are row steps of an optimizer that never refreshes again, in turn with `adamw_fused`. A refresh's
FLOPs are those that it really computes: of a symmetric product only the part that isn't mirrored. `matmul` is what as
many take in bf16 products of the same widths.

{_bars(sizes)}

{_peer_table(peers)}
"""


def _ratio_table(sizes: Mapping[str, Measured]) -> str:
    rows = []
    for name, value in worst_ratios(sizes).items():
        cells = [m.ratios()[name].show() for m in sizes.values()]
        target = f"{'>=' if name in _AT_LEAST else '<='} {TARGETS[name]:g}" if name in TARGETS else ""
        verdict = {True: "yes", False: "**no**", None: ""}[reached(name, value)]
        rows.append([f"{name}: {meaning(name)}", *cells, f"{value:.3f}", target, verdict])
    return table(["ratio", *sizes, "worst", "target", "reached"], rows)


def _times_table(sizes: Mapping[str, Measured]) -> str:
    names = list(dict.fromkeys(name for m in sizes.values() for name in m.seconds))
    return table(
        ["ms per step", *sizes],
        [[name, *(m.spread(name).show(1e3) if m.seconds.get(name) else "" for m in sizes.values())] for name in names],
    )


def _bars(sizes: Mapping[str, Measured]) -> str:
    """A bar for each contender's median step, to scale within a size."""
    parts = ["```text"]
    for size, measured in sizes.items():
        names = [name for name in measured.seconds if name not in ("k3 refresh", "k3 row")]
        medians = {name: measured.spread(name).median for name in names}
        parts.append(f"{size}, ms a step")
        for name, value in sorted(medians.items(), key=lambda item: item[1]):
            bar = "#" * max(1, round(_BAR_WIDTH * value / max(medians.values())))
            parts.append(f"  {name:18} {bar} {digits(value * 1e3)}")
    return "\n".join([*parts, "```"])


def _peer_table(peers: Peers) -> str:
    rows: list[Sequence[str]] = [
        [name, peers.versions[name], check.verdict, "yes" if check.correct else "**no**"]
        for name, check in peers.checks.items()
    ]
    versions = {peer.name: peer.distribution for peer in PEERS}
    rows += [[name, f"{versions[name]}, skipped", reason, ""] for name, reason in peers.skipped.items()]
    return table(["peer", "version", "three steps against float64", "correct"], rows)
