"""Which parameters an optimizer never changes, and which gradients it never reads.

Both follow from the program of its ``update``, traced without arrays, so that they are known while
a step is traced. A gradient that is not read is then not computed, checked or averaged, and a
parameter that never changes needs no master.
"""

import contextlib
import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.dtypes import FLOAT32
from mpjax._src.core.base.errors import warn_user
from mpjax._src.core.base.higher_order import BRANCH, higher_order
from mpjax._src.core.base.trees import is_array, varies_over, widen
from mpjax._src.core.policy.policy import Policy

# Results that are zero if all of these operands are: by default all. Those of `ANY` are zero if one
# operand is: a factor of zero is meant as a mask, whatever the other one holds.
ANY = {"mul", "and", *rules.MATMULS}
FIRST = {"div", "rem", "integer_pow", *rules.having(rules.PART), *rules.having(rules.LOOKS_UP)}
OPERANDS = {**dict.fromkeys(FIRST, slice(1)), "select_n": slice(1, None)}
SUMS_AND_MOVES = (rules.FULL, rules.FOLLOW, rules.MOVE)
LINEAR = rules.names_where(lambda rule: rule.linear and rule.need in SUMS_AND_MOVES)
KEEPS_ZERO = ({*LINEAR, *ANY, *OPERANDS} - {"top_k"}) | {  # which returns indices too
    *("erf", "real", "imag", "reduce_or", "reduce_precision"),
    *("copy_p", "pcast", "device_put", "mesh_cast"),
}
# What is computed of numbers, such as masks: functions of NumPy and operators of Python have the
# names of the primitives that do the same.
FOLDED: dict[str, Any] = {
    **{name: fun for name, fun in vars(np).items() if isinstance(fun, np.ufunc)},
    **{name.strip("_"): fun for name, fun in inspect.getmembers(operator, inspect.isbuiltin)},
    **dict.fromkeys(rules.having(rules.SAME_CONSTANT), lambda x: x),
    "not": np.invert,
}
# What a value is made of: the number that all its entries are, or a bit for each argument that it
# depends on, and one more. Both only grow upwards: zero, no argument, some of them, all of them.
Made = np.generic | int
ZERO, UNKNOWN = np.float32(0), 1


class Reads(NamedTuple):
    """What an optimizer does, for each leaf of the tree that it was asked about.

    Attributes:
        frozen: Whether the update is always zero.
        unread: Whether nothing that changes a parameter depends on the gradient. A frozen leaf's
            gradient counts as unread, also if it would count in a norm of all gradients.
    """

    frozen: tuple[bool, ...]
    unread: tuple[bool, ...]

    def flags(self, like: Any) -> Any:
        """Returns a tree of bools: which leaves are frozen."""
        return jax.tree.unflatten(jax.tree.structure(like), self.frozen)

    def trained(self, tree: Any, like: Any) -> Any:
        """Returns a tree without the frozen leaves of ``tree``: None in their place."""
        return _replaced(self.frozen, tree, like)

    def read(self, grads: Any, like: Any) -> Any:
        """Returns gradients without those that are not read: None in their place."""
        return _replaced(self.unread, grads, like)

    def completed(self, grads: Any, like: Any) -> Any:
        """Returns gradients in which those that are not read are zeros."""
        return _replaced(self.unread, grads, like, _zeros)

    def held(self, updates: Any, like: Any) -> Any:
        """Returns updates in which those of frozen leaves are zeros, in the dtype of the leaf."""
        # -0.0, because adding 0.0 would turn a parameter of -0.0 into 0.0.
        zeros = lambda x: jnp.full(jnp.shape(x), -0.0, jnp.result_type(x))  # noqa: E731
        return _replaced(self.frozen, updates, like, zeros)

    def floating(self, params: Any) -> Any:
        """Returns the parameters with zeros in the place of frozen integers.

        Optimizers make moments in the dtype of a parameter, and norms of floating gradients alone.
        """
        return _replaced(self._integers(params), params, params, _zeros)

    def around(self, fun: Callable[..., Any], params: Any) -> Callable[..., Any]:
        """Returns a function for an optimizer that was given `floating` parameters."""

        @functools.wraps(fun)
        def run(tree, *args, **kwargs):
            tree = _replaced(self._integers(params), tree, params, lambda x: x)
            out = fun(tree, *args, **kwargs)
            return out if is_array(out) else self.completed(out, params)

        return run

    def _integers(self, params: Any) -> list[bool]:
        rows = zip(self.frozen, jax.tree.leaves(params), strict=True)
        return [frozen and not _is_inexact(x) for frozen, x in rows]

    def widened(self, params: Any) -> Any:
        """Returns the parameters as the inner optimizer sees them: frozen ones as they are."""
        trained = widen(self.trained(params, params))
        return _replaced(self.frozen, trained, params, lambda x: x)

    def stored(self, params: Any, policy: Policy) -> Any:
        """Casts parameters to the dtypes that a policy stores, but frozen ones never to wider."""

        def choose(own, cast, frozen):
            return own if frozen and own.dtype.itemsize <= cast.dtype.itemsize else cast

        return jax.tree.map(choose, params, policy.cast_to_param(params), self.flags(params))


