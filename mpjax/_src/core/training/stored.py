"""The common part of optimizers of 16-bit weights: float32 inside, exact new parameters."""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import optax

from mpjax._src.core.base.dtypes import FLOAT32
from mpjax._src.core.base.trees import widen
from mpjax._src.core.training.frozen import Reader
from mpjax._src.core.training.optimizers import as_optimizer, first_state, for_state


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


def made(
    inner: optax.GradientTransformationExtraArgs,
    init: Callable[..., Any],
    core: Callable[..., Any],
) -> Optimizer:
    """Returns an `Optimizer`; ``reads`` are the `Reads` of the one inside.

    ``init(params, reads)`` returns the first state. ``core(advance, state, params, reads)`` returns
    the updates of the inner optimizer; a list of the new parameters, with None for a parameter that
    is the sum with its update, or None if all are such sums; and the new state. It calls ``advance(
    state, params)``, with the state and the full parameters of the inner optimizer, which returns
    its updates and new state.
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


def by_leaf(params: Any, *trees: Any) -> Iterator[tuple[Any, ...]]:
    """Returns each leaf of the parameters with the subtrees at its place in other trees."""
    structure: Any = jax.tree.structure(params)
    return zip(jax.tree.leaves(params), *map(structure.flatten_up_to, trees), strict=True)


def added(param: Any, update: Any) -> Any:
    """Adds an update as ``optax.apply_updates`` does: in float32, rounded once."""
    if update is None:
        return param
    wide = widen(param)
    return (wide + update.astype(wide.dtype)).astype(param.dtype)


def advanced(inner, grads, extra_args, reads, state, full):
    """Returns the updates and the new state of an inner optimizer, in float32."""
    grads = widen(grads)
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
