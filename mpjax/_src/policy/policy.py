"""Policies: the dtypes that a program stores, computes and returns its values in.

A policy is data. `LEVELS` and `NAMES` list the named policies. `get_policy` parses the string
grammar and `str(policy)` writes it. The casts themselves are in `trees`.
"""

import contextlib
import dataclasses
import json
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jmp
import numpy as np

from mpjax._src.base import _jax
from mpjax._src.base.called import CALLED, CASTS
from mpjax._src.base.deprecations import deprecated
from mpjax._src.base.dtypes import (
    BY_NAME,
    FLOAT16,
    FLOAT32,
    HALVES,
    DTypeLike,
    canonical,
    default_half,
    elsewhere,
    short_name,
)
from mpjax._src.base.errors import LONGEST, brief, did_you_mean, misplaced
from mpjax._src.base.operations import primitives_of
from mpjax._src.base.patterns import matches, nearest_paths, path_of, paths
from mpjax._src.base.public import public
from mpjax._src.base.rules import NO_HALF_FORM, PROGRAM, rule_of
from mpjax._src.base.trees import cast, cast_leaf
from mpjax._src.policy.words import NAMES_ELSEWHERE, rewritten

T = TypeVar("T")

# The names of policies that editors complete; a policy is more than its name, so a string is valid.
PolicyName: TypeAlias = Literal[
    "float32",
    "mixed_bfloat16",
    "mixed_float16",
    "O0",
    "O1",
    "O2",
    "O3",
    "O1:bfloat16",
    "O1:float16",
    "O2:bfloat16",
    "O2:float16",
    "O3:bfloat16",
    "O3:float16",
    "bf16-mixed",
    "16-mixed",
    "bf16-true",
    "16-true",
    "32-true",
    "32",
    "no",
]
PolicyLike: TypeAlias = jmp.Policy | PolicyName | str | Mapping[str, Any] | Sequence[Any]

# Names of normalization layers in Flax, Equinox, Haiku and PyTorch models.
NORM_PATTERNS = (
    *("*norm*", "*/bn/*", "*/ln/*", "*/gn/*"),
    *("*/bn[0-9_]*", "*/ln[0-9_]*", "*/gn[0-9_]*", "*_bn/*", "*_ln/*", "*_gn/*"),
)

OP_LISTS = ("half_ops", "full_ops", "follow_ops")
FLAGS = ("master_weights", "fused_attention", "chunked_loss")


_UNSET: Any = None  # of a dtype that was not given


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
        "'boundary' (cast parameters and inputs once) or 'op' (choose the dtype of each "
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
        ("float32", "8bit"),
        "'float32' or '8bit' (8-bit codes, with a scale for each block).",
    ),
}


