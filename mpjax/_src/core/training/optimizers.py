"""Optax transformations: `skip_nonfinite`, and what all of ours have in common.

That is the checks of what an optimizer is called with, and the wrapper of one that works in float32
and returns exact 16-bit parameters.
"""

import contextlib
import copy
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from mpjax._src.core.base import trees
from mpjax._src.core.base.absent import answering
from mpjax._src.core.base.dtypes import FLOAT32
from mpjax._src.core.base.errors import brief, is_state, misplaced
from mpjax._src.core.base.outlines import outline
from mpjax._src.core.base.patterns import difference, name_of, path_of
from mpjax._src.core.base.public import public
from mpjax._src.core.training.frozen import Reader, Reads
from mpjax._src.core.training.replicas import agreed
from mpjax._src.core.training.transaction import counted, gated_update, may_overflow

C = TypeVar("C", bound=type)


def of_ours(cls: C) -> C:
    """Decorates the class of a state: it prints as an outline, and looks for what it lacks inside.

    The functions of optax that read a state, such as ``schedule_free_eval_params``, take that of
    their own optimizer. The error says where in our state it is.
    """

    def look(self, name: str) -> None:
        def has_it(node):
            return node is not self and name in getattr(node, "_fields", ())

        for keys, node in jax.tree_util.tree_leaves_with_path(self, is_leaf=has_it):
            if has_it(node):
                place = f"state{jax.tree_util.keystr(keys)}"
                raise AttributeError(
                    f"{cls.__name__!r} object has no attribute {name!r}, but the "
                    f"{type(node).__name__} inside it has one: pass {place} instead of state, or "
                    f"read {place}.{name}."
                )

    setattr(cls, "__repr__", outline)  # noqa: B010  (type checkers need not know it)
    return answering(cls, look)


