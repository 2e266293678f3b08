"""Policies: which dtype parameters are stored in, computed in, and handed out in.

A policy is data. The named ones are the rows of `LEVELS` and `NAMES`; `get_policy` reads the string
grammar, `str(policy)` writes it. What the casts do to a tree is in `trees`.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jmp
import numpy as np

from mpjax._src import _jax
from mpjax._src.dtypes import (
    BY_NAME,
    FLOAT16,
    FLOAT32,
    HALVES,
    DTypeLike,
    canonical,
    default_half,
    short_name,
)
from mpjax._src.errors import brief, did_you_mean
from mpjax._src.patterns import matches, nearest_paths, path_of, paths
from mpjax._src.rules import NO_HALF_FORM, PROGRAM, rule_of
from mpjax._src.trees import cast, cast_leaf

T = TypeVar("T")

# The parameters of normalization layers, as Flax, Equinox, Haiku and Torch users name them.
NORM_PATTERNS = (
    *("*norm*", "*/bn/*", "*/ln/*", "*/gn/*"),
    *("*/bn[0-9_]*", "*/ln[0-9_]*", "*/gn[0-9_]*", "*_bn/*", "*_ln/*", "*_gn/*"),
)

OP_LISTS = ("half_ops", "full_ops", "follow_ops")


class Choice(NamedTuple):
    """A setting with few legal values; the first is the default."""

    values: tuple[str, ...]
    legal: str


_HALF_IS = "Which half is the policy's compute dtype."
CHOICES = {
    "casting": Choice(
        ("boundary", "op"),
        "'boundary' (cast parameters and inputs once) or 'op' (operation by operation).",
    ),
    "storage": Choice(
        ("fast", "lean"),
        "'fast' (few bytes moved) or 'lean' (few bytes kept for the backward pass).",
    ),
    "gather": Choice(
        ("half", "float32"),
        "'half' or 'float32', what devices gather parameters in. " + _HALF_IS,
    ),
    "reduce": Choice(
        ("float32", "half"),
        "'half' or 'float32', what devices sum gradients in. " + _HALF_IS,
    ),
    "masters": Choice(
        ("float32", "split", "split8"),
        "'float32' (a master of each half parameter), 'split' (the 16 bits that a bfloat16 "
        "parameter lacks) or 'split8' (8 of them).",
    ),
    "rounding": Choice(
        ("nearest", "stochastic", "kahan"),
        "'nearest' (small updates are lost), 'stochastic' or 'kahan' (compensated summation).",
    ),
    "moments": Choice(
        ("float32", "8bit"),
        "'float32' or '8bit' (codes, with a scale for each block).",
    ),
}


@dataclasses.dataclass(frozen=True, repr=False)
class Policy(jmp.Policy):
    """How a program uses precision; frozen, hashable, and a `jmp.Policy`.

    Attributes:
        param_dtype: What floating parameters are stored in.
        compute_dtype: What the forward and backward passes compute in.
        output_dtype: What floating results are handed out in.
        overrides: ``(pattern, dtype)`` pairs that decide storage and compute dtype of the
            parameters whose path matches; the first match wins. See `override`.
        keep_full: Patterns of parameters *stored* in float32 whatever ``param_dtype`` says, such
            as O2's normalization layers. Unlike overrides they may match nothing, and leave the
            compute dtype alone.
        master_weights: Whether training keeps a float32 copy of half parameters in the optimizer
            state.
        casting: "op" where the dtype is chosen operation by operation (O1, O2), "boundary" where
            parameters and inputs are cast once, as jmp does.
        half_ops: Names of JAX primitives that compute in half, for op-level casting.
        full_ops: Names of JAX primitives that compute in float32.
        follow_ops: Names of JAX primitives that follow their inputs.
        storage: What the backward pass is given, for op-level casting: "fast" or "lean". See
            `with_storage`.
        fused_attention: Whether attention that is written by hand becomes the fused kernel of the
            device, for op-level casting. See `with_fused_attention`.
        gather: What devices gather parameters in, "half" or "float32", for op-level casting. See
            `with_communication`.
        reduce: What devices sum gradients of parameters in, "float32" or "half".
        masters: How masters are kept, "float32", "split" or "split8". See `with_optimizer_state`.
        rounding: How half parameters without masters are rounded: "nearest", "stochastic" or
            "kahan".
        moments: What the optimizer's moments are kept in, "float32" or "8bit".

    Raises:
        ValueError: If a dtype, a pattern, the name of a primitive or a setting is not legal, or two
            of them contradict each other.

    Example:
        >>> import mpjax
        >>> policy = mpjax.Policy("float32", "bfloat16", "float32")
        >>> str(policy.override({"*/head/*": "float32"}))
        'p=f32,c=bf16,o=f32,overrides={"*/head/*": "f32"}'
    """

    param_dtype: np.dtype
    compute_dtype: np.dtype
    output_dtype: np.dtype
    overrides: tuple[tuple[str, np.dtype], ...] = ()
    keep_full: tuple[str, ...] = ()
    master_weights: bool = True
    casting: str = "boundary"
    half_ops: tuple[str, ...] = ()
    full_ops: tuple[str, ...] = ()
    follow_ops: tuple[str, ...] = ()
    storage: str = "fast"
    fused_attention: bool = False
    gather: str = "half"
    reduce: str = "float32"
    masters: str = "float32"
    rounding: str = "nearest"
    moments: str = "float32"

    def __post_init__(self):
        for name, value in _canonical_fields(self).items():
            object.__setattr__(self, name, value)

    def override(self, patterns: Mapping[str, DTypeLike]) -> "Policy":
        """Returns this policy with dtypes of its own for the parameters that patterns match.

        Paths are joined with "/" from the root of the parameter tree ("Dense_0/kernel"). Patterns
        are globs, case-insensitive; ``*`` crosses "/", and a leading ``*/`` also matches at the
        root. The first match wins, and a later call goes before earlier ones.

        Args:
            patterns: From pattern to dtype.

        Returns:
            A new policy.

        Raises:
            ValueError: If a dtype is not legal. A pattern that matches no parameter is an error
                once the parameters are seen: in ``init`` or `check_overrides`.

        Example:
            >>> import mpjax
            >>> policy = mpjax.get_policy("bfloat16").override({"*norm*": "float32"})
            >>> params = {"LayerNorm_0": {"scale": np.ones(2, np.float32)}}
            >>> policy.cast_to_compute(params)["LayerNorm_0"]["scale"].dtype
            dtype('float32')
        """
        return dataclasses.replace(self, overrides=(*_pairs(patterns), *self.overrides))

    def with_ops(
        self,
        half: str | Iterable[str] = (),
        full: str | Iterable[str] = (),
        follow: str | Iterable[str] = (),
    ) -> "Policy":
        """Returns this policy with primitives added to its op lists, for op-level casting.

        Args:
            half: Names of JAX primitives to compute in the half dtype.
            full: Names of JAX primitives to compute in float32.
            follow: Names of JAX primitives to compute in the dtype of their inputs.

        Returns:
            A new policy.

        Raises:
            ValueError: If JAX has no primitive of a name, or a name is in two lists.

        Example:
            >>> import mpjax
            >>> mpjax.get_policy("mixed_bfloat16").with_ops(full=("tanh",)).full_ops
            ('tanh',)
        """

        return dataclasses.replace(
            self,
            half_ops=(*self.half_ops, *_strings(half, "half")),
            full_ops=(*self.full_ops, *_strings(full, "full")),
            follow_ops=(*self.follow_ops, *_strings(follow, "follow")),
        )

    def with_storage(self, storage: str) -> "Policy":
        """Returns this policy with another choice of what is kept for the backward pass.

        For op-level casting. It changes memory and time, and no result but by rounding.

        Args:
            storage: "fast", the default: as few bytes as possible are moved. "lean": as few as
                possible are kept from the forward to the backward pass, which then computes
                elementwise work again, across norms and activations; no matmul, convolution or
                reduction runs twice. What you wrap in `jax.checkpoint` yourself stays as it is.

        Returns:
            A new policy.

        Raises:
            ValueError: If ``storage`` is neither.

        Example:
            >>> import mpjax
            >>> str(mpjax.get_policy("mixed_bfloat16").with_storage("lean"))
            'mixed_bfloat16,storage=lean'
        """
        return dataclasses.replace(self, storage=storage)

    def with_fused_attention(self, fused_attention: bool = True) -> "Policy":
        """Returns this policy with attention that is written by hand run by the fused kernel.

        For op-level casting. ``softmax(scale * q @ k.T + bias) @ v``, masked or causal, however it
        is spelled, becomes cuDNN's kernel on NVIDIA GPUs from Ampere on, and flash attention on
        TPUs: the scores are never written out, so that memory grows linearly with the sequence.
        What the kernel does not take (a dropout, probabilities that are read elsewhere, a device
        without one) stays as it was planned, and `explain` says why. It changes memory and time,
        and results by the kernel's rounding alone; a row of which every entry is masked by -Inf
        gives finite numbers, not NaN.

        Args:
            fused_attention: Whether to do so.

        Returns:
            A new policy.

        Raises:
            ValueError: If ``fused_attention`` is neither True nor False.

        Example:
            >>> import mpjax
            >>> str(mpjax.get_policy("mixed_bfloat16").with_fused_attention())
            'mixed_bfloat16,fused_attention=true'

        Dao et al., FlashAttention, 2022.
        """
        return dataclasses.replace(self, fused_attention=fused_attention)

    def with_communication(self, gather: str = "half", reduce: str = "float32") -> "Policy":
        """Returns this policy with other dtypes in which devices exchange parameters and gradients.

        For op-level casting, and for programs that are sharded over several devices; nothing
        changes on one. `compile_for` lists what a program exchanges, and in which dtype.

        Args:
            gather: What a parameter that is used in half is gathered in. "half", the default, casts
                it first, before a `jax.sharding.reshard` too. "float32" leaves a `reshard` as it is
                written. Where axes are automatic XLA gathers what a matmul reads, which is half.
            reduce: What the gradient of a parameter is summed in, over devices. "float32", the
                default: a matmul's gradient is the float32 accumulator. "half" sends half the
                bytes, and rounds each device's part. A convolution's gradient is half where axes
                are automatic: XLA sums it where it is made, and cuDNN makes it in half.

        Returns:
            A new policy.

        Raises:
            ValueError: If ``gather`` or ``reduce`` is neither "half" nor "float32".

        Example:
            >>> import mpjax
            >>> str(mpjax.get_policy("mixed_bfloat16").with_communication(reduce="half"))
            'mixed_bfloat16,reduce=half'

        Zhao et al., PyTorch FSDP, 2023: ``MixedPrecisionPolicy(param_dtype, reduce_dtype)``.
        """
        return dataclasses.replace(self, gather=gather, reduce=reduce)

    def with_optimizer_state(
        self, masters: str = "float32", rounding: str = "nearest", moments: str = "float32"
    ) -> "Policy":
        """Returns this policy with another choice of what the optimizer keeps for each weight.

        For `build_train_step`, `mixed_precision` and what is made of them. Float32 parameters have
        neither masters nor anything that rounding could take: for them the first two do nothing.

        Args:
            masters: Of policies with master weights: "float32" (6 bytes a weight, with the half
                parameter), "split" (4 bytes, the same masters bit for bit; bfloat16 alone) or
                "split8" (3 bytes). See `with_master_weights`.
            rounding: Of policies without: "nearest" (2 bytes a weight, small updates are lost),
                "stochastic" (2 bytes) or "kahan" (4 bytes). See `with_stochastic_rounding` and
                `with_kahan_summation`.
            moments: "float32" (4 bytes a moment) or "8bit" (1 byte). See `with_8bit_moments`.

        Returns:
            A new policy.

        Raises:
            ValueError: If an argument is not legal; if masters are split and parameters float16; if
                a policy with half parameters and masters is to round otherwise than to the nearest,
                or one without masters to split them.

        Example:
            >>> import mpjax
            >>> str(mpjax.get_policy("O2:bfloat16").with_optimizer_state(masters="split"))
            'O2:bfloat16,masters=split'
        """
        return dataclasses.replace(self, masters=masters, rounding=rounding, moments=moments)

    def cast_to_param(self, tree: T) -> T:
        """Casts a tree of parameters to the dtypes they are stored in.

        Args:
            tree: A pytree whose paths the overrides speak of. Leaves that are not real floating
                arrays pass through; float64 ones too, unless an override names them.

        Returns:
            A pytree of the same structure.
        """

        def stored(path):
            full = any(matches(pattern, path) for pattern in self.keep_full)
            return FLOAT32 if full and self.param_dtype in HALVES else self.param_dtype

        return self._cast_by_path(tree, stored, uniform=not self.keep_full)

    def cast_to_compute(self, tree: T) -> T:
        """Casts a tree of parameters, or of inputs, to the dtypes they are computed in.

        Args:
            tree: As for `cast_to_param`.

        Returns:
            A pytree of the same structure.
        """
        return self._cast_by_path(tree, lambda path: self.compute_dtype, uniform=True)

    def cast_to_output(self, tree: T) -> T:
        """Casts the real floating leaves of a tree of results to the output dtype.

        Args:
            tree: Any pytree. Overrides do not speak of results.

        Returns:
            A pytree of the same structure.
        """
        return cast(tree, self.output_dtype)

    def override_for(self, path: str) -> np.dtype | None:
        """Returns the dtype that the first matching override gives to a path, or None."""
        return next((dtype for pattern, dtype in self.overrides if matches(pattern, path)), None)

    def check_overrides(self, params: Any) -> None:
        """Checks that every pattern of `overrides` matches a parameter.

        Args:
            params: The tree of parameters, concrete or abstract.

        Raises:
            ValueError: If a pattern matches none, naming the nearest paths.
        """
        known = paths(params)
        for pattern, _ in self.overrides:
            if not any(matches(pattern, path) for path in known):
                near = ", ".join(map(repr, nearest_paths(pattern, known))) or "none at all"
                raise ValueError(
                    f"overrides: the pattern {brief(pattern)} matches no parameter path. The "
                    f"nearest are {near}. Paths start at the root of the parameter tree; '*' "
                    "crosses '/', and a leading '*/' matches at any depth."
                )

    @property
    def needs_loss_scaling(self) -> bool:
        """Whether something computes in float16, where small gradients vanish."""
        return FLOAT16 in (self.compute_dtype, *(dtype for _, dtype in self.overrides))

    def _cast_by_path(self, tree: T, default: Callable[[str], np.dtype], uniform: bool) -> T:
        if uniform and not self.overrides:
            return cast(tree, default(""))

        def convert(keys, leaf):
            path = path_of(keys)
            named = self.override_for(path)
            return cast_leaf(leaf, named or default(path), float64=named is not None)

        return jax.tree_util.tree_map_with_path(convert, tree)

    def __str__(self) -> str:
        # What is spelled out after the name.
        chosen = {k: row.values[0] for k, row in CHOICES.items() if k != "casting"}
        extras: dict[str, Any] = {
            "overrides": (),
            "fused_attention": False,
            **chosen,
            **dict.fromkeys(OP_LISTS, ()),
        }
        base = dataclasses.replace(self, **extras)
        names = (name for name in NAMES if get_policy(name) == base)
        parts = [next(names, "") or _spell_out(base)]
        if self.overrides:
            pairs = {pattern: short_name(dtype) for pattern, dtype in self.overrides}
            parts.append(f"overrides={json.dumps(pairs)}")
        parts += [
            f"{ops}={json.dumps(getattr(self, ops))}" for ops in OP_LISTS if getattr(self, ops)
        ]
        parts += ["fused_attention=true"] if self.fused_attention else []
        parts += [f"{k}={getattr(self, k)}" for k in chosen if getattr(self, k) != chosen[k]]
        return ",".join(parts)

    def __repr__(self) -> str:
        def plain(value):
            if isinstance(value, np.dtype):
                return value.name
            return tuple(map(plain, value)) if isinstance(value, tuple) else value

        shown = (
            f"{field.name}={plain(getattr(self, field.name))!r}"
            for field in dataclasses.fields(self)
            if field.default is dataclasses.MISSING or getattr(self, field.name) != field.default
        )
        return f"Policy({', '.join(shown)})"


# The levels of Apex, Paddle and MindSpore; "half" stands for the half dtype that is asked for.
LEVELS: dict[str, dict[str, Any]] = {
    name: dict(zip(("param_dtype", "compute_dtype", "output_dtype"), dtypes, strict=True), **more)
    for name, dtypes, more in (
        ("O0", ("f32", "f32", "f32"), {}),
        ("O1", ("f32", "half", "f32"), {"casting": "op"}),
        ("O2", ("half", "half", "f32"), {"casting": "op", "keep_full": NORM_PATTERNS}),
        ("O3", ("half", "half", "half"), {"master_weights": False}),
    )
}
# Keras's names for two of them.
KERAS = {"mixed_float16": "O1:float16", "mixed_bfloat16": "O1:bfloat16"}
# Those of Lightning's Trainer(precision=...), and Accelerate's mixed_precision="no".
LIGHTNING = {
    "16-mixed": "O1:float16",
    "bf16-mixed": "O1:bfloat16",
    "16-true": "O3:float16",
    "bf16-true": "O3:bfloat16",
    **dict.fromkeys(("32-true", "32", "no"), "O0"),
}
ALIASES = {**KERAS, **LIGHTNING}
# What str(policy) calls a policy that has a name; the first name that fits is taken.
NAMES = ("float32", *KERAS, *(f"{level}:{half}" for level in ("O2", "O3") for half in HALVES))

# The keys of the grammar, with jmp's first.
KEYS = {
    "p": "param_dtype",
    "params": "param_dtype",
    "c": "compute_dtype",
    "compute": "compute_dtype",
    "o": "output_dtype",
    "output": "output_dtype",
    **{
        name: name
        for name in (
            *("casting", "master_weights", "keep_full", "overrides"),
            *(*OP_LISTS, "fused_attention", *CHOICES),
        )
    },
}


def get_policy(x: "str | jmp.Policy", half: DTypeLike | None = None) -> Policy:
    """Returns the policy that a string names, or that a policy is.

    The grammar, in which spaces and letter case do not matter:

    - jmp's: "p=f32,c=bf16,o=f32" or "params=float32, compute=bf16"; parameters default to
      float32, compute follows parameters, output follows compute. A dtype alone ("bf16", "half")
      stands for all three.
    - Keras's names: "float32", "mixed_float16", "mixed_bfloat16".
    - Lightning's: "16-mixed" and "bf16-mixed" (O1), "16-true" and "bf16-true" (O3), "32-true".
    - The levels of Apex, Paddle and MindSpore: "O0" (all float32), "O1" (float32 parameters,
      op-level casting), "O2" (half parameters but for norm layers, float32 masters and outputs),
      "O3" (everything half, no masters), with the half dtype as a suffix: "O2:float16".
    - After any of these, refinements: ``master_weights=false``, ``casting=op``,
      ``storage=lean``, ``fused_attention=true``, ``reduce=half``, ``masters=split``,
      ``rounding=stochastic``, ``moments=8bit``,
      ``overrides={"*norm*": "f32"}``, ``half_ops=["exp"]`` (JSON after the equals sign).

    Args:
        x: The string, a `Policy` or a `jmp.Policy`.
        half: What "half", and a level without a suffix, mean: float16 or bfloat16. If None, what
            the default device is best at (`half_dtype`): bfloat16 on TPU, CPU and NVIDIA GPUs of
            compute capability 8.0 or more, float16 on older ones. jmp differs here: its "half" is
            float16 off TPU.

    Returns:
        A `Policy`. ``get_policy(str(p)) == p`` for every policy ``p``.

    Raises:
        TypeError: If ``x`` is neither a string nor a policy.
        ValueError: If the string does not follow the grammar; the message says where.

    Example:
        >>> import mpjax
        >>> mpjax.get_policy("O1:float16") == mpjax.get_policy("mixed_float16")
        True
        >>> mpjax.get_policy("params=float32, compute=bf16")
        Policy(param_dtype='float32', compute_dtype='bfloat16', output_dtype='bfloat16')
    """
    half = None if half is None else _as_half(half)
    if isinstance(x, Policy):
        return x
    if isinstance(x, jmp.Policy):
        return Policy(x.param_dtype, x.compute_dtype, x.output_dtype)
    if not isinstance(x, str):
        raise TypeError(
            f"policy={brief(x)} must be a string such as 'mixed_bfloat16', an mpjax.Policy or a "
            f"jmp.Policy, not a {type(x).__name__}. A dtype for everything is its name: 'bfloat16'."
        )
    name, refinements = _split(x)
    base = _named(name, x, half) if name else None
    dtypes: dict[str, Any] = {
        key: canonical(value, f"policy={brief(x)}: {key}", half)
        for key, value in refinements.items()
        if key.endswith("_dtype")
    }
    if "overrides" in refinements:
        dtypes["overrides"] = tuple(
            (pattern, canonical(dtype, f"policy={brief(x)}: overrides[{brief(pattern)}]", half))
            for pattern, dtype in _pairs(refinements["overrides"])
        )
    if base is None:
        param = dtypes.get("param_dtype", FLOAT32)
        compute = dtypes.get("compute_dtype", param)
        base = Policy(param, compute, dtypes.get("output_dtype", compute))
    return dataclasses.replace(base, **{**refinements, **dtypes})


def _named(name: str, text: str, half: np.dtype | None) -> Policy:
    """Returns the policy of a level, Keras name or dtype name."""
    by_fold = {key.lower(): key for key in (*LEVELS, *ALIASES)}
    level, colon, suffix = (ALIASES.get(name.lower()) or name).partition(":")
    row = LEVELS.get(by_fold.get(level.strip().lower(), ""))
    if row is None:
        if not colon and (name.lower() in BY_NAME or name.lower() == "half"):
            dtype = canonical(name, "policy", half)
            return Policy(dtype, dtype, dtype)
        choices = [*NAMES, *LEVELS, *LIGHTNING, *BY_NAME, "half"]
        raise ValueError(
            f"policy={brief(text)} is not known: {brief(name)} is no policy name. Legal are "
            "'float32', 'mixed_float16', 'mixed_bfloat16', the levels 'O0' to 'O3' (with a suffix "
            "as in 'O2:float16'), a dtype such as 'bf16', and jmp's form 'p=f32,c=bf16,o=f32'."
            + did_you_mean(name, choices)
        )
    if colon:
        asked = _as_half(suffix.strip(), f"policy={brief(text)}: the suffix")
        if half not in (None, asked):
            raise ValueError(
                f"policy={brief(text)} asks for {asked}, but half={half.name!r}. Give one of the "
                "two."
            )
        half = asked

    def resolve(value):
        return (half or default_half()) if value == "half" else value

    return Policy(**{key: resolve(value) for key, value in row.items()})


def _as_half(dtype: DTypeLike, argument: str = "half") -> np.dtype:
    found = canonical(dtype, argument)
    if found not in HALVES:
        raise ValueError(
            f"{argument}={brief(dtype)} is not a half dtype. Legal are 'float16' and 'bfloat16'."
        )
    return found


_KEY = re.compile(r"\s*(\w+)\s*=\s*")
_COMMA = re.compile(r"\s*(,|$)")


def _split(text: str) -> tuple[str, dict[str, Any]]:
    """Splits "name, key=value, ..." into the name ("" if none) and the values by field."""
    name, position = "", 0
    values: dict[str, Any] = {}
    while position < len(text) or not (name or values):
        key = _KEY.match(text, position)
        if key is None:
            name, end = _word(text, position)
            if not (position or name):
                raise ValueError(
                    f"policy={brief(text)} is empty. Legal are names such as {', '.join(NAMES)}, "
                    "and jmp's form 'p=f32,c=bf16,o=f32'."
                )
            if position:
                raise ValueError(
                    f"policy={brief(text)}: expected key=value at {brief(text[position:])}. "
                    f"{_grammar(name)}"
                )
            position = end
        else:
            field = KEYS.get(key[1].lower())
            if field is None:
                raise ValueError(
                    f"policy={brief(text)}: {brief(key[1])} is not a key of a policy. "
                    f"{_grammar(key[1])}"
                )
            if field in values:
                raise ValueError(f"policy={brief(text)} gives {brief(key[1])} twice. Give it once.")
            values[field], position = _value(text, key.end())
        comma = _COMMA.match(text, position)
        if comma is None:
            raise ValueError(f"policy={brief(text)}: expected a comma at {brief(text[position:])}.")
        if comma[1] and comma.end() == len(text):
            raise ValueError(f"policy={brief(text)} ends with a comma. Remove it.")
        position = comma.end()
    return name, values


def _value(text: str, position: int) -> tuple[Any, int]:
    """Reads one value: JSON where it opens with a bracket, else the text up to a comma."""
    if text[position : position + 1] in ("{", "["):
        try:
            # Pairs, not a dict: their order matters.
            decoder = json.JSONDecoder(object_pairs_hook=tuple)
            return decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:  # brackets too deep, digits too many
            raise ValueError(
                f"policy={brief(text)}: bad JSON at {brief(text[position:])}: {error}"
            ) from None
    word, end = _word(text, position)
    return {"true": True, "false": False}.get(word.lower(), word), end


def _word(text: str, position: int) -> tuple[str, int]:
    """Returns the text up to the next comma, and where it ends."""
    end = text.find(",", position)
    end = len(text) if end < 0 else end
    return text[position:end].strip(), end


def _grammar(word: str) -> str:
    legal = ", ".join(key for key in KEYS if len(key) > 1)
    return f"Legal keys are {legal}.{did_you_mean(word, KEYS)}"


def _spell_out(policy: Policy) -> str:
    dtypes = (policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    parts = [f"{key}={short_name(dtype)}" for key, dtype in zip("pco", dtypes, strict=True)]
    if policy.keep_full:
        parts.append(f"keep_full={json.dumps(policy.keep_full)}")
    if not policy.master_weights:
        parts.append("master_weights=false")
    if policy.casting != "boundary":
        parts.append(f"casting={policy.casting}")
    return ",".join(parts)


def _canonical_fields(policy: Policy) -> dict[str, Any]:
    """Returns every field in its one canonical form, or raises what is wrong with it."""
    fields: dict[str, Any] = {
        name: canonical(getattr(policy, name), name)
        for name in ("param_dtype", "compute_dtype", "output_dtype")
    }
    overrides: dict[str, np.dtype] = {}
    for pattern, dtype in _pairs(policy.overrides):
        found = canonical(dtype, f"overrides[{brief(pattern)}]")
        overrides.setdefault(_pattern(pattern, "overrides"), found)  # the first match wins
    fields["overrides"] = tuple(overrides.items())
    patterns = _strings(policy.keep_full, "keep_full")
    fields["keep_full"] = tuple(_pattern(p, "keep_full") for p in patterns)
    for name in ("master_weights", "fused_attention"):
        if not isinstance(getattr(policy, name), bool):
            raise ValueError(f"{name}={brief(getattr(policy, name))} must be True or False.")
    for name, (values, legal) in CHOICES.items():
        value = getattr(policy, name)
        if not isinstance(value, str) or value not in values:
            raise ValueError(f"{name}={brief(value)} must be {legal}{did_you_mean(value, values)}")
    _check_kept(policy, fields)
    listed: dict[str, str] = {}
    for names in OP_LISTS:
        fields[names] = tuple(dict.fromkeys(_strings(getattr(policy, names), names)))
        for name in fields[names]:
            if name in listed:
                raise ValueError(
                    f"{names}: {brief(name)} is in {listed[name]} already. An op belongs to one "
                    "list."
                )
            listed[name] = names
    unknown = set(listed) - _jax.primitive_names() if listed else set()
    for name in sorted(unknown, key=str):
        raise ValueError(
            f"{listed[name]}: JAX has no primitive named {brief(name)}."
            f"{did_you_mean(name, _jax.primitive_names())} Names are those that "
            "jax.make_jaxpr prints, such as 'dot_general', 'exp' or 'reduce_sum'."
        )
    for name in sorted(name for name in listed if rule_of(name).need == PROGRAM):
        raise ValueError(
            f"{listed[name]}: {brief(name)} is not an operation with a dtype of its own, but a "
            "program, a kernel or the function's own cast. Name the operations inside it, or use "
            "an override or mpjax.precision for a part of the function."
        )
    for name in sorted(name for name in fields["half_ops"] if NO_HALF_FORM in rule_of(name).traits):
        raise ValueError(
            f"half_ops: JAX has no half-precision form of {brief(name)}. Leave it out."
        )
    return fields


def _check_kept(policy: Policy, fields: dict[str, Any]) -> None:
    """Refuses what the optimizer cannot keep for weights, or need not."""
    stored = fields["param_dtype"]
    if stored not in HALVES:
        return
    if policy.masters != CHOICES["masters"].values[0]:
        if not policy.master_weights:
            raise ValueError(
                f"masters={policy.masters!r}: the policy keeps no masters. Add "
                "master_weights=true, or take an O2 policy; for weights without masters, "
                "rounding=stochastic."
            )
        if stored == FLOAT16:
            raise ValueError(
                f"masters={policy.masters!r}: parameters are stored in float16, and a master is "
                "split into a bfloat16 parameter, which is the first 16 bits of a float32 number, "
                "and the rest. Store them in bfloat16, or leave masters=float32."
            )
    if policy.rounding != CHOICES["rounding"].values[0] and policy.master_weights:
        raise ValueError(
            f"rounding={policy.rounding!r}: half parameters have masters, to which no update is "
            "lost. Add master_weights=false, or take an O3 policy."
        )


def _strings(value: str | Iterable[str], argument: str) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if isinstance(strings, Iterable):
        strings = tuple(strings)
        if all(isinstance(string, str) for string in strings):
            return strings
    raise ValueError(f"{argument}={brief(value)} must be a sequence of strings.")


def _pairs(overrides: Any) -> tuple[tuple[Any, Any], ...]:
    pairs = overrides.items() if isinstance(overrides, Mapping) else overrides
    try:
        return tuple((pattern, dtype) for pattern, dtype in pairs)
    except (TypeError, ValueError):
        raise ValueError(
            f"overrides={brief(overrides)} must map patterns to dtypes, such as "
            '{"*/head/*": "float32"}.'
        ) from None


def _pattern(pattern: Any, argument: str) -> str:
    if isinstance(pattern, str) and pattern:
        return pattern
    raise ValueError(
        f"{argument}: the pattern {brief(pattern)} must be a non-empty string, such as '*/head/*'."
    )