@public("mpjax")
@dataclasses.dataclass(frozen=True, repr=False)
class Policy(jmp.Policy):
    """The dtypes that a program stores, computes and returns its floating values in.

    A policy is frozen and hashable, and it is a `jmp.Policy`. `get_policy` makes one from a string
    such as ``"mixed_bfloat16"``.

    Attributes:
        param_dtype: The dtype in which floating parameters are stored.
        compute_dtype: The dtype of the forward and backward passes.
        output_dtype: The dtype of floating results.
        overrides: ``(pattern, dtype)`` pairs. A parameter whose path matches a pattern is stored
            and computed in that dtype; the first match wins. See `override`.
        keep_full: Patterns of parameters that are *stored* in float32 whatever ``param_dtype``
            says, such as the normalization layers of O2. Their compute dtype does not change.
            Unlike an override, a pattern may match nothing.
        master_weights: Whether training stores a float32 copy of 16-bit parameters in the optimizer
            state.
        casting: "op" if the dtype is chosen operation by operation (O1, O2), "boundary" if
            parameters and inputs are cast once, as in jmp.
        half_ops: Names of JAX primitives that compute in 16 bits. For op-level casting.
        full_ops: Names of JAX primitives that compute in float32. For op-level casting.
        follow_ops: Names of JAX primitives that compute in the dtype of their inputs. For op-level
            casting.
        storage: For op-level casting. "fast", the default, moves as few bytes as possible. "lean"
            stores as few bytes as possible for the backward pass, which then repeats elementwise
            operations, across norms and activations; no matmul, convolution or reduction runs
            twice. Functions that you wrap in `jax.checkpoint` are left unchanged. Results differ by
            rounding alone. "8bit" stores these values as 8-bit codes, most of them
            with a power-of-two scale for each block of at most 128 entries. The loss is that of
            "lean"; gradients have a rounding error of 8 bits. Values are left unchanged where a
            derivative would amplify that error (the values and the result of an attention), where
            they are exact, and where they are small (ActNN, Chen et al., 2021; COAT, Xi et al.,
            2024). A number is a budget, as PyTorch's ``activation_memory_budget``: of the bytes
            that "lean" stores beyond the fewest that are possible, the share that may be stored.
            The backward pass then repeats matmuls and reductions too, those first that save the
            most bytes for the time that they take. 0 stores the fewest bytes, and 1 means "fast".
            Results differ by rounding alone.
        fused_attention: For op-level casting: whether hand-written attention,
            ``softmax(scale * q @ k.T + bias) @ v``, masked or causal, runs in a fused kernel:
            cuDNN's on NVIDIA GPUs from Ampere on, flash attention on TPUs (Dao et al., 2022). The
            kernel does not write out the scores, so memory grows linearly with the sequence
            length. Attention that the kernel cannot run is planned as without this setting;
            `explain` says why. Results change by the kernel's rounding alone, with one
            exception: a row in which -Inf masks every entry returns finite numbers instead of NaN.
        chunked_loss: For op-level casting: whether a cross entropy of a linear layer's results, as
            at the end of a language model, runs by blocks of these logits, as
            `linear_cross_entropy` does. The labels may be picked or one-hot, smoothed, masked
            or weighted. Logits that are also read elsewhere are computed as usual; `explain` says
            why. Results change by rounding alone.
        gather: For op-level casting: the dtype in which devices gather a parameter that is used in
            16 bits. "half", the default, casts the parameter before it is gathered, also before a
            `jax.sharding.reshard`. "float32" leaves a `reshard` as it is written. With automatic
            mesh axes XLA gathers the operand of the matmul, which is 16-bit.
        reduce: For op-level casting: the dtype in which devices sum the gradient of a parameter.
            With "float32", the default, a matmul's gradient is sent as its float32 accumulator,
            and a convolution's gradient, which each device computes in 16 bits for its part of the
            batch, is cast to float32 before it is sent. "half" sends half the bytes and rounds the
            part of each device. `compile_for` lists what a program sends.
        masters: The form of the master weights, for policies that have them: "float32" (6 bytes a
            weight, including the 16-bit parameter), "split" (4 bytes, masters of the same
            precision, bfloat16 parameters only) or "split8" (3 bytes). See `with_master_weights`.
        rounding: How updates of 16-bit parameters are rounded, for policies without master weights:
            "nearest" (2 bytes a weight, small updates are lost), "stochastic" (2 bytes) or "kahan"
            (4 bytes). See `with_stochastic_rounding` and `with_kahan_summation`.
        moments: The form of the optimizer's moments: "float32" (4 bytes a moment) or "8bit" (1
            byte). See `with_8bit_moments`.

    Raises:
        ValueError: If a dtype, a pattern, the name of a primitive or a setting is invalid, or if
            two settings contradict each other.

    Example:
        >>> import mpjax
        >>> policy = mpjax.Policy("float32", "bfloat16", "float32")
        >>> str(policy.override({"*/head/*": "float32"}))
        'p=f32,c=bf16,o=f32,overrides={"*/head/*": "f32"}'
    """

    param_dtype: np.dtype
    compute_dtype: np.dtype = _UNSET
    output_dtype: np.dtype = _UNSET
    overrides: tuple[tuple[str, np.dtype], ...] = ()
    keep_full: tuple[str, ...] = ()
    master_weights: bool = True
    casting: str = "boundary"
    half_ops: tuple[str, ...] = ()
    full_ops: tuple[str, ...] = ()
    follow_ops: tuple[str, ...] = ()
    storage: str | float = "fast"
    fused_attention: bool = False
    chunked_loss: bool = False
    gather: str = "half"
    reduce: str = "float32"
    masters: str = "float32"
    rounding: str = "nearest"
    moments: str = "float32"

    def __post_init__(self):
        if self.compute_dtype is None and self.output_dtype is None:
            given = brief(self.param_dtype)
            raise TypeError(
                f"Policy({given}) lacks compute_dtype and output_dtype. mpjax.get_policy({given}) "
                "returns the policy of a name."
            )
        for name, value in _canonical_fields(self).items():
            object.__setattr__(self, name, value)

    def replace(self, **settings: Any) -> "Policy":
        """Returns a copy of this policy with new values for the named settings.

        All other settings stay as they are. `override` and `with_ops` add to a setting instead.

        Args:
            **settings: New values, by the names of the attributes listed above or by the keys that
                `get_policy` reads in a string, such as ``compute``.

        Returns:
            A new policy.

        Raises:
            TypeError: If a policy has no setting of that name, or if one is given twice.
            ValueError: If a value is invalid or contradicts another setting.

        Example:
            >>> import mpjax
            >>> policy = mpjax.get_policy("O2:bfloat16,moments=8bit")
            >>> str(policy.replace(masters="split", storage="lean"))
            'O2:bfloat16,storage=lean,masters=split,moments=8bit'
        """
        fields: dict[str, Any] = {}
        for key, value in settings.items():
            name = KEYS.get(key)
            if name is None:
                valid = [field.name for field in dataclasses.fields(self)]
                raise TypeError(
                    f"{key}={brief(value)} is not a setting of a policy. Choose one of "
                    f"{', '.join(valid)}.{did_you_mean(key, KEYS)}"
                )
            if name in fields:
                raise TypeError(f"{key}={brief(value)}: {name} is set twice. Set it once.")
            fields[name] = value
        return dataclasses.replace(self, **fields)

    def override(self, patterns: Mapping[str, DTypeLike]) -> "Policy":
        """Returns a copy of this policy with another dtype for some parameters.

        A path joins the keys from the root of the parameter tree with "/" ("Dense_0/kernel").
        Patterns are case-insensitive globs: ``*`` also matches "/", and a leading ``*/`` also
        matches at the root. The first match wins. The patterns of a later call come before earlier
        ones. Under `autocast`, a pattern also matches operations, by their named scopes and name,
        and a 16-bit dtype lifts the ``precision`` that a matmul asks for.

        Args:
            patterns: A mapping from pattern to dtype.

        Returns:
            A new policy.

        Raises:
            ValueError: If a dtype is invalid. A pattern that matches no parameter is an error
                too, raised where the parameters are known: in ``init`` or `check_overrides`.

        Example:
            >>> import mpjax
            >>> policy = mpjax.get_policy("bfloat16").override({"*norm*": "float32"})
            >>> params = {"LayerNorm_0": {"scale": np.ones(2, np.float32)}}
            >>> policy.cast_to_compute(params)["LayerNorm_0"]["scale"].dtype
            dtype('float32')
        """
        return self.replace(overrides=(*_pairs(patterns), *self.overrides))

    def with_ops(
        self,
        half: Any = (),
        full: Any = (),
        follow: Any = (),
    ) -> "Policy":
        """Returns a copy of this policy with primitives added to its op lists.

        The lists apply to op-level casting (`autocast`). They take precedence over mpjax's own
        table of primitives.

        Args:
            half: JAX primitives to compute in the 16-bit dtype: one or several, or their names.
            full: JAX primitives to compute in float32.
            follow: JAX primitives to compute in the dtype of their inputs.

        Returns:
            A new policy.

        Raises:
            ValueError: If JAX has no primitive with such a name, or if a name is in two lists.

        Example:
            >>> import mpjax
            >>> mpjax.get_policy("mixed_bfloat16").with_ops(full=("tanh",)).full_ops
            ('tanh',)
        """
        return self.replace(
            half_ops=(*self.half_ops, *_strings(half, "half")),
            full_ops=(*self.full_ops, *_strings(full, "full")),
            follow_ops=(*self.follow_ops, *_strings(follow, "follow")),
        )

    @deprecated("policy.replace(storage=...)")
    def with_storage(self, storage: str | float) -> "Policy":
        """Deprecated: use ``replace(storage=...)``."""
        return self.replace(storage=storage)

    @deprecated("policy.replace(fused_attention=True)")
    def with_fused_attention(self, fused_attention: bool = True) -> "Policy":
        """Deprecated: use ``replace(fused_attention=True)``."""
        return self.replace(fused_attention=fused_attention)

    @deprecated("policy.replace(gather=..., reduce=...)")
    def with_communication(self, gather: str | None = None, reduce: str | None = None) -> "Policy":
        """Deprecated: use ``replace(gather=..., reduce=...)``. None leaves a setting as it is."""
        return self.replace(**_given(gather=gather, reduce=reduce))

    @deprecated("policy.replace(masters=..., rounding=..., moments=...)")
    def with_optimizer_state(
        self,
        masters: str | None = None,
        rounding: str | None = None,
        moments: str | None = None,
    ) -> "Policy":
        """Deprecated: use ``replace(masters=..., ...)``. None leaves a setting as it is."""
        return self.replace(**_given(masters=masters, rounding=rounding, moments=moments))

    def cast_to_param(self, tree: T) -> T:
        """Casts a tree of parameters to the dtypes they are stored in.

        Args:
            tree: A pytree. The patterns of `overrides` and `keep_full` are matched against its
                paths. Leaves that are not real floating arrays pass through unchanged; so do
                float64 leaves, unless an override matches them.

        Returns:
            A pytree of the same structure and shapes.

        Example:
            >>> import mpjax
            >>> policy = mpjax.get_policy("O2:bfloat16")
            >>> params = {"kernel": np.ones(2, np.float32), "norm": np.ones(2, np.float32)}
            >>> {name: str(x.dtype) for name, x in policy.cast_to_param(params).items()}
            {'kernel': 'bfloat16', 'norm': 'float32'}
        """

        def stored(path):
            full = any(matches(pattern, path) for pattern in self.keep_full)
            return FLOAT32 if full and self.param_dtype in HALVES else self.param_dtype

        return self._cast_by_path(tree, stored, uniform=not self.keep_full)

    def cast_to_compute(self, tree: T) -> T:
        """Casts a tree of parameters or inputs to the dtypes that the program computes in.

        Args:
            tree: A pytree, as for `cast_to_param`. `keep_full` does not apply.

        Returns:
            A pytree of the same structure and shapes.

        Example:
            >>> import mpjax
            >>> policy = mpjax.get_policy("mixed_bfloat16")
            >>> policy.cast_to_compute({"x": np.ones(2, np.float32)})["x"].dtype
            dtype(bfloat16)
        """
        if self.compute_dtype in HALVES:
            CALLED.add(CASTS)
        return self._cast_by_path(tree, lambda path: self.compute_dtype, uniform=True)

    def cast_to_output(self, tree: T) -> T:
        """Casts the real floating leaves of a tree of results to the output dtype.

        Args:
            tree: Any pytree. Overrides do not apply to results.

        Returns:
            A pytree of the same structure and shapes.
        """
        return cast(tree, self.output_dtype)

    def override_for(self, path: str) -> np.dtype | None:
        """Returns the dtype that the first matching override gives to a path.

        Args:
            path: The path of a parameter, such as "Dense_0/kernel".

        Returns:
            The dtype, or None if no override matches.
        """
        return next((dtype for pattern, dtype in self.overrides if matches(pattern, path)), None)

    def check_overrides(self, params: Any) -> None:
        """Checks that every pattern of `overrides` matches a parameter.

        Args:
            params: The tree of parameters: arrays or `jax.ShapeDtypeStruct`.

        Raises:
            ValueError: If a pattern matches no parameter. The message names the nearest paths.
        """
        names = paths(params)
        for pattern, _ in self.overrides:
            if not any(matches(pattern, path) for path in names):
                near = ", ".join(map(repr, nearest_paths(pattern, names))) or "none at all"
                raise ValueError(
                    f"overrides: the pattern {brief(pattern)} matches no parameter path. The "
                    f"nearest are {near}. Paths start at the root of the parameter tree; '*' also "
                    "matches '/', and a leading '*/' matches at any depth."
                )

    @property
    def needs_loss_scaling(self) -> bool:
        """Whether a part of the program computes in float16, where small gradients underflow."""
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
        # These settings are written after the name of the policy.
        chosen = {k: row.values[0] for k, row in CHOICES.items() if k != "casting"}
        lists = dict.fromkeys(("overrides", *OP_LISTS), ())
        base = self.replace(fused_attention=False, chunked_loss=False, **lists, **chosen)
        names = (name for name in NAMES if get_policy(name) == base)
        parts = [next(names, "") or _spell_out(base)]
        if self.overrides:
            pairs = {pattern: short_name(dtype) for pattern, dtype in self.overrides}
            parts.append(f"overrides={json.dumps(pairs)}")
        parts += [
            f"{ops}={json.dumps(getattr(self, ops))}" for ops in OP_LISTS if getattr(self, ops)
        ]
        parts += [f"{k}=true" for k in ("fused_attention", "chunked_loss") if getattr(self, k)]
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
            if field.name.endswith("_dtype") or getattr(self, field.name) != field.default
        )
        return f"Policy({', '.join(shown)})"