@public("mpjax.optim")
@of_ours
class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`.

    Attributes:
        inner_state: The state of the inner optimizer.
        skipped_steps: The total number of skipped updates, an int32 scalar.
        consecutive_skips: The number of updates skipped in a row up to now, an int32 scalar.
    """

    inner_state: optax.OptState
    skipped_steps: jax.Array
    consecutive_skips: jax.Array


def skip_nonfinite(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Skips the updates of an optimizer when its gradients, or they themselves, are non-finite.

    A skipped update is zero and leaves the inner state unchanged, bit for bit. Skips are counted. A
    non-finite gradient is never applied, whereas ``optax.apply_if_finite`` applies it after
    a number of failures; use `raise_if_diverged` to stop instead. If several optimizers are wrapped
    (as in ``optax.multi_transform``), each checks only the gradients that it receives. Gradients
    that ``inner`` does not read, such as those of frozen parameters, are not checked.

    Args:
        inner: Any optax optimizer.

    Returns:
        An optax transformation. ``update(..., finite=False)`` skips the update too, for your
        own check. Other extra arguments are passed to ``inner``.

    Raises:
        TypeError: If ``inner`` is not an optax optimizer; from ``init``, if ``inner`` fails for
            leaves of ``params`` that are not arrays.
        ValueError: From ``update``, if ``finite`` is not a single bool, ``value`` is not one
            number, the state was created by a different optimizer, or the gradients are of other
            parameters.

    Example:
        >>> import jax.numpy as jnp, mpjax, optax
        >>> optimizer = mpjax.optim.skip_nonfinite(optax.adam(1e-3))
        >>> params = jnp.ones(2)
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update(jnp.array([1.0, jnp.nan]), state, params)
        >>> bool((updates == 0).all()), int(state.skipped_steps)
        (True, 1)
    """
    inner = as_optimizer(inner, "inner")
    reader = Reader(inner)

    def init(params):
        # Two arrays, because one buffer cannot be donated twice.
        zeros = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return SkipNonfiniteState(first_state(inner, params), *zeros)

    def update(updates, state, params=None, *, finite=True, **extra_args):
        if not trees.is_one_bool(finite):
            raise ValueError(f"finite={brief(finite)} must be a single bool for all gradients.")
        check_params(updates, "updates")
        check_value(extra_args.get("value"))
        check_kind(state, SkipNonfiniteState, "skip_nonfinite")
        reads = reader(updates if params is None else params)
        finite = jnp.logical_and(trees.all_finite(read_grads(reads, updates, params)), finite)
        given = updates, state, params, extra_args
        updates, inner_state, good = updated_if(finite, inner, reads, *given)
        return updates, SkipNonfiniteState(inner_state, **counted(state, finite & good))

    return optax.GradientTransformationExtraArgs(init, update)


def updated_if(finite, inner, reads: Reads, grads, outer, params, extra_args: dict[str, Any]):
    """Returns an optimizer's updates and new state, or zeros and the old state.

    ``outer`` is the state around that of the optimizer. The third result is the verdict on the
    updates and the new state; see `gated_update`.

    Gradients that are not read, and updates of frozen parameters, do not pass through the choice.

    Raises:
        ValueError: If the state belongs to another optimizer, or the gradients to other parameters.
    """
    tree, state = grads if params is None else params, outer.inner_state
    read = read_grads(reads, grads, params)

    def update(state, grads, params):
        updates, new = inner.update(reads.completed(grads, tree), state, params, **extra_args)
        return reads.trained(updates, tree), new

    # What evaluates a function is not plain arithmetic, whatever its operations are.
    wholly = any(map(callable, extra_args.values())) or may_overflow(state)
    options = {"agree": functools.partial(agreed, count=outer.skipped_steps), "wholly": wholly}
    with for_state(inner, state, params, grads, reads.frozen):
        (updates, new), good = gated_update(finite, update, state, read, params, **options)
        updates = reads.held(updates, tree)
    if params is not None:  # Equinox trains a part of a module
        _check_updates(updates, params, lacking=updates is None)
    return updates, new, good


def read_grads(reads: Reads, grads: Any, params: Any) -> Any:
    """Returns the gradients that an optimizer reads, with None in place of the others.

    Raises:
        ValueError: If they are not those of ``params``.
    """
    try:
        return reads.read(grads, grads if params is None else params)
    except ValueError:
        _check_updates(grads, params)
        raise


def check_value(value: Any) -> None:
    """Refuses a loss that is not one number: optimizers compare it with one."""
    fits = isinstance(value, int) and abs(value) < 2**127
    scalar = trees.is_array(value) and jnp.ndim(value) == 0
    if not (value is None or fits or isinstance(value, float) or scalar):
        kind = f"of shape {jnp.shape(value)}" if trees.is_array(value) else brief(value)
        raise ValueError(
            f"value is {kind}, but must be the loss: one number, of shape (). Losses of several "
            "examples are usually averaged: value=jnp.mean(losses)."
        )


def first_state(inner: optax.GradientTransformation, params: Any) -> optax.OptState:
    """Returns ``inner.init(params)``.

    Raises:
        TypeError: If ``params`` is a state or contains no arrays; if ``inner`` fails, and a leaf is
            not an array. Stateless optimizers take such leaves, so they are no error by themselves.
    """
    check_params(params)
    try:
        return inner.init(params)
    except Exception:
        for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
            if not (trees.is_array_or_shape(leaf) or isinstance(leaf, (float, complex))):
                raise TypeError(
                    f"{name_of('params', keys)} is {brief(leaf)}, not an array, so the optimizer "
                    "has no state for it. Call init with the trained arrays alone: for Equinox, "
                    "optimizer.init(eqx.filter(model, eqx.is_inexact_array))."
                ) from None
        raise


def check_kind(state: Any, kind: type, name: str) -> None:
    """Raises a ValueError if an optimizer's state is not an instance of ``kind``."""
    if not isinstance(state, kind):
        raise ValueError(
            f"state is a {type(state).__name__}, not the {kind.__name__} of {name}: it was created "
            "by a different optimizer, or the order is not update(grads, state, params). Pass the "
            "state that init or the last update of this one returned."
        )


def check_params(params: Any, argument: str = "params") -> None:
    """Raises a TypeError for what is no tree of arrays: a state, or leaves without an array."""
    if is_state(params):
        raise TypeError(
            f"{argument}={brief(params)} must be a tree of arrays, not a state that init returned."
            f"{misplaced(params)} Call init once; each update or step returns the next state."
        )
    if params is None and argument == "params":
        raise TypeError("params=None must be a tree of arrays.")
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for keys, leaf in leaves:
        trees.check_fits(argument, keys, leaf)
    if leaves and not any(hasattr(x, "shape") or isinstance(x, trees.NUMBER) for _, x in leaves):
        keys, leaf = leaves[0]
        raise TypeError(
            f"{name_of(argument, keys)} is {brief(leaf)}, not an array, and {argument} contains "
            f"none. Pass the trained arrays, or their gradients.{misplaced(params)}"
        )


def check_state(init: Callable[..., Any], state: Any, params: Any, argument: str) -> None:
    """Raises a ValueError if ``init(params)`` would return other arrays than ``state`` holds."""

    differences = difference(_arrays(jax.eval_shape(init, params)), _arrays(state))
    if differences:
        raise ValueError(
            f"{argument} was created by a different optimizer, or for parameters of other shapes "
            f"or dtypes: it {differences}. Pass the state that init of this optimizer returned for "
            "these parameters, or restore a checkpoint that was written with it."
        )


def _arrays(tree: Any) -> set[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{path_of(keys)} {list(getattr(leaf, 'shape', ()))}".lstrip() for keys, leaf in leaves}


def check_trained(params: Any, frozen: Sequence[bool], place: str) -> None:
    """Raises a TypeError if a trained parameter has no gradient, as integers and keys."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (keys, leaf), held in zip(leaves, frozen, strict=True):
        kind = getattr(leaf, "dtype", type(leaf))
        number = trees.is_array(leaf) or isinstance(leaf, int)
        if number and not (held or jnp.issubdtype(kind, jnp.inexact)):
            raise TypeError(
                f"{name_of('params', keys)} is {getattr(kind, '__name__', kind)}, which has no "
                f"gradient. Move counters, tables and keys {place}, or freeze it by "
                "optax.partition with optax.set_to_zero()."
            )


@contextlib.contextmanager
def for_state(inner, state, params, updates, frozen: Sequence[bool] = ()) -> Iterator[None]:
    """Replaces the error of a failing optimizer, if what it was called with does not fit.

    Without ``params`` it is unknown what fits, and the error is raised as it is.
    """
    try:
        yield
    except Exception:
        if params is not None:
            _check_updates(updates, params)
            check_state(inner.init, state, params, "state.inner_state")
            if frozen:  # optax does not say which parameter it is
                check_trained(params, frozen, "out of the parameters")
        raise


def _check_updates(updates: Any, params: Any, lacking: bool = True) -> None:
    """Raises a ValueError if gradients are not those of ``params``: other paths or shapes."""
    # Equinox has no gradients, and no states, of leaves that are not floating arrays.
    trained = jax.tree.map(lambda x: x if trees.is_floating(x) else None, params)
    grads = _arrays(updates)
    # A gradient of a leaf that is not trained is no error, if its path and shape are the leaf's.
    differences = difference(_arrays(trained) if lacking else set(), grads, grads - _arrays(params))
    if differences:
        pair = isinstance(updates, tuple) and len(updates) == 2
        hint = " jax.value_and_grad returns (loss, grads): pass grads alone." if pair else ""
        raise ValueError(
            f"updates must be the gradients of params, a tree like it, but it {differences}.{hint}"
        ) from None


def is_optimizer(value: Any) -> bool:
    """Returns whether a value has the functions of an optax optimizer."""
    return hasattr(value, "init") and hasattr(value, "update")


def shown(update: Any) -> str:
    """Returns the name of an optimizer, such as "chain(trace, scale)", by its update function."""
    inspectable = inspect.isfunction(update) or inspect.ismethod(update)
    inside = inspect.getclosurevars(update).nonlocals if inspectable else {}
    parts = []
    for value in inside.values():
        for part in jax.tree.leaves(value, is_leaf=is_optimizer):
            part = part.update if is_optimizer(part) else part
            if "update" in getattr(part, "__name__", ""):
                parts.append(shown(part))
    name = getattr(update, "__qualname__", type(update).__name__).split(".")[0]
    # Wrappers that all optimizers have, of which the name inside says more.
    if name in ("with_extra_args_support", "as_optimizer"):
        return parts[0] if parts else name
    return f"{name}({', '.join(parts)})" if parts else name


def _uncalled(value: Any) -> str:
    """Returns the hint for a function such as optax.adamw that makes an optimizer, or ""."""
    ours = getattr(value, "__module__", "").startswith("optax") and callable(value)
    return f" Call it: {value.__name__}(...)." if ours and hasattr(value, "__name__") else ""


def as_optimizer(
    optimizer: optax.GradientTransformation, argument: str
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that passes each of its parts those extra arguments that it takes."""
    if isinstance(optimizer, type) or not is_optimizer(optimizer):
        raise TypeError(
            f"{argument}={brief(optimizer)} must be an optax optimizer with init and update, such "
            f"as optax.adamw(1e-3).{_uncalled(optimizer) or misplaced(optimizer)}"
        )
    inner, taken = optimizer.update, _taken_by(optimizer.update)

    def update(updates, state, params=None, **extra_args):
        known = {k: v for k, v in extra_args.items() if taken is None or k in taken}
        try:
            return inner(updates, state, params, **known)
        # Most optimizers take what they are passed, so copies are made only after one has refused.
        except TypeError as error:
            # optax's chain, masked and their like pass every argument to every part.
            if not any(f"unexpected keyword argument '{name}'" in str(error) for name in known):
                raise
        return _lenient(inner, frozenset(known), {})(updates, state, params, **known)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _taken_by(function: Callable[..., Any]) -> set[str] | None:
    """Returns the names of the arguments that a function takes, or None for every name."""
    parameters = inspect.signature(function).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return None if every else {*parameters}


def _lenient(value: Any, names: frozenset[str], done: dict[int, Any]) -> Any:
    """Returns an optimizer, a function of one or a container of them, of lenient parts.

    They ignore the extra arguments of these names that they do not take. The functions are copied
    with other closures, because the parts of an optimizer are known to these alone.
    """
    if id(value) in done:
        return done[id(value)]
    if type(value).__module__.startswith("mpjax"):  # made of lenient parts by `as_optimizer`
        return value
    again = functools.partial(_lenient, names=names, done=done)
    if inspect.ismethod(value):
        return value.__func__.__get__(again(value.__self__))
    if isinstance(value, (list, tuple, dict)):
        return jax.tree.map(again, value, is_leaf=lambda x: x is not value)
    # Its methods read their parts from the object, not from closures.
    if is_optimizer(value) and not isinstance(value, type):  # such as optax.MultiSteps
        done[id(value)] = new = copy.copy(value)
        vars(new).update({k: again(v) for k, v in vars(value).items()})
        return new
    if not inspect.isfunction(value):
        return value
    taken = _taken_by(value)

    @functools.wraps(value)
    def lenient(*args, **kwargs):
        drop = names - taken if taken is not None else ()
        out = new(*args, **{k: v for k, v in kwargs.items() if k not in drop})
        return again(out) if is_optimizer(out) else out  # of what inject_hyperparams is given

    # Before its parts are copied, because a closure may contain the function itself.
    done[id(value)] = lenient
    cells = tuple(types.CellType(again(c.cell_contents)) for c in value.__closure__ or ())
    new = types.FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
    )
    new.__kwdefaults__ = value.__kwdefaults__
    return lenient


# ---- optimizers of 16-bit weights: float32 inside, exact new parameters --------------------------


class Stepped(NamedTuple):
    """The result of one update."""

    params: Any  # the new parameters, in the dtypes that they are stored in
    state: Any  # the new state
    # The float32 updates of the inner optimizer, before rounding. None for a parameter that it
    # never changes.
    updates: Any


class Optimizer(optax.GradientTransformationExtraArgs):
    """An optax optimizer that can also return the new parameters themselves.

    ``update`` returns differences. ``optax.apply_updates`` adds them in float32, almost always
    exactly. ``step`` is always exact.

    Attributes:
        init: As in every optax optimizer.
        update: As in every optax optimizer.
        step: ``step(grads, state, params, **extra_args)`` returns `Stepped`.
        reads: ``reads(params)`` returns what it changes and reads.
    """

    step: Callable[..., Stepped]
    reads: Reader


def in_full_precision(inner: optax.GradientTransformation) -> Optimizer:
    """Widens 16-bit gradients and parameters for an optimizer, without keeping masters.

    The state of ``inner`` and its updates are float32, so their dtypes do not change during
    training. Only the sum in ``optax.apply_updates`` is rounded to 16 bits.
    """
    inner = as_optimizer(inner, "inner")

    def init(params, reads):
        return first_state(inner, reads.widened(params))

    def core(advance, state, params, reads):
        updates, state = advance(state, None if params is None else reads.widened(params))
        return updates, None, state

    return made(inner, init, core)


def made(inner: Any, init: Callable[..., Any], core: Callable[..., Any]) -> Optimizer:
    """Returns an `Optimizer`; ``reads`` are the `Reads` of the one inside.

    ``init(params, reads)`` returns the first state. ``core(advance, state, params, reads)`` returns
    the updates of the inner optimizer; a list of the new parameters, with None for a parameter that
    is the sum with its update, or None if all are such sums; and the new state. In between it calls
    ``advance(inner_state, full_params)``, which returns the updates and the new inner state.
    """
    reader = Reader(inner)

    def run(grads, state, params, extra_args):
        tree = grads if params is None else params
        reads = reader(tree)
        # The caller's functions read the parameters themselves, where the optimizer sees zeros for
        # frozen integers.
        extra_args |= {k: reads.around(f, tree) for k, f in extra_args.items() if callable(f)}
        if "grad" in extra_args:
            extra_args["grad"] = reads.completed(extra_args["grad"], tree)
        advance = functools.partial(advanced, inner, grads, extra_args, reads)
        seen = None if params is None else reads.floating(params)
        updates, stored, state = core(advance, state, seen, reads)
        return reads, reads.trained(updates, tree), stored, state

    def update(grads, state, params=None, **extra_args):
        reads, updates, stored, state = run(grads, state, params, extra_args)
        # What was rounded, or computed by a master, is no longer the sum of parameter and update.
        if stored is not None:
            differences = [
                update if new is None else new.astype(FLOAT32) - param.astype(FLOAT32)
                for new, (param, update) in zip(stored, by_leaf(params, updates), strict=True)
            ]
            updates = jax.tree.unflatten(jax.tree.structure(params), differences)
        return reads.held(updates, grads if params is None else params), state

    def step(grads, state, params, **extra_args):
        try:
            _, updates, stored, state = run(grads, state, params, extra_args)
        except (TypeError, ValueError) as error:
            # The words of Python and of optax for an argument that `update` was not given.
            if not re.search(r"missing \d+ required|must be provided", str(error)):
                raise
            raise TypeError(
                f"optimizer: {error} A training step passes it value= (the loss) alone. What "
                "evaluates the loss itself, or takes other arguments, needs your own loop: "
                "optimizer = mpjax.mixed_precision(optimizer, policy), and in each step "
                "optimizer.update(grads, opt_state, params, value=loss, grad=grads, "
                "value_fn=lambda params: loss_fn(params, batch)), with the arguments that it takes."
            ) from error
        rows = list(by_leaf(params, updates))
        pairs = zip(stored or [None] * len(rows), rows, strict=True)
        new = [added(*row) if new is None else new for new, row in pairs]
        return Stepped(jax.tree.unflatten(jax.tree.structure(params), new), state, updates)

    def first(params):
        reads = reader(params)
        return init(reads.floating(params), reads)

    optimizer = Optimizer(first, update)
    optimizer.step, optimizer.reads = step, reader
    return optimizer


def is_masked(node: Any) -> bool:
    """Returns whether a node represents a leaf that has no master or scale."""
    return isinstance(node, optax.MaskedNode)


def by_leaf(params: Any, *others: Any) -> Iterator[tuple[Any, ...]]:
    """Returns each leaf of the parameters with the subtrees at its place in other trees."""
    structure: Any = jax.tree.structure(params)
    return zip(jax.tree.leaves(params), *map(structure.flatten_up_to, others), strict=True)


def added(param: Any, update: Any) -> Any:
    """Adds an update as ``optax.apply_updates`` does: in float32, rounded once."""
    if update is None:
        return param
    wide = trees.widen(param)
    return (wide + update.astype(wide.dtype)).astype(param.dtype)


def advanced(inner, grads, extra_args, reads, state, full):
    """Returns the updates and the new state of an inner optimizer, in float32."""
    grads = trees.widen(grads)
    tree = grads if full is None else full
    with for_state(inner, state, tree, grads):
        # Twice, because an error in here is about the gradients without these zeros.
        grads = reads.completed(grads, tree)
    with for_state(inner, state, tree, grads):
        return inner.update(grads, state, full, **extra_args)


def need_params(params: Any, name: str) -> None:
    if params is None:
        raise ValueError(
            f"{name}: update was called without params. Call optimizer.update(grads, state, "
            "params), because the new value of a 16-bit parameter depends on the old one."
        )
