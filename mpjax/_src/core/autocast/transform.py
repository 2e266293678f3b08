"""`autocast`: op-level mixed precision for any JAX function.

This module traces, caches and calls the function. `planner` decides what is rounded and kept.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp

from mpjax._src.core.autocast import boundary
from mpjax._src.core.autocast.classify import Outline, classify, outline
from mpjax._src.core.autocast.eager import Kept
from mpjax._src.core.autocast.kernels import Numbers, overridden, tracing
from mpjax._src.core.autocast.unplanned import (
    check_no_checks,
    check_no_other_policy,
    warn_if_nothing_is_half,
    warn_if_wide,
)
from mpjax._src.core.autocast.unscaled import watched
from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import held
from mpjax._src.core.base.called import CALLED, CASTS
from mpjax._src.core.base.dtypes import FLOAT16, FLOAT32, HALVES
from mpjax._src.core.base.errors import brief, check_callable, did_you_mean
from mpjax._src.core.base.patterns import matches, nearest_paths
from mpjax._src.core.base.wrapped import Decorator, Wrapped
from mpjax._src.core.planner.exceptions import half_regions
from mpjax._src.core.planner.kept import program_of
from mpjax._src.core.planner.program import Program
from mpjax._src.core.planner.replaced import replaced
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.policy.policy import Policy, PolicyLike
from mpjax._src.core.program import trace as programs
from mpjax._src.core.program.modules import call_on_arrays, has_modules, on_arrays
from mpjax._src.core.program.respellings import Respellings
from mpjax._src.core.program.site import with_rows
from mpjax._src.core.program.states import next_states
from mpjax._src.core.program.trace import Flat, parameters_of

F = TypeVar("F", bound=Callable[..., Any])


class Replaced(NamedTuple):
    """A program in which attentions and losses that a policy asks for are replaced."""

    jaxpr: Any  # its closed jaxpr
    # By ops of the outline: the kernel of each attention, by the matmul that reads its weights, or
    # why it has none; and the blocks of each loss, by what makes its logits, or why it has none.
    attention: Mapping[Any, str]
    losses: Mapping[Any, str]
    instead: Mapping[Any, str]  # for each op that is replaced: what runs in its place


@dataclasses.dataclass(frozen=True)
class Traced(programs.Traced):
    """A function, traced for one signature, and its plan, which is made when it is needed.

    The program is as written, without casts.
    """

    policy: Policy
    avals: tuple[Any, ...]  # the abstract values of the array arguments, as the caller passes them
    paths: tuple[str, ...]  # the path of each of them
    out_dtypes: tuple[Any, ...]  # for each float32 result, the dtype in which it is returned

    @functools.cached_property
    def outline(self) -> Outline:
        """What is asked of its operations, which are the rows of reports."""
        policy = boundary.of_operations(self.policy)
        return outline(*_jax.open_jaxpr(self.jaxpr), policy, self.paths)

    @functools.cached_property
    def replaced(self) -> Replaced:
        """The program with replacements, and what becomes of its attentions and losses."""
        policy = self.policy
        if self.as_written:
            return Replaced(self.jaxpr, {}, {}, {})
        if not (policy.fused_attention or policy.chunked_loss):
            jaxpr = replaced(self.jaxpr, self.outline.block, Respellings())
            return Replaced(jaxpr, {}, {}, {})
        from mpjax._src.replacements.finder import Finder  # few policies ask for it

        rulings = self.outline.rulings

        def of(block):  # a rule's program is another one
            known = all(op in rulings for op in block.ops)
            return rulings if known else classify(block, policy)[0]

        find = Finder(of, policy)
        jaxpr = replaced(self.jaxpr, self.outline.block, find)
        return Replaced(jaxpr, find.attention, find.losses, find.instead)

    @functools.cached_property
    def program(self) -> Program:
        """The program that sees its derivative, whose first arguments are the constants."""
        dtypes = [getattr(a, "dtype", None) for a in self.avals]
        around = functools.partial(tracing, self.policy)
        return program_of(
            self.replaced.jaxpr, self.policy, self.paths, dtypes, self.out_dtypes, around
        )

    @functools.cached_property
    def with_rows(self) -> "Traced":
        """The same with the numbers of its rows as scopes, which derivatives have too."""
        jaxpr = with_rows(self.jaxpr, self.outline.block, self.outline.rows)
        return dataclasses.replace(self, jaxpr=jaxpr)

    @functools.cached_property
    def as_written(self) -> bool:
        """Whether its operations run as they are traced, because nothing asks for casts of them."""
        if boundary.casts_arguments(self.policy):
            return True
        if self.policy.compute_dtype in HALVES:
            return False
        # Without overrides only a region can ask for it, which is found without a graph.
        if self.policy.overrides:
            return self.outline.as_written
        return not {*half_regions(self.jaxpr)}

    @property
    def computes_in(self) -> Collection[Any]:
        """The 16-bit dtypes that its policy or a region asks for."""
        if boundary.casts_arguments(self.policy):
            return (self.policy.compute_dtype,)
        return () if self.as_written else self.program.computes_in

    @functools.cached_property
    def donates(self) -> bool:
        """Whether the program contains a jit that donates its arguments."""
        return _jax.donates(self.jaxpr)


@overload
def autocast(fun: F, policy: "PolicyLike" = "mixed_bfloat16") -> F: ...
@overload
def autocast(fun: None = None, *, policy: "PolicyLike" = "mixed_bfloat16") -> Callable[[F], F]: ...
def autocast(fun: Any = None, policy: "PolicyLike" = "mixed_bfloat16", **others: Any) -> Any:
    """Runs a float32 function in mixed precision, choosing the dtype of each operation.

    Matmuls and convolutions read and return 16 bits, in the forward and backward pass. All other
    operations that compute do so in float32; those that move or select values, as a reshape or a
    ReLU, have the dtype of their operands. What is stored for the backward pass, and what it
    computes again, changes no value and no gradient. (A derivative of a gradient rounds elsewhere:
    what is computed again is differentiated again.) Values of the function that are not float32
    keep their dtypes. If neither the policy nor a region of the function asks for a 16-bit dtype,
    the function runs as traced. Matmuls that set their own ``precision`` stay float32, unless an
    override lifts it; a `PrecisionWarning` says so if no other is left.

    A policy with ``casting="boundary"`` (O3, "bf16", jmp strings) chooses no dtypes: the floating
    arguments are cast once to its compute dtype, except for states, and the results to its output
    dtype. A function that refuses such arguments, or adds gradients to them, runs as under
    ``casting="op"``, and a `PrecisionWarning` says so.

    The function may use any JAX transformation, and any of them may be applied to the result.
    Outside of transformations:

    - Each call traces the function anew, so closed-over arrays, numbers and objects have their
      present values, as in a call of the function itself. What is compiled is used again if the
      trace is the same; arrays may have changed. `jax.jit` around the result saves the trace, and
      captures closed-over values.
    - Array arguments are traced; Python values and other objects are passed on unchanged.
    - Changes to Flax NNX modules among the arguments are applied, as with ``nnx.jit``. A module
      that the function only reads or returns is not written to.

    Args:
        fun: Any function that `jax.jit` can trace. If None, a decorator is returned. Parameters
            that the policy stores in 16 bits (O2, or by an override) arrive in the function as
            float32, because the function was written for float32.
        policy: A `Policy`, or anything that `get_policy` accepts. ``compute_dtype`` is the 16-bit
            dtype, and ``output_dtype`` is the dtype of float32 results. The op lists and overrides
            apply. An override matches the named scopes of an operation and the paths of the
            parameters that it reads.
        **others: None. The error says how to write what ``torch.autocast`` takes.

    Returns:
        A function of the same signature. Its float32 results are cast to ``policy.output_dtype``;
        other results keep their dtypes. A returned tree with the structure and shapes of an
        argument counts as the next value of that argument (batch statistics, a cache) and has its
        dtypes.

    Raises:
        TypeError: If ``fun`` is not a function, or if ``policy`` is neither a policy nor a string.
        ValueError: If the policy is invalid. When the result is called: if a pattern of the
            overrides matches neither a scope nor a parameter path; if Keras's own dtype policy
            casts in the function too; or if checks of ``checkify`` are in it.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> layer = mpjax.autocast(lambda w, x: jax.nn.relu(x @ w), "mixed_bfloat16")
        >>> w, x = jnp.ones((8, 2)), jnp.ones((3, 8))
        >>> layer(w, x).dtype
        dtype('float32')
        >>> "bf16" in str(jax.make_jaxpr(layer)(w, x))
        True

    References:
        The lists of operations follow ``torch.amp`` and NVIDIA Apex; Micikevicius et al., Mixed
        Precision Training, 2018.
    """
    for name in others:
        raise TypeError(
            f"autocast has no argument {name!r}. Write mpjax.autocast(fun, policy){INSTEAD[name]}."
            if name in INSTEAD
            else f"autocast has no argument {name!r}. It has fun and policy."
            f"{did_you_mean(name, ('fun', 'policy'))}"
        )
    if isinstance(fun, str):
        raise TypeError(
            f"fun={brief(fun)} must be a function. Pass a policy as the second argument or "
            f"policy=, or write @mpjax.autocast(policy={brief(fun)}) above the function. No `with` "
            "block sets one."
        )
    if fun is None:
        return Decorator(Autocast, policy=get_policy(policy))
    return Autocast(fun, policy)


# What other libraries' autocast takes, and what says it here.
INSTEAD = {
    "dtype": ', with the policy "mixed_bfloat16" or "mixed_float16"',
    "enabled": ', with the policy "float32" where it is not enabled',
    "device_type": " without it: a function runs where its arrays are",
    "cache_enabled": " without it: no casts are cached",
}


class Autocast(Wrapped):
    """A function under autocast: what `autocast` returns.

    Attributes:
        policy: The policy.
        is_loss: Whether it is a loss. Its results are float32, whatever the policy's output dtype.
        returning: Is called, while the function is traced, with what it returns.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        policy: Any,
        is_loss: bool = False,
        returning: Callable[[Any], None] | None = None,
    ) -> None:
        check_callable(fun, "fun")
        policy = get_policy(policy)
        super().__init__(fun, policy, is_loss, returning)
        boundary.warn_if_unused(policy)
        self.policy, self.kept = policy, Kept()
        self.is_loss, self.returning = is_loss, returning

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fun, owner = self.fun, getattr(self.fun, "__self__", self.fun)
        if has_modules(owner):  # it may change: it is an argument like others
            fun, args = getattr(fun, "__func__", type(fun).__call__), (owner, *args)
        if self.returning is not None:
            fun = _watched(fun, self.returning)
        if not has_modules((args, kwargs)):
            return self._run(fun, args, kwargs)
        pure = on_arrays(fun)
        return call_on_arrays(lambda *args, **kwargs: self._run(pure, args, kwargs), args, kwargs)

    def _run(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        flat = Flat.of((args, kwargs))
        make = functools.partial(_traced, flat, fun, self.policy, self.is_loss)
        names = lambda: flat.names(parameters_of(fun, args))  # noqa: E731
        traced = make()
        entry = self.kept.entry(traced, flat.arrays)
        if entry is None:
            traced, _ = _checked(traced, make, names)
            return traced.rebuild(call(traced, flat.arrays))
        if entry.others is not None:
            # Overrides gave some kernels another dtype when the program was new.
            traced = make(entry.others)
        elif entry.made is None:
            traced, entry.others = _checked(traced, make, names)
        return traced.rebuild(entry(traced, flat.arrays, _compiled))


def _watched(fun: Callable[..., Any], watch: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(fun)
    def run(*args, **kwargs):
        out = fun(*args, **kwargs)
        watch(out)
        return out

    return run


def _compiled(traced: Traced, known: dict[int, Any]) -> Callable[[Any, Any], list[Any]]:
    """Returns a program as a function of its constants, without those known, and its arguments."""
    inner, _ = _jax.open_jaxpr(traced.jaxpr)
    count = len(inner.constvars)
    inner, _ = _jax.open_jaxpr(_jax.close(inner, [None] * count))  # from 0.12 on it has constants
    bare = dataclasses.replace(traced, jaxpr=None, out=Flat.of(()))  # keeps no array alive

    def filled(others):
        rest = iter(others)
        values = [known[i] if i in known else next(rest) for i in range(count)]
        return dataclasses.replace(bare, jaxpr=_jax.close(inner, values))

    if not traced.donates:
        return jax.jit(lambda others, arrays: call(filled(others), arrays))
    whole = filled(()) if len(known) == count else None
    return lambda others, arrays: call(whole or filled(others), arrays)


def trace(
    fun: Callable[..., Any], policy: Policy, args: Any, kwargs: Any, is_loss: bool = False
) -> Traced:
    """Traces and plans a function, as `Autocast` does.

    ``args`` and ``kwargs`` may contain `jax.ShapeDtypeStruct`.
    """
    boundary.warn_if_unused(policy)
    make = functools.partial(_traced, Flat.of((args, kwargs)), fun, policy, is_loss)
    return _checked(make(), make)[0]


def _traced(
    flat: Flat, fun: Callable[..., Any], policy: Policy, is_loss: bool, others: Any = None
) -> Traced:
    """Traces a function as its policy asks: here it is decided what a policy makes of a function.

    Boundary casting casts its arguments and results (`boundary`), and refuses a function that does
    not run on cast arguments: then its operations are cast, as by all other policies.
    """
    done = functools.partial(_with_results, flat, FLOAT32 if is_loss else policy.output_dtype)
    if not boundary.casts_arguments(policy):
        return done(policy, *_by_operations(flat, fun, policy, others))
    try:
        run = functools.partial(_trace, flat, fun)
        return done(policy, *boundary.program_of(flat, policy, run))
    except (TypeError, ValueError) as error:
        # Without casts to 16 bits, the error is the function's own.
        if policy.compute_dtype not in HALVES:
            raise
        refused = error
    try:
        by_op = policy.replace(casting="op")
        traced = done(by_op, *_by_operations(flat, fun, by_op, others))
    except Exception:
        # The first error, of the function as it is written, says more.
        raise refused from None
    boundary.warn_of_refusal(policy, fun, refused)
    return traced


def _by_operations(
    flat: Flat, fun: Callable[..., Any], policy: Policy, others: Any
) -> tuple[programs.Traced, Sequence[Any]]:
    """Traces a function whose operations are cast.

    Args:
        flat: The call.
        fun: The function.
        policy: The policy.
        others: The dtypes that overrides give to its kernels, if any.

    Returns:
        The program, and the abstract values of its arguments.
    """
    written = [_as_written(a, p, policy) for a, p in zip(flat.avals, flat.paths, strict=True)]
    options = {} if others is None else {"numbers": Numbers(), "others": others}
    with tracing(policy, **options):
        return _trace(flat, fun, written), written


def _trace(flat: Flat, fun: Callable[..., Any], seen: Sequence[Any]) -> programs.Traced:
    try:
        return programs.trace(flat.on(fun), seen, getattr(fun, "__name__", "autocast"))
    except Exception as error:
        if type(error).__name__ == "TraceContextError":  # Flax's
            error.add_note(
                "autocast traces the function, and it changes a module that it closes over. Pass "
                "the module as an argument: autocast(lambda model, x: model(x))(model, x)."
            )
        raise


def _with_results(
    flat: Flat, dtype: Any, policy: Policy, program: programs.Traced, seen: Sequence[Any]
) -> Traced:
    """Returns a program with the dtypes of its results: states have those of their arguments."""
    results = [v.aval for v in _jax.open_jaxpr(program.jaxpr)[0].outvars]
    if boundary.casts_arguments(policy):
        seen, results = boundary.alike(seen), boundary.alike(results)
    to = [dtype if getattr(a, "dtype", None) == FLOAT32 else None for a in results]
    given = [getattr(aval, "dtype", None) for aval in flat.avals]
    # Of several arguments that a result may be the next value of, the first.
    for arguments, values in reversed([*next_states(flat, seen, program.out, results)]):
        for argument, value in zip(arguments, values, strict=True):
            if argument is not None and value is not None and to[value] is not None:
                to[value] = given[argument]
    return Traced(program.jaxpr, program.out, policy, flat.avals, flat.paths, tuple(to))


def _checked(traced: Traced, make: Callable[..., Traced], names: Any = None) -> tuple[Traced, Any]:
    """Checks what a policy does to a program. With ``names`` of its arguments it warns too.

    Returns:
        The program, which ``make`` traces again if overrides give some kernels another dtype; and
        these dtypes, or None.
    """
    policy, others = traced.policy, None
    if policy.overrides and boundary.casts_arguments(policy):
        used = {p for p, _ in policy.overrides if any(matches(p, path) for path in traced.paths)}
        _check_patterns(policy, used, traced.paths)
    elif policy.overrides:
        if overridden(traced.outline.block, policy):
            # The first trace gave calls no numbers. This one does, and the next uses them.
            others = tuple(sorted(overridden(make(()).outline.block, policy).items()))
            traced = make(others)
        scopes = ("/".join(op.scopes) for op in traced.outline.block.walk())
        _check_patterns(policy, traced.outline.used_patterns, (*traced.paths, *scopes))
    if policy.compute_dtype in HALVES:
        CALLED.add(CASTS)
    if policy.compute_dtype in HALVES and not boundary.casts_arguments(policy):
        check_no_checks(traced.jaxpr)
        check_no_other_policy(traced.outline.block)
        if names is not None:
            block, rulings = traced.outline.block, traced.outline.rulings
            warn_if_nothing_is_half(block, rulings, policy)
            warn_if_wide(block, rulings, policy, names)
    return traced, others


def _as_written(aval: Any, path: str, policy: Policy) -> Any:
    """Returns the abstract value of an argument as the function sees it.

    A parameter that the policy stores in 16 bits arrives as float32, because the function was
    written for float32. An argument of another 16-bit dtype is the user's own choice and keeps it.
    """
    dtype = getattr(aval, "dtype", None)
    stored = dtype in (policy.param_dtype, policy.override_for(path))
    return _jax.retyped(aval, FLOAT32) if stored and dtype in HALVES else aval


def call(traced: Traced, arrays: Sequence[Any], rows: bool = False) -> list[Any]:
    """Evaluates a traced function on its array arguments.

    With ``rows``, each equation that runs is in the scope of the row that it belongs to.
    """
    traced = traced.with_rows if rows else traced
    arrays = [jnp.asarray(x) if not isinstance(x, jax.Array) else x for x in arrays]
    with boundary.scopes(traced.policy):
        run = _run_as_written if traced.as_written else _run_program
        results = run(traced, arrays)
        if FLOAT16 in traced.computes_in and not rows:
            # What is returned as it was given stays the same object, which callers know.
            given = {*map(id, arrays)}
            results = [x if id(x) in given else watched(x) for x in results]
    # A result that is a constant may be a Python number.
    outs = zip(results, _jax.open_jaxpr(traced.jaxpr)[0].outvars, traced.out_dtypes, strict=True)
    return [x if hasattr(x, "dtype") else jnp.asarray(x, to or v.aval.dtype) for x, v, to in outs]


def _run_as_written(traced: Traced, arrays: Sequence[Any]) -> list[Any]:
    """Runs a program that asks for no 16-bit dtype: only its arguments and results are cast."""
    avals = _jax.in_avals(traced.jaxpr)
    inputs = [_cast(x, getattr(a, "dtype", None)) for x, a in zip(arrays, avals, strict=True)]
    # A jit around it would ignore what the jit inside donates.
    run = _jax.eval_closed if traced.donates else _jax.call_as_jit
    # JAX takes apart a jit that returned NaN by calling its function; this one has none.
    run = _jax.eval_apart if jax.debug_nans.value or jax.debug_infs.value else run
    results = run(traced.jaxpr, *inputs)
    return [_cast(x, dtype) for x, dtype in zip(results, traced.out_dtypes, strict=True)]


def _run_program(traced: Traced, arrays: Sequence[Any]) -> list[Any]:
    """Runs a program that sees its derivative."""
    outs = held.call_held(traced.program, *_passed(traced, arrays))
    inner, _ = _jax.open_jaxpr(traced.jaxpr)
    given = dict(zip(inner.invars, arrays, strict=True))  # what is returned as it came
    same = [None if isinstance(v, _jax.Literal) else given.get(v) for v in inner.outvars]
    outs = [out if x is None else x for out, x in zip(outs, same, strict=True)]
    return [_cast(x, to) for x, to in zip(outs, traced.out_dtypes, strict=True)]


def called(traced: Traced, arrays: Sequence[Any]) -> list[Any]:
    """Does what `call` does, with calls of functions with rules, for who looks for their operands.

    Nobody can differentiate it.
    """
    if traced.as_written:
        return call(traced, arrays)
    return _jax.eval_closed(traced.program.calling, *_passed(traced, arrays))


def _passed(traced: Traced, arrays: Sequence[Any]) -> list[Any]:
    """Returns the constants and arguments of a program in the dtypes in which it takes them."""
    consts = _jax.open_jaxpr(traced.replaced.jaxpr)[1]
    typed = zip([*consts, *arrays], traced.program.in_avals, strict=True)
    return [_cast(x, getattr(a, "dtype", None)) for x, a in typed]


def _cast(x: Any, dtype: Any) -> Any:
    same = dtype is None or getattr(x, "dtype", dtype) == dtype
    return x if same else jax.lax.convert_element_type(x, dtype)


def _check_patterns(policy: Policy, used: Collection[str], places: Collection[str]) -> None:
    for pattern, _ in policy.overrides:
        if pattern not in used:
            known = [place for place in places if place]
            near = ", ".join(map(repr, nearest_paths(pattern, known))) or "none at all"
            raise ValueError(
                f"overrides: the pattern {pattern!r} matches neither a named scope nor the path of "
                f"a parameter. The nearest are {near}. Correct the pattern, or remove the override."
            )
