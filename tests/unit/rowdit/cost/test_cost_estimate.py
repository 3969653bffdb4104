from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from rowdit.cost import RankMesh, estimate
from rowdit.cost.activations import activations
from rowdit.cost.estimate import Batch
from rowdit.cost.live_bytes import LiveBytes
from rowdit.cost.optimizer import refresh_share
from rowdit.cost.text import describe
from rowdit.flow import flow_loss
from rowdit.models import DiT, DiTConfig, preset
from rowdit.models.parallel import ParallelConfig
from rowdit.train.config import OptimizerConfig, RunConfig, TrainConfig
from rowdit.train.optimizers import build_optimizer

SMALL = DiTConfig(8, 3, 2, hidden_size=32, depth=3, num_heads=2, num_classes=5)


def run(model: DiTConfig = SMALL, batch_size: int = 64, **optimizer: object) -> RunConfig:
    settings = {"name": "periodic", **optimizer}
    return RunConfig(model, optimizer=OptimizerConfig(**settings), train=TrainConfig(batch_size=batch_size))  # type: ignore[arg-type]


def test_the_plan_of_one_process_is_the_real_optimizers() -> None:
    found = estimate(run(), RankMesh(1), device="cpu")
    optimizer = build_optimizer(DiT(SMALL), OptimizerConfig("periodic"))
    plan = optimizer.plan("refresh")  # type: ignore[attr-defined]
    assert found.optimizer.refresh.flops.max == plan.num_flops(0) > 0
    assert found.optimizer.refresh.peak_bytes == plan.peak_bytes(0) > 0
    assert found.optimizer.refresh.num_orthogonalizations == plan.num_orthogonalizations(0) == 3 * 12
    held = sum(p.numel() for p in DiT(SMALL).parameters())
    assert found.num_parameters == held and found.memory.weights == found.memory.gradients == 4 * held
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.ndim]
    assert found.memory.optimizer == sum(t.numel() * t.element_size() for t in state)


@pytest.mark.parametrize("period", [1, 3, 5])
def test_the_mean_over_a_period(period: int) -> None:
    mesh = RankMesh(6)
    every = estimate(run(name="muon"), mesh).to_dict()
    found = estimate(run(period=period), mesh).to_dict()
    assert found["optimizer_bytes_per_step"] == pytest.approx(every["optimizer_bytes_per_step"] / period)
    assert found["optimizer_flops_per_step_max"] == pytest.approx(every["optimizer_flops_per_step_max"] / period)
    assert every["optimizer_bytes_per_step"] > 0 and found["optimizer_steps"]["row"]["bytes_sent_max"] == 0


def test_never_a_refresh_and_a_schedule() -> None:
    assert refresh_share(None) == 0.0 and refresh_share(((0, 3), (100, 4))) == 0.25
    assert estimate(run(period=None), RankMesh(4)).to_dict()["optimizer_bytes_per_step"] == 0.0


def test_adamw_sends_nothing_and_keeps_two_moments() -> None:
    found = estimate(run(name="adamw"), RankMesh(4)).to_dict()
    assert found["optimizer_bytes_per_step"] == found["optimizer_flops_per_step"] == 0.0
    memory = found["memory_bytes_per_rank"]
    assert memory["optimizer"] == 2 * memory["weights"] and memory["refresh"] == 0


def test_gather_sends_and_computes_what_the_paper_says() -> None:
    """All-gather: (N-1)/N of the matrices received by each, every product on every rank; exchange divides by N."""
    mesh = RankMesh(8)
    gather, exchange = (estimate(run(name="muon"), mesh, refresh=mode) for mode in ("gather", "exchange"))
    numel = sum(p.numel for p in gather.optimizer.parameters if p.algorithm == "muon")
    assert gather.optimizer.refresh.bytes_sent.max == 2 * numel * 7 // 8
    sent = exchange.optimizer.refresh.bytes_sent.mean  # out and back, but for what an owner holds itself, in bf16
    assert 0.8 * 2 * 2 * numel / 8 < sent <= 2 * 2 * numel / 8
    assert gather.optimizer.refresh.flops.max == 8 * exchange.optimizer.refresh.flops.mean


