"""Predicted seconds: each part against arithmetic by hand, and what must hold whatever the figures are."""

from __future__ import annotations

import dataclasses

import pytest

from rowdit.cost import Estimate, RankMesh, estimate
from rowdit.cost.collectives import Members, ring_seconds
from rowdit.cost.hardware import CLUSTERS, Cluster, Link
from rowdit.cost.plot import sweep_svg
from rowdit.cost.predict import predict, sensitivities
from rowdit.cost.sweep import sweep, sweep_dict, sweep_table
from rowdit.models import DiTConfig, forward_flops
from rowdit.models.parallel import ParallelConfig
from rowdit.train.config import OptimizerConfig, RunConfig, TrainConfig

H100 = CLUSTERS["h100"]
MODEL = DiTConfig(32, 4, 2, hidden_size=256, depth=4, num_heads=4, num_classes=10)


def run(name: str = "periodic", batch_size: int = 256, micro: int | None = None, **parallel: object) -> RunConfig:
    return RunConfig(
        MODEL,
        optimizer=OptimizerConfig(name),  # type: ignore[arg-type]
        train=TrainConfig(batch_size=batch_size, micro_batch_size=micro),
        parallel=ParallelConfig(**{"param_dtype": "bfloat16", **parallel}),  # type: ignore[arg-type]
    )


def priced(config: RunConfig, world_size: int, replicas: int = 1, refresh: str | None = None) -> Estimate:
    return estimate(config, RankMesh(world_size, replicas), refresh=refresh)  # type: ignore[arg-type]


def with_links(speed: float) -> Cluster:
    link = Link(speed, 1.0, 0.0, 0.0)
    return dataclasses.replace(H100, inside=link, between=link)


def test_one_rank_by_hand() -> None:
    found = priced(run(), 1)
    time = predict(found, H100)
    assert time.compute == pytest.approx(3 * 256 * forward_flops(MODEL) / (989.4e12 * 0.803 * 0.5))
    muon, adamw = (sum(p.numel for p in found.optimizer.parameters if p.algorithm == a) for a in ("muon", "adamw"))
    memory = 3.35e12 * 0.85
    assert time.row.total == pytest.approx((20 * muon + 28 * adamw) / memory)
    assert time.averages == pytest.approx(12 * (muon + adamw) / memory)
    products = found.optimizer.refresh.flops.max / (989.4e12 * 0.803 * 0.75)
    assert time.refresh.products == pytest.approx(products)
    assert time.fsdp_traffic == time.refresh.traffic == 0
    assert time.refresh.exposed == pytest.approx(0.0, abs=1e-15)
    assert time.total == pytest.approx(time.compute + time.averages + time.optimizer)
    assert time.optimizer == pytest.approx((time.refresh.total + 2 * time.row.total) / 3)
    slow = predict(priced(run(param_dtype="float32"), 1), H100)
    assert slow.compute == pytest.approx(time.compute * 989.4 / 66.9)
    again = predict(priced(run(activation_checkpointing=True), 1), H100)
    assert again.compute == pytest.approx(time.compute * 4 / 3)


def test_fsdp_traffic_by_hand() -> None:
    found = priced(run(), 8)
    known = found.optimizer.parameters
    block = sum(p.numel for p in known if p.name.startswith("blocks.0."))
    root = 8 * sum(RankMesh(8).numel(p.shape) for p in known if not p.name.startswith("blocks."))  # padded
    gather, scatter, root_once = (
        ring_seconds(7 / 8 * size, Members(8, 8), H100) for size in (2 * block, 4 * block, 4 * root)
    )
    assert predict(found, H100).fsdp_traffic == pytest.approx(4 * (2 * gather + scatter) + 2 * root_once)
    kept = predict(priced(run(reshard_after_forward=False), 8), H100)
    assert kept.fsdp_traffic == pytest.approx(4 * (gather + scatter) + 2 * root_once)
    twice = predict(priced(run(micro=16), 8), H100)
    assert twice.fsdp_traffic == pytest.approx(2 * 4 * (2 * gather + scatter) + 4 * root_once)
    late = predict(priced(run(micro=16, accumulate_unsharded=True), 8), H100)
    assert late.fsdp_traffic == pytest.approx(4 * (4 * gather + scatter) + 3 * root_once)
    on_gloo = predict(found, dataclasses.replace(H100, overlaps=False, scatter_passes=2.0))
    assert on_gloo.fsdp_exposed == on_gloo.fsdp_traffic
    assert on_gloo.fsdp_traffic == pytest.approx(4 * (2 * gather + 2 * scatter) + 3 * root_once)


