"""Which parameter goes to which algorithm, in how many chunks. Ordered rules, total and printable."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

__all__ = ["ParamGroups", "Rule", "param_groups"]

Algorithm = Literal["muon", "adamw"]


@dataclass(frozen=True)
class Rule:
    """Sends the parameters whose name matches ``pattern`` to ``algorithm``.

    Args:
        pattern: a regular expression, searched for in the name as the model gives it, without the prefixes of wrappers
            (DDP, activation checkpointing, ``torch.compile``).
        algorithm: "muon" or "adamw".
        chunks: matrices above each other in the rows of the parameter (a fused qkv: 3). Muon only.
        what: a few words for the table.
        max_ndim: the rule holds for parameters of at most this many dimensions.
        stack_dims: leading dimensions that count independent matrices; None is 1 for 3-D parameters and 0 otherwise.
        optional: the rule may match nothing.
    """

    pattern: str
    algorithm: Algorithm
    chunks: int = 1
    what: str = ""
    max_ndim: int | None = None
    stack_dims: int | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        if self.algorithm not in ("muon", "adamw"):
            raise ValueError(f"rule {self.pattern!r}: algorithm {self.algorithm!r} is neither 'muon' nor 'adamw'")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"rule {self.pattern!r} isn't a regular expression: {error}") from error
        for name, least in (("chunks", 1), ("max_ndim", 0), ("stack_dims", 0)):
            value = getattr(self, name)
            if value is None and name != "chunks":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"rule {self.pattern!r}: {name}={value!r} isn't an integer >= {least}")
        if self.algorithm == "adamw" and (self.chunks != 1 or self.stack_dims is not None):
            raise ValueError(
                f"rule {self.pattern!r}: chunks={self.chunks}, stack_dims={self.stack_dims} say how Muon sees a "
                "parameter, and this rule sends it to AdamW. Leave them out, or send it to 'muon'."
            )

    def matches(self, name: str, ndim: int) -> bool:
        return (self.max_ndim is None or ndim <= self.max_ndim) and re.search(self.pattern, name) is not None


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups for :class:`rowmuon.PeriodicRowMuon`; prints as a table."""

    def __init__(self, groups: Iterable[dict[str, Any]], rows: Sequence[tuple[str, ...]]) -> None:
        super().__init__(groups)
        self.rows = tuple(rows)

    def __str__(self) -> str:
        return table(("parameter", "shape", "algorithm", "chunks", "rule"), self.rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def clean_name(name: str) -> str:
    """A parameter's name without what wrappers add to it; a leading ``module.`` is DDP's."""
    return _WRAPPERS.sub("", name).removeprefix("module.")


def param_groups(
    model: nn.Module,
    rules: Sequence[Rule],
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    require_muon: bool = True,
) -> ParamGroups:
    """Sorts a model's parameters into groups by ordered rules; the first rule that matches decides.

    Args:
        model: its ``named_parameters()`` are sorted; frozen ones too, so that they can be unfrozen later. A tied
            parameter counts once, under the first of its names.
        rules: e.g. ``rowmuon.rules.DIT``.
        muon: settings of the Muon groups (lr, weight_decay, ...).
        adamw: settings of the AdamW groups (lr, betas, ...).
        require_muon: False accepts a model without any Muon parameter.

    Returns:
        The groups, in the order of the model's parameters within each.

    Raises:
        TypeError: ``model`` isn't a module, or ``rules`` aren't Rules.
        ValueError: a parameter that no rule covers, a rule that matches nothing (unless optional), an empty Muon set,
            or chunks that don't divide a parameter's rows; the names are given.

    Example:
        >>> import torch, rowmuon
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.Linear(24, 8))
        >>> rules = [rowmuon.Rule("0.weight", "muon", chunks=3), rowmuon.Rule(".*", "adamw")]
        >>> groups = rowmuon.param_groups(model, rules, muon={"lr": 0.02}, adamw={"lr": 1e-3})
        >>> [(g["algorithm"], len(g["params"])) for g in groups]
        [('muon', 1), ('adamw', 3)]
    """
    rules = _checked(model, rules)
    used: set[int] = set()
    uncovered, rows = [], []
    groups: dict[tuple, list[tuple[str, Tensor]]] = {}
    for raw_name, parameter in model.named_parameters():
        name = clean_name(raw_name)
        found = next((i for i, rule in enumerate(rules) if rule.matches(name, parameter.ndim)), None)
        if found is None:
            uncovered.append(name)
            continue
        used.add(found)
        rule = rules[found]
        if rule.algorithm == "muon":
            _check_muon(name, parameter, rule)
            key: tuple = ("muon", rule.chunks, rule.stack_dims)
        else:
            key = ("adamw", 1, None)
        groups.setdefault(key, []).append((name, parameter))
        shape = "x".join(map(str, parameter.shape)) or "scalar"
        rows.append((name, shape, rule.algorithm, str(key[1]), rule.what or rule.pattern))
    if uncovered:
        raise ValueError(
            f"no rule covers {uncovered}. Add a rule for them; Rule('.*', 'adamw') at the end takes the rest."
        )
    dead = [rule.pattern for i, rule in enumerate(rules) if i not in used and not rule.optional]
    if dead:
        raise ValueError(
            f"rules that match no parameter: {dead}. Correct or remove them, or mark them optional=True."
            + _tied_matches(model, [rules[i] for i in range(len(rules)) if rules[i].pattern in dead])
        )
    if require_muon and not any(key[0] == "muon" for key in groups):
        raise ValueError(
            "no parameter goes to Muon, so this would be AdamW under another name. Check the rules against the "
            f"model's names (the first ones: {[row[0] for row in rows[:5]]}), or say require_muon=False."
        )
    settings = {"muon": dict(muon or {}), "adamw": dict(adamw or {})}
    out = []
    for (algorithm, chunks, stack_dims), params in sorted(groups.items(), key=lambda item: item[0][0] != "muon"):
        group: dict[str, Any] = {"params": params, "algorithm": algorithm, **settings[algorithm]}
        if algorithm == "muon":
            group["chunks"] = chunks
            if stack_dims is not None:
                group["stack_dims"] = stack_dims
        out.append(group)
    return ParamGroups(out, rows)


def _checked(model: object, rules: object) -> Sequence[Rule]:
    """The rules as a sequence.

    Raises:
        TypeError: what was given can't be a model and its rules; it says what to give.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"param_groups takes the model, since rules go by name, not a {type(model).__name__}")
    if isinstance(rules, (Rule, str)) or not isinstance(rules, Iterable):
        raise TypeError(f"rules={rules!r} isn't a sequence: give [Rule(pattern, algorithm), ...] or rowmuon.rules.DIT")
    rules = tuple(rules)
    for rule in rules:
        if not isinstance(rule, Rule):
            raise TypeError(f"rules hold {rule!r}, which isn't a Rule: write Rule(pattern, algorithm)")
    return rules


def _tied_matches(model: nn.Module, dead: Sequence[Rule]) -> str:
    """A sentence for each further name of a tied parameter that one of the dead rules would have matched."""
    first: dict[Tensor, str] = {}
    hints = []
    for raw_name, parameter in model.named_parameters(remove_duplicate=False):
        name = clean_name(raw_name)
        own = first.setdefault(parameter, name)
        if own != name and any(rule.matches(name, parameter.ndim) for rule in dead):
            hints.append(f" {name!r} is tied to {own!r}, and the rule for that name decides.")
    return "".join(hints)


def _check_muon(name: str, parameter: Tensor, rule: Rule) -> None:
    if parameter.ndim < 2:
        raise ValueError(
            f"rule {rule.pattern!r} sends {name!r} of shape {tuple(parameter.shape)} to Muon, which needs a matrix. "
            "Put a rule for vectors before it: Rule('.*', 'adamw', max_ndim=1)."
        )
    stack_dims = rule.stack_dims if rule.stack_dims is not None else default_stack_dims(parameter.ndim)
    if stack_dims >= parameter.ndim - 1:
        raise ValueError(f"rule {rule.pattern!r}: stack_dims={stack_dims} leaves no matrix of {name!r}")
    if rule.chunks < 1 or parameter.shape[stack_dims] % rule.chunks:
        raise ValueError(
            f"rule {rule.pattern!r}: chunks={rule.chunks} doesn't divide the {parameter.shape[stack_dims]} rows of "
            f"{name!r} {tuple(parameter.shape)}"
        )


def default_stack_dims(ndim: int) -> int:
    """3-D parameters are stacks of matrices (experts); others are one matrix (a convolution's is out x in*kh*kw)."""
    return 1 if ndim == 3 else 0