@pytest.mark.parametrize(("name", "count"), [("1.3B", 1_283_776_528), ("15B", 15_187_220_496)])
def test_a_preset_on_thousands_of_ranks(name: str, count: int) -> None:
    found = estimate(run(preset(name), batch_size=4096), RankMesh(4096))
    assert found.num_parameters == count
    assert found.memory.weights >= 4 * count / 4096
    assert found.optimizer.refresh.bytes_sent.mean <= found.optimizer.refresh.bytes_sent.max


def test_batches() -> None:
    config = dataclasses.replace(run(), train=TrainConfig(batch_size=104, micro_batch_size=6))
    batch = Batch.of(config, RankMesh(8, 2))
    assert (batch.images_per_rank, batch.micro_batch_size, batch.num_micro_batches) == (13, 6, 3)
    assert batch.problem(8) == ""
    for world_size, near in ((128, 128), (10, 100)):
        batch = Batch.of(config, RankMesh(world_size))
        assert batch.images_per_rank == -(-104 // world_size)
        assert f"batch_size = 104 can't be shared evenly by {world_size} ranks" in batch.problem(world_size)
        assert f"--train.batch-size {near}," in batch.problem(world_size)


@pytest.mark.parametrize(
    ("world_size", "num_replicas", "words"),
    [(0, 1, "world_size = 0"), (6, 4, "replicas = 4: 6 ranks .* 3"), (8, 0, "replicas = 0.* 1")],
)
def test_ranks_that_cannot_be(world_size: int, num_replicas: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RankMesh(world_size, num_replicas)


def test_the_text_names_every_part() -> None:
    text = describe(estimate(run(), RankMesh(8, 2)))
    for word in (
        "2 replicas of 4 shards",
        "blocks.*.attn.qkv.weight",
        "muon, 3 chunks",
        "refresh",
        "activations",
        "peak",
    ):
        assert word in text, word


# ---- activations


def peak_of_a_real_pass(config: DiTConfig, num_images: int) -> int:
    model = DiT(config)
    nn.init.normal_(model.final_layer.linear.weight)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    shape = (num_images, config.in_channels, config.image_size, config.image_size)
    with LiveBytes() as live:
        x, noise, t = torch.randn(shape), torch.randn(shape), torch.rand(num_images)
        flow_loss(model, x, torch.zeros(num_images, dtype=torch.int64), noise, t).mean().backward()
    return live.peak


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_activations_are_those_of_a_real_pass(depth: int) -> None:
    config = dataclasses.replace(SMALL, depth=depth)
    # Real tensors and fake ones go through the same operators but for the kernel of attention.
    assert activations(config, 6).peak == pytest.approx(peak_of_a_real_pass(config, 6), rel=0.02)


def test_activations_grow_with_the_batch_and_shrink_with_checkpointing_and_dtype() -> None:
    config = dataclasses.replace(SMALL, depth=12)
    whole = activations(config, 32)
    assert activations(config, 64).peak == pytest.approx(2 * whole.peak, rel=0.05)
    assert activations(config, 32, dtype=torch.bfloat16).peak == pytest.approx(whole.peak / 2, rel=0.1)
    kept = activations(config, 32, checkpointing=True)
    assert kept.per_block < whole.per_block / 5 and kept.peak < whole.peak / 4


def test_what_the_parallel_settings_do_to_memory() -> None:
    def memory(**parallel: object) -> dict[str, int]:
        config = dataclasses.replace(run(dataclasses.replace(SMALL, depth=12)), parallel=ParallelConfig(**parallel))  # type: ignore[arg-type]
        return estimate(config, RankMesh(4)).memory.parts()

    plain = memory()
    kept = memory(reshard_after_forward=False)
    block = sum(p.numel() for p in DiT(SMALL).blocks[0].parameters())
    assert kept["unsharded"] - plain["unsharded"] == 10 * 4 * block
    half = memory(param_dtype="bfloat16")
    assert half["weights"] == plain["weights"] and half["activations"] < 0.6 * plain["activations"]
    assert memory(activation_checkpointing=True)["activations"] < plain["activations"] / 3
