"""Evaluates programs equation by equation, with custom operations. `measure` is built on it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

MATMULS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Amplifying operations, repeated here: the yardstick must not change with the code it measures.
AMPLIFIES = names(
    "acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cos cosh digamma erf_inv erfc "
    "exp exp2 expm1 igamma igamma_grad_a igammac lgamma log log1p polygamma pow random_gamma "
    "regularized_incomplete_beta sin sinh tan zeta cumlogsumexp cumprod cumsum reduce_prod "
    "cholesky cholesky_update eig eigh geqrf hessenberg householder_product lu ormqr qr schur svd "
    "symmetric_product triangular_solve tridiagonal tridiagonal_solve fft"
)
PASSES = names(
    "abs add add_any cbrt ceil clamp convert_element_type div erf floor logistic max min mul neg "
    "rem round select_n sign sqrt sub tanh broadcast_in_dim concatenate copy copy_p cummax cummin "
    "dynamic_slice dynamic_update_slice gather name optimization_barrier pad reduce_max reduce_min "
    "reduce_precision reshape rev slice sort split squeeze stop_gradient tile top_k transpose"
)
# They hold the program of their update, which has one dtype.
SCATTERS = {
    "scatter-max": jax.lax.scatter_max,
    "scatter-min": jax.lax.scatter_min,
    "scatter-mul": jax.lax.scatter_mul,
}
CALLS = {
    **dict.fromkeys(("jit", "pjit", "remat2", "checkpoint"), "jaxpr"),
    **dict.fromkeys(
        ("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"
    ),
    "custom_vmap_call": "call",
}


# ---- programs, equation by equation -------------------------------------------------------------


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr without its constants, and the constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def bind(eqn: Any, ins: Sequence[Any], **changed: Any) -> list[Any]:
    exact = NUMPY.get(eqn.primitive.name)
    if exact and not any(isinstance(x, jax.core.Tracer) for x in ins):
        with np.errstate(all="ignore"):
            results = exact({**eqn.params, **changed}, *map(np.asarray, ins))
        return [np.asarray(x) for x in results]
    if eqn.primitive.name in SCATTERS:
        own = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return [SCATTERS[eqn.primitive.name](*ins, **{name: eqn.params[name] for name in own})]
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    outs = eqn.primitive.bind(*ins, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _pad(p, x, fill):
    low, high, inner = zip(*p["padding_config"], strict=True)
    wide = [n + max(0, n - 1) * i for n, i in zip(x.shape, inner, strict=True)]
    shape = [max(0, k) + n + max(0, m) for k, n, m in zip(low, wide, high, strict=True)]
    out = np.full(shape, fill, x.dtype)
    at = [slice(max(0, k), max(0, k) + n, i + 1) for k, n, i in zip(low, wide, inner, strict=True)]
    out[tuple(at)] = x
    cut = [slice(max(0, -k), n + min(0, m)) for k, n, m in zip(low, shape, high, strict=True)]
    return [out[tuple(cut)]]


def _broadcast(p, x):
    shape = np.ones(len(p["shape"]), int)
    shape[list(p["broadcast_dimensions"])] = x.shape
    return [np.broadcast_to(x.reshape(shape), p["shape"])]


def _reshape(p, x):
    order = p.get("dimensions")
    return [np.reshape(x if order is None else np.transpose(x, order), p["new_sizes"])]


def _slice(p, x):
    steps = p["strides"] or (1,) * x.ndim
    return [x[tuple(map(slice, p["start_indices"], p["limit_indices"], steps))]]


def _split(p, x):
    return np.split(x, np.cumsum(p["sizes"])[:-1], p["axis"])


def _unstack(p, x):
    return list(np.moveaxis(x, p["axis"], 0))


def _convert(p, x):
    x = np.real(x) if jnp.issubdtype(p["new_dtype"], jnp.floating) else x
    return [x.astype(p["new_dtype"])]


def _each(fun):
    return lambda p, *ins: [fun(*ins)]


# Operations that are exact or round once. NumPy gives the same results without compilation.
NUMPY = {
    "add": _each(np.add),
    "add_any": _each(np.add),
    "sub": _each(np.subtract),
    "mul": _each(np.multiply),
    "div": _each(lambda x, y: x / y if x.dtype.kind not in "iu" else jax.lax.div(x, y)),
    "neg": _each(np.negative),
    "abs": _each(np.abs),
    "max": _each(np.maximum),
    "min": _each(np.minimum),
    "eq": _each(np.equal),
    "ne": _each(np.not_equal),
    "ge": _each(np.greater_equal),
    "gt": _each(np.greater),
    "le": _each(np.less_equal),
    "lt": _each(np.less),
    "and": _each(np.bitwise_and),
    "or": _each(np.bitwise_or),
    "sqrt": _each(np.sqrt),
    "real": _each(np.real),
    "stop_gradient": _each(np.array),
    "name": _each(np.array),
    "select_n": _each(lambda which, *cases: np.choose(which.astype(int), cases)),
    "convert_element_type": _convert,
    "reduce_sum": lambda p, x: [np.sum(x, p["axes"], x.dtype)],
    "reduce_max": lambda p, x: [np.max(x, p["axes"])],
    "reshape": _reshape,
    "squeeze": lambda p, x: [np.squeeze(x, tuple(p["dimensions"]))],
    "transpose": lambda p, x: [np.transpose(x, p["permutation"])],
    "rev": lambda p, x: [np.flip(x, p["dimensions"])],
    "concatenate": lambda p, *xs: [np.concatenate(xs, p["dimension"])],
    "stack": lambda p, *xs: [np.stack(xs, p["axis"])],
    "broadcast_in_dim": _broadcast,
    "pad": _pad,
    "slice": _slice,
    "split": _split,
    "unstack": _unstack,
}


def subprograms(eqn: Any) -> list[tuple[Any, int, list[int | None], dict[int, int]]]:
    """Returns the programs inside an equation that are evaluated with it.

    Each is a tuple: the jaxpr; the index of the first operand that it takes (it takes one for each
    argument); for each of its results, the index of the equation's result; and a map from results
    to the arguments that they become in the next iteration.
    """
    name, p = eqn.primitive.name, eqn.params
    if name in CALLS:
        inner = opened(p[CALLS[name]])[0]
        return [(p[CALLS[name]], 0, list(range(len(inner.outvars))), {})]
    if name == "cond":
        return [(b, 1, list(range(len(eqn.outvars))), {}) for b in p["branches"]]
    if name == "scan":
        consts, carry = scan_counts(eqn)
        again = {i: consts + i for i in range(carry)}
        return [(p["jaxpr"], 0, list(range(len(eqn.outvars))), again)]
    if name == "while":
        first, second = p["cond_nconsts"], p["body_nconsts"]
        again = {i: second + i for i in range(len(eqn.outvars))}
        return [(p["body_jaxpr"], first, list(range(len(eqn.outvars))), again)]
    return []


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Returns the numbers of a scan's constants and carries, which have no axis of iterations."""
    inner = opened(eqn.params["jaxpr"])[0]
    pairs = zip(eqn.invars, inner.invars, strict=True)
    same = sum(len(v.aval.shape) == len(w.aval.shape) for v, w in pairs)
    pairs = zip(eqn.outvars, inner.outvars, strict=True)
    carry = sum(len(v.aval.shape) == len(w.aval.shape) for v, w in pairs)
    return same - carry, carry


