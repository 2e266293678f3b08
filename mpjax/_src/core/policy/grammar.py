"""The grammar of policies: reads strings, and the settings of configuration files."""

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jmp
import numpy as np

from mpjax._src.core.base import dtypes
from mpjax._src.core.base.errors import LONGEST, brief, did_you_mean, misplaced
from mpjax._src.core.policy.fields import CHOICES, FLAGS, pairs_of
from mpjax._src.core.policy.policy import (
    ALIASES,
    KEYS,
    LEVELS,
    NAMES,
    FoundPolicy,
    Policy,
    PolicyLike,
    of_level,
)
from mpjax._src.core.policy.words import NAMES_ELSEWHERE, key_elsewhere, rewritten


def get_policy(x: "PolicyLike", half: dtypes.DTypeLike | None = None, **settings: Any) -> Policy:
    """Returns the policy that a string, or a mapping from a configuration file, describes.

    Spaces and letter case do not matter. A string is one of these:

    - The form of jmp: "p=f32,c=bf16,o=f32" or "params=float32, compute=bf16". Parameters default
      to float32, the compute dtype to that of the parameters, and the output dtype to the compute
      dtype. A single dtype ("bf16", "half") represents all three.
    - A name of Keras: "float32", "mixed_float16", "mixed_bfloat16".
    - A name of Lightning: "16-mixed" and "bf16-mixed" (O1), "16-true" and "bf16-true" (O3),
      "32-true" (O0).
    - A level of Apex, Paddle and MindSpore: "O0" (all float32), "O1" (float32 parameters, op-level
      casting), "O2" (16-bit parameters except in norm layers, float32 master weights and outputs),
      "O3" (everything 16-bit, no master weights). A suffix names the 16-bit dtype: "O2:float16".

    Settings may follow, separated by commas: ``master_weights=false``, ``casting=op``,
    ``storage=lean``, ``storage=0.4``, ``fused_attention=true``, ``chunked_loss=true``,
    ``gather=float32``, ``reduce=half``, ``masters=split``, ``rounding=stochastic``,
    ``moments=8bit``, ``overrides={"*norm*": "f32"}``, ``half_ops=["exp"]``. Mappings and lists are
    written in JSON.

    Args:
        x: The string. A `Policy` is returned as it is, and so is that of a report that found one
            (`debug.tune`, `debug.calibrate`); a `jmp.Policy` is converted. Configuration
            files may also have a mapping of settings, ``{"policy": "mixed_bfloat16", "storage":
            "lean"}``, and a list of what stands between the commas, mappings included.
        half: The dtype that "half" and a level without a suffix mean: float16 or bfloat16. If
            None, the 16-bit dtype that suits the default device (`half_dtype`): bfloat16 on TPUs,
            CPUs and NVIDIA GPUs of compute capability 8.0 or more, float16 on older NVIDIA GPUs.
            In jmp, by contrast, "half" is float16 everywhere except on TPUs.

        **settings: Further settings, by the keys of the string, as in ``storage="lean"``.

    Returns:
        A `Policy`. ``get_policy(str(p)) == p`` for every policy ``p``.

    Raises:
        TypeError: If ``x`` is no string, policy, mapping or list.
        ValueError: If the string does not follow the grammar, or a setting is invalid. The message
            says where.

    Example:
        >>> import mpjax
        >>> mpjax.get_policy("O1:float16") == mpjax.get_policy("mixed_float16")
        True
        >>> mpjax.get_policy("params=float32, compute=bf16")
        Policy(param_dtype='float32', compute_dtype='bfloat16', output_dtype='bfloat16')
        >>> str(mpjax.get_policy({"policy": "O2:float16", "storage": "lean"}, moments="8bit"))
        'O2:float16,storage=lean,moments=8bit'
    """
    half = None if half is None else _as_half(half)
    x = _found(x)
    if isinstance(x, jmp.Policy):
        base = x if isinstance(x, Policy) else Policy(**vars(x))
        return _refined(base, _added({}, settings.items(), x), x, half) if settings else base
    text, pairs = _text_of(x)
    pairs += settings.items()
    try:
        return _parsed(text, pairs, x, half)
    except ValueError as error:
        meant = _meant(text)
        if not meant:
            raise
        # One hint is enough: the whole string that was meant.
        said = re.sub(r" Did you mean .*?\?", "", str(error))
    raise ValueError(
        f"{said} Did you mean {meant!r}? Commas separate settings; lists and mappings are JSON."
    )