@pytest.mark.parametrize("refresh", ["gather", "exchange"])
def test_fast_links_hide_and_slow_links_show(refresh: str) -> None:
    found = priced(run(), 8, refresh=refresh)
    instant, slow = predict(found, with_links(1e18)), predict(found, with_links(1e8))
    assert instant.refresh.exposed < 1e-4 and instant.fsdp_exposed < 1e-6
    # Nothing can be hidden behind so little work: nearly all of the messages are waited for. But an exchange's buckets
    # come home while others go out, and have their owners on other ranks.
    if refresh == "gather":
        assert slow.refresh.exposed == pytest.approx(slow.refresh.traffic, rel=0.1)
    else:
        assert 0.5 * slow.refresh.traffic < slow.refresh.exposed < slow.refresh.traffic
    assert slow.fsdp_exposed == pytest.approx(slow.fsdp_traffic, rel=0.1)
    assert slow.refresh.exposed <= slow.refresh.traffic and slow.fsdp_exposed <= slow.fsdp_traffic
    busy = predict(priced(run(batch_size=64 * 4096), 8, refresh=refresh), H100)
    assert (
        busy.fsdp_exposed < 0.5 * busy.fsdp_traffic
    )  # of four blocks one has nothing to hide behind, nor has the root


def test_gather_computes_everywhere_what_exchange_divides() -> None:
    gather, exchange = (predict(priced(run("muon"), 8, refresh=mode), H100) for mode in ("gather", "exchange"))
    assert gather.refresh.products == pytest.approx(8 * exchange.refresh.products, rel=0.35)
    assert gather.refresh_share == 1.0


def test_adamw_has_no_refresh() -> None:
    time = predict(priced(run("adamw"), 8), H100)
    assert time.refresh_share == 0 and time.optimizer == time.row.total > 0


def test_replicas_sum_their_gradients() -> None:
    alone, copies = predict(priced(run(), 8), H100), predict(priced(run(), 16, 2), H100)
    assert copies.fsdp_traffic > alone.fsdp_traffic
    last_only = predict(priced(run(batch_size=512, micro=8), 16, 2), H100)
    every = predict(priced(run(batch_size=256, micro=8), 8), H100)
    assert 0 < last_only.fsdp_traffic - every.fsdp_traffic < copies.fsdp_traffic


def test_what_hangs_on_what() -> None:
    found = priced(run(batch_size=64 * 4096), 8)
    hangs = sensitivities(found, H100)
    assert list(hangs.values()) == sorted(hangs.values(), reverse=True) and min(hangs.values()) >= 0
    assert "matmul rate" in list(hangs)[:2] and hangs["matmul rate"] == pytest.approx(0.25, abs=0.01)
    assert list(sensitivities(priced(run(), 8), with_links(1e7)))[0].startswith("rate of the links inside")


def test_sweep_table_plot_and_data() -> None:
    points = sweep(run(), H100, 16, None, (8, 64))
    assert [(p.world_size, p.refresh) for p in points] == [(n, m) for n in (8, 64) for m in ("gather", "exchange")]
    direct = predict(priced(run(batch_size=16 * 64), 64, refresh="gather"), H100)
    assert points[2].at(3).total == pytest.approx(direct.total)
    assert points[0].at(1).total > points[0].at(2).total > points[0].at(8).total
    table = sweep_table(points)
    assert table.count("\n") == 5 and "K = 8 saves" in table
    saved = 1 - points[0].at(3).total / points[0].at(1).total
    assert f"{100 * saved:.1f} %" in table
    data = sweep_dict(points)
    assert data[2]["seconds"]["3"] == points[2].at(3).total
    svg = sweep_svg(points, (1, 3), "a < b")
    assert svg.startswith("<svg") and svg.count("<polyline") == 6 and "a &lt; b" in svg
    replicas = sweep(run(), H100, 16, 8, (8, 12, 64))
    assert [(p.world_size, p.num_replicas) for p in replicas[::2]] == [(8, 1), (64, 8)]
