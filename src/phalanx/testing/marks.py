"""The arguments of the pytest mark `ranks`, checked when tests are collected."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from phalanx.testing.options import Options

__all__ = ["read_ranks"]

_OPTIONS = [field.name for field in fields(Options) if field.name not in ("function", "ranks")]
_KNOWN = ("sizes", "seeds", *_OPTIONS)


def read_ranks(args: Sequence[Any], given: Mapping[str, Any]) -> list[int]:
    """The sizes of `ranks(*args, **given)`; a ValueError says what is wrong with it."""
    for name in given:
        if name not in _KNOWN:
            close = difflib.get_close_matches(name, _KNOWN, 1)
            meant = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"expected options among {', '.join(_KNOWN)}, got {name!r}{meant}")
    sizes = _read_sizes(args, given)
    num_seeds = given.get("seeds", 1)
    if type(num_seeds) is not int or num_seeds < 1:
        raise ValueError(f"expected a number of seeds from 1 on, got {num_seeds!r}")
    if num_seeds > 1 and given.get("seed") is not None:
        raise ValueError("expected seeds or a seed, got both")
    options = {name: value for name, value in given.items() if name in _OPTIONS}
    if num_seeds > 1:
        options["seed"] = 0
    for size in sizes:
        try:
            Options(_any_function, size, **options)
        except TypeError as error:
            raise ValueError(str(error)) from None
    return sizes


def _any_function(rank: int, world: Any) -> None:
    """Stands for the test."""


def _read_sizes(args: Sequence[Any], given: Mapping[str, Any]) -> list[int]:
    values = [*args, *([given["sizes"]] if "sizes" in given else [])]
    if len(values) != 1 or isinstance(values[0], str):
        shown = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in given.items())])
        raise ValueError(f"expected ranks(number) or ranks([number, ...]), got ranks({shown})")
    (sizes,) = values
    sizes = list(sizes) if isinstance(sizes, (list, tuple, range)) else [sizes]
    if not sizes:
        raise ValueError("expected one number of ranks or more, got an empty list")
    return sizes
