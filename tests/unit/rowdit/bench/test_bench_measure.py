"""What `rowdit bench` times, in which order, and how it judges its numbers."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

import rowmuon
from rowdit.bench import measure as measuring
from rowdit.bench.check import check_optimizer
from rowdit.bench.contender import Contender, Workplace, periodic
from rowdit.bench.machine import best_product
from rowdit.bench.measure import Measured, Peers, find_peers, in_turn, measure
from rowdit.bench.peers import LR, PEERS, WEIGHT_DECAY, Peer, load_peer
from rowdit.bench.report import TARGETS, Setup, as_data, as_page, reached, worst_ratios
from rowdit.bench.shapes import SIZES, Matrix, dit_matrices, size_named, weights_and_grads

SETTINGS = {"lr": LR, "weight_decay": WEIGHT_DECAY, "adjust_lr_fn": "match_rms_adamw"}


def test_sizes_are_the_presets() -> None:
    assert [SIZES[name].hidden for name in ("S", "B", "L", "XL")] == [384, 768, 1024, 1152]
    assert (SIZES["15B"].hidden, SIZES["15B"].scaled_by) == (1280, 4)
    assert size_named("96").hidden == 96
    for name in ("M", "0", "-3", "9.5"):
        with pytest.raises(ValueError, match=f"size '{name}' is unknown: take one of S, B"):
            size_named(name)


def test_a_block_has_18_squares_of_its_width() -> None:
    for chunked in (False, True):
        matrices = dit_matrices(32, 2, chunked=chunked)
        assert sum(m.num_rows * m.num_cols for m in matrices) == 2 * 18 * 32**2
        assert sum(m.chunks for m in matrices) == (2 * 12 if chunked else 10)
    assert sum(m.num_rows for m in dit_matrices(32, 1, adaln=False)) == 12 * 32 - 3 * 32


def test_chunks_as_parameters_are_the_same_numbers() -> None:
    matrices = dit_matrices(16, 1, chunked=True)
    whole, parts = weights_and_grads(matrices, split=False), weights_and_grads(matrices, split=True)
    assert torch.equal(torch.cat([g for _, g in parts[:6]]), whole[0][1])
    assert torch.equal(torch.cat([w for w, _ in parts[6:9]]), whole[1][0])


# ---------------------------------------------------------------------------------------------------- what is timed


def test_every_step_gets_its_gradients_anew() -> None:
    class Spoils(torch.optim.SGD):
        seen: list[float] = []

        def step(self, closure=None):
            self.seen.append(float(self.param_groups[0]["params"][0].grad.sum()))
            self.param_groups[0]["params"][0].grad.zero_()

    contender = Contender([Matrix("w", 4, 4)], Workplace(), lambda params: Spoils(params, lr=0.1))
    contender.timed_step()
    contender.timed_step()
    assert Spoils.seen[0] == Spoils.seen[1] == pytest.approx(float(contender.grads[0].sum()))


def test_only_the_kind_of_step_that_was_meant_is_timed() -> None:
    contender = periodic(dit_matrices(8, 1), Workplace(), 3)
    assert len(contender.timed_period(3)) == 3
    contender.timed_step("refresh")
    with pytest.raises(RuntimeError, match="about to time a refresh step, but the next one is row"):
        contender.timed_step("refresh")


def test_a_product_counts_its_flops() -> None:
    product = best_product(32, "cpu")
    assert product.num_flops in (2 * 32**3, 8 * 32**3)
    torch.testing.assert_close(product.out, product.a @ product.b)
    assert product.seconds(10 * product.num_flops) > 0


def test_the_order_is_reversed_every_other_round() -> None:
    order: list[str] = []
    in_turn(3, [lambda: order.append("a"), lambda: order.append("b")])
    assert "".join(order) == "abbaab"


def test_measure_counts_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "row_settings", lambda device: {"eager": {"compile": False}})
    peers = find_peers(PEERS[:1], Workplace())
    found = measure(dit_matrices(16, 1), 16, Workplace(), peers, num_rounds=2, num_pairs=3)
    lengths = {name: len(times) for name, times in found.seconds.items()}
    assert lengths == {
        "row eager": 3,
        "adamw_fused": 3,
        "k1": 2,
        "k3": 2,
        "k3 refresh": 2,
        "k3 row": 4,
        "torch_muon": 2,
        "matmul": 2,
    }
    assert all(seconds > 0 for times in found.seconds.values() for seconds in times)
    h = 16
    direct = sum(rowmuon.newton_schulz_flops(m.num_rows, m.num_cols, 5) for m in dit_matrices(h, 1))
    assert found.refresh_flops == direct
    assert set(found.ratios()) >= {"row_over_adamw_fused", "k1_over_torch_muon", "k3_over_k1", "k3_over_torch_muon"}


def test_a_period_is_its_refresh_and_its_row_steps() -> None:
    steps = {"k1": [9.0], "k3 refresh": [9.0], "k3 row": [1.0, 2.0], "k3": [4.0], "row eager": [1.0]}
    found = Measured({**steps, "adamw_fused": [2.0], "heavyball": [18.0]}, "eager").ratios()
    assert {name: spread.median for name, spread in found.items()} == {
        "row_over_adamw_fused": 0.5,
        "row_eager_over_adamw_fused": 0.5,
        "k3_over_k1": pytest.approx(4 / 9),
        "k1_over_heavyball": 0.5,
        "k3_over_heavyball": pytest.approx(2 / 9),
    }


# ---------------------------------------------------------------------------------------------------------- the peers


def test_a_missing_peer_is_named_with_the_way_to_get_it() -> None:
    peer = Peer("nobody", "no_such_module_at_all", "nobody", lambda module, params: None)
    found = find_peers([peer], Workplace())
    assert found.makers == {} and found.skipped == {
        "nobody": "not installed: pip install '.[peers]' in the clone installs the peers"
    }


def test_a_peer_that_lacks_something_or_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "needs_more.py").write_text("import no_such_module_at_all\n")
    (tmp_path / "breaks.py").write_text("raise RuntimeError('first line\\nsecond')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module, reason in [
        ("needs_more", "doesn't import: No module named 'no_such_module_at_all'"),
        ("breaks", "doesn't import: RuntimeError: first line"),
    ]:
        assert load_peer(Peer("p", module, "p", lambda module, params: None)) == (None, reason)

    def raises(module, params):
        raise NameError("name 'muon_update' is not defined")

    monkeypatch.setitem(sys.modules, "imports_well", ModuleType("imports_well"))
    found = find_peers([Peer("p", "imports_well", "p", raises)], Workplace())
    assert found.skipped == {"p": "fails: NameError: name 'muon_update' is not defined"}


def test_a_peer_for_meshes_says_how_to_start() -> None:
    peer = Peer("torch_muon", "torch.optim", "torch", lambda module, params: None, needs_dtensors=True)
    assert "--ranks" in find_peers([peer], Workplace()).skipped["torch_muon"]


@pytest.mark.parametrize("maker", [rowmuon.Muon, torch.optim.Muon])
def test_a_right_update_is_seen(maker) -> None:
    check = check_optimizer(lambda params: maker(params, **SETTINGS), Workplace())
    assert check.correct and check.apart < 0.04 and "the reference's update" in check.verdict


def test_another_convention_is_still_right() -> None:
    check = check_optimizer(lambda params: torch.optim.Muon(params, lr=LR), Workplace())
    assert check.correct and check.apart > 0.1 and "another scale" in check.verdict


def test_a_wrong_update_is_seen() -> None:
    class HalvesByThemselves(torch.optim.Optimizer):
        """What an optimizer does that orthogonalises each of two ranks' rows by themselves."""

        def __init__(self, params) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                halves = [rowmuon.newton_schulz(half, "keller_jordan") for half in p.grad.chunk(2)]
                p.mul_(1 - LR * WEIGHT_DECAY).sub_(torch.cat(halves), alpha=LR)

    check = check_optimizer(HalvesByThemselves, Workplace())
    assert not check.correct and check.verdict.startswith("NOT the orthogonalised matrix")
    assert not check_optimizer(lambda params: torch.optim.SGD(params, lr=LR), Workplace()).correct