def joined(tree: Any, rest: Any) -> Any:
    """Returns a tree whose missing leaves are those of another one; None has nothing to add."""
    if rest is None:
        return tree
    return jax.tree.map(lambda a, b: b if a is None else a, tree, rest, is_leaf=lambda x: x is None)


def _zeros(x: Any) -> Any:
    """Returns zeros in the place of a gradient or an integer; outside of jit without memory."""
    dtype, shape = jnp.result_type(x) if _is_inexact(x) else FLOAT32, jnp.shape(x)
    traced = isinstance(x, jax.core.Tracer)
    return jnp.zeros(shape, dtype) if traced else np.broadcast_to(np.zeros((), dtype), shape)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _replaced(
    flags: Sequence[bool], tree: Any, like: Any, new: Callable[[Any], Any] = lambda _: None
) -> Any:
    """Returns a tree in which leaves with a flag are made of those of another tree."""
    if not any(flags):
        return tree
    structure: Any = jax.tree.structure(like)
    rows = zip(flags, jax.tree.leaves(like), structure.flatten_up_to(tree), strict=True)
    return structure.unflatten(new(leaf) if flag else old for flag, leaf, old in rows)


class Reader:
    """Finds out once for each form of parameters what an optimizer reads.

    Its answer depends on the optimizer and on shapes alone, so that ``init`` and every ``update``
    agree. An optimizer that cannot be traced, because it needs arguments of a form that is not
    known, reads everything.
    """

    def __init__(self, optimizer: optax.GradientTransformationExtraArgs):
        self._optimizer, self._known = optimizer, dict[Any, Reads]()

    def __call__(self, tree: Any) -> Reads:
        """Returns what the optimizer does with parameters (or gradients) of this form."""
        leaves, structure = jax.tree.flatten(tree)
        forms = tuple(map(_form, leaves))
        key = _jax.Structure(structure), forms
        if (known := self._known.get(key)) is not None:
            return known
        floating = tuple(f if f and jnp.issubdtype(f[1], jnp.inexact) else None for f in forms)
        for parts in dict.fromkeys((forms, floating)):  # Equinox trains the floating arrays
            try:
                found = _traced(self._optimizer, parts, structure)
            except Exception:  # what is wrong is said where the optimizer is called
                continue
            if all(found.frozen[i] for i, form in enumerate(parts) if form) and any(parts):
                warn_user(
                    "The optimizer changes no parameter: all of its updates are zero, and nothing "
                    "is trained. Usual causes: labels or a mask that freeze everything, or a "
                    "learning rate of 0."
                )
                break
            return self._known.setdefault(key, found)
        return self._known.setdefault(key, Reads(*[(False,) * len(leaves)] * 2))


