"""Measures soundness: autocast's errors relative to those of matmuls rounded by hand.

The yardstick is the float32 program with its matmuls and convolutions rounded to half, in the
gradient too: their operands, or operands and results, whichever is further off. The truth is the
same program in float64. Both evaluate the equations of the float32 program one by one, without code
of the library. An error is relative to its leaf, and its root mean square over several arguments
counts.

The yardstick does not round the result of a matmul if an operation that amplifies relative errors
reads it, directly or through elementwise operations and changes of layout. If such a matmul sums
few products, so that half would gain nothing, its operands are not rounded either.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from evaluation import MATMULS, Way, bind, evaluate, is_var, names

import mpjax

# Unit roundoff: the largest relative error of one rounding.
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
TIMES = 4  # autocast's error may be this many times the yardstick's,
FLOOR = 2.0**-23  # which is at least a rounding to float32
SEEDS, CONFIRM = 3, 10  # the arguments of a measurement, and of one that confirms a finding
FIRST, CONFIRMING = range(SEEDS), range(SEEDS, SEEDS + CONFIRM)
HALVES = [jnp.dtype(name) for name in UNIT]
LOSS_SCALE = {"bfloat16": 1.0, "float16": 2.0**10}
SHORT = 8  # a matmul that sums at most this many products gains nothing from half operands
VANISHES = 1e-6  # a gradient leaf this small relative to the whole gradient cancels

# The compiler must not remove a rounding of the program.
STRICT = {"xla_allow_excess_precision": False}
QUICK = {"xla_cpu_parallel_codegen_split_count": 1, "xla_cpu_use_fusion_emitters": False}


@functools.cache
def options() -> dict[str, Any]:
    """Returns the compiler options. Not every XLA version knows the fastest ones."""
    try:
        jax.jit(lambda x: x, compiler_options=STRICT | QUICK)(0.0)
    except jax.errors.JaxRuntimeError:
        return STRICT
    return STRICT | QUICK


# ---- two ways: float64, and rounded matmuls -----------------------------------------------------


def is_f32(x: Any) -> bool:
    return getattr(x, "dtype", None) == jnp.float32


# The dtypes that replace others in the float64 program.
WIDE = {jnp.dtype(k): jnp.dtype(v) for k, v in (("f4", "f8"), ("c8", "c16"))}


def _widen(x: Any, aval: Any) -> Any:
    dtype = getattr(aval, "dtype", None)
    return jnp.asarray(x, WIDE[dtype]) if dtype in WIDE and x.dtype == dtype else x


# The results of these operations depend on the bits of their operands.
NARROW = names(
    "bitcast_convert_type nextafter rng_uniform random_gamma reduce reduce_window "
    "select_and_scatter select_and_gather_add"
)
SCATTERS = {f"scatter-{name}": getattr(jax.lax, f"scatter_{name}") for name in ("add", "mul")}
DTYPES = ("preferred_element_type", "new_dtype", "dtype")


def _in_float64(eqn: Any, ins: list[Any], amplified: bool) -> list[Any]:
    wide = {k: WIDE[eqn.params[k]] for k in DTYPES if eqn.params.get(k) in WIDE}
    if eqn.primitive.name == "custom_linear_solve":  # it holds programs for float32
        lengths, programs = eqn.params["const_lengths"], eqn.params["jaxprs"]
        first = lengths.matvec + lengths.vecmat
        consts = ins[first : first + lengths.solve]
        return evaluate(programs.solve, [*consts, *ins[sum(lengths) :]], FLOAT64)
    if eqn.primitive.name in SCATTERS:  # they hold a program for float32
        p = {k: eqn.params[k] for k in ("indices_are_sorted", "unique_indices", "mode")}
        scatter = SCATTERS[eqn.primitive.name]
        return [scatter(*ins, eqn.params["dimension_numbers"], **p)]
    if eqn.primitive.name not in NARROW:
        try:
            return bind(eqn, ins, **wide)
        except (TypeError, ValueError, NotImplementedError):  # it has no such form
            pass
    narrow = [
        x.astype(v.aval.dtype) if v.aval.dtype in WIDE else x
        for x, v in zip(ins, eqn.invars, strict=True)
    ]
    return bind(eqn, narrow)


FLOAT64 = Way(_in_float64, _widen, derived=True)


def rounded(x: Any, half: Any) -> Any:
    """Returns a float32 array rounded to half and widened again. Its cotangents are rounded too."""
    if isinstance(x, np.ndarray):
        with np.errstate(over="ignore"):
            return x.astype(half).astype(x.dtype)
    return jax.lax.optimization_barrier(x.astype(half)).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def rounded_backwards(x: Any, half: Any) -> Any:
    """Returns an array unchanged. Its cotangents are rounded to half."""
    return x


@rounded_backwards.defjvp
def _rounded_backwards_jvp(half, primals, tangents):
    return primals[0], rounded(tangents[0], half)


def _products(eqn: Any) -> int:
    """Returns the number of products that a matmul sums for one entry of its result."""
    if eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        return int(np.prod(kernel)) // kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    numbers = eqn.params.get("dimension_numbers") or eqn.params["ragged_dot_dimension_numbers"]
    (contracting, _), _ = getattr(numbers, "dot_dimension_numbers", numbers)
    return int(np.prod([eqn.invars[0].aval.shape[d] for d in contracting]))


def _rounding(
    half: Any, eqn: Any, ins: list[Any], amplified: bool, results: bool = True
) -> list[Any]:
    floats = [is_f32(x) for x in ins]
    if eqn.primitive.name not in MATMULS or not (any(floats) and is_f32(eqn.outvars[0].aval)):
        return bind(eqn, ins)
    if amplified and _products(eqn) <= SHORT:
        return bind(eqn, ins)
    ins = [rounded(x, half) if yes else x for x, yes in zip(ins, floats, strict=True)]
    (out,) = bind(eqn, ins)
    if not results:
        return [out]
    return [(rounded_backwards if amplified else rounded)(out, half)]


def _rounding_all(half: Any, eqn: Any, ins: list[Any], amplified: bool) -> list[Any]:
    return _rounding(half, eqn, ins, False)


def in_the_lowering(fun: Callable[..., Any], args: Sequence[Any], half: Any, argnums: Any = 0):
    """Returns a function of arguments: results and gradients of the float32 program of ``fun``.

    Operands and results of all matmuls are rounded, after JAX has differentiated the program.
    """
    args = jax.tree.map(jnp.asarray, tuple(args))
    program = traced(_measured(fun, args, argnums, 1.0), args)
    return _runner(program, functools.partial(_rounding_all, jnp.dtype(half)))


def traced(fun: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the jaxpr of a function, and the tree structure of its result."""
    jaxpr, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    return jaxpr, jax.tree.structure(shape)


