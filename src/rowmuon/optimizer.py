"""Periodic Row-wise Muon as a ``torch.optim.Optimizer``. A thin shell: it keeps groups and state, asks `period.py`
which parameters refresh, `plan.py` what to do, and lets `runtime.py` do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from rowmuon import adamw
from rowmuon.groups import (
    AdjustLr,
    check_hyper,
    complete_group,
    flops_per_matrix,
    muon_layout,
    name_of,
    prune_group,
)
from rowmuon.layout import Layout, local_tensor
from rowmuon.orthogonalize import Triple, resolve_coefficients
from rowmuon.period import Period, assign_phases, check_period, is_refresh
from rowmuon.plan import Entry, PlanOptions, StepPlan, build_plan, plan_hash
from rowmuon.process_groups import ProcessGroups
from rowmuon.runtime import Runtime, add_over
from rowmuon.shards import Hyper, Shard, make_shard
from rowmuon.state import adapt_state_dict, plain_copy
from rowmuon.traffic import Traffic

__all__ = ["Muon", "PeriodicRowMuon"]

StepKind = Literal["refresh", "row", "mixed"]


class PeriodicRowMuon(Optimizer):
    r"""Muon whose Newton-Schulz iteration runs once in ``period`` steps, with row-normalised steps between.

    In every step the momentum takes the gradient in, M <- momentum M + (1 - momentum) G, U is M or with Nesterov
    (1 - momentum) G + momentum M, and the weights decay by lr weight_decay. A refresh then subtracts
    lr s_spectral(m, n) NewtonSchulz(U), a row step lr row_scale s_row(m, n) U_i / ||U_i|| from each row i. A row step
    works on the local shard alone and sends nothing. Sources: arXiv:2608.20818 (periodic row-wise steps),
    Keller Jordan's Muon; the scales of the row step are our choice (see `rowmuon.update`).

    Args:
        params: tensors, named tensors or groups. A group may say ``algorithm`` ("muon", the default, or "adamw"),
            ``chunks``, ``stack_dims``, and its own value of anything below up to ``row_scale``; AdamW groups also
            ``betas`` (0.9, 0.95), ``eps`` 1e-8, ``amsgrad``, ``foreach``, ``fused``, ``capturable``.
        lr: learning rate, float or 1-element tensor, >= 0.
        weight_decay: decoupled decay, multiplied by the group's lr, >= 0.
        momentum: in [0, 1).
        nesterov: see above.
        ns_coefficients: one (a, b, c) for all iterations, one per iteration, or a name in ``rowmuon.COEFFICIENTS``.
        eps: > 0; takes the place of a norm that is exactly zero and touches nothing else.
        ns_steps: iterations; None is 5, or the number of triples given.
        adjust_lr_fn: "original" (None means the same) or "match_rms_adamw", as in ``torch.optim.Muon``.
        maximize: climb instead of descend.
        period: K >= 1; 1 is Muon; None never refreshes after the first step; or a schedule such as
            ``((0, 3), (8000, 1))``, whose every entry starts with a refresh.
        row_scale: RMS of a row step over that of a refresh, >= 0.
        refresh: "exchange" orthogonalises each matrix once in its shard group; "gather" all-gathers and everyone
            orthogonalises everything, as in the paper.
        stagger: each parameter refreshes in its own phase of the period.
        ns_dtype: arithmetic of Newton-Schulz.
        comm_dtype: what is sent in a refresh.
        bucket_bytes: bound on one stack of matrices in a refresh.
        process_group: over which plain tensors are replicated (DDP); also agrees on skipping.
        skip_nonfinite: skip a step on all ranks alike if any gradient isn't finite; one scalar all-reduce and one host
            read a step. A skipped step changes nothing and doesn't count.

    Raises:
        ValueError: a setting out of range, a layout or parameter that can't be worked on; the parameter is named.

    Example:
        >>> import torch, rowmuon
        >>> layer = torch.nn.Linear(4, 8, bias=False)
        >>> opt = rowmuon.PeriodicRowMuon(layer.parameters(), lr=0.02, period=3)
        >>> kinds = []
        >>> for _ in range(4):
        ...     layer(torch.ones(1, 4)).sum().backward()
        ...     kinds.append(opt.next_step_kind)
        ...     opt.step()
        >>> kinds
        ['refresh', 'row', 'row', 'refresh']
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Triple | Sequence[Triple] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int | None = None,
        adjust_lr_fn: AdjustLr = None,
        *,
        maximize: bool = False,
        period: Period = 3,
        row_scale: float = 1.0,
        refresh: Literal["exchange", "gather"] = "exchange",
        stagger: bool = False,
        ns_dtype: torch.dtype = torch.bfloat16,
        comm_dtype: torch.dtype = torch.bfloat16,
        bucket_bytes: int = 64 << 20,
        process_group: dist.ProcessGroup | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        if refresh not in ("exchange", "gather"):
            raise ValueError(f"refresh={refresh!r} is neither 'exchange' nor 'gather'")
        for name, dtype in (("ns_dtype", ns_dtype), ("comm_dtype", comm_dtype)):
            if dtype not in (torch.bfloat16, torch.float32, torch.float64):
                raise ValueError(f"{name}={dtype} isn't torch.bfloat16, torch.float32 or torch.float64")
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes!r} isn't a positive number of bytes")
        coefficients = resolve_coefficients(ns_coefficients, ns_steps)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": len(coefficients),
            "adjust_lr_fn": adjust_lr_fn,
            "maximize": maximize,
            "period": check_period(period),
            "row_scale": row_scale,
        }
        check_hyper(defaults, "the constructor")
        self.options = PlanOptions(refresh, comm_dtype, bucket_bytes)
        self.stagger, self.ns_dtype = stagger, ns_dtype
        self.process_group, self.skip_nonfinite = process_group, skip_nonfinite
        self.num_skipped_steps = 0
        self.traffic = Traffic()
        self._reset_caches()
        self._constructing = True  # the process groups of all parameters are made in one go, below
        super().__init__(params, defaults)
        self._constructing = False
        self._set_up()

    # ------------------------------------------------------------------------------------------ groups and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; under a mesh or process group all ranks must add the same one at the same time.

        The new parameters start with a refresh and count their own steps.
        """
        group = complete_group(param_group, self.defaults)
        super().add_param_group(group)
        prune_group(group)
        try:
            layouts = self._check_group(group)
        except ValueError:
            self.param_groups.remove(group)
            raise
        self._layouts.update(layouts)
        for parameter in group["params"]:
            self._init_state(parameter, group)
        if not self._constructing:
            self._set_up()

    def _check_group(self, group: dict[str, Any]) -> dict[Tensor, Layout]:
        layouts = {}
        for parameter in group["params"]:
            name = name_of(group, parameter)
            if parameter.is_meta:
                raise ValueError(
                    f"parameter {name!r} is on the meta device: materialise and initialise the model first "
                    "(to_empty, then its init), then build the optimizer."
                )
            if group["algorithm"] == "muon":
                layouts[parameter] = muon_layout(parameter, group, self.process_group)
        return layouts

    def _init_state(self, parameter: Tensor, group: dict[str, Any]) -> None:
        if group["algorithm"] == "adamw":
            self.state[parameter] = adamw.init_state(parameter, group)
        else:
            self.state[parameter] = {
                "momentum_buffer": torch.zeros_like(
                    parameter, memory_format=torch.preserve_format, requires_grad=False
                ),
                "step": 0,
                "phase": 0,
            }

    def _set_up(self) -> None:
        """After a change of the groups: phases, process groups, and plans to be made anew and compared again."""
        self._plans.clear()
        self._compared = False
        if self.stagger:
            self._stagger()
        self._process_groups.prepare(self._layouts.items())

    def _stagger(self, keep: bool = False) -> None:
        muon = [(group, p) for group in self.param_groups if group["algorithm"] == "muon" for p in group["params"]]
        if keep and any(self.state[p]["phase"] for _, p in muon):
            return
        costs = [flops_per_matrix(self._layouts[p], group) * self._layouts[p].num_matrices for group, p in muon]
        for (_, p), phase in zip(muon, assign_phases(costs, [g["period"] for g, _ in muon]), strict=True):
            self.state[p]["phase"] = phase

    def _reset_caches(self) -> None:
        self._layouts: dict[Tensor, Layout] = {}
        self._plans: dict[tuple, StepPlan] = {}
        self._compared = False
        self._process_groups = ProcessGroups()
        self._process_groups.known(self.process_group)
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._runtime = Runtime(rank, self._process_groups.group_of)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for handle in ("_layouts", "_plans", "_compared", "_process_groups", "_runtime"):
            del state[handle]  # made again from the groups
        return plain_copy(state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_runtime" not in self.__dict__:  # unpickled or copied
            self._reset_caches()
            for group in self.param_groups:
                self._layouts.update(self._check_group(group))
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                adamw.repair_state(group, self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this optimizer or, where the parameters agree, of ``torch.optim.Muon``.

        What torch keeps in groups (lr, weight_decay, momentum, nesterov, row_scale, period, ...) comes from the
        checkpoint; how it is computed (refresh, stagger, ns_dtype, comm_dtype, bucket_bytes) stays as constructed.

        Raises:
            ValueError: the checkpoint routes parameters to other algorithms or chunks; they are named. Nothing is
                changed then.
        """
        super().load_state_dict(adapt_state_dict(state_dict, self))
        for group in self.param_groups:
            check_hyper(group, "the loaded state dict")
            if group["algorithm"] == "muon" and not self.stagger:
                for parameter in group["params"]:
                    self.state[parameter]["phase"] = 0
        self._plans.clear()
        self._compared = False
        if self.stagger:
            self._stagger(keep=True)

    # ------------------------------------------------------------------------------------------------- the step

    @property
    def next_step_kind(self) -> StepKind:
        """What the next step will be: "refresh", "row", or "mixed" if some parameters refresh and others don't."""
        return _kind([due for *_, due in self._muon_params()])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step.

        Args:
            closure: recomputes the loss; called once, with gradients enabled.

        Returns:
            What the closure returns, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.skip_nonfinite and not self._gradients_are_finite():
            self.num_skipped_steps += 1
            return loss
        muon = self._muon_params()
        kind = _kind([due for *_, due in muon])
        shards = self._shards(muon)
        plan = self._plan(muon)
        if not self._compared:
            self._compare(muon)
        counts = self.traffic[kind]
        counts.num_steps += 1
        self._runtime.execute(plan, shards, counts, fill=self._step_adamw)
        for shard in shards:
            shard.write_back()
        for parameter, _, _ in muon:
            self.state[parameter]["step"] += 1
        return loss

    def _muon_params(self) -> list[tuple[Tensor, dict[str, Any], bool]]:
        """(parameter, group, whether it refreshes in this step) of all Muon parameters that aren't frozen."""
        out = []
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                for parameter in group["params"]:
                    if parameter.requires_grad:
                        state = self.state[parameter]
                        out.append((parameter, group, is_refresh(group["period"], state["step"], state["phase"])))
        return out

    def _plan(self, muon: list[tuple[Tensor, dict[str, Any], bool]]) -> StepPlan:
        """The plan of this step; made once for each set of refreshing parameters."""
        key = tuple((id(parameter), due) for parameter, _, due in muon)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) > 64:  # a schedule, or freezing and unfreezing, has changed the sets
                self._plans.clear()
            due = [i for i, (_, _, due) in enumerate(muon) if due]
            plan = self._plans[key] = build_plan(self._entries(muon), due, self.options)
        return plan

    def _entries(self, muon: Iterable[tuple[Tensor, dict[str, Any], bool]]) -> list[Entry]:
        entries = []
        for parameter, group, _ in muon:
            kernel = (resolve_coefficients(group["ns_coefficients"], group["ns_steps"]), group["eps"], self.ns_dtype)
            layout = self._layouts[parameter]
            entries.append(
                Entry(
                    name_of(group, parameter),
                    layout,
                    parameter.dtype,
                    parameter.device.type,
                    kernel,
                    flops_per_matrix(layout, group),
                )
            )
        return entries

    def _shards(self, muon: list[tuple[Tensor, dict[str, Any], bool]]) -> list[Shard]:
        hypers: dict[int, Hyper] = {}
        shards = []
        for parameter, group, _ in muon:
            hyper = hypers.setdefault(id(group), Hyper.of(group))
            momentum = self.state[parameter]["momentum_buffer"]
            layout = self._layouts[parameter]
            shards.append(make_shard(parameter, momentum, layout, self._runtime.rank, group, hyper))
        return shards

    def _step_adamw(self) -> None:
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                adamw.step(group, self.state)

    def _gradients_are_finite(self) -> bool:
        """Whether the gradients are finite on all ranks: one scalar all-reduce where there is a process group."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        locals_ = [local_tensor(cast(Tensor, grad)) for grad in grads]
        device = local_tensor(self.param_groups[0]["params"][0]).device
        bad = torch.zeros((), dtype=torch.float32, device=device)
        for grad in locals_:
            bad += torch.logical_not(torch.isfinite(grad).all()).to(device)
        if dist.is_available() and dist.is_initialized():
            add_over(bad, self.process_group)
        return not bool(bad.item())

    def _compare(self, muon: list[tuple[Tensor, dict[str, Any], bool]]) -> None:
        """Once after every change of the groups: all ranks of each process group must be about to do the same."""
        self._compared = True
        entries = self._entries(muon)
        steps = [self.state[p]["step"] for p, _, _ in muon]
        for ranks, members in self._process_groups.members(entry.layout for entry in entries).items():
            if self._process_groups.is_fake(ranks):
                continue
            chosen = [entries[i] for i in members]
            extra = [(muon[i][1]["period"], steps[i], self.state[muon[i][0]]["phase"]) for i in members]
            device = local_tensor(muon[members[0]][0]).device
            number = plan_hash(chosen, self.options, extra)
            self._runtime.compare(ranks, number, device, "parameters, settings or step counts")

    # -------------------------------------------------------------------------------------------------- reports

    def plan(self, kind: Literal["refresh", "row"]) -> StepPlan:
        """The plan of a step in which all parameters refresh, or none does."""
        muon = [(parameter, group, kind == "refresh") for parameter, group, _ in self._muon_params()]
        return self._plan(muon)

    def describe(self) -> str:
        """Routing, layout and buckets as text, and what this rank computes and sends in each kind of step."""
        from rowmuon.report import describe

        return describe(self)


class Muon(PeriodicRowMuon):
    """Muon: :class:`PeriodicRowMuon` with period 1. Takes the same arguments, but neither period nor row_scale."""

    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        for name in ("period", "row_scale", "stagger"):
            if name in kwargs:
                raise TypeError(f"Muon takes no {name}: every step is a refresh. Use PeriodicRowMuon.")
        super().__init__(params, *args, period=1, **kwargs)


def _kind(due: Sequence[bool]) -> StepKind:
    if all(due):
        return "refresh"
    return "mixed" if any(due) else "row"
