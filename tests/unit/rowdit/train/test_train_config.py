"""A config is checked when it is made: T22, a typing error never trains with a default."""

from __future__ import annotations

import dataclasses
import json

import pytest

from rowdit.train.config import (
    ConfigError,
    EvaluateConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    differences,
    flatten,
    from_dict,
    to_dict,
)
from toy_training import toy_config


def test_json_round_trip() -> None:
    config = toy_config("periodic", seed=7)
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, period=((0, 3), (8, 1))))
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [("train", "step", "steps"), ("optimizer", "row_scal", "row_scale"), ("model", "patchsize", "patch_size")],
)
def test_unknown_key_names_the_nearest(section: str, key: str, meant: str) -> None:
    data = to_dict(toy_config())
    data[section][key] = 1
    with pytest.raises(ConfigError, match=rf"unknown key {section}\.{key}; did you mean '{meant}'\?"):
        from_dict(RunConfig, data)


def test_unknown_section_and_missing_key() -> None:
    data = to_dict(toy_config())
    with pytest.raises(ConfigError, match="unknown key trian; did you mean 'train'"):
        from_dict(RunConfig, data | {"trian": {}})
    del data["model"]
    with pytest.raises(ConfigError, match="missing key model"):
        from_dict(RunConfig, data)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("train", "steps", "many", r"train\.steps = 'many': must be an integer"),
        ("train", "steps", 10.5, r"train\.steps = 10\.5: must be an integer"),
        ("train", "steps", True, r"train\.steps = True: must be an integer"),
        ("train", "grad_clip", "1", r"train\.grad_clip = '1': must be a number or null"),
        ("train", "schedule", "cosin", r"train\.schedule = 'cosin': unknown choice; did you mean 'cosine'\?"),
        ("optimizer", "betas", [0.9], r"optimizer\.betas = \[0\.9\]: must be a list"),
        ("optimizer", "nesterov", 1, r"optimizer\.nesterov = 1: must be true or false"),
        ("train", "steps", 0, r"train\.steps = 0: must be an integer >= 1"),
        ("train", "class_dropout", 1.0, r"train\.class_dropout = 1\.0: must be in \[0, 1\)"),
        ("optimizer", "ns_coefficients", "polar", r"optimizer\.ns_coefficients = 'polar': must be one of keller"),
        ("optimizer", "period", [[5, 3]], r"optimizer\.period = \(\(5, 3\),\): must be .* start at 0 and rise"),
        ("optimizer", "period", [[0, 3], [8, 0]], r"optimizer\.period = .*: must be an integer >= 1, null, or pairs"),
        ("optimizer", "period", 0, r"optimizer\.period = 0: must be an integer >= 1"),
        ("optimizer", "state_dtype", "float64", r"optimizer\.state_dtype = 'float64'"),
        ("optimizer", "overlap", "forward", r"optimizer\.overlap = 'forward'"),
        ("optimizer", "lr", -1e-3, r"optimizer\.lr = -0\.001: must be a finite number >= 0"),
        ("model", "patch_size", 3, r"model\.image_size 8 isn't divisible by patch_size 3"),
    ],
)
def test_wrong_values_are_named(section: str, key: str, value: object, message: str) -> None:
    data = to_dict(toy_config())
    data[section][key] = value
    with pytest.raises(ConfigError, match=message):
        from_dict(RunConfig, data)


def test_an_integer_serves_as_a_number() -> None:
    assert from_dict(OptimizerConfig, {"lr": 1}).lr == 1.0


def test_a_zero_learning_rate_stays_zero() -> None:
    config = OptimizerConfig(name="muon", lr=1e-3, adamw_lr=0.0)
    assert config.settings()["adamw_lr"] == 0.0


def test_a_setting_that_the_optimizer_does_not_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="period = 5: the optimizer 'muon' doesn't read it, only periodic does"):
        OptimizerConfig(name="muon", period=5)
    with pytest.raises(ConfigError, match="momentum = 0.9: the optimizer 'adamw' doesn't read it"):
        OptimizerConfig(name="adamw", momentum=0.9)


def test_overlap_and_clipping_exclude_each_other() -> None:
    data = to_dict(toy_config("periodic"))
    data["optimizer"]["overlap"], data["train"]["grad_clip"] = "backward", 1.0
    with pytest.raises(ConfigError, match=r"optimizer\.overlap = 'backward' with train\.grad_clip = 1\.0: .*to null"):
        from_dict(RunConfig, data)
    data["train"]["grad_clip"] = None
    assert from_dict(RunConfig, data).optimizer.overlap == "backward"


def test_settings_are_those_that_are_read() -> None:
    assert set(OptimizerConfig(name="adamw").settings()) == {"name", "lr", "weight_decay", "betas", "eps"}
    muon = OptimizerConfig(name="muon", lr=0.02).settings()
    assert "period" not in muon and muon["adamw_lr"] == 0.02
    assert OptimizerConfig(name="periodic", period=None).settings()["period"] is None


def test_differences_name_the_keys() -> None:
    old = toy_config("periodic")
    new = toy_config("periodic", steps=20)
    assert differences(old, new) == ["train.steps: 12 -> 20"]
    assert differences(old, old) == []
    shorter = to_dict(old)
    del shorter["train"]["steps"]
    assert differences(shorter, old) == ["train.steps: (absent) -> 12"]


def test_flatten_has_a_key_for_each_leaf() -> None:
    flat = flatten(toy_config())
    assert flat["train.batch_size"] == 8 and flat["model.image_size"] == 8


@pytest.mark.parametrize(
    ("num", "steps", "grid"), [(4, 1000, (250, 500, 750, 1000)), (4, 3, (1, 2, 3)), (1, 10, (10,)), (3, 10, (3, 7, 10))]
)
def test_evaluation_grid_ends_at_the_last_step(num: int, steps: int, grid: tuple[int, ...]) -> None:
    assert EvaluateConfig(num_evaluations=num).steps(steps) == grid


def test_configs_are_values() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().steps = 5  # type: ignore[misc]