def _is_mapping(x: Any) -> bool:  # that of ml_collections is no `Mapping`
    fits = isinstance(x, Mapping) or (hasattr(x, "items") and hasattr(x, "keys"))
    return fits and not isinstance(x, type)


def _found(x: Any) -> Any:
    """Returns the policy that a report found, or else what was given."""
    return x.policy if isinstance(x, FoundPolicy) else x


def _text_of(x: Any) -> tuple[str | None, list[tuple[Any, Any]]]:
    """Returns the string of a policy, None if there is none, and its further settings."""
    # A named tuple, such as an optimizer, is no list of settings.
    listed = isinstance(x, Sequence) and not isinstance(x, str) and not hasattr(x, "_fields")
    words, pairs = [], []
    for part in x if listed else [x]:
        for key, value in part.items() if _is_mapping(part) else [("policy", part)]:
            if key not in ("policy", "name"):
                pairs.append((key, value))
            elif isinstance(value, str):
                words.append(value)
            else:
                raise TypeError(
                    f"policy={brief(x)} must be a string such as 'mixed_bfloat16', an mpjax.Policy "
                    f"or a jmp.Policy, or a mapping or list of settings.{_no_string(value)}"
                )
    return None if pairs and not words else ",".join(words), pairs


def _no_string(value: Any) -> str:
    """Says what a value is that was given in the place of a policy, and what to write."""
    if isinstance(value, bool | int):
        return " YAML reads no and off as False, and 32 as a number. Put quotes around them."
    if value is None:
        return " To leave everything in float32, write 'float32'."
    name = getattr(getattr(value, "dtype", value), "name", "")
    if name in dtypes.BY_NAME and not getattr(value, "shape", ()):
        mixed = f"mixed_{name}" if dtypes.BY_NAME[name] in dtypes.HALVES else name
        return f" Did you mean {mixed!r}? To use one dtype everywhere, give its name: {name!r}."
    return misplaced(value)


def _meant(text: str | None) -> str:
    """Returns the valid string that an invalid one probably means, or ""."""
    valid = {name: row.values[1:] for name, row in CHOICES.items()}
    valid |= {f"{name}=true": (name,) for name in FLAGS}
    meant = rewritten(text, KEYS, valid) if text and len(text) < LONGEST else ""
    return meant if meant != text and _is_valid(meant) and not _is_valid(text) else ""


def _is_valid(text: str | None) -> bool:
    try:
        return bool(_parsed(text, [], text, None))
    except ValueError:
        return False


def _parsed(text: str | None, pairs: Iterable[tuple[Any, Any]], x: Any, half: Any) -> Policy:
    name, values = ("", {}) if text is None else _split(text)
    values = _added(values, pairs, x)
    if name:
        return _refined(_named(name, text or name, half), values, x, half)
    # Before the defaults are filled in, which are dtypes too.
    named = any(field.endswith("_dtype") for field in values)
    values.setdefault("param_dtype", dtypes.FLOAT32)
    values.setdefault("compute_dtype", values["param_dtype"])
    values.setdefault("output_dtype", values["compute_dtype"])
    policy = _refined(Policy(dtypes.FLOAT32, dtypes.FLOAT32, dtypes.FLOAT32), values, x, half)
    if not named:
        raise ValueError(
            f"policy={brief(x)} has no name and no dtype, so all would be float32. Begin with a "
            "name, as in 'mixed_bfloat16,storage=lean'."
        )
    return policy


