"""`autocast`: op-level mixed precision for any JAX function.

This module traces, caches and calls the function. `plan` decides the dtypes, and `rewrite`
evaluates the program with them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import jmp

from mpjax._src import _jax
from mpjax._src.autocast.graph import PLANNED, Block
from mpjax._src.autocast.kernels import Numbers, overridden, tracing
from mpjax._src.autocast.modules import are_there, call_on_arrays, on_arrays
from mpjax._src.autocast.others import check_no_other_policy
from mpjax._src.autocast.plan import Plan, make_plan
from mpjax._src.autocast.rewrite import run_plan
from mpjax._src.autocast.signature import KEPT_CALLS, signature
from mpjax._src.autocast.states import handed_out, states
from mpjax._src.dtypes import FLOAT32, HALVES
from mpjax._src.errors import check_callable
from mpjax._src.patterns import nearest_paths, path_of
from mpjax._src.policy import Policy, get_policy
from mpjax._src.trees import is_array

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function, traced and planned for one signature.

    Attributes:
        plan: The plan.
        avals: The abstract values of the array arguments, as the caller passes them.
        out_dtypes: For each float32 result, the dtype in which it is returned.
        rebuild: A function from the array results to the value that the function returns.
        jaxpr: The program as written, without casts.
    """

    plan: Plan
    avals: tuple[Any, ...]
    out_dtypes: tuple[Any, ...]
    rebuild: Callable[[list[Any]], Any]
    jaxpr: Any

    def returned(self) -> Any:
        """Returns the result of the function, with a `jax.ShapeDtypeStruct` for each array."""
        results = [v.aval for v in self.plan.block.outvars]
        return self.rebuild([jax.ShapeDtypeStruct(a.shape, a.dtype) for a in results])


@overload
def autocast(fun: F, policy: str | jmp.Policy) -> F: ...
@overload
def autocast(fun: None = None, *, policy: str | jmp.Policy) -> Callable[[F], F]: ...
def autocast(fun: Any = None, policy: Any = None) -> Any:
    """Runs a float32 function in mixed precision, choosing the dtype of each operation.

    Matmuls and convolutions get half operands, in the forward and backward pass. Softmax, norms,
    losses, exp, log, sums and similar operations compute in float32. Other operations compute in
    the dtype of their operands. Values kept for the backward pass are stored in half if that adds
    at most one rounding. Values of the function that are not float32 keep their dtypes.

    The function may use any JAX transformation, and any of them may be applied to the result.
    Outside of `jax.jit` the result is compiled and cached, as with `jax.jit`:

    - Array arguments are traced; Python values and other objects are passed on unchanged.
    - Values that the function does not get as arguments are read when it is traced.
    - New numbers, strings, enums, dtypes or functions among the arguments cause a new trace.
      Objects of other types cause a new trace at each call, because they may have changed.
    - Changes to Flax NNX modules among the arguments are kept, as with ``nnx.jit``.

    Args:
        fun: Any function that `jax.jit` can trace. If None, a decorator is returned. Parameters
            that the policy stores in half (O2, O3, or by an override) arrive in the function as
            float32, because the function was written for float32.
        policy: A `Policy`, or anything that `get_policy` accepts. ``compute_dtype`` is the half
            dtype, and ``output_dtype`` is the dtype of float32 results. The op lists and overrides
            apply. An override matches the named scopes of an operation and the paths of the
            parameters that it reads.

    Returns:
        A function of the same signature. Its float32 results are cast to ``policy.output_dtype``;
        other results keep their dtypes. A returned tree with the structure and shapes of an
        argument counts as the next value of that argument (batch statistics, a cache) and has its
        dtypes.

    Raises:
        TypeError: If ``fun`` is not a function, or if ``policy`` is neither a policy nor a string.
        ValueError: If the policy is not legal. When the result is called: if a pattern of the
            overrides matches neither a scope nor a parameter path, or if Keras's own dtype policy
            casts in the function too.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> layer = mpjax.autocast(lambda w, x: jax.nn.relu(x @ w), "mixed_bfloat16")
        >>> w, x = jnp.ones((4, 2)), jnp.ones((3, 4))
        >>> layer(w, x).dtype
        dtype('float32')
        >>> "bf16" in str(jax.make_jaxpr(layer)(w, x))
        True

    References:
        The lists of operations follow ``torch.amp`` and NVIDIA Apex; Micikevicius et al., Mixed
        Precision Training, 2018.
    """
    if fun is None:
        return functools.partial(_autocast, policy=get_policy(policy))
    return _autocast(fun, policy)


def _autocast(fun: Callable[..., Any], policy: Any) -> Callable[..., Any]:
    check_callable(fun, "fun")
    policy = get_policy(policy)
    kept: Callable[[Any], list[Any]] = functools.lru_cache(KEPT_CALLS)(lambda key: [])
    _jax.cleared_with_jax(kept)

    def run_planned(fun, args, kwargs, leaves, tree):
        arrays = [x for x in leaves if is_array(x)]
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            traced = trace(fun, policy, args, kwargs)
            return traced.rebuild(call(traced, arrays))
        key = signature(leaves, tree)
        entry = [] if key is None else kept(key)
        if entry:
            traced, run = entry[0]
            return traced.rebuild(run(arrays))
        traced = trace(fun, policy, args, kwargs)
        run = functools.partial(call, traced)
        block = traced.plan.block
        if key is not None and not _holds_tracers(block):
            run = run if _donates(block) else jax.jit(run)
            entry.append((traced, run))
        return traced.rebuild(run(arrays))

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        if not are_there(leaves, tree):
            return run_planned(fun, args, kwargs, leaves, tree)
        pure = on_arrays(fun)

        def run(*args, **kwargs):
            return run_planned(pure, args, kwargs, *jax.tree_util.tree_flatten((args, kwargs)))

        return call_on_arrays(run, args, kwargs)

    return wrapped  # type: ignore[return-value]