def amplified(jaxpr: Any, outs: Sequence[bool]) -> dict[Any, bool]:
    """Returns for each variable of a program whether an amplifying operation reads it."""
    inner = opened(jaxpr)[0]
    found = {v: True for v, yes in zip(inner.outvars, outs, strict=True) if yes and is_var(v)}
    for eqn in reversed(inner.eqns):
        name = eqn.primitive.name
        programs = subprograms(eqn)
        for program, first, _, again in programs:
            wanted = [found.get(v, False) for v in eqn.outvars]
            while True:
                args = opened(program)[0].invars
                inside = amplified(program, wanted)
                more = [
                    yes or (i in again and inside.get(args[again[i]], False))
                    for i, yes in enumerate(wanted)
                ]
                if more == wanted:
                    break
                wanted = more
            read = zip(eqn.invars[first:], args, strict=False)
            found |= {v: True for v, a in read if is_var(v) and inside.get(a, False)}
        passes = name in PASSES and any(found.get(v, False) for v in eqn.outvars)
        if name in AMPLIFIES or passes:
            found |= {v: True for v in eqn.invars if is_var(v)}
    return found


def is_var(atom: Any) -> bool:
    return not isinstance(atom, jex.Literal)


def holds_matmuls(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name in MATMULS or any(holds_matmuls(s[0]) for s in subprograms(eqn))
        for eqn in opened(jaxpr)[0].eqns
    )


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to evaluate a program.

    Attributes:
        operation: Runs an equation: ``(eqn, operands, is its result amplified) -> results``.
        value: Converts a constant or a result to the value that represents it.
        derived: Whether all derivatives were taken, so that custom rules need none.
        eager: Whether values are arrays, so that loops run iteration by iteration. Only single
            operations are compiled, once for all programs.
    """

    operation: Callable[[Any, list[Any], bool], list[Any]]
    value: Callable[[Any, Any], Any] = lambda x, aval: x
    derived: bool = False
    eager: bool = False


def evaluate(jaxpr: Any, args: Sequence[Any], way: Way, outs: Sequence[bool] = ()) -> list[Any]:
    """Evaluates a program equation by equation, including its inner programs."""
    inner, consts = opened(jaxpr)
    outs = outs or [False] * len(inner.outvars)
    reads = amplified(jaxpr, outs)
    env = dict(zip(inner.invars, args, strict=True))
    env |= {v: way.value(c, v.aval) for v, c in zip(inner.constvars, consts, strict=True)}

    def read(atom):
        return env[atom] if is_var(atom) else way.value(literal(atom), atom.aval)

    for eqn in inner.eqns:
        ins = [read(atom) for atom in eqn.invars]
        wanted = [reads.get(v, False) for v in eqn.outvars]
        program = (EAGER if way.eager else PROGRAMS).get(eqn.primitive.name)
        kept = "custom_" in eqn.primitive.name and not way.derived
        if program and not (kept and not any(holds_matmuls(s[0]) for s in subprograms(eqn))):
            results = program(eqn, ins, way, wanted)
        else:
            results = way.operation(eqn, ins, any(wanted))
        results = [way.value(x, v.aval) for x, v in zip(results, eqn.outvars, strict=True)]
        env |= dict(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in inner.outvars]


def literal(atom: Any) -> Any:
    dtype = getattr(atom.aval, "dtype", None)
    extended = dtype is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    return atom.val if extended else np.asarray(atom.val, dtype)


def _call(eqn, ins, way, wanted):
    return evaluate(eqn.params[CALLS[eqn.primitive.name]], ins, way, wanted)


def split(values: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    return values[:first], values[first : first + second], values[first + second :]


def _carried(eqn: Any, wanted: Sequence[bool]) -> list[bool]:
    """Returns which results of a loop's body an amplifying operation reads in any iteration."""
    ((body, _, _, again),) = subprograms(eqn)
    args = opened(body)[0].invars
    for _ in wanted:
        inside = amplified(body, wanted)
        wanted = [
            yes or (i in again and inside.get(args[again[i]], False))
            for i, yes in enumerate(wanted)
        ]
    return list(wanted)