# The levels of Apex, Paddle and MindSpore; "half" represents the 16-bit dtype that the user
# chooses.
LEVELS: dict[str, dict[str, Any]] = {
    name: dict(zip(("param_dtype", "compute_dtype", "output_dtype"), dtypes, strict=True), **more)
    for name, dtypes, more in (
        ("O0", ("f32", "f32", "f32"), {}),
        ("O1", ("f32", "half", "f32"), {"casting": "op"}),
        ("O2", ("half", "half", "f32"), {"casting": "op", "keep_full": NORM_PATTERNS}),
        ("O3", ("half", "half", "half"), {"master_weights": False}),
    )
}
# Keras's names for O1.
KERAS = {"mixed_float16": "O1:float16", "mixed_bfloat16": "O1:bfloat16"}
# The names in Lightning's Trainer(precision=...), and Accelerate's mixed_precision="no".
LIGHTNING = {
    "16-mixed": "O1:float16",
    "bf16-mixed": "O1:bfloat16",
    "16-true": "O3:float16",
    "bf16-true": "O3:bfloat16",
    **dict.fromkeys(("32-true", "32", "no"), "O0"),
}
ALIASES = {**KERAS, **LIGHTNING}
# The names that str(policy) writes; the first name that fits is taken.
NAMES = ("float32", *KERAS, *(f"{level}:{half}" for level in ("O2", "O3") for half in HALVES))