# ------------------------------------------------------------------------------------------------------- the verdicts


def measured(row: float, k1: float, *, compiled: float = 9.0) -> Measured:
    seconds = {"row eager": [row] * 2, "row compiled": [compiled] * 2, "adamw_fused": [1.0] * 2}
    setting = "compiled" if compiled < row else "eager"
    return Measured(
        {**seconds, "k1": [k1] * 2, "k3": [1.0] * 2, "torch_muon": [4.0] * 2, "matmul": [1.0] * 2}, setting, 1e9
    )


def test_the_worst_size_counts() -> None:
    sizes = {"S": measured(0.5, 2.8), "B": measured(0.6, 3.2), "L": measured(2.0, 2.5, compiled=0.55)}
    worst = worst_ratios(sizes)
    assert worst["row_over_adamw_fused"] == 0.6 and worst["row_eager_over_adamw_fused"] == 2.0
    assert worst["k1_over_torch_muon"] == 0.8 and worst["k3_over_k1"] == 0.4
    assert worst["refresh_over_matmul"] == 1 / 3.2


def test_reached_is_computed() -> None:
    assert reached("k3_over_k1", TARGETS["k3_over_k1"]) and not reached("k3_over_k1", 0.361)
    assert reached("refresh_over_matmul", 0.8) and not reached("refresh_over_matmul", 0.79)
    assert reached("k1_over_heavyball", 9.0) is None
    sizes = {"S": measured(0.5, 2.8), "L": measured(2.0, 2.8, compiled=0.72)}
    setup = Setup("rowdit bench", {"S": 384, "L": 1024}, 2, False, "float32", 1, 5, 20, machine())
    data, page = as_data(sizes, Peers(), setup), as_page(sizes, Peers(), setup)
    assert data["reached"]["row_over_adamw_fused"] is False and data["row_over_adamw_fused"] == 0.72
    assert data["fastest_setting"] == {"S": "compile=False", "L": "compile=True"}
    verdicts = {line.split(":")[0].strip("| "): line.rstrip(" |") for line in page.splitlines() if "_over_" in line}
    assert verdicts["row_over_adamw_fused"].endswith("**no**")
    assert verdicts["k1_over_torch_muon"].endswith("yes")


def machine() -> dict[str, object]:
    return {"cpu": "x", "num_cores": 2, "device": "cpu", "python": "3", "torch": "2", "num_threads": 2}
