"""``describe()``, the kinds of steps, the counters."""

from __future__ import annotations

import json

import pytest
import torch

import rowmuon
from optimizer_cases import give_grads, make_params, mixed_optimizer, train
from rowmuon import StepTraffic


def named_optimizer(**settings) -> rowmuon.PeriodicRowMuon:
    qkv, out, bias = make_params([(24, 8), (8, 8), (8,)])
    bias.requires_grad_(False)
    groups = [
        {"params": [("attn.qkv", qkv)], "chunks": 3},
        {"params": [("attn.out", out)]},
        {"params": [("attn.bias", bias)], "algorithm": "adamw", "betas": (0.9, 0.98)},
    ]
    return rowmuon.PeriodicRowMuon(groups, lr=0.02, **settings)


def test_describe_shows_routing_layout_buckets_and_cost() -> None:
    optimizer = named_optimizer(period=4, row_scale=0.5)
    text = optimizer.describe()
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith("attn.")}
    assert rows["attn.qkv"] == ["attn.qkv", "24x8", "muon", "3", "of", "8x8", "local"]
    assert rows["attn.out"] == ["attn.out", "8x8", "muon", "1", "of", "8x8", "local"]
    assert rows["attn.bias"] == ["attn.bias", "8", "adamw", "frozen"]
    assert "period=4" in text and "row_scale=0.5" in text and "betas=(0.9, 0.98)" in text
    (bucket,) = [line for line in text.splitlines() if line.startswith("0 ")]
    assert "local" in bucket and "4 of 8x8" in bucket and f"{4 * 64 * 4:,}" in bucket
    flops = 4 * rowmuon.newton_schulz_flops(8, 8, 5)
    assert f"refresh: {flops:,} FLOPs, 4 orthogonalisations, 0 collectives, 0 bytes sent by rank 0" in text
    assert "row step: 0 FLOPs, 0 orthogonalisations" in text


def test_describe_shows_how_it_is_computed() -> None:
    text = named_optimizer().describe()
    assert "computed with: refresh='exchange', stagger=False, ns_dtype=torch.bfloat16, state_dtype=the par" in text
    assert "overlap=None, skip_nonfinite=False, compile=False" in text and "phase" not in text
    optimizer = named_optimizer(
        refresh="gather",
        stagger=True,
        skip_nonfinite=True,
        state_dtype=torch.float32,
        bucket_bytes=4096,
        overlap="backward",
    )
    text = optimizer.describe()
    assert "refresh='gather', stagger=True" in text and "state_dtype=torch.float32" in text
    assert "bucket_bytes=4,096, overlap='backward', skip_nonfinite=True" in text
    rows = {line.split()[0]: line.split()[-2:] for line in text.splitlines() if line.startswith("attn.")}
    phases = [optimizer.state[group["params"][0]]["phase"] for group in optimizer.param_groups[:2]]
    assert (rows["attn.qkv"], rows["attn.out"]) == (["phase", str(phases[0])], ["phase", str(phases[1])])
    assert sorted(phases) == [0, 1]
    assert "\nrefresh of all: " in text and "\nrefresh: " not in text


def test_describe_changes_nothing() -> None:
    params, others = make_params([(8, 8), (5,)]), make_params([(8, 8), (5,)])
    watched, plain = mixed_optimizer(params), mixed_optimizer(others)
    for step in range(3):
        watched.describe()
        for each, optimizer in ((params, watched), (others, plain)):
            give_grads(each, step)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    assert watched.traffic == plain.traffic


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({"period": 1}, ["refresh"] * 6),
        ({"period": None}, ["refresh"] + ["row"] * 5),
        ({"period": 3}, ["refresh", "row", "row", "refresh", "row", "row"]),
        ({"period": 3, "stagger": True}, ["refresh", "mixed", "row", "mixed", "mixed", "row"]),
    ],
    ids=str,
)
def test_next_step_kind_and_traffic(settings: dict, kinds: list[str]) -> None:
    params = make_params([(8, 8), (8, 8)])
    optimizer = rowmuon.PeriodicRowMuon(params, lr=0.02, **settings)
    assert train(optimizer, params, 6) == kinds
    assert {kind: counts.num_steps for kind, counts in optimizer.traffic.items()} == {
        kind: kinds.count(kind) for kind in ("refresh", "row", "mixed")
    }
    total = sum(counts.num_orthogonalizations for counts in optimizer.traffic.values())
    assert total == sum({"refresh": 2, "mixed": 1, "row": 0}[kind] for kind in kinds)
    assert all(counts.bytes_sent == counts.num_collectives == 0 for counts in optimizer.traffic.values())


def test_traffic_is_plain_data_and_can_be_reset() -> None:
    params = make_params([(8, 8)])
    optimizer = rowmuon.PeriodicRowMuon(params, lr=0.02, period=2)
    train(optimizer, params, 3)
    logged = json.loads(json.dumps(optimizer.traffic.as_dict()))
    assert logged["refresh"] == {"num_steps": 2, "num_collectives": 0, "bytes_sent": 0, "num_orthogonalizations": 2}
    assert logged["row"]["num_steps"] == 1
    optimizer.traffic.reset()
    assert all(counts == StepTraffic() for counts in optimizer.traffic.values())
    train(optimizer, params, 1, start=3)
    assert optimizer.traffic["row"].num_steps == 1


def test_staggered_phases_come_from_order_and_shapes_alone() -> None:
    shapes = [(8, 8), (16, 8), (8, 8), (4, 4), (24, 24), (8, 8)]
    phases = []
    for settings in ({}, {"bucket_bytes": 1}, {"ns_dtype": torch.float32}, {"refresh": "gather"}):
        params = make_params(shapes)
        optimizer = rowmuon.PeriodicRowMuon(params, period=3, stagger=True, **settings)
        phases.append([optimizer.state[p]["phase"] for p in params])
    assert all(found == phases[0] for found in phases)
    assert set(phases[0]) == {0, 1, 2}
    params = make_params(shapes)
    in_two = rowmuon.PeriodicRowMuon([{"params": params[:2]}, {"params": params[2:4]}], period=3, stagger=True)
    in_two.add_param_group({"params": params[4:]})
    assert [in_two.state[p]["phase"] for p in params] == phases[0]


def test_plans_are_made_once_per_set_of_refreshing_parameters() -> None:
    params = make_params([(8, 8), (16, 8), (5,)])
    optimizer = mixed_optimizer(params, stagger=True)
    train(optimizer, params, 7)
    plans = dict(optimizer._plans)
    train(optimizer, params, 6, start=7)
    assert optimizer._plans == plans


def test_the_number_of_plans_kept_is_bounded() -> None:
    params = make_params([(2, 2)] * 8)
    optimizer = rowmuon.PeriodicRowMuon(params, lr=0.02, period=2)
    for step in range(256):  # each time another set is frozen
        for i, parameter in enumerate(params):
            parameter.requires_grad_(bool(step >> i & 1))
        train(optimizer, params, 1, start=step)
    assert 0 < len(optimizer._plans) < 70
