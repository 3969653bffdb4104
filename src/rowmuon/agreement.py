"""Whether all ranks are about to do the same: before the first step, after a change of groups, and in skipping."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from rowmuon.groups import ADAMW_KEYS, MUON_KEYS, PLAN_KEYS, name_of
from rowmuon.layout import Layout, local_tensor
from rowmuon.plan import Entry, PlanOptions, explain_difference, plan_hash
from rowmuon.process_groups import ProcessGroups
from rowmuon.runtime import Runtime, all_finite

__all__ = ["check_some_parameters", "compare_ranks", "gradients_are_finite"]

_NOTHING = 0  # of a rank that leaves everything on a mesh alone
_MOST_INSIDE = 6  # meshes inside another one of which its ranks tell each other

_SAME = (
    "Give every rank of a mesh the same parameters in the same order, the same groups and the same settings; what is "
    "frozen on one rank must be frozen on all of them."
)


def check_some_parameters(groups: Sequence[Mapping[str, Any]]) -> None:
    """An optimizer of one rank among several must hold something, for others may wait for it.

    Raises:
        ValueError: it has no parameter. torch says so of an empty list, but not of groups that are empty.
    """
    if any(group["params"] for group in groups) or not (dist.is_available() and dist.is_initialized()):
        return
    if dist.get_world_size() > 1:
        raise ValueError(
            f"rank {dist.get_rank()}: this optimizer has no parameter in any of its groups, so it can't know of the "
            "ranks that wait for this one. A rank with no rows of a matrix still holds its empty shard: give it to the "
            "optimizer. A rank that takes part in nothing builds no optimizer."
        )


def compare_ranks(
    muon: Sequence[tuple[Tensor, Mapping[str, Any], Mapping[str, Any], Layout, Entry]],
    adamw: Sequence[tuple[Tensor, Mapping[str, Any]]],
    idle: Iterable[tuple[Tensor, Layout | None]],
    same: tuple[PlanOptions, bool],
    process_groups: ProcessGroups,
    runtime: Runtime,
) -> None:
    """Compares parameters, settings, step counts and options over every mesh and the process group of plain tensors.

    Names count too: equal shapes in another order would mix up the parameters. So do settings that a plan doesn't
    depend on: another lr on one rank would make replicas drift apart. A tensor lr is read back here, and only here.

    Args:
        muon: (parameter, group, state, layout, the plan's entry).
        adamw: (parameter, group).
        idle: all others, frozen ones above all, with their layouts; None for AdamW's.
        same: how it is computed, and whether steps are skipped (by a collective of its own).

    Raises:
        RuntimeError: on all ranks of a mesh, if one of them would do something else; it is named.
    """
    params = [(p, layout) for p, _, _, layout, _ in muon] + [(p, None) for p, _ in adamw]
    comparisons = {
        ranks: comparison
        for ranks, comparison in process_groups.comparisons(params, idle).items()
        if not process_groups.is_fake(comparison.stages[0])
    }
    problems: list[str] = []
    for ranks, comparison in comparisons.items():
        entries: list[Entry] = []
        extra: list[object] = []
        for i in comparison.members:
            if i < len(muon):
                parameter, group, state, _, entry = muon[i]
                entries.append(entry)
                extra.append(
                    (entry.name, state["step"], state["phase"], state.get("num_grams"), *_settings(group, MUON_KEYS))
                )
            else:
                parameter, group = adamw[i - len(muon)]
                extra.append((name_of(group, parameter), *_settings(group, ADAMW_KEYS)))
        number = plan_hash(entries, same[0], [same[1], *extra]) if comparison.members else _NOTHING
        inside = [other for other in comparisons if len(other) < len(ranks) and set(other) <= set(ranks)]
        device = process_groups.sending_device(comparison.stages[0], comparison.device)
        numbers = [number, *_places(inside)]
        heard = runtime.numbers_of_all(comparison.stages, numbers, device)
        problems.append(_difference({rank: first for rank, (first, *_) in heard.items()}))
        unknown = _unknown(inside, {rank: places for rank, (_, *places) in heard.items()})
        if unknown:  # now, for they won't come to the comparison there; all ranks of this mesh have heard of it
            raise RuntimeError("; ".join(filter(None, [*problems, unknown])))
    if any(problems):  # only now: a rank that stopped at the first would leave others waiting in the second
        raise RuntimeError("; ".join(filter(None, problems)))


def _difference(numbers: Mapping[int, int]) -> str:
    """What is wrong if the ranks of a mesh differ; empty if they don't."""
    without = sorted(rank for rank, number in numbers.items() if number == _NOTHING)
    if not without or len(without) == len(numbers):
        return explain_difference(numbers)
    others = sorted(set(numbers) - set(without))
    return (
        f"rank(s) {without} would do nothing in this step: all that their optimizers hold there is frozen, or they "
        f"hold nothing, while rank(s) {others} have trainable parameters. {_SAME}"
    )


def _places(meshes: Sequence[tuple[int, ...]]) -> list[int]:
    """A number for each mesh, with its size in the lowest bits; 0 where there is none."""
    places = []
    for ranks in meshes[:_MOST_INSIDE]:
        digest = hashlib.sha256(repr(ranks).encode()).digest()
        places.append((int.from_bytes(digest[:4], "big") << 24) + len(ranks))
    return places + [0] * (_MOST_INSIDE - len(places))


def _unknown(inside: Sequence[tuple[int, ...]], places: Mapping[int, Sequence[int]]) -> str:
    """Which mesh isn't known to all of its ranks; empty if there is none.

    Args:
        inside: the meshes that this rank knows inside the one that has compared.
        places: rank -> its `_places`. One that is full may have left some out, so nothing is said then.
    """
    if any(all(known) for known in places.values()):
        return ""
    names = dict(zip(_places(inside), inside, strict=False))
    for place in sorted({place for known in places.values() for place in known if place}):
        found = sorted(rank for rank, known in places.items() if place in known)
        if len(found) == place % (1 << 24):
            continue
        ranks = names.get(place)
        if ranks is None:
            missing, where = "others", f"a mesh of {place % (1 << 24)} ranks"
        else:
            missing = f"rank(s) {sorted(set(ranks) - set(found))}"
            where = f"the mesh of ranks {list(ranks)}"
        return f"rank(s) {found} have parameters on {where}, on which {missing} hold none, trainable or not. {_SAME}"
    return ""


def gradients_are_finite(groups: Sequence[Mapping[str, Any]], process_group: dist.ProcessGroup | None) -> bool:
    """Whether all gradients are finite on all ranks of a process group (None: the default one)."""
    params = [p for group in groups for p in group["params"]]
    grads = [local_tensor(cast(Tensor, p.grad)) for p in params if p.grad is not None]
    return all_finite(grads, local_tensor(params[0]).device, process_group) if params else True


def _settings(group: Mapping[str, Any], keys: Sequence[str]) -> list[object]:
    return [_plain(group[key]) for key in keys if key not in PLAN_KEYS]  # entries say more of these


def _plain(value: object) -> object:
    """As text. Numbers to six digits: another machine's cosine may differ in the last bit, and that is no mistake."""
    if isinstance(value, Tensor):
        value = value.item()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    return repr(value)
