"""A small model whose modules can be sharded in every way, and a float64 twin that the reference optimizer trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import rowmuon
from reference.step import AdamWSettings, MuonSettings, adamw_step, muon_step

__all__ = ["FEATURES", "RULES", "ReferenceTrainer", "Toy", "batch", "loss_of", "optimizer_for"]

FEATURES = 10
RULES = (
    rowmuon.Rule(r"^embed\.|bias$", "adamw", what="embedding and vectors"),
    rowmuon.Rule(r"\.qkv\.", "muon", chunks=3),
    rowmuon.Rule(r".*", "muon"),
)
MUON = {"lr": 0.02, "weight_decay": 0.1}
ADAMW = {"lr": 0.003, "weight_decay": 0.1}


class Experts(nn.Module):
    """Every sample goes to all of a stack of experts: (stack, out, in)."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(num_experts, width, width))

    def forward(self, x_BD: Tensor) -> Tensor:
        return torch.tanh(torch.einsum("eoi,bi->beo", self.weight, x_BD)).mean(1)


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(3 * width, width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width, bias=False)
        self.experts = Experts(3, width)

    def forward(self, x_BD: Tensor) -> Tensor:
        x_BD = x_BD + self.proj(torch.tanh(self.qkv(x_BD)))
        x_BD = x_BD + self.fc2(torch.tanh(self.fc1(x_BD)))
        return x_BD + self.experts(x_BD)


class Toy(nn.Module):
    """Widths that no number of ranks divides, but 2 (which tensor parallelism asks for)."""

    def __init__(self, width: int = 14, hidden: int = 18, num_blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(num_blocks))
        self.head = nn.Linear(width, 1)  # one row

    def forward(self, x_BF: Tensor) -> Tensor:
        x_BD = self.embed(x_BF)
        for block in self.blocks:
            x_BD = block(x_BD)
        return self.head(x_BD)


def make_toy(**sizes: int) -> Toy:
    """The same on every rank."""
    torch.manual_seed(5)
    return Toy(**sizes)


def batch(step: int, size: int = 24) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step; 24 samples are the same share for 1, 2, 3, 4 and 8 ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(size, FEATURES, generator=generator), torch.randn(size, 1, generator=generator)


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def optimizer_for(model: nn.Module, **settings: Any) -> rowmuon.PeriodicRowMuon:
    """Float32 throughout, period 3."""
    exact = {"ns_dtype": torch.float32, "comm_dtype": torch.float32, "period": 3}
    groups = rowmuon.param_groups(model, RULES, muon=MUON, adamw=ADAMW)
    return rowmuon.PeriodicRowMuon(groups, **{**exact, **settings})


class ReferenceTrainer:
    """Trains a float64 copy of a model on whole batches with the reference's optimizer."""

    def __init__(self, model: nn.Module, period: int = 3) -> None:
        self.model = model.double()
        self.start = self.weights()
        self._states: dict[str, dict[str, Any]] = {name: {} for name in self.start}
        self._settings = {name: _settings(name, period) for name in self.start}
        self._step = 0

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def step(self, x: Tensor, y: Tensor) -> None:
        self.model.zero_grad()
        loss_of(self.model, x.double(), y.double()).backward()
        for name, parameter in self.model.named_parameters():
            setting = self._settings[name]
            one_step: Any = adamw_step if isinstance(setting, AdamWSettings) else muon_step
            weight, grad = parameter.detach().numpy(), parameter.grad.numpy()
            parameter.data = torch.from_numpy(one_step(weight, grad, self._states[name], setting, self._step))
        self._step += 1

    def error(self, weights: Mapping[str, Tensor]) -> tuple[float, str]:
        """The largest error of any parameter, relative to how far it has moved, and its name."""
        right = self.weights()
        return max(
            (float((weights[n].double() - right[n]).norm() / (right[n] - self.start[n]).norm()), n) for n in right
        )


def _settings(name: str, period: int) -> MuonSettings | AdamWSettings:
    if name.startswith("embed.") or name.endswith("bias"):
        return AdamWSettings(**ADAMW)
    return MuonSettings(period=period, chunks=3 if ".qkv." in name else 1, **MUON)