def _scan(eqn, ins, way, wanted):
    p = eqn.params
    num_consts, num_carry = scan_counts(eqn)
    wanted = _carried(eqn, wanted)
    consts, carry, xs = split(ins, num_consts, num_carry)

    def body(carry, xs):
        outs = evaluate(p["jaxpr"], [*consts, *carry, *xs], way, wanted)
        return outs[:num_carry], outs[num_carry:]

    carry, ys = jax.lax.scan(body, carry, xs, p["length"], p["reverse"])
    return [*carry, *ys]


def _while(eqn, ins, way, wanted):
    p = eqn.params
    wanted = _carried(eqn, wanted)
    cond_consts, body_consts, carry = split(ins, p["cond_nconsts"], p["body_nconsts"])

    def going(carry):
        return evaluate(p["cond_jaxpr"], [*cond_consts, *carry], way)[0]

    def body(carry):
        turned = evaluate(p["body_jaxpr"], [*body_consts, *carry], way, wanted)
        # Under vmap, some examples continue while others have finished.
        return [_where(going(carry), new, old) for new, old in zip(turned, carry, strict=True)]

    return jax.lax.while_loop(lambda carry: jnp.any(going(carry)), body, carry)


def _where(going, new, old):
    """Returns an array of ``old`` entries where a predicate over the leading axes is false."""
    xp = jnp if isinstance(new, jax.core.Tracer) else np
    return xp.where(going.reshape(going.shape + (1,) * (new.ndim - going.ndim)), new, old)


