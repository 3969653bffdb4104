"""What is compared, and in which folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from rowdit import recipes
from rowdit.models.dit import DiT
from rowdit.study.comparison import Comparison, run_name
from rowdit.study.lock import lock_folder
from rowdit.train.config import ConfigError, differences, from_dict, to_dict
from toy_training import toy_comparison


def test_runs_differ_in_optimizer_and_seed_alone() -> None:
    comparison = toy_comparison()
    a, b = comparison.run_config("adamw", 0), comparison.run_config("muon", 5)
    changed = {line.split(":")[0] for line in differences(a, b)}
    assert {key.split(".")[0] for key in changed} == {"optimizer", "train"}
    assert {key for key in changed if key.startswith("train")} == {"train.seed"}


def test_seeds_are_consecutive_from_the_recipe_s() -> None:
    assert toy_comparison(seed=5).seeds(3) == (5, 6, 7)
    with pytest.raises(ConfigError, match="seeds = 0"):
        toy_comparison().seeds(0)


def test_selecting_optimizers() -> None:
    comparison = toy_comparison()
    assert comparison.select(None) == ("adamw", "muon", "periodic")
    assert comparison.select("periodic, adamw") == ("adamw", "periodic")
    on_request = dataclasses.replace(comparison, on_request=("periodic",))
    assert on_request.select(None) == ("adamw", "muon")
    assert on_request.select("periodic") == ("periodic",)
    with pytest.raises(ConfigError, match="there is no 'moun'; did you mean 'muon'"):
        comparison.select("moun")
    with pytest.raises(ConfigError, match="name at least one of adamw, muon, periodic"):
        comparison.select(",")


def test_a_comparison_survives_json() -> None:
    comparison = toy_comparison()
    assert from_dict(Comparison, to_dict(comparison)) == comparison


def test_run_names() -> None:
    assert run_name("periodic", 2) == "periodic-seed2"


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_recipes_can_be_built(name: str) -> None:
    recipe = recipes.load(name)
    if isinstance(recipe, Comparison):
        assert list(recipe.optimizers)[0] == "adamw"
        assert recipe.select(None) == ("adamw", "muon", "periodic")
        for label, optimizer in recipe.optimizers.items():
            assert optimizer.name == ("periodic" if label in recipe.on_request else label)
    with torch.device("meta"):  # some have billions of parameters
        DiT(recipe.model)


def test_quickstart_is_of_the_size_that_it_says() -> None:
    comparison = recipes.load("quickstart")
    assert isinstance(comparison, Comparison)
    num = sum(p.numel() for p in DiT(comparison.model).parameters() if p.requires_grad)
    assert comparison.model.num_tokens == 49 and 0.4e6 < num < 0.7e6
    assert len(comparison.evaluate.steps(comparison.train.steps)) == 4
    assert comparison.optimizers["paper"].row_scale == 1.0


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no recipe 'quikstart'; did you mean 'quickstart'"):
        recipes.load("quikstart")


def test_one_writer_per_folder(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match="another process is writing into")
    with lock_folder(tmp_path / "out"), refused, lock_folder(tmp_path / "out"):
        pass
    with lock_folder(tmp_path / "out"):  # the lock goes with its holder
        pass


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match="can't write into .*out"), lock_folder(tmp_path / "out"):
        pass
