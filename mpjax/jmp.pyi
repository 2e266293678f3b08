"""The public names of `mpjax.jmp`, and where they come from."""

import typing

from ._src.core.frameworks.jmp import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    Policy,
    StaticLossScale,
    all_finite,
    cast_to_full,
    cast_to_half,
    get_policy,
    half_dtype,
    select_tree,
)

__version__: str
# Not public in jmp either, and used by programs that read its tables of names.
dtype_to_names: dict[typing.Any, tuple[str, ...]]
name_to_dtype: dict[str, typing.Any]

def parse_dtype(value: str) -> typing.Any: ...

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "Policy",
    "StaticLossScale",
    "all_finite",
    "cast_to_full",
    "cast_to_half",
    "get_policy",
    "half_dtype",
    "select_tree",
]
