"""The fields of a policy: which values they take, and the checks of what is given."""

import numbers
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import FLOAT16, HALVES, canonical
from mpjax._src.core.base.errors import LONGEST, brief, did_you_mean
from mpjax._src.core.base.operations import primitives_of
from mpjax._src.core.base.rules import NO_HALF_FORM, PROGRAM, rule_of
from mpjax._src.core.policy.words import as_json

OP_LISTS = ("half_ops", "full_ops", "follow_ops")
FLAGS = ("master_weights", "fused_attention", "chunked_loss")


class Choice(NamedTuple):
    """A setting with a few valid values. The first value is the default.

    Attributes:
        values: The valid values.
        valid: The end of the error message: the valid values and what each one means.
        numbers: Whether a number from 0 to 1 is valid too; 1 means the first value.
    """

    values: tuple[str, ...]
    valid: str
    numbers: bool = False


_HALF_IS = "'half' means the policy's compute dtype."
CHOICES = {
    "casting": Choice(
        ("boundary", "op"),
        "'boundary' (cast arguments and results once) or 'op' (choose the dtype of each "
        "operation).",
    ),
    "storage": Choice(
        ("fast", "lean", "8bit"),
        "'fast' (move few bytes), 'lean' (store few bytes for the backward pass), '8bit' (store "
        "8-bit codes of them), or a number from 0 (store the fewest bytes) to 1 (as 'fast').",
        numbers=True,
    ),
    "gather": Choice(
        ("half", "float32"),
        "'half' or 'float32', the dtype in which devices gather parameters. " + _HALF_IS,
    ),
    "reduce": Choice(
        ("float32", "half"),
        "'half' or 'float32', the dtype in which devices sum gradients. " + _HALF_IS,
    ),
    "masters": Choice(
        ("float32", "split", "split8"),
        "'float32' (a float32 master of each 16-bit parameter), 'split' (the 16 bits that a "
        "bfloat16 parameter lacks) or 'split8' (8 of these bits).",
    ),
    "rounding": Choice(
        ("nearest", "stochastic", "kahan"),
        "'nearest' (small updates are lost), 'stochastic' or 'kahan' (compensated summation).",
    ),
    "moments": Choice(
        ("float32", "8bit"), "'float32' or '8bit' (8-bit codes, with a scale for each block)."
    ),
}


def canonical_fields(policy: Any) -> dict[str, Any]:
    """Returns the fields in canonical form. Raises a ValueError for a field that is invalid."""
    fields: dict[str, Any] = {
        name: canonical(getattr(policy, name), name)
        for name in ("param_dtype", "compute_dtype", "output_dtype")
    }
    overrides: dict[str, np.dtype] = {}
    for pattern, dtype in pairs_of(policy.overrides):
        chosen = canonical(dtype, f"overrides[{brief(pattern)}]")
        overrides.setdefault(_pattern(pattern, "overrides"), chosen)  # the first match wins
    fields["overrides"] = tuple(overrides.items())
    patterns = strings_of(policy.keep_full, "keep_full")
    fields["keep_full"] = tuple(_pattern(p, "keep_full") for p in patterns)
    fields |= _choices(policy)
    _check_kept(policy, fields)
    for names in OP_LISTS:
        fields[names] = tuple(dict.fromkeys(strings_of(getattr(policy, names), names)))
    _check_primitives({names: fields[names] for names in OP_LISTS})
    return fields


def _choices(policy: Any) -> dict[str, str | float]:
    """Returns the settings of `CHOICES` in canonical form, and refuses those that are invalid."""
    for name in FLAGS:
        if not isinstance(getattr(policy, name), bool):
            raise ValueError(f"{name}={brief(getattr(policy, name))} must be True or False.")
    found: dict[str, str | float] = {}
    for name, row in CHOICES.items():
        value = getattr(policy, name)
        number = _share(value) if row.numbers else None
        if number is not None:
            # Policies that mean the same have to be equal.
            found[name] = row.values[0] if number == 1 else number
        elif isinstance(value, str) and value in row.values:
            found[name] = value
        else:
            meant = did_you_mean(value, row.values)
            raise ValueError(f"{name}={brief(value)} must be {row.valid}{meant}")
    return found