def _form(leaf: Any) -> Any:
    if isinstance(leaf, float):
        return (), FLOAT32, ()
    return (leaf.shape, leaf.dtype, varies_over(leaf)) if is_array(leaf) else None


def _shaped(form: Any) -> Any:
    """Returns the form in which an optimizer is traced: 16-bit arrays and integers in float32."""
    shape, dtype, _ = form
    number = jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_
    small = not jnp.issubdtype(dtype, jnp.inexact) or dtype.itemsize < FLOAT32.itemsize
    return jax.ShapeDtypeStruct(shape, FLOAT32 if number and small else dtype)


def _varying(x: Any, form: Any) -> Any:
    """Marks an array as one that differs between devices, as the parameter of its form does."""
    return jax.lax.pcast(x, form[2], to="varying") if form[2] else x


def _traced(optimizer: Any, forms: Sequence[Any], structure: Any) -> Reads:
    """Traces an optimizer for arrays of some forms, and reads its program."""
    shapes = [_shaped(form) for form in forms if form]
    loss = jax.ShapeDtypeStruct((), FLOAT32)

    def whole(arrays):
        rest = iter(arrays)
        return structure.unflatten(_varying(next(rest), form) if form else None for form in forms)

    def init(params):
        return optimizer.init(whole(params))

    def update(grads, state, params, loss):
        def value_fn(params, *, grad_norm=None, grad_fn=None, obj_fn=None):
            # Its derivatives depend on everything.
            return sum(map(jnp.sum, jax.tree.leaves(params)), loss) ** 3

        grads, known = whole(grads), {"value": loss, "grad_norm": loss, "value_fn": value_fn}
        grad_fn = lambda params, *_: jax.grad(value_fn)(params)  # noqa: E731
        known |= {"grad": grads, "grad_fn": grad_fn, "obj_fn": value_fn}
        extra: dict[str, Any] = {}
        while True:
            try:
                updates, state = optimizer.update(grads, state, whole(params), **extra)
                break
            except Exception as error:  # it may lack arguments: those of optax, or of other names
                missing = {*known, *re.findall(r"'(\w+)'", str(error).partition(" missing ")[2])}
                if missing <= extra.keys():
                    raise
                extra = dict.fromkeys(missing, loss) | known
        structures: list[Any] = [jax.tree.structure(tree) for tree in (updates, grads)]
        if structures[0] != structures[1]:
            raise ValueError("The updates are not a tree like the gradients.")
        return updates, state

    first, states = jax.make_jaxpr(init, return_shape=True)(shapes)
    program = jax.make_jaxpr(update)(shapes, states, shapes, loss)
    places = {form[0] for form in forms if form}
    # Not of single numbers: a user may set a learning rate in the state that was zero at first.
    made = _walk(first, [UNKNOWN] * len(shapes))
    arrays = [leaf.shape != () and leaf.shape in places for leaf in jax.tree.leaves(states)]
    zeros = [array and _is_zero(x) for array, x in zip(arrays, made, strict=True)]
    flags = iter(zip(*_flags_of(program, len(shapes), zeros), strict=True))
    rows = [next(flags) if form else (False, False) for form in forms]
    return Reads(*zip(*rows, strict=True))