# The keys of the grammar, with jmp's first.
KEYS = {
    "p": "param_dtype",
    "params": "param_dtype",
    "c": "compute_dtype",
    "compute": "compute_dtype",
    "o": "output_dtype",
    "output": "output_dtype",
    **{field.name: field.name for field in dataclasses.fields(Policy)},
}


def get_policy(x: "PolicyLike", half: DTypeLike | None = None, **settings: Any) -> Policy:
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
        x: The string. A `Policy` is returned as it is; a `jmp.Policy` is converted. Configuration
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
    if isinstance(x, jmp.Policy):
        base = (
            x if isinstance(x, Policy) else Policy(x.param_dtype, x.compute_dtype, x.output_dtype)
        )
        return _refined(base, _added({}, settings.items(), x), x, half) if settings else base
    text, pairs = _text_of(x)
    pairs += settings.items()
    try:
        return _parsed(text, pairs, x, half)
    except ValueError as error:
        meant = _meant(text)
        if not meant:
            raise
        said = re.sub(r" Did you mean .*?\?", "", str(error))
    raise ValueError(
        f"{said} Did you mean {meant!r}? Commas separate settings; lists and mappings are JSON."
    )


def _is_mapping(x: Any) -> bool:  # that of ml_collections is no `Mapping`
    return isinstance(x, Mapping) or (hasattr(x, "items") and hasattr(x, "keys"))


