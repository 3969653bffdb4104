"""Whether all ranks are about to do the same: before the first step, after a change of groups, and in skipping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from rowmuon.groups import ADAMW_KEYS, MUON_KEYS, PLAN_KEYS, name_of
from rowmuon.layout import Layout, local_tensor
from rowmuon.plan import Entry, PlanOptions, explain_difference, plan_hash
from rowmuon.process_groups import ProcessGroups
from rowmuon.runtime import Runtime, all_finite

__all__ = ["compare_ranks", "gradients_are_finite"]


def compare_ranks(
    muon: Sequence[tuple[Tensor, Mapping[str, Any], Mapping[str, Any], Layout, Entry]],
    adamw: Sequence[tuple[Tensor, Mapping[str, Any]]],
    same: tuple[PlanOptions, bool],
    process_groups: ProcessGroups,
    runtime: Runtime,
) -> None:
    """Compares parameters, settings, step counts and options over every mesh and the process group of plain tensors.

    Names count too: equal shapes in another order would mix up the parameters. So do settings that a plan doesn't
    depend on: another lr on one rank would make replicas drift apart. A tensor lr is read back here, and only here.

    Args:
        muon: (parameter, group, state, layout, the plan's entry).
        adamw: (parameter, group); frozen ones don't count.
        same: how it is computed, and whether steps are skipped (by a collective of its own).

    Raises:
        RuntimeError: on all ranks of a mesh, if one of them would do something else; it is named.
    """
    adamw = [(p, group) for p, group in adamw if p.requires_grad]
    params = [(p, layout) for p, _, _, layout, _ in muon] + [(p, None) for p, _ in adamw]
    heard: list[dict[int, int]] = []
    for comparison in process_groups.comparisons(params).values():
        if process_groups.is_fake(comparison.stages[0]):
            continue
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
        number = plan_hash(entries, same[0], [same[1], *extra])
        here = local_tensor(params[comparison.members[0]][0]).device
        device = process_groups.sending_device(comparison.stages[0], here)
        heard.append(runtime.numbers_of_all(comparison.stages, number, device))
    problems = [difference for difference in map(explain_difference, heard) if difference]
    if problems:  # only now: a rank that stopped at the first would leave others waiting in the second
        raise RuntimeError("; ".join(problems))


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