def _added(values: dict[str, Any], pairs: Iterable[tuple[Any, Any]], x: Any) -> dict[str, Any]:
    """Returns values by field with those of further keys."""
    for key, value in pairs:
        values[_field(key, x, values)] = value
    return values


def _field(key: Any, x: Any, values: Collection[str]) -> str:
    """Returns the field of a key that is none of those given already."""
    field = KEYS.get(str(key).strip().lower())
    if field is None:
        raise ValueError(
            f"policy={brief(x)}: {brief(key)} is not a key of a policy. {_grammar(str(key))}"
            + (" The name of a policy belongs under 'policy'." if _is_mapping(x) else "")
        )
    if field in values:
        raise ValueError(f"policy={brief(x)} sets {brief(key)} twice. Set it once.")
    return field


def _refined(base: Policy, values: dict[str, Any], x: Any, half: np.dtype | None) -> Policy:
    """Returns a policy with other values of some fields."""
    of = f"policy={brief(x)}: "
    # Here, because `Policy` itself takes "half" for the dtype of the device, not for the argument.
    resolved: dict[str, Any] = {
        field: dtypes.canonical(value, of + field, half)
        for field, value in values.items()
        if field.endswith("_dtype")
    }
    if "overrides" in values:
        resolved["overrides"] = tuple(
            (pattern, dtypes.canonical(dtype, f"{of}overrides[{brief(pattern)}]", half))
            for pattern, dtype in pairs_of(values["overrides"])
        )
    return dataclasses.replace(base, **{**values, **resolved})


def _half_of_suffix(suffix: str, text: str, half: np.dtype | None) -> np.dtype:
    asked = _as_half(suffix.strip(), f"policy={brief(text)}: the suffix")
    if half is not None and half != asked:
        raise ValueError(
            f"policy={brief(text)} asks for {asked}, but half={half.name!r}. Remove the suffix or "
            "the argument half."
        )
    return asked


def _unknown_name(name: str, text: str) -> ValueError:
    choices = [*NAMES, *LEVELS, *ALIASES, *dtypes.BY_NAME, "half"]
    meant = _mixed(name) or NAMES_ELSEWHERE.get(name.lower())
    hint = dtypes.elsewhere(name) or key_elsewhere(name) or did_you_mean(name, choices)
    hint = f" Did you mean {meant!r}?" if meant else hint
    if name.lower() in ("auto", "default", "best"):
        hint = " mpjax.recommend_policy() returns the one that suits this device."
    return ValueError(
        f"Unknown policy {brief(name)} (policy={brief(text)}).{hint} Choose one of 'float32', "
        "'mixed_float16', 'mixed_bfloat16', the levels 'O0' to 'O3' (with a suffix as in "
        "'O2:float16'), a dtype such as 'bf16', and jmp's form 'p=f32,c=bf16,o=f32'."
    )


def _named(name: str, text: str, half: np.dtype | None) -> Policy:
    """Returns the policy of a level, a name of others or a dtype."""
    by_fold = {key.lower(): key for key in (*LEVELS, *ALIASES)}
    level, colon, suffix = (ALIASES.get(name.lower()) or name).partition(":")
    level = by_fold.get(level.strip().lower(), "")
    if level in LEVELS:
        return of_level(level, _half_of_suffix(suffix, text, half) if colon else half)
    if not colon and (name.lower() in dtypes.BY_NAME or name.lower() == "half"):
        dtype = dtypes.canonical(name, "policy", half)
        return Policy(dtype, dtype, dtype)
    raise _unknown_name(name, text)


# Words that represent mixed precision in the names of others.
MIXED = {"mixed", "amp", "autocast"}