def _text_of(x: Any) -> tuple[str | None, list[tuple[Any, Any]]]:
    """Returns the string of a policy, None if there is none, and the settings beside it."""
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
    if name in BY_NAME and not getattr(value, "shape", ()):
        mixed = f"mixed_{name}" if BY_NAME[name] in HALVES else name
        return f" Did you mean {mixed!r}? To use one dtype everywhere, give its name: {name!r}."
    return misplaced(value)


def _meant(text: str | None) -> str:
    """Returns the valid string that an invalid one probably means, or ""."""
    valid = {name: row.values[1:] for name, row in CHOICES.items()}
    valid |= {f"{name}=true": (name,) for name in FLAGS}
    meant = rewritten(text, KEYS, valid) if text and len(text) < LONGEST else ""
    if not meant or meant == text:
        return ""
    with contextlib.suppress(ValueError):
        _parsed(meant, [], meant, None)
        try:
            _parsed(text, [], text, None)
        except ValueError:
            return meant
    return ""


def _parsed(text: str | None, pairs: Iterable[tuple[Any, Any]], x: Any, half: Any) -> Policy:
    name, values = ("", {}) if text is None else _split(text)
    values = _added(values, pairs, x)
    if name:
        return _refined(_named(name, text or name, half), values, x, half)
    named = any(field.endswith("_dtype") for field in values)
    values.setdefault("param_dtype", FLOAT32)
    values.setdefault("compute_dtype", values["param_dtype"])
    values.setdefault("output_dtype", values["compute_dtype"])
    policy = _refined(Policy(FLOAT32, FLOAT32, FLOAT32), values, x, half)
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
    dtypes: dict[str, Any] = {
        field: canonical(value, of + field, half)
        for field, value in values.items()
        if field.endswith("_dtype")
    }
    if "overrides" in values:
        dtypes["overrides"] = tuple(
            (pattern, canonical(dtype, f"{of}overrides[{brief(pattern)}]", half))
            for pattern, dtype in _pairs(values["overrides"])
        )
    return dataclasses.replace(base, **{**values, **dtypes})