def _flags_of(program: Any, count: int, zeros: list[bool]) -> tuple[list[bool], list[bool]]:
    """Returns for each gradient whether its leaf is frozen, and whether it is unread.

    ``program`` is that of ``(grads, state, params, loss) -> (updates, state)``. ``zeros`` says for
    each array of the state whether it is zero at first: moments of gradients that are always zero
    stay zero.
    """
    bits = [2 << i for i in range(count + len(zeros))]
    while True:  # in each turn at least one array turns out to change
        state = [ZERO if zero else bit for zero, bit in zip(zeros, bits[count:], strict=True)]
        outs = _walk(program, [*bits[:count], *state, *[UNKNOWN] * (count + 1)])
        updates, after = outs[:count], outs[count:]
        still = [zero and _is_zero(made) for zero, made in zip(zeros, after, strict=True)]
        if still == zeros:
            break
        zeros = still
    live, before = _union(updates), 0
    while live != before:  # what the next updates depend on, by the state
        before = live
        live |= _union(made for made, bit in zip(after, bits[count:], strict=True) if live & bit)
    frozen = [*map(_is_zero, updates)]
    return frozen, [own or not live & bit for own, bit in zip(frozen, bits, strict=False)]


def _is_number(made: Made) -> bool:
    return isinstance(made, np.generic)


def _is_zero(made: Made) -> bool:
    return _is_number(made) and not made


def _union(values: Iterable[Made]) -> int:
    return functools.reduce(operator.or_, (v for v in values if not _is_number(v)), UNKNOWN)


def _join(values: Sequence[Made]) -> Made:
    return ZERO if all(map(_is_zero, values)) else _union(values)


def _of_constant(value: Any) -> Made:
    known = not isinstance(value, jax.core.Tracer) and getattr(value, "is_fully_addressable", True)
    dtype = getattr(value, "dtype", np.dtype(type(value)))
    if not (known and (jnp.issubdtype(dtype, np.number) or dtype == np.bool_)):
        return UNKNOWN
    entries = np.asarray(value).ravel()
    first = entries[0] if entries.size else ZERO
    return first if (entries == first).all() else UNKNOWN


def _walk(program: Any, ins: Sequence[Made]) -> list[Made]:
    """Returns what each result of a program is made of."""
    return _jax.walk(program, ins, _results, _of_constant)


def _results(eqn: Any, operands: list[Made]) -> Sequence[Made]:
    name = eqn.primitive.name
    row = higher_order(name)
    if insides := list(row.wire(eqn)):
        return _inside(insides, operands, operands[:1] if row.kind == BRANCH else [], eqn)
    if name in rules.BARRIERS and len(operands) == len(eqn.outvars):
        return operands
    if name == "select_n" and _is_number(operands[0]):
        return [operands[1 + int(operands[0])]]
    if name in FOLDED and all(map(_is_number, operands)):
        # NumPy may lack the dtype, or refuse an exponent.
        with contextlib.suppress(TypeError, ValueError), np.errstate(all="ignore"):
            number: Any = np.asarray(FOLDED[name](*operands))
            return [number.astype(eqn.outvars[0].aval.dtype)[()]]
    deciding = operands[OPERANDS.get(name, slice(None))]
    keeps = name in KEEPS_ZERO and bool(deciding) and eqn.params.get("y", 1) > 0  # integer_pow
    zero = keeps and (any if name in ANY else all)(map(_is_zero, deciding))
    return [ZERO if zero else _union(operands)] * len(eqn.outvars)


def _inside(
    insides: Sequence[Any], operands: list[Made], control: list[Made], eqn: Any
) -> list[Made]:
    """Returns what the results of an equation with programs inside are made of."""
    results: list[list[Made]] = [[] for _ in eqn.outvars]
    for inside in insides:
        ins = [operands[i] for i in inside.ins]
        for _, argument in inside.carry:
            ins[argument] = _join([ins[argument]])  # no constant
        while True:  # a carry only grows, up to zero or not and all arguments
            outs, before = _walk(inside.program, ins), list(ins)
            for out, argument in inside.carry:
                ins[argument] = _join([ins[argument], outs[out]])
            if ins == before:
                break
        for out, argument in inside.carry:  # a loop may not turn at all
            outs[out] = ins[argument]
        for made, place in zip(outs, inside.outs, strict=True):
            (control if place is None else results[place]).append(made)
    joined = map(_join, results)
    return [made if _is_zero(made) else _union([made, *control]) for made in joined]
