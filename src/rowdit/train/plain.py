"""Configs to and from plain data: JSON-able dicts, dotted keys, what differs between two.

A key that doesn't exist, a missing one or a value of the wrong type is an error that names the key, the value and the
nearest valid choice.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Collection
from typing import Any, Literal


class ConfigError(ValueError):
    """A config that can't be run; the message names the key, the value and the way out."""


def to_dict(config: Any) -> dict[str, Any]:
    """A config as JSON-able plain data: dicts, lists, numbers, strings, booleans, None."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def flatten(config: Any) -> dict[str, Any]:
    """`{"train.steps": 1000, ...}`: one dotted key a leaf, for showing and comparing configs."""

    def walk(value: Any, path: str) -> typing.Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            for key, item in value.items():
                yield from walk(item, f"{path}.{key}" if path else key)
        else:
            yield path, value

    return dict(walk(config if isinstance(config, dict) else to_dict(config), ""))


def differences(old: Any, new: Any, ignore: Collection[str] = ()) -> list[str]:
    """Lines `key: old -> new` for every leaf in which two configs (or their dicts) differ, but for those to ignore."""
    a, b = flatten(old), flatten(new)
    absent = object()

    def show(value: Any) -> str:
        return "(absent)" if value is absent else json.dumps(value)

    keys = sorted({*a, *b}.difference(ignore))
    pairs = [(key, a.get(key, absent), b.get(key, absent)) for key in keys]
    return [f"{key}: {show(x)} -> {show(y)}" for key, x, y in pairs if x != y]


def from_dict(cls: type, data: Any, path: str = "") -> Any:
    """Builds a config class from plain data, checking every key and value.

    Raises:
        ConfigError: for an unknown key (naming the nearest one), a missing one, a wrong type, a value out of range.
    """
    where = path or cls.__name__
    if not isinstance(data, dict):
        raise ConfigError(f"{where} = {data!r}: must be a table of keys")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    prefix = f"{path}." if path else ""
    for key in data:
        if key not in fields:
            raise ConfigError(f"unknown key {prefix}{key}{nearest(str(key), fields)}")
    for name, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and name not in data:
            raise ConfigError(f"missing key {prefix}{name}")
    values = {key: _convert(hints[key], value, prefix + key) for key, value in data.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(f"{prefix}{error}" if path else str(error)) from None


def nearest(name: str, choices: typing.Iterable[str]) -> str:
    """`"; did you mean X?"`, or the whole list of choices when none is near."""
    choices = list(choices)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; there are: {', '.join(choices)}"


def _convert(hint: Any, value: Any, path: str) -> Any:
    """`value` as what the annotation `hint` says, or a `ConfigError` that names `path`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, path)
    if origin in (typing.Union, types.UnionType):
        for option in args:
            try:
                return _convert(option, value, path)
            except ConfigError:
                continue
    elif origin is Literal:
        if value in args:
            return value
        raise ConfigError(f"{path} = {value!r}: unknown choice{nearest(str(value), map(str, args))}")
    elif origin is tuple and isinstance(value, (list, tuple)):
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_convert(args[0], item, f"{path}[{i}]") for i, item in enumerate(value))
        if len(args) == len(value):
            return tuple(
                _convert(arg, item, f"{path}[{i}]") for i, (arg, item) in enumerate(zip(args, value, strict=True))
            )
    elif origin is dict and isinstance(value, dict):
        return {key: _convert(args[1], item, f"{path}.{key}") for key, item in value.items()}
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif hint is type(None) and value is None:
        return None
    elif isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(f"{path} = {value!r}: must be {_readable(hint)}")


def _readable(hint: Any) -> str:
    if hint is type(None):
        return "null"
    if isinstance(hint, type) and not typing.get_args(hint):
        return {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a string"}.get(
            hint.__name__, hint.__name__
        )
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_readable(arg) for arg in typing.get_args(hint))
    return "a list like " + str(hint).replace("typing.", "")
