"""Samples of a sharded model with its averages swapped in: two states give two sets of images, each those of a plain
model with the same weights (cases T3, T6, T11, T12), and every rank gets all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ranks.pool import RankPool, device_type
from rowdit.evaluate import balanced_labels, generate
from rowdit.evaluate.ranks import Ranks
from rowdit.models.dit import DiT, DiTConfig
from rowdit.models.parallel import ParallelConfig, build_model, resharded
from rowdit.train.ema import Ema

CONFIG = DiTConfig(image_size=8, in_channels=1, patch_size=2, hidden_size=16, depth=2, num_heads=2, num_classes=3)
OPTIONS = {"seed": 0, "image_shape": (1, 8, 8), "num_classes": 3, "num_steps": 3, "sampler": "dpm", "guidance": 2.0}


@torch.no_grad()
def change_(model: nn.Module, seed: int) -> None:
    """The same change of the weights on any number of ranks."""
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        change = 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.device)
        if isinstance(parameter, DTensor):
            from torch.distributed.tensor import distribute_tensor

            parameter.add_(distribute_tensor(change, parameter.device_mesh, parameter.placements))
        else:
            parameter.add_(change)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def images_of(model: nn.Module, ranks: Ranks | None) -> torch.Tensor:
    """Five batches: on two ranks one has none left in the last round, and the other must not wait for it."""
    with resharded(model):
        return generate(model, balanced_labels(18, 3), batch_size=4, ranks=ranks, **OPTIONS)


def plain_images(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    plain = DiT(CONFIG).to(device_type())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(full(weights[name]))
    return images_of(plain, None)


def two_averages_of_a_sharded_model(compiled: bool) -> None:
    world_size = dist.get_world_size()
    mesh = init_device_mesh(device_type(), (world_size,))
    group = dist.new_group(backend="gloo")
    ranks = Ranks(dist.get_rank(), world_size, group)
    model = build_model(CONFIG, ParallelConfig(), seed=0, device=device_type(), mesh=mesh)
    if compiled:
        for block in model.blocks:
            object.__setattr__(block, "forward", torch.compile(block.forward, backend="eager"))
    change_(model, 1)
    ema = Ema(model, decay=0.5)
    seen = []
    for _ in range(2):
        own = {name: local(p).clone() for name, p in model.named_parameters()}
        averages = {name: local(w).clone() for name, w in ema.weights.items()}
        expected = plain_images(ema.weights)
        before = images_of(model, ranks)  # leaves nothing gathered that the averages would have to go past
        with ema.swap_in(model):
            for name, parameter in model.named_parameters():
                assert torch.equal(local(parameter), averages[name])
                assert torch.equal(local(ema.weights[name]), own[name]), "they change places: there is no third copy"
            images = images_of(model, ranks)
        assert torch.equal(images, expected)
        for name, parameter in model.named_parameters():
            assert torch.equal(local(parameter), own[name]) and torch.equal(local(ema.weights[name]), averages[name])
        assert torch.equal(images_of(model, ranks), before)
        seen.append((before, images))
        change_(model, 2)
        ema.update(model)
    assert torch.equal(seen[0][0], seen[0][1]), "the average begins as the weights"
    assert not torch.equal(seen[0][1], seen[1][1]), "two states of the average, two sets of images"
    assert not torch.equal(seen[1][0], seen[1][1])
    everyone = ranks.gather(seen[1][1])
    assert all(torch.equal(images, everyone[0]) for images in everyone)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("world_size", [2])
def test_two_averages_of_a_sharded_model(ranks: Callable[[int], RankPool], world_size: int, compiled: bool) -> None:
    ranks(world_size).run(two_averages_of_a_sharded_model, compiled)


def diverged_on_one_rank() -> str:
    """One image of one rank isn't finite: every rank raises, none is left in a collective."""

    class Diverged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, x, t, y):
            return torch.where(y[:, None, None, None] == 2, torch.inf, 0.0) * x + self.weight

    group = dist.new_group(backend="gloo")
    labels = torch.tensor([0, 0, 1, 1, 0, 0, 2, 0, 1, 1])  # image 6 is rank 1's, of two
    options = OPTIONS | {"guidance": 1.0}
    with pytest.raises(FloatingPointError) as caught:
        generate(
            Diverged(), labels, batch_size=2, ranks=Ranks(dist.get_rank(), dist.get_world_size(), group), **options
        )
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2])
def test_a_diverged_image_is_everyones_error(ranks: Callable[[int], RankPool], world_size: int) -> None:
    messages = ranks(world_size).run(diverged_on_one_rank)
    assert len(set(messages)) == 1 and "(first: image 6)" in messages[0]
