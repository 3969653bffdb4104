from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rowdit.models import DiT, DiTConfig, forward_flops, preset


@pytest.mark.parametrize(
    "config",
    [
        preset("toy"),
        preset("S/4", depth=2),
        DiTConfig(12, 3, 2, hidden_size=24, depth=3, num_heads=2, num_classes=5, mlp_ratio=2.5, learn_sigma=True),
        DiTConfig(8, 3, 2, 32, depth=2, num_heads=2, num_classes=5, qk_norm=True, positions="rope", mlp="swiglu"),
        DiTConfig(8, 3, 2, 32, depth=1, num_heads=2, num_classes=0, caption_dim=24),
    ],
    ids=["toy", "S/4", "odd", "options", "captions"],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_equal_to_the_flops_that_torch_counts(config, batch):
    model = DiT(config)
    x = torch.zeros(batch, config.in_channels, config.image_size, config.image_size)
    # torch's counter knows nothing of the CPU's fused attention, so attention is made of its matrix products here.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        captions = config.caption_dim is not None
        y = torch.ones(batch, config.caption_dim) if captions else torch.zeros(batch, dtype=torch.int64)
        model(x, torch.zeros(batch), y)
    assert counter.get_total_flops() == batch * forward_flops(config)


@pytest.mark.parametrize(("name", "gflops"), [("S/2", 6.06), ("B/2", 23.01), ("L/2", 80.71), ("XL/2", 118.64)])
def test_published_figures(name, gflops):
    """The figures published with the DiT (arXiv:2212.09748) count a multiply-add as one."""
    assert forward_flops(preset(name)) / 2 == pytest.approx(gflops * 1e9, rel=2e-3)
