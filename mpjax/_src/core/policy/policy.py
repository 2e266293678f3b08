"""Policies: the dtypes that a program stores, computes and returns its values in.

A policy is data. `LEVELS` and `NAMES` list the named policies. `get_policy` in `grammar` reads the
strings that `str(policy)` writes. The casts themselves are in `trees`.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jmp
import numpy as np

from mpjax._src.core.base import dtypes
from mpjax._src.core.base.absent import answering
from mpjax._src.core.base.called import CALLED, CASTS
from mpjax._src.core.base.errors import brief, did_you_mean
from mpjax._src.core.base.patterns import matches, nearest_paths, path_of, paths
from mpjax._src.core.base.public import public
from mpjax._src.core.base.trees import cast, cast_leaf
from mpjax._src.core.base.wrapped import NoBlock
from mpjax._src.core.policy.fields import CHOICES, OP_LISTS, canonical_fields, pairs_of, strings_of

T = TypeVar("T")

# The names of policies that editors complete; a policy is more than its name, so a string is valid.
PolicyName: TypeAlias = Literal[
    "float32", "mixed_bfloat16", "mixed_float16", "O0", "O1", "O2", "O3",
    "O1:bfloat16", "O1:float16", "O2:bfloat16", "O2:float16", "O3:bfloat16", "O3:float16",
    "bf16-mixed", "16-mixed", "bf16-true", "16-true", "32-true", "32", "no",
]  # fmt: skip


class FoundPolicy:
    """A report that found a policy, and is taken in its place."""

    policy: "Policy"


PolicyLike: TypeAlias = (
    FoundPolicy | jmp.Policy | PolicyName | str | Mapping[str, Any] | Sequence[Any]
)

# Names of normalization layers in Flax, Equinox, Haiku and PyTorch models.
NORM_PATTERNS = (
    *("*norm*", "*/bn/*", "*/ln/*", "*/gn/*"),
    *("*/bn[0-9_]*", "*/ln[0-9_]*", "*/gn[0-9_]*", "*_bn/*", "*_ln/*", "*_gn/*"),
)

_UNSET: Any = None  # of a dtype that was not given


@public("mpjax")
@answering
@dataclasses.dataclass(frozen=True, repr=False)
class Policy(NoBlock, jmp.Policy):
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
        casting: "op" if the dtype is chosen operation by operation (O1, O2), "boundary" if the
            arguments of a function and its results are cast, as in jmp.
        half_ops: Names of JAX primitives that compute in 16 bits. For op-level casting.
        full_ops: Names of JAX primitives that compute in float32. For op-level casting.
        follow_ops: Names of JAX primitives that compute in the dtype of their inputs. For op-level
            casting.
        storage: For op-level casting. "fast", the default, moves as few bytes as possible. "lean"
            stores as few bytes as possible for the backward pass, which then repeats elementwise
            operations, across norms and activations; no matmul, convolution or reduction runs
            twice. Functions that you wrap in `jax.checkpoint` are left unchanged. No result
            changes. "8bit" stores these values as 8-bit codes, most of them
            with a power-of-two scale for each block of at most 128 entries. The loss is that of
            "lean"; gradients have a rounding error of 8 bits. Values are left unchanged where a
            derivative would amplify that error (the values and the result of an attention), where
            they are exact, and where they are small (ActNN, Chen et al., 2021; COAT, Xi et al.,
            2024). A number is a budget, as PyTorch's ``activation_memory_budget``: of the bytes
            that "lean" stores beyond the fewest that are possible, the share that may be stored.
            The backward pass then repeats matmuls and reductions too, those first that save the
            most bytes for the time that they take. 0 stores the fewest bytes, and 1 means "fast".
            No result changes.
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
        for name, value in canonical_fields(self).items():
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

    def override(self, patterns: Mapping[str, dtypes.DTypeLike]) -> "Policy":
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
        return self.replace(overrides=(*pairs_of(patterns), *self.overrides))

    def with_ops(self, half: Any = (), full: Any = (), follow: Any = ()) -> "Policy":
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
            half_ops=(*self.half_ops, *strings_of(half, "half")),
            full_ops=(*self.full_ops, *strings_of(full, "full")),
            follow_ops=(*self.follow_ops, *strings_of(follow, "follow")),
        )

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
            # These patterns only widen: under a float64 policy nothing becomes float32.
            widens = full and self.param_dtype in dtypes.HALVES
            return dtypes.FLOAT32 if widens else self.param_dtype

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
        if self.compute_dtype in dtypes.HALVES:
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
        return dtypes.FLOAT16 in halves_of(self)

    def _cast_by_path(self, tree: T, default: Callable[[str], np.dtype], uniform: bool) -> T:
        # Without patterns no path matters, and to make all paths takes time.
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
        names = (n for n in NAMES if of_level(*ALIASES.get(n, n).split(":")) == base)
        parts = [next(names, "") or _spell_out(base)]
        if self.overrides:
            pairs = {pattern: dtypes.short_name(dtype) for pattern, dtype in self.overrides}
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
    name: dict(zip(("param_dtype", "compute_dtype", "output_dtype"), three, strict=True), **more)
    for name, three, more in (
        ("O0", ("f32", "f32", "f32"), {}),
        ("O1", ("f32", "half", "f32"), {"casting": "op"}),
        ("O2", ("half", "half", "f32"), {"casting": "op", "keep_full": NORM_PATTERNS}),
        ("O3", ("half", "half", "half"), {"master_weights": False}),
    )
}
KERAS = {"float32": "O0", "mixed_float16": "O1:float16", "mixed_bfloat16": "O1:bfloat16"}
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
NAMES = (*KERAS, *(f"{level}:{half}" for level in ("O2", "O3") for half in dtypes.HALVES))

# The keys of the grammar, with jmp's first.
KEYS = {
    **dict.fromkeys(("p", "params"), "param_dtype"),
    **dict.fromkeys(("c", "compute"), "compute_dtype"),
    **dict.fromkeys(("o", "output"), "output_dtype"),
    **{field.name: field.name for field in dataclasses.fields(Policy)},
}


def halves_of(policy: Policy) -> list[np.dtype]:
    """Returns the 16-bit dtypes that a policy computes in, also by its overrides, each once."""
    every = (policy.compute_dtype, *(dtype for _, dtype in policy.overrides))
    return [dtype for dtype in dict.fromkeys(every) if dtype in dtypes.HALVES]


def of_level(level: str, half: dtypes.DTypeLike = None) -> Policy:
    """Returns the policy of a level; "half" in it is ``half``, or what suits the device."""

    def resolve(value):
        return (half or dtypes.default_half()) if value == "half" else value

    return Policy(**{key: resolve(value) for key, value in LEVELS[level].items()})


def _spell_out(policy: Policy) -> str:
    three = (policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    parts = [f"{key}={dtypes.short_name(dtype)}" for key, dtype in zip("pco", three, strict=True)]
    if policy.keep_full:
        parts.append(f"keep_full={json.dumps(policy.keep_full)}")
    if not policy.master_weights:
        parts.append("master_weights=false")
    if policy.casting != "boundary":
        parts.append(f"casting={policy.casting}")
    return ",".join(parts)