def _share(value: Any) -> float | None:
    """Returns a number from 0 to 1, which may be written as a string; None for all else."""
    # A bool is a Real, too, but storage=True means nothing.
    if isinstance(value, bool) or not isinstance(value, numbers.Real | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if 0 <= number <= 1 else None


def _check_primitives(lists: dict[str, tuple[str, ...]]) -> None:
    """Refuses what the lists of operations name if it is no primitive, or one without a dtype."""
    # Of a primitive in two lists this has the last one, so the first one does not match it below.
    listed = {name: names for names, members in lists.items() for name in members}
    for names in OP_LISTS:
        for name in lists[names]:
            if listed[name] != names:
                raise ValueError(
                    f"{listed[name]}: {brief(name)} is also in {names}. Name a primitive in one "
                    "list only."
                )
    unknown = set(listed) - _jax.primitive_names() if listed else set()
    for name in sorted(unknown, key=str):
        hint = primitives_of(name) or did_you_mean(name, _jax.primitive_names())
        raise ValueError(
            f"{listed[name]}: JAX has no primitive named {brief(name)}.{hint} Choose one of the "
            "names that jax.make_jaxpr prints, such as 'dot_general', 'exp' or 'reduce_sum'."
        )
    for name in sorted(name for name in listed if rule_of(name).need == PROGRAM):
        raise ValueError(
            f"{listed[name]}: {brief(name)} has no compute dtype: it is a call, a loop, "
            "a branch, a kernel or a cast that the function writes itself. Name the operations "
            "inside it, or use an override or mpjax.precision for a part of the function."
        )
    for name in sorted(name for name in lists["half_ops"] if NO_HALF_FORM in rule_of(name).traits):
        raise ValueError(f"half_ops: JAX cannot compute {brief(name)} in 16 bits. Remove it.")


def _check_kept(policy: Any, fields: dict[str, Any]) -> None:
    """Refuses settings of masters and rounding that contradict the rest of the policy."""
    stored = fields["param_dtype"]
    # These settings have no effect on others, of which `training.levels` warns.
    if stored not in HALVES:
        return
    if policy.masters != CHOICES["masters"].values[0]:
        if not policy.master_weights:
            raise ValueError(
                f"masters={policy.masters!r}: the policy has no master weights. Add "
                "master_weights=true or use an O2 policy. To train without master weights, use "
                "rounding=stochastic instead."
            )
        if stored == FLOAT16:
            raise ValueError(
                f"masters={policy.masters!r} needs bfloat16 parameters, but they are stored in "
                "float16. A master is split into its first 16 bits, which are a bfloat16 number, "
                "and the remaining bits. Store parameters in bfloat16, or use masters=float32."
            )
    if policy.rounding != CHOICES["rounding"].values[0] and policy.master_weights:
        raise ValueError(
            f"rounding={policy.rounding!r} is for 16-bit parameters without master weights, but "
            "the policy keeps master weights, which lose no update. Add master_weights=false, use "
            "an O3 policy, or leave rounding=nearest."
        )


def strings_of(value: Any, argument: str) -> tuple[str, ...]:
    """Returns strings, and the names of primitives."""
    strings = value if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    strings = tuple(getattr(string, "name", string) for string in strings)
    if all(isinstance(string, str) for string in strings):
        return strings
    hint = ""
    if argument.removesuffix("_ops") in ("half", "full", "follow"):
        names = (getattr(string, "__name__", "") for string in strings)  # such as jnp.matmul
        hint = "".join(map(primitives_of, names))
        hint += " jax.make_jaxpr(fun)(*args) prints the primitives of a function."
    raise ValueError(f"{argument}={brief(value)} must be a sequence of strings.{hint}")


def pairs_of(overrides: Any) -> tuple[tuple[Any, Any], ...]:
    pairs = overrides.items() if isinstance(overrides, Mapping) else overrides
    try:
        return tuple((pattern, dtype) for pattern, dtype in pairs)
    except (TypeError, ValueError):
        text = overrides if isinstance(overrides, str) and len(overrides) < LONGEST else ""
        meant = f" Did you mean {as_json(text, True)}?" if re.search("[:=]", text) else ""
        raise ValueError(
            f"overrides={brief(overrides)} must map patterns to dtypes, such as "
            f'{{"*/head/*": "float32"}}.{meant}'
        ) from None


def _pattern(pattern: Any, argument: str) -> str:
    if isinstance(pattern, str) and pattern:
        return pattern
    raise ValueError(
        f"{argument}: the pattern {brief(pattern)} must be a non-empty string, such as '*/head/*'."
    )