def rounded_matmuls(fun: Callable[..., Any], half: Any) -> Callable[..., Any]:
    """Returns a function with its matmuls and convolutions rounded to half.

    It is differentiable, and the matmuls of its gradient are rounded too. JAX's own derivative
    replaces a custom rule around matmuls, except for a custom rule that was traced already, as in
    ``rounded_matmuls(jax.grad(f), half)``.
    """
    way = Way(functools.partial(_rounding, jnp.dtype(half)))

    def run(*args):
        jaxpr, tree = traced(fun, args)
        return jax.tree.unflatten(tree, evaluate(jaxpr, jax.tree.leaves(args), way))

    return run


# ---- errors -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Error:
    """The relative L2 error of one result or one leaf of the gradient.

    Attributes:
        part: "result", "gradient" or "update".
        leaf: The path of the leaf.
        yardstick: The larger error of rounded matmuls.
        autocast: The error of autocast.
        nonfinite: The number of Infs and NaNs that only autocast has.
        half: The name of the half dtype.
    """

    part: str
    leaf: str
    yardstick: float
    autocast: float
    nonfinite: int
    half: str

    @property
    def bound(self) -> float:
        return TIMES * max(self.yardstick, FLOOR)

    @property
    def sound(self) -> bool:
        return not self.nonfinite and self.autocast <= self.bound

    def __str__(self) -> str:
        text = (
            f"{self.part}{self.leaf} in {self.half}: autocast is {self.autocast:.3g} off, rounded "
            f"matmuls {self.yardstick:.3g}, the bound is {self.bound:.3g}"
        )
        return text + (f"; {self.nonfinite} new Inf or NaN" if self.nonfinite else "")