def _half_of_suffix(suffix: str, text: str, half: np.dtype | None) -> np.dtype:
    asked = _as_half(suffix.strip(), f"policy={brief(text)}: the suffix")
    if half is not None and half != asked:
        raise ValueError(
            f"policy={brief(text)} asks for {asked}, but half={half.name!r}. Remove the suffix or "
            "the argument half."
        )
    return asked


def _unknown_name(name: str, text: str) -> ValueError:
    choices = [*NAMES, *LEVELS, *LIGHTNING, *BY_NAME, "half"]
    meant = _mixed(name) or NAMES_ELSEWHERE.get(name.lower())
    hint = f" Did you mean {meant!r}?" if meant else elsewhere(name) or did_you_mean(name, choices)
    if name.lower() in ("auto", "default", "best"):
        hint = " mpjax.recommend_policy() returns the one that suits this device."
    return ValueError(
        f"Unknown policy {brief(name)} (policy={brief(text)}).{hint} Choose one of 'float32', "
        "'mixed_float16', 'mixed_bfloat16', the levels 'O0' to 'O3' (with a suffix as in "
        "'O2:float16'), a dtype such as 'bf16', and jmp's form 'p=f32,c=bf16,o=f32'."
    )


def _named(name: str, text: str, half: np.dtype | None) -> Policy:
    """Returns the policy of a level, Keras name or dtype name."""
    by_fold = {key.lower(): key for key in (*LEVELS, *ALIASES)}
    level, colon, suffix = (ALIASES.get(name.lower()) or name).partition(":")
    row = LEVELS.get(by_fold.get(level.strip().lower(), ""))
    if row is None:
        if not colon and (name.lower() in BY_NAME or name.lower() == "half"):
            dtype = canonical(name, "policy", half)
            return Policy(dtype, dtype, dtype)
        raise _unknown_name(name, text)
    if colon:
        half = _half_of_suffix(suffix, text, half)

    def resolve(value):
        return (half or default_half()) if value == "half" else value

    return Policy(**{key: resolve(value) for key, value in row.items()})


# Words that represent mixed precision in the names of others.
MIXED = {"mixed", "amp", "autocast"}


def _mixed(name: str) -> str:
    """Returns the mixed policy that a name such as "float16 mixed" or "amp_bf16" means, or ""."""
    words = {*re.findall(r"[a-z0-9]+", name.lower())}
    halves = [BY_NAME[word] for word in words if BY_NAME.get(word) in HALVES]
    rest = words - {*BY_NAME, *MIXED, "precision", "16"}
    if rest or len(halves) > 1 or not words & MIXED:
        return ""
    return f"mixed_{(halves or [FLOAT16 if '16' in words else default_half()])[0]}"