def _mixed(name: str) -> str:
    """Returns the mixed policy that a name such as "float16 mixed" or "amp_bf16" means, or ""."""
    words = {*re.findall(r"[a-z0-9]+", name.lower())}
    halves = [dtypes.BY_NAME[word] for word in words if dtypes.BY_NAME.get(word) in dtypes.HALVES]
    rest = words - {*dtypes.BY_NAME, *MIXED, "precision", "16"}
    # Any other word may mean something else.
    if rest or len(halves) > 1 or not words & MIXED:
        return ""
    half = dtypes.FLOAT16 if "16" in words else dtypes.default_half()
    return f"mixed_{(halves or [half])[0]}"


def means_another_policy(x: Any) -> bool:
    """Returns whether a policy is a name that elsewhere means mixed precision, such as "bf16".

    For Hugging Face's ``mixed_precision=`` and PyTorch's autocast it is what matmuls run in; for
    jmp and mpjax it is the dtype of everything, parameters included.
    """
    text = None if isinstance(_found(x), jmp.Policy) else _text_of(x)[0]
    word = _split(text)[0].lower() if text else ""
    return word == "half" or dtypes.BY_NAME.get(word) in dtypes.HALVES


def _as_half(dtype: dtypes.DTypeLike, argument: str = "half") -> np.dtype:
    canonical_dtype = dtypes.canonical(dtype, argument)
    if canonical_dtype not in dtypes.HALVES:
        raise ValueError(
            f"{argument}={brief(dtype)} is not a 16-bit dtype. Choose 'float16' or 'bfloat16'."
        )
    return canonical_dtype


_KEY = re.compile(r"\s*(\w+)\s*=\s*")
_COMMA = re.compile(r"\s*(,|$)")


def _split(text: str) -> tuple[str, dict[str, Any]]:
    """Splits "name, key=value, ..." into the name ("" if there is none) and the values by field."""
    name, position = "", 0
    values: dict[str, Any] = {}
    while position < len(text) or not (name or values):
        key = _KEY.match(text, position)
        if key is None:  # a name, which stands first, and alone or before a comma
            name, end = _word(text, position)
            if not (position or name):
                raise ValueError(
                    f"policy={brief(text)} is empty. Use a name such as {', '.join(NAMES)}, "
                    "or jmp's form 'p=f32,c=bf16,o=f32'."
                )
            if position:
                raise ValueError(
                    f"policy={brief(text)}: expected key=value at {brief(text[position:])}. "
                    f"{_grammar(name)}"
                )
            position = end
        else:
            field = _field(key[1], text, values)
            values[field], position = _value(text, key.end())
        comma = _COMMA.match(text, position)
        if comma is None:
            raise ValueError(f"policy={brief(text)}: expected a comma at {brief(text[position:])}.")
        if comma[1] and comma.end() == len(text):
            raise ValueError(f"policy={brief(text)} ends with a comma. Remove it.")
        position = comma.end()
    return name, values


def _value(text: str, position: int) -> tuple[Any, int]:
    """Reads one value: JSON if it begins with a bracket, else the text up to a comma."""
    if text[position : position + 1] in ("{", "["):
        try:
            # Pairs, not a dict: their order matters.
            decoder = json.JSONDecoder(object_pairs_hook=tuple)
            return decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:  # brackets too deep, digits too many
            raise ValueError(
                f"policy={brief(text)}: bad JSON at {brief(text[position:])}: {error}."
            ) from None
    word, end = _word(text, position)
    return {"true": True, "false": False}.get(word.lower(), word), end


def _word(text: str, position: int) -> tuple[str, int]:
    """Returns the text up to the next comma, and the position of the comma."""
    word = text[position:].partition(",")[0]
    return word.strip(), position + len(word)


def _grammar(word: str) -> str:
    valid = ", ".join(key for key in KEYS if len(key) > 1)
    return f"Choose one of {valid}.{key_elsewhere(word) or did_you_mean(word, KEYS)}"
