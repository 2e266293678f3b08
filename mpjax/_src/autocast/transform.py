"""`autocast`: op-level mixed precision for any JAX function.

The transformation itself: tracing, caching and calling. What it decides is in `plan`, how the
decisions are carried out in `rewrite`.
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
    """A function traced and planned for one signature.

    Attributes:
        plan: The plan.
        avals: What it takes: the arrays as they arrive.
        out_dtypes: What each float32 result is handed out in.
        rebuild: Makes of array results what the function returns.
        jaxpr: The program as it is written.
    """

    plan: Plan
    avals: tuple[Any, ...]
    out_dtypes: tuple[Any, ...]
    rebuild: Callable[[list[Any]], Any]
    jaxpr: Any

    def returned(self) -> Any:
        """Returns what the function returns, with shapes for arrays."""
        results = [v.aval for v in self.plan.block.outvars]
        return self.rebuild([jax.ShapeDtypeStruct(a.shape, a.dtype) for a in results])


@overload
def autocast(fun: F, policy: str | jmp.Policy) -> F: ...
@overload
def autocast(fun: None = None, *, policy: str | jmp.Policy) -> Callable[[F], F]: ...
def autocast(fun: Any = None, policy: Any = None) -> Any:
    """Gives a function mixed precision, chosen operation by operation over the whole program.

    Matmuls and convolutions take half operands, in the backward pass too; softmax, norms, losses,
    exp, log, sums and the like compute in float32; the rest follows its operands, and what is kept
    for the backward pass is stored in half where that costs one rounding at most. What is not
    float32 in the function stays as it is.

    Args:
        fun: Any function that `jax.jit` can trace; if None, a decorator is returned.
            Array arguments are traced; Python values and other objects are passed on as they are.
            What it changes of Flax NNX modules among them is kept, as under ``nnx.jit``.
            It sees arguments in the half dtype that the policy stores parameters in (O2, O3, an
            override of theirs) as float32, which the program was written for.
            It may use, and be used under, any of JAX's transformations. Called outside of them, it
            is compiled and kept as under jit: what it reads besides its arguments is read when it
            is traced. It is traced anew for other numbers, strings, enums, dtypes and functions,
            and each time for arguments of other kinds, which might have changed.
        policy: A `Policy` or what `get_policy` takes: its ``compute_dtype`` is the half dtype,
            ``output_dtype`` that of float32 results. Its op lists and overrides apply; an override
            matches the named scopes of an operation, and the paths of the parameters that feed it.

    Returns:
        A function of the same signature. float32 results come back in ``policy.output_dtype``,
        others in their own dtype. A tree of arrays in the structure and shapes of one among the
        arguments is its next state (batch statistics, a cache), and keeps that one's dtypes.

    Raises:
        TypeError: If ``fun`` is not a function, or ``policy`` neither a policy nor a string.
        ValueError: If the policy is not legal; when called, if a pattern of its overrides matches
            neither a scope nor a parameter path.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> layer = mpjax.autocast(lambda w, x: jax.nn.relu(x @ w), "mixed_bfloat16")
        >>> w, x = jnp.ones((4, 2)), jnp.ones((3, 4))
        >>> layer(w, x).dtype
        dtype('float32')
        >>> "bf16" in str(jax.make_jaxpr(layer)(w, x))
        True
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
    """Traces a function and plans it. ``args`` and ``kwargs`` may be abstract."""
    pairs, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    traced = [is_array(x) or isinstance(x, jax.ShapeDtypeStruct) for _, x in pairs]
    avals = [_jax.aval_of(x) for (_, x), yes in zip(pairs, traced, strict=True) if yes]
    # Paths start at the root of each argument: neither its position nor its name is part of them.
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
    if overridden(plan.block, policy):  # some kernels want another dtype: which ones?
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
    """Returns what the function sees of an argument.

    A parameter that the policy stores in half stands for the float32 one that the function was
    written for. Half of another dtype is the user's own.
    """
    dtype = getattr(aval, "dtype", None)
    stored = dtype in (policy.param_dtype, policy.override_for(path))
    return _jax.retyped(aval, FLOAT32) if stored and dtype in HALVES else aval


def _flat_tracing(fun: Callable[..., Any], avals: Sequence[Any], name: str) -> tuple[Any, Any]:
    """As `_jax.trace`, for a function that returns a pytree: the jaxpr, and what `fun` returned.

    The second result holds tracers that are dead; only its structure means anything.
    """
    stored: list[Any] = []

    def flat(*args):
        leaves, tree = jax.tree_util.tree_flatten(fun(*args))
        stored.append((leaves, tree))
        return [leaf for leaf in leaves if is_array(leaf)]

    return _jax.trace(flat, avals, name), stored[-1]


def _spread(values: Sequence[Any], places: Sequence[bool]) -> list[Any]:
    """Puts values, in their order, where ``places`` is true, and None elsewhere."""
    given = iter(values)
    return [next(given) if yes else None for yes in places]


def call(traced: Traced, arrays: list[Any], rows: bool = False) -> list[Any]:
    """Evaluates a traced function on its array arguments; ``rows`` as for `run_plan`."""
    arrays = [jnp.asarray(x) if not isinstance(x, jax.Array) else x for x in arrays]
    with jax.named_scope(PLANNED):
        results = run_plan(traced.plan, arrays, traced.out_dtypes, rows)
    # A constant may be a number.
    outs = zip(results, traced.plan.block.outvars, traced.out_dtypes, strict=True)
    return [x if hasattr(x, "dtype") else jnp.asarray(x, to or v.aval.dtype) for x, v, to in outs]


def _holds_tracers(block: Block) -> bool:
    """Tells whether a planned program closes over tracers of an enclosing transformation."""
    return any(isinstance(const, jax.core.Tracer) for _, const in block.consts)


def _donates(block: Block) -> bool:
    """Tells whether a program holds a jit that donates its arguments."""
    return any(op.name == "jit" and any(op.params["donated_invars"]) for op in block.ops)


def _check_patterns(plan: Plan, paths: list[str]) -> None:
    for pattern, _ in plan.policy.overrides:
        if pattern not in plan.used_patterns:
            scopes = ["/".join(op.scopes) for op in plan.block.walk()]
            known = [place for place in (*paths, *scopes) if place]
            near = ", ".join(map(repr, nearest_paths(pattern, known))) or "none at all"
            raise ValueError(
                f"overrides: the pattern {pattern!r} matches neither a named scope nor the path of "
                f"a parameter. The nearest are {near}."
            )