def means_another_policy(x: Any) -> bool:
    """Returns whether a policy is a name that elsewhere means mixed precision, such as "bf16".

    For Hugging Face's ``mixed_precision=`` and PyTorch's autocast it is what matmuls run in; for
    jmp and mpjax it is the dtype of everything, parameters included.
    """
    text = None if isinstance(x, jmp.Policy) else _text_of(x)[0]
    word = _split(text)[0].lower() if text else ""
    return word == "half" or BY_NAME.get(word) in HALVES


def _as_half(dtype: DTypeLike, argument: str = "half") -> np.dtype:
    canonical_dtype = canonical(dtype, argument)
    if canonical_dtype not in HALVES:
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
    end = text.find(",", position)
    end = len(text) if end < 0 else end
    return text[position:end].strip(), end


def _grammar(word: str) -> str:
    valid = ", ".join(key for key in KEYS if len(key) > 1)
    return f"Choose one of {valid}.{did_you_mean(word, KEYS)}"


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
    """Returns the fields in canonical form. Raises a ValueError for a field that is invalid."""
    fields: dict[str, Any] = {
        name: canonical(getattr(policy, name), name)
        for name in ("param_dtype", "compute_dtype", "output_dtype")
    }
    overrides: dict[str, np.dtype] = {}
    for pattern, dtype in _pairs(policy.overrides):
        chosen = canonical(dtype, f"overrides[{brief(pattern)}]")
        overrides.setdefault(_pattern(pattern, "overrides"), chosen)  # the first match wins
    fields["overrides"] = tuple(overrides.items())
    patterns = _strings(policy.keep_full, "keep_full")
    fields["keep_full"] = tuple(_pattern(p, "keep_full") for p in patterns)
    fields |= _choices(policy)
    _check_kept(policy, fields)
    for names in OP_LISTS:
        fields[names] = tuple(dict.fromkeys(_strings(getattr(policy, names), names)))
    _check_primitives({names: fields[names] for names in OP_LISTS})
    return fields


def _choices(policy: Policy) -> dict[str, str | float]:
    """Returns the settings of `CHOICES` in canonical form, and refuses those that are invalid."""
    for name in FLAGS:
        if not isinstance(getattr(policy, name), bool):
            raise ValueError(f"{name}={brief(getattr(policy, name))} must be True or False.")
    found: dict[str, str | float] = {}
    for name, row in CHOICES.items():
        value = getattr(policy, name)
        number = _share(value) if row.numbers else None
        if number is not None:
            found[name] = row.values[0] if number == 1 else number
        elif isinstance(value, str) and value in row.values:
            found[name] = value
        else:
            meant = did_you_mean(value, row.values)
            raise ValueError(f"{name}={brief(value)} must be {row.valid}{meant}")
    return found


def _share(value: Any) -> float | None:
    """Returns a number from 0 to 1, which may be written as a string; None for all else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if 0 <= number <= 1 else None


def _list_of_each(lists: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Returns the list that each primitive is in."""
    listed: dict[str, str] = {}
    for names, members in lists.items():
        for name in members:
            if name in listed:
                raise ValueError(
                    f"{names}: {brief(name)} is also in {listed[name]}. Name a primitive in one "
                    "list only."
                )
            listed[name] = names
    return listed


def _check_primitives(lists: dict[str, tuple[str, ...]]) -> None:
    """Refuses what the lists of operations name if it is no primitive, or one without a dtype."""
    listed = _list_of_each(lists)
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


def _check_kept(policy: Policy, fields: dict[str, Any]) -> None:
    """Refuses settings of masters and rounding that contradict the rest of the policy."""
    stored = fields["param_dtype"]
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


def _given(**settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _strings(value: Any, argument: str) -> tuple[str, ...]:
    """Returns strings, and the names of primitives."""
    strings = value if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    strings = tuple(getattr(string, "name", string) for string in strings)
    if all(isinstance(string, str) for string in strings):
        return strings
    ops = argument.removesuffix("_ops") in ("half", "full", "follow")
    hint = " jax.make_jaxpr(fun)(*args) prints the primitives of a function." if ops else ""
    raise ValueError(f"{argument}={brief(value)} must be a sequence of strings.{hint}")


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
