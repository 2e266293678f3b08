"""Keys of programs, by which two traces of a function are recognized as the same program."""

import dataclasses
import types
from typing import Any

import jax
import numpy as np
from jax.extend import linear_util as lu
from jax.extend.core import Literal

from mpjax._src.core.base._jax.programs import Structure, equation_key, inner_jaxprs, open_jaxpr

# Parameters that only derivatives read. A trace makes new functions for them.
_OF_DERIVATIVES = frozenset(
    {"jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd", "out_trees", "policy"}
)

# The levels of objects in objects that a key enters; a function may contain itself.
_DEEP = 8


class _Same:
    """An object without an equality of its own, as a key."""

    def __init__(self, x: Any):
        # The object, not its id: Python uses an id again once its object is gone.
        self.x = x

    def __hash__(self) -> int:
        return id(self.x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.x is other.x


def program_key(jaxpr: Any, known: bool = False) -> Any:
    """Returns a key of a program: two traces have the same if they compute the same.

    The derivatives that a program brings along do not count (`rules_key`), and neither do its own
    constants unless they are ``known``: those of programs inside it.
    """
    inner, consts = open_jaxpr(jaxpr)
    numbers: dict[Any, int] = {}

    def atom(v):
        if isinstance(v, Literal):
            return v.aval, _key(v.val)
        return v.aval, numbers.setdefault(v, len(numbers))

    def row(eqn):
        names = [name for name in eqn.params if name not in _OF_DERIVATIVES]
        params = tuple((name, _key(eqn.params[name])) for name in sorted(names))
        sides = tuple(map(atom, eqn.invars)), tuple(map(atom, eqn.outvars))
        return eqn.primitive, params, sides, eqn.ctx, str(eqn.source_info.name_stack)

    arguments = tuple(map(atom, (*inner.constvars, *inner.invars)))
    rows = tuple(map(row, inner.eqns))
    results = tuple(map(atom, inner.outvars))
    return arguments, rows, results, _key(tuple(consts)) if known else len(consts)


def _key(x: Any, depth: int = 0) -> Any:
    """Returns a key of a part of a program, by value where it is known how."""
    if depth > _DEEP:
        return _Same(x)
    if hasattr(x, "eqns") or hasattr(x, "jaxpr"):
        return program_key(x, known=True)
    if isinstance(x, tuple | list):
        return type(x), *(_key(part, depth + 1) for part in x)
    if isinstance(x, set | frozenset):
        return set, frozenset(_key(part, depth + 1) for part in x)
    if isinstance(x, dict):
        return dict, *((_key(k, depth + 1), _key(v, depth + 1)) for k, v in x.items())
    if isinstance(x, jax.tree_util.PyTreeDef):
        return Structure(x)
    if isinstance(x, jax.core.Tracer):
        raise TypeError("A part of the program is traced.")
    if isinstance(x, jax.Array):
        return _Same(x)
    if hasattr(x, "dtype") and hasattr(x, "__array__"):
        array = np.asarray(x)
        return str(array.dtype), array.shape, array.tobytes()
    if isinstance(x, float | complex):
        return type(x), repr(x)  # tells -0.0 from 0.0, and nan is nan
    if isinstance(x, types.FunctionType):  # a callback that is defined where it is called
        read = [cell.cell_contents for cell in x.__closure__ or ()]
        read += [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        # A list that the user's callback appends to is another one even if it is equal.
        by_value = (x.__module__ or "").startswith("jax.")
        return x.__code__, *(
            _key(y, depth + 1) if by_value or _lasts(y) else _Same(y) for y in read
        )
    if getattr(getattr(type(x), "__dataclass_params__", None), "frozen", False):
        fields = [getattr(x, field.name, None) for field in dataclasses.fields(x)]
        return type(x), _key(fields, depth + 1)
    try:
        hash(x)
    except TypeError:
        return _Same(x)
    return type(x), x


def _lasts(x: Any) -> bool:
    return isinstance(x, types.FunctionType | bool | int | float | complex | str | bytes | None)


def rules_key(jaxpr: Any) -> Any:
    """Returns a key of the derivative rules that a program brings along.

    A rule of the user is the same if it is the same function and has what it had to read: the
    values that it closes over, and the globals that its code names. The policy of a checkpoint is
    the same, too, if it is made anew of the same code.

    Raises:
        TypeError: If a rule closes over a value that is traced, or hides what it reads.
    """
    rules: list[Any] = []
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        rules += [_rule(eqn.params[name]) for name in _RULES if name in eqn.params]
        rules += [_policy(eqn.params["policy"])] if eqn.params.get("policy") else []
        rules += map(rules_key, inner_jaxprs(eqn))
    return tuple(filter(None, rules))


_RULES = ("jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd")


def call_key(eqn: Any) -> Any:
    """Returns a key of an equation's operation and source; calls with equal rules have the same.

    Raises:
        TypeError: If a part of it has no key.
    """
    rules = tuple(_rule(eqn.params[name]) for name in _RULES if name in eqn.params)
    if not rules:
        return equation_key(eqn)
    names = (name for name in eqn.params if name not in _OF_DERIVATIVES)
    params = tuple((name, _key(eqn.params[name])) for name in names)
    inner = tuple(map(rules_key, inner_jaxprs(eqn)))
    return eqn.primitive, params, rules, inner, eqn.ctx, eqn.source_info.traceback


def _rule(x: Any, depth: int = 0) -> Any:
    if depth > 2 * _DEEP:
        raise TypeError("A rule is too deep.")
    if isinstance(x, lu.WrappedFun):
        given = [part for _, params in x.transforms for p in params for part in _given(p)]
        return _rule(x.f, depth + 1), *given
    if isinstance(x, tuple | list):
        return tuple(_rule(part, depth + 1) for part in x)
    if not isinstance(x, types.FunctionType):
        return _value(x)
    cells = [cell.cell_contents for cell in x.__closure__ or () if _is_filled(cell)]
    if (x.__module__ or "").startswith("jax."):
        # JAX wraps a rule anew in each trace. The code of the wrapper and the user's functions in
        # its cells say which rule it is.
        parts = [y for y in cells if isinstance(y, lu.WrappedFun | types.FunctionType | tuple)]
        return x.__code__, *(_rule(y, depth + 1) for y in parts)
    # co_names has attributes and builtins too: those that are no globals are None.
    read = [*cells, *(x.__globals__.get(name) for name in x.__code__.co_names)]
    own = [_rule(y, depth + 1) if isinstance(y, types.FunctionType) else _value(y) for y in read]
    return _Same(x), *own


def _policy(x: Any) -> Any:
    """Returns a key of the policy of a checkpoint."""
    own = isinstance(x, types.FunctionType) and not (x.__module__ or "").startswith("jax.")
    names = x.__code__.co_names if own else ()
    return _key(x), *(_value(x.__globals__.get(name)) for name in names)


def _value(x: Any) -> Any:
    """Returns a key of what a rule reads: plain values by value, other objects by identity."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError("A rule reads a value that is traced.")
    return (type(x), repr(x)) if isinstance(x, bool | int | float | complex | str) else _Same(x)


def _given(x: Any) -> list[Any]:
    """Returns keys of what JAX passes on to a rule: trees, and arguments that are not traced."""
    if isinstance(x, jax.tree_util.PyTreeDef):
        return [Structure(x)]
    if isinstance(x, tuple):
        return [part for y in x for part in _given(y)]
    return [_rule(x.val)] if hasattr(x, "val") else []


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