def _cond(eqn, ins, way, wanted):
    branches = [lambda *args, b=b: evaluate(b, args, way, wanted) for b in eqn.params["branches"]]
    index = ins[0].astype(jnp.int32)
    return jax.lax.switch(index, branches, *ins[1:])


def _scan_eagerly(eqn, ins, way, wanted):
    p = eqn.params
    num_consts, num_carry = scan_counts(eqn)
    wanted = _carried(eqn, wanted)
    consts, carry, xs = split(ins, num_consts, num_carry)
    xs = [np.asarray(x) for x in xs]
    turns = range(p["length"])
    rows = []
    for i in reversed(turns) if p["reverse"] else turns:
        outs = evaluate(p["jaxpr"], [*consts, *carry, *(x[i] for x in xs)], way, wanted)
        carry = outs[:num_carry]
        rows.append(outs[num_carry:])
    rows = rows[::-1] if p["reverse"] else rows
    return [*carry, *map(np.stack, zip(*rows, strict=True))]


def _while_eagerly(eqn, ins, way, wanted):
    p = eqn.params
    wanted = _carried(eqn, wanted)
    cond_consts, body_consts, carry = split(ins, p["cond_nconsts"], p["body_nconsts"])
    while np.any(going := np.asarray(evaluate(p["cond_jaxpr"], [*cond_consts, *carry], way)[0])):
        turned = evaluate(p["body_jaxpr"], [*body_consts, *carry], way, wanted)
        pairs = zip(map(np.asarray, turned), map(np.asarray, carry), strict=True)
        carry = [_where(going, new, old) for new, old in pairs]
    return carry


def _cond_eagerly(eqn, ins, way, wanted):
    branches = eqn.params["branches"]
    index = min(max(int(ins[0]), 0), len(branches) - 1)
    return evaluate(branches[index], ins[1:], way, wanted)


def _shard_map(eqn, ins, way, wanted):
    p, way = eqn.params, dataclasses.replace(way, eager=False)
    mapped = jax.shard_map(
        lambda *xs: tuple(evaluate(p["jaxpr"], xs, way)),
        mesh=p["mesh"],
        in_specs=p["in_specs"],
        out_specs=p["out_specs"],
        check_vma=p["check_vma"],
        axis_names=p["newly_manual_axes"],
    )
    return jax.jit(mapped)(*ins)


CALLED = {**dict.fromkeys(CALLS, _call), "shard_map": _shard_map}
PROGRAMS = {**CALLED, "scan": _scan, "while": _while, "cond": _cond}
EAGER = {**CALLED, "scan": _scan_eagerly, "while": _while_eagerly, "cond": _cond_eagerly}