def _as_it_is(eqn: Any, ins: list[Any], amplified: bool) -> list[Any]:
    return bind(eqn, ins)


def _as_written(eqn: Any, ins: list[Any], amplified: bool) -> list[Any]:
    """Runs an equation. A matmul of halves sums in float32, as hardware does."""
    out = eqn.outvars[0].aval.dtype
    halves = [getattr(x, "dtype", None) in HALVES for x in ins]
    if eqn.primitive.name not in MATMULS or not any(halves):
        return bind(eqn, ins)
    wide = [x.astype(jnp.float32) if yes else x for x, yes in zip(ins, halves, strict=True)]
    return [bind(eqn, wide, preferred_element_type=jnp.dtype(jnp.float32))[0].astype(out)]


def run(fun: Callable[..., Any], *args: Any) -> Any:
    """Runs a small program operation by operation, which is cheaper than to compile it for one run.

    Only single operations are compiled, once for all programs of a process.
    """
    jaxpr, tree = traced(fun, args)
    way = Way(_as_written, derived=True, eager=True)
    return jax.tree.unflatten(tree, evaluate(jaxpr, jax.tree.leaves(args), way))


def errors(
    fun: Callable[..., Any],
    args: Sequence[Any] | Callable[[int], Sequence[Any]],
    half: str,
    argnums: int | Sequence[int] | None = 0,
    *,
    loss_scale: float | None = None,
    by_hand: Callable[..., Any] | None = None,
    update: Callable[..., Any] | None = None,
    storage: str = "fast",
    seeds: Sequence[int] = FIRST,
    eager: bool = False,
    planned: Callable[..., Any] | None = None,
    spared: bool = True,
) -> list[Error]:
    """Returns the errors of autocast and of the yardstick, for each result and gradient leaf.

    Args:
        fun: The float32 program.
        args: The arguments of the program, of which others are `redrawn`, or a function that
            returns those of a seed. Numbers and arrays among them are traced.
        half: "bfloat16" or "float16".
        argnums: The arguments to differentiate in; None for no gradient. A function that does not
            return a scalar is differentiated along fixed random cotangents.
        loss_scale: The factor of the cotangents, by which the gradients are divided in float32.
            If None, the `LOSS_SCALE` of this half dtype.
        by_hand: The yardstick's program, if it differs from ``fun``: with `rounded` after each
            block of a residual stream, because models cast by hand keep the stream in half.
        update: ``(args, results) -> tree``, in float64: further results to judge, such as the
            update of a step's state.
        storage: The storage option of autocast.
        seeds: The seeds of the arguments.
        eager: Whether to run operation by operation, which is faster for a small program without
            long loops.
        planned: The planner that is judged: ``(fun, policy) -> function``. Today's if None.
        spared: Whether the yardstick spares matmuls that an amplifying operation reads. If not, it
            rounds operands and results of all.
    """
    draw = args if callable(args) else functools.partial(redrawn, args)
    given = [jax.tree.map(jnp.asarray, tuple(draw(seed))) for seed in seeds]
    scale = LOSS_SCALE[half] if loss_scale is None else loss_scale
    auto = (planned or mpjax.autocast)(fun, f"mixed_{half},storage={storage}")
    exact, hand, auto = (
        traced(_measured(f, given[0], argnums, factor), given[0])
        for f, factor in ((fun, 1.0), (by_hand or fun, scale), (auto, scale))
    )
    rounding = functools.partial(_rounding, jnp.dtype(half))
    ways = [functools.partial(rounding, results=results) for results in (False, True)]
    ways = ways if spared else [functools.partial(_rounding_all, jnp.dtype(half))]
    runs = [_runner(exact, _in_float64, eager), *(_runner(hand, way, eager) for way in ways)]
    runs.append(_runner(auto, _as_written if eager else _as_it_is, eager))
    found = []
    for args in given:
        parts = [dict(zip(("result", "gradient"), run(args), strict=False)) for run in runs]
        if update is not None:
            plain, *results = (_in_numpy(x) for x in (args, *(part["result"] for part in parts)))
            for part, result in zip(parts, results, strict=True):
                part["update"] = update(plain, result)
        rows = (_rows(name, half, *(part[name] for part in parts)) for name in parts[0])
        found.append([*itertools.chain(*rows)])
    return [pooled(rows) for rows in zip(*found, strict=True)]