def trace(fun: Callable[..., Any], policy: Policy, args: Any, kwargs: Any) -> Traced:
    """Traces and plans a function. ``args`` and ``kwargs`` may hold `jax.ShapeDtypeStruct`."""
    pairs, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    traced = [is_array(x) or isinstance(x, jax.ShapeDtypeStruct) for _, x in pairs]
    avals = [_jax.aval_of(x) for (_, x), yes in zip(pairs, traced, strict=True) if yes]
    # A path starts at the root of an argument and does not contain its position or name.
    paths = [path_of(keys[2:]) for (keys, _), yes in zip(pairs, traced, strict=True) if yes]

    def flat(*arrays):
        given = iter(arrays)
        leaves = [next(given) if yes else x for (_, x), yes in zip(pairs, traced, strict=True)]
        args, kwargs = jax.tree_util.tree_unflatten(tree, leaves)
        return fun(*args, **kwargs)

    name = getattr(fun, "__name__", "autocast")
    written = [_as_written(a, path, policy) for a, path in zip(avals, paths, strict=True)]
    in_dtypes = [getattr(a, "dtype", None) for a in avals]

    def planned(**options):
        with tracing(policy, **options):
            closed, out = _flat_tracing(flat, written, name)
        jaxpr, consts = _jax.open_jaxpr(closed)
        return closed, out, make_plan(jaxpr, consts, policy, in_dtypes, paths=paths)

    closed, (out_leaves, out_tree), plan = planned()
    if overridden(plan.block, policy):  # an override gives some kernels another dtype: find them
        plan = planned(numbers=Numbers())[2]
        found = tuple(sorted(overridden(plan.block, policy).items()))
        closed, (out_leaves, out_tree), plan = planned(numbers=Numbers(), others=found)
    others = [None if is_array(x) else (x,) for x in out_leaves]

    def rebuild(arrays):
        made = iter(arrays)
        return jax.tree_util.tree_unflatten(
            out_tree, [next(made) if other is None else other[0] for other in others]
        )

    jaxpr = _jax.open_jaxpr(closed)[0]
    _check_patterns(plan, paths)
    if policy.compute_dtype in HALVES:
        check_no_other_policy(plan.block)
    known = states(tree, _spread(written, traced), _spread(in_dtypes, traced))
    is_made = [other is None for other in others]
    results = _spread([v.aval for v in jaxpr.outvars], is_made)
    to = handed_out(out_tree, results, known, policy.output_dtype)
    out_dtypes = tuple(itertools.compress(to, is_made))
    return Traced(plan, tuple(avals), out_dtypes, rebuild, closed)


def _as_written(aval: Any, path: str, policy: Policy) -> Any:
    """Returns the abstract value of an argument as the function sees it.

    A parameter that the policy stores in half arrives as float32, because the function was written
    for float32. An argument of another half dtype is the user's own choice and keeps it.
    """
    dtype = getattr(aval, "dtype", None)
    stored = dtype in (policy.param_dtype, policy.override_for(path))
    return _jax.retyped(aval, FLOAT32) if stored and dtype in HALVES else aval


def _flat_tracing(fun: Callable[..., Any], avals: Sequence[Any], name: str) -> tuple[Any, Any]:
    """Traces a function that returns a pytree: returns the jaxpr, and the leaves and structure.

    The leaves are tracers that must not be used any more.
    """
    stored: list[Any] = []

    def flat(*args):
        leaves, tree = jax.tree_util.tree_flatten(fun(*args))
        stored.append((leaves, tree))
        return [leaf for leaf in leaves if is_array(leaf)]

    return _jax.trace(flat, avals, name), stored[-1]


def _spread(values: Sequence[Any], places: Sequence[bool]) -> list[Any]:
    """Returns a list with the values, in order, where ``places`` is true, and None elsewhere."""
    given = iter(values)
    return [next(given) if yes else None for yes in places]


def call(traced: Traced, arrays: list[Any], rows: bool = False) -> list[Any]:
    """Evaluates a traced function on its array arguments; ``rows`` as for `run_plan`."""
    arrays = [jnp.asarray(x) if not isinstance(x, jax.Array) else x for x in arrays]
    with jax.named_scope(PLANNED):
        results = run_plan(traced.plan, arrays, traced.out_dtypes, rows)
    # A result that is a constant may be a Python number.
    outs = zip(results, traced.plan.block.outvars, traced.out_dtypes, strict=True)
    return [x if hasattr(x, "dtype") else jnp.asarray(x, to or v.aval.dtype) for x, v, to in outs]


def _holds_tracers(block: Block) -> bool:
    """Returns whether a planned program closes over tracers of an enclosing transformation."""
    return any(isinstance(const, jax.core.Tracer) for _, const in block.consts)


def _donates(block: Block) -> bool:
    """Returns whether a program contains a jit that donates its arguments."""
    return any(op.name == "jit" and any(op.params["donated_invars"]) for op in block.ops)


def _check_patterns(plan: Plan, paths: list[str]) -> None:
    for pattern, _ in plan.policy.overrides:
        if pattern not in plan.used_patterns:
            scopes = ["/".join(op.scopes) for op in plan.block.walk()]
            known = [place for place in (*paths, *scopes) if place]
            near = ", ".join(map(repr, nearest_paths(pattern, known))) or "none at all"
            raise ValueError(
                f"overrides: the pattern {pattern!r} matches neither a named scope nor the path of "
                f"a parameter. The nearest are {near}. Correct the pattern, or remove the override."
            )
