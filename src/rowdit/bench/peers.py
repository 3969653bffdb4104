"""Public Muons to compare with: how each is made, so that all do the same update where they can.

All get lr, weight decay 0.01, momentum 0.95 with Nesterov, five iterations, and the scale that gives an update the RMS
of AdamW's, as far as their arguments say so. Each is at its defaults otherwise.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LR", "PEERS", "WEIGHT_DECAY", "Peer", "load_peer"]

LR, WEIGHT_DECAY = 1e-3, 0.01

Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Peer:
    """A public Muon.

    `name` is also what its ratios are called by. `module` is what is imported; `distribution` what is installed, at
    the version whose interface `make` knows. `needs_dtensors`: takes parameters on a mesh only, be it of one rank.
    """

    name: str
    module: str
    distribution: str
    make: Callable[[object, Iterable[Tensor]], torch.optim.Optimizer]
    needs_dtensors: bool = False
    hint: str = "pip install '.[peers]' in the clone installs the peers"

    def version(self) -> str:
        return importlib.metadata.version(self.distribution)


def _torch(module, params):
    return module.Muon(params, lr=LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")


def _pytorch_optimizer(module, params):
    group = {"params": list(params), "use_muon": True, "lr": LR, "weight_decay": WEIGHT_DECAY, "use_adjusted_lr": True}
    return module.Muon([group])


def _heavyball(module, params):
    return module.Muon(params, lr=LR, weight_decay=WEIGHT_DECAY, betas=(0.95, 0.99))


def _muonium(module, params):
    settings = {"momentum": 0.95, "use_cautious_wd": False, "orthogonalization_strategy": "newton_schulz"}
    return module.Muon(params, lr=LR, wd=WEIGHT_DECAY, **settings)


def _muon_fsdp2(module, params):
    return module.Muon([{"params": list(params), "lr": LR, "weight_decay": WEIGHT_DECAY, "use_muon": True}])


PEERS: tuple[Peer, ...] = (
    Peer("torch_muon", "torch.optim", "torch", _torch),
    Peer("pytorch_optimizer", "pytorch_optimizer", "pytorch_optimizer", _pytorch_optimizer),
    Peer("heavyball", "heavyball", "heavyball", _heavyball),
    Peer("muonium", "muonium", "muonium", _muonium),
    # With plain parameters version 0.3.0 raises a NameError.
    Peer("muon_fsdp2", "muon_fsdp2", "muon-fsdp2", _muon_fsdp2, needs_dtensors=True),
)


def load_peer(peer: Peer) -> tuple[Make | None, str]:
    """(what makes its optimizer, "") or (None, why it can't be used here, in a line)."""
    try:
        module = importlib.import_module(peer.module)
    except ModuleNotFoundError as error:
        if error.name == peer.module:
            return None, f"not installed: {peer.hint}"
        return None, f"doesn't import: {error}"
    except Exception as error:  # a peer's own fault, whatever it is, must not end the run
        return None, f"doesn't import: {_one_line(error)}"
    return lambda params: peer.make(module, params), ""


def _one_line(error: Exception) -> str:
    lines: Sequence[str] = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