def _in_numpy(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def _runner(program, operation, eager=False):
    """Returns a traced program as a function of its arguments that returns NumPy arrays."""
    jaxpr, tree = program
    wide = operation is _in_float64
    way = Way(operation, _widen if wide else Way.value, derived=True, eager=eager)
    run = lambda leaves: evaluate(jaxpr, leaves, way)  # noqa: E731
    run = run if eager else jax.jit(run, compiler_options=options())

    def outcome(args):
        leaves = jax.tree.leaves(args)
        with jax.enable_x64(wide):  # where nothing of the program is traced: it would be another
            leaves = [_widen(x, jax.typeof(x)) for x in leaves] if wide else leaves
            return jax.tree.unflatten(tree, [np.asarray(x) for x in run(leaves)])

    return outcome


def in_float64(fun: Callable[..., Any], args: Sequence[Any], argnums: Any = 0) -> Any:
    """Returns the results of a float32 program and its gradients, computed in float64."""
    args = jax.tree.map(jnp.asarray, tuple(args))
    return _runner(traced(_measured(fun, args, argnums, 1.0), args), _in_float64)(args)


def redrawn(args: Sequence[Any], seed: int) -> Any:
    """Returns arguments whose every rounding to half is another one; of seed 0, the same.

    Numbers, and arrays that half holds exactly, such as masks, stay as they are.
    """
    rng = np.random.default_rng(seed)

    def another(x):
        x = jnp.asarray(x)
        if not (seed and is_f32(x) and x.ndim) or np.all(rounded(np.asarray(x), HALVES[0]) == x):
            return x
        return x * jnp.asarray(1 + rng.uniform(-1, 1, x.shape) / 64, jnp.float32)

    return jax.tree.map(another, tuple(args))


def _measured(fun, args, argnums, scale):
    """Returns a function of all arguments that returns results and unscaled gradients."""
    if argnums is None:
        return lambda *args: (fun(*args),)
    argnums = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def run(*args):
        leaves, tree = jax.tree.flatten(tuple(args[i] for i in argnums))
        floats = [is_f32(x) for x in leaves]

        def part(diff):
            given = iter(diff)
            mixed = [next(given) if yes else x for x, yes in zip(leaves, floats, strict=True)]
            changed = dict(zip(argnums, jax.tree.unflatten(tree, mixed), strict=True))
            out = fun(*(changed.get(i, x) for i, x in enumerate(args)))
            return [x for x in jax.tree.leaves(out) if is_f32(x)], out

        diff = [x for x, yes in zip(leaves, floats, strict=True) if yes]
        flat, back, out = jax.vjp(part, diff, has_aux=True)
        (grads,) = back([scale * _cotangent(i, x, len(flat)) for i, x in enumerate(flat)])
        given = iter(grads)
        grads = [next(given) / scale if yes else None for yes in floats]
        grads = jax.tree.unflatten(tree, grads)
        return out, grads[0] if len(argnums) == 1 else grads

    return run


def _cotangent(index, x, count):
    if count == 1 and x.ndim == 0:
        return jnp.ones((), jnp.float32)
    noise = np.random.default_rng(index).standard_normal(x.shape) / max(1, x.size) ** 0.5
    return jnp.asarray(noise, jnp.float32)


def _rows(part, half, truth, *others):
    """Returns the errors of two runs by hand and of autocast's; the larger one by hand counts."""
    pairs = jax.tree_util.tree_flatten_with_path(truth)[0]
    others = [jax.tree.leaves(tree) for tree in others]
    rows = []
    floats = [t for _, t in pairs if np.issubdtype(t.dtype, np.inexact)]
    whole = norm(np.concatenate([t.ravel() for t in floats])) if floats else 0.0
    for (path, want), *runs in zip(pairs, *others, strict=True):
        if not jnp.issubdtype(want.dtype, jnp.inexact) or not want.size:
            continue
        exact = np.result_type(want.dtype, np.float64)
        want, *runs = (np.asarray(x, exact) for x in (want, *runs))
        size = norm(want)
        if part == "gradient" and size <= VANISHES * whole:
            size = whole
        size = size or 1.0
        fine = np.logical_and.reduce([np.isfinite(x) for x in (want, *runs[:-1])])
        new = int(np.sum(~np.isfinite(runs[-1]) & fine))
        *hand, auto = (norm(np.where(fine & np.isfinite(x), x - want, 0)) / size for x in runs)
        rows.append(Error(part, jax.tree_util.keystr(path), max(hand), auto, new, half))
    return rows


def kept(fun: Callable[..., Any], args: Sequence[Any], half: str) -> collections.Counter:
    """Counts the arrays that autocast keeps for the backward pass, by dtype and shape."""
    auto = mpjax.autocast(fun, f"mixed_{half}")

    def residuals(*args):
        return [x for x in jax.tree.leaves(jax.vjp(auto, *args)[1]) if isinstance(x, jax.Array)]

    jaxpr = jax.make_jaxpr(residuals)(*args).jaxpr
    fills = {v for eqn in jaxpr.eqns if _fills(eqn) for v in eqn.outvars}
    made = {v for v in jaxpr.outvars if is_var(v)} - {*jaxpr.invars, *jaxpr.constvars} - fills
    return collections.Counter((str(v.aval.dtype), v.aval.shape) for v in made)


def _fills(eqn: Any) -> bool:
    """Returns whether an equation repeats one number; compilers do not keep such an array."""
    return eqn.primitive.name == "broadcast_in_dim" and eqn.invars[0].aval.size == 1


def norm(x: np.ndarray) -> float:
    x = x[np.isfinite(x)]
    return float(np.linalg.norm(x))


def pooled(rows: Sequence[Error]) -> Error:
    """Returns the error of one leaf over several runs: root mean squares."""
    hand, auto = (
        float(np.sqrt(np.mean(np.square([getattr(row, name) for row in rows]))))
        for name in ("yardstick", "autocast")
    )
    new = int(np.median([row.nonfinite for row in rows]))
    return dataclasses.replace(rows[0], yardstick=hand, autocast=auto, nonfinite=new)


def findings(fun: Any, draw: Callable[[int], Any], *args: Any, **kwargs: Any) -> list[Error]:
    """Returns the `errors` above their bounds that fresh arguments confirm.

    Among many programs, a yardstick is sometimes lucky.
    """
    for seeds in (FIRST, CONFIRMING):
        rows = errors(fun, draw, *args, seeds=seeds, **kwargs)
        if not (wrong := [row for row in rows if not row.sound]):
            break
    return wrong


def check(*args: Any, parts: str = "result gradient update", **kwargs: Any) -> list[Error]:
    """Like `errors`, but fails where autocast is less accurate than its bound."""
    rows = errors(*args, **kwargs)
    return judge(rows, parts)


def judge(rows: Sequence[Error], parts: str = "result gradient update") -> list[Error]:
    """Fails if an error of these parts is above its bound."""
    rows = [row for row in rows if row.part in parts.split()]
    wrong = [row for row in rows if not row.sound]
    assert not wrong, "\n".join(map(str, wrong))
    return rows
