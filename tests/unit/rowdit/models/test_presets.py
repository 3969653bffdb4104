from __future__ import annotations

import pytest
import torch

from rowdit.models import PRESETS, DiT, preset

# As stated for the published shapes (XL/2) and for this project's own; the small ones follow from the block's
# 18 h^2 + 15 h and 3 h^2 + 1310 h + 32 outside the blocks (patch 2, 4 channels, 1000 classes, learned sigma).
NUM_PARAMETERS = {
    "S/2": 32_865_056,
    "B/2": 130_315_808,
    "L/2": 457_840_672,
    "XL/2": 674_834_720,
    "1.3B": 1_283_776_528,
    "2B": 1_978_966_032,
    "4B": 4_035_082_256,
    "9B": 9_117_171_728,
    "15B": 15_187_220_496,
}


def meta_model(name: str, **changes) -> DiT:
    with torch.device("meta"):
        return DiT(preset(name, **changes))


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_number_of_trainable_parameters(name):
    assert sum(parameter.numel() for parameter in meta_model(name).parameters()) == NUM_PARAMETERS[name]


@pytest.mark.parametrize("name", ["S/2", "B/2", "L/2", "XL/2"])
def test_the_published_shapes_follow_the_formula(name):
    h, depth = PRESETS[name].hidden_size, PRESETS[name].depth
    assert NUM_PARAMETERS[name] == depth * (18 * h * h + 15 * h) + 3 * h * h + 1310 * h + 32


def test_xl2_with_its_fixed_positions():
    assert sum(tensor.numel() for tensor in meta_model("XL/2").state_dict().values()) == 675_129_632


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_built(name):
    model = meta_model(name)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    if name.endswith("B"):
        assert PRESETS[name].hidden_size == 128 * PRESETS[name].num_heads


def test_the_toy_is_a_toy():
    assert PRESETS["toy"].num_tokens == 49
    assert 4.5e5 < sum(parameter.numel() for parameter in meta_model("toy").parameters()) < 6e5


def test_changes():
    config = preset("S/2", num_classes=7, learn_sigma=False)
    assert (config.num_classes, config.learn_sigma, config.hidden_size) == (7, False, 384)
    assert PRESETS["S/2"].num_classes == 1000


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: preset("XL2"), "'XL2'.*did you mean 'XL/2'"),
        (lambda: preset("?"), "'\\?'; presets are toy, S/2"),
        (lambda: preset("S/2", num_clases=3), "'num_clases'.*did you mean 'num_classes'"),
        (lambda: preset("S/2", patch_size=3), "nearest valid sizes are 30 and 33"),
    ],
)
def test_bad_names(call, words):
    with pytest.raises(ValueError, match=words):
        call()
