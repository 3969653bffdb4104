"""The paper's setting, priced: 256 H100, 1.3B to 15B parameters, refreshes by gather, K = 3 against K = 1.

    python benchmarks/paper_setting.py                 # Markdown tables, some seconds

The paper (arXiv:2608.20818) reports 46.9 to 54.3 % less optimizer time and 15.7 to 24.3 % less time a step. Neither its
batch nor its model shapes nor its mesh are public. So the first table says what the cost model expects under this
project's shapes at 16 images a rank, and the second what must be assumed for both of the paper's figures to come out:

    V = F + N          optimizer time of vanilla Muon: N is cut by 1 - 1/K, F isn't (AdamW, momentum, launches)
    1 - P/V = (1 - 1/K) N/V                       the paper's first figure gives N/V, so F
    step saved = (1 - 1/K) N / step               the second gives the step, so what is computed in it
"""

from __future__ import annotations

import dataclasses

from rowdit import recipes
from rowdit.cost import RankMesh, estimate
from rowdit.cost.hardware import CLUSTERS
from rowdit.cost.predict import predict
from rowdit.train.config import OptimizerConfig, RunConfig

SIZES = {"1.3B": "scale_1p3b", "2B": "scale_2b", "4B": "scale_4b", "9B": "scale_9b", "15B": "scale_15b"}
NUM_RANKS, PERIOD = 256, 3
OPTIMIZER_SAVED, STEP_SAVED = (0.469, 0.543), (0.157, 0.243)


def vanilla(name: str) -> RunConfig:
    config = recipes.load(name)
    assert isinstance(config, RunConfig)
    return dataclasses.replace(config, optimizer=OptimizerConfig("muon", lr=3e-4))


def table(head: str, rows: list[list[str]]) -> str:
    cells = head.split("|")
    lines = [head.join(("| ", " |")), "|" + "---|" * len(cells)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def main() -> None:
    cluster, kept = CLUSTERS["h100"], 1 - 1 / PERIOD
    expected, needed = [], []
    for label, name in SIZES.items():
        for num_replicas in (1, NUM_RANKS // 8):
            found = estimate(vanilla(name), RankMesh(NUM_RANKS, num_replicas), refresh="gather")
            time = predict(found, cluster)
            every, row = time.refresh.total, time.row.total
            periodic = every / PERIOD + kept * row
            saved = every - periodic
            mesh = f"{num_replicas} x {NUM_RANKS // num_replicas}"
            expected.append([
                label, mesh, f"{1e3 * time.rest:,.0f}", f"{1e3 * every:,.0f}", f"{1e3 * row:.2f}",
                f"{100 * every / time.total:.0f} %", f"{100 * saved / every:.1f} %",
                f"{100 * saved / time.total:.1f} %",
            ])  # fmt: skip
            if num_replicas > 1:
                continue
            fixed, images = [], []
            for optimizer_saved, step_saved in zip(OPTIMIZER_SAVED, reversed(STEP_SAVED), strict=True):
                share = optimizer_saved / kept  # N / V
                fixed.append(every * (1 / share - 1))
                step = kept * every / step_saved
                rest = step - every / share
                images.append(rest / (time.compute / found.batch.images_per_rank))
            tokens = [n * found.batch.num_tokens for n in images]
            needed.append([
                label, f"{1e3 * every:,.0f}", f"{1e3 * min(fixed):,.0f} to {1e3 * max(fixed):,.0f}",
                f"{min(images):,.0f} to {max(images):,.0f}", f"{min(tokens) / 1e3:,.0f}k to {max(tokens) / 1e3:,.0f}k",
                f"{NUM_RANKS * min(images):,.0f} to {NUM_RANKS * max(images):,.0f}",
            ])  # fmt: skip
    print("What the cost model expects, 16 images a rank:\n")
    head = "model | replicas x shards | rest of a step, ms | refresh, ms | row step, ms | share of the step, K = 1 | "
    print(table(head + "optimizer saves, K = 3 | step saves", expected))
    print("\nWhat must hold for the paper's two figures, one shard group of 256:\n")
    head = "model | N, ms | F, ms: optimizer time that K doesn't cut | images a rank | tokens a rank | batch"
    print(table(head, needed))


if __name__ == "__main__":
    main()
