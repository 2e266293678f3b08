"""The table of JAX primitives: their numerical properties, one row per primitive.

A row states properties of the primitive alone, and a test checks each of them. The planner decides
what they mean for a program. The choice of primitives that need float32 merges the lists of
PyTorch, Apex, Paddle, MindSpore and TensorFlow's graph pass. Autocast leaves a primitive without a
row alone.

The column ``gain`` says by how much a relative error of an operand grows. It is the largest value
of ``|x f'(x)|`` divided by ``|f(x)|``, or by the bound of a bounded function if that is larger. The
errors of an array's entries are independent, so their contributions are added. A sum has no such
number because its terms may cancel; by convention its error is measured against the magnitudes of
its terms. Operands range over the values of the 16-bit dtype, and results are computed in float32.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from mpjax._src.core.base import _jax
from mpjax._src.core.base.errors import brief
from mpjax._src.core.base.operations import primitives_of

# ---- the columns --------------------------------------------------------------------------------

# need: the dtype it computes in.
HALF = "half"  # 16-bit operands on the matrix units, with float32 accumulation
FULL = "full"  # float32: special functions, and sums and products over many
FOLLOW = "follow"  # float32: elementwise arithmetic
MOVE = "move"  # no arithmetic; uses the dtype that needs the fewest casts
COMPARE = "compare"  # returns no floats; reads its operands in the dtype they are stored in
PROGRAM = "program"  # a nested program or a kernel, which is planned separately

# gain: by how much it amplifies a relative error of its operands.
NONE = "none"  # not at all: its derivative is zero
ONE = "one"  # by a factor of about 1 at most (a few for small powers)
SUM = "sum"  # by a factor of 1 at most, relative to the magnitudes of its terms
RANGE = "range"  # by more, up to what the exponents of float32 allow (exp: 88)
UNBOUNDED = "unbounded"  # without limit: a phase, a pole, a condition number
AMPLIFIES = (RANGE, UNBOUNDED)

# span: the size of its result, for operands in the range of float16.
KEEPS = "keeps"  # in the same range, or larger by as much as a sum of two is
BOUNDED = "bounded"  # at most a small number, for any operand
GROWS = "grows"  # may leave the range of float16

# saves: the values that its derivative reads.
NOTHING = "nothing"  # none, or only masks
OTHERS = "others"  # the other operands of a product; also the divisor of a quotient
OPERANDS = "operands"  # its operands, and perhaps its result
RESULT = "result"  # its result

# cost: the cost of recomputing it.
FUSED = "fused"  # none: compilers repeat it in every reader by themselves
DEAR = "dear"  # that of a special function: worth it where it saves memory
NEVER = "never"  # too high: memory traffic or many operations

# traits: further properties, which only some primitives have.
REDUCES = "reduces"  # makes a small result from large operands
NO_HALF_FORM = "no 16-bit form"  # compilers cannot run it in 16 bits, even if a list or region asks
HAS_WIDE_FORM = "has wide form"  # can return its float32 accumulator, on any hardware
SUMS_BACK = "sums back"  # a linear move whose transpose is a sum
SAME_PARAMETER = "same parameter"  # path patterns of its operand apply to its result too
SAME_CONSTANT = "same constant"  # turns a known constant into a known constant
FRESH = "fresh"  # a move whose result is a new array, not a view of its operand
KINKED = "kinked"  # piecewise linear: its derivative depends on the side of a kink
PART = "part"  # takes one entry of a stack, or a part of an array
LOOKS_UP = "looks up"  # takes rows of a table, like a matmul with one-hot rows
STATE = "state"  # used to update running sums and averages from one loop iteration to the next
CANCELS = "cancels"  # differentiation writes such sums, and their terms tend to cancel
POLE = "pole"  # infinite at some finite operand
JUMPS = "jumps"  # discontinuous at some operands other than zero
RANKS = "ranks"  # sorts entries, or finds the first one in an order


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """The row of a primitive."""

    need: str = PROGRAM  # the dtype it computes in: HALF, FULL, FOLLOW, MOVE, COMPARE or PROGRAM
    # By how much it amplifies a relative error of an operand: NONE, ONE, SUM, RANGE or UNBOUNDED,
    # or a function from the equation's parameters to one of these.
    gain: str | Callable[[dict[str, Any]], str] = SUM
    span: str = KEEPS  # the size of its result: KEEPS, BOUNDED or GROWS
    # The values that its derivative reads: NOTHING, OTHERS, OPERANDS or RESULT.
    saves: str = OPERANDS
    cost: str = NEVER  # the cost of recomputing it: FUSED, DEAR or NEVER
    traits: frozenset[str] = frozenset()  # any of the traits above
    # Whether a backward pass may recompute it to save memory. This excludes matmuls,
    # reductions, collectives and kernels. Slices and concatenations are included: they are computed
    # where they are read.
    runs_again: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        sliced = not self.traits.isdisjoint((PART, FRESH)) and LOOKS_UP not in self.traits
        again = (self.cost != NEVER or sliced) and REDUCES not in self.traits
        object.__setattr__(self, "runs_again", again)

    def amplifies(self, params: dict[str, Any]) -> bool:
        """Returns whether an equation with these parameters amplifies an error of its operands."""
        return self.gain_of(params) in AMPLIFIES

    @property
    def linear(self) -> bool:
        """Whether its derivative reads no operand: it is linear, or piecewise linear, in each."""
        return self.saves == NOTHING

    @property
    def multiplies(self) -> bool:
        """Whether it is an elementwise product or quotient."""
        return self.need == FOLLOW and self.saves == OTHERS

    def gain_of(self, params: dict[str, Any]) -> str:
        """Returns the gain of an equation with these parameters."""
        return self.gain(params) if callable(self.gain) else self.gain


UNKNOWN = Rule("unknown", UNBOUNDED, GROWS)
RULES: dict[str, Rule] = {}


def rule_of(name: str) -> Rule:
    """Returns the row of a primitive, or `UNKNOWN` if there is none."""
    return RULES.get(name, UNKNOWN)


def names_where(test: Callable[[Rule], bool]) -> Iterator[str]:
    """Yields the names of the primitives whose row passes a test."""
    return (name for name, rule in RULES.items() if test(rule))


def having(trait: str) -> frozenset[str]:
    """Returns the names of the primitives that have a trait."""
    return frozenset(names_where(lambda rule: trait in rule.traits))


def row(names: str, need: str, gain: Any = SUM, span: str = KEEPS, **columns: Any) -> None:
    """Adds the same row for each name in a string of names."""
    traits = frozenset(columns.pop("traits", ()))
    RULES.update(dict.fromkeys(names.split(), Rule(need, gain, span, traits=traits, **columns)))


def _power(params: dict[str, Any]) -> str:
    # |x f'(x)| / |f(x)| of x**y is |y|. A RANGE is what exp has, whose gain is 88 at most.
    size = abs(params["y"])
    return ONE if size <= 4 else RANGE if size <= 100 else UNBOUNDED


# ---- matrix units -------------------------------------------------------------------------------

row("dot_general", HALF, SUM, GROWS, saves=OTHERS, traits=(HAS_WIDE_FORM, CANCELS))
row("ragged_dot_general", HALF, SUM, GROWS, saves=OTHERS, traits=(HAS_WIDE_FORM,))
row("conv_general_dilated", HALF, SUM, GROWS, saves=OTHERS, traits=(CANCELS,))

# ---- elementwise arithmetic ---------------------------------------------------------------------

LINEAR: dict[str, Any] = {"saves": NOTHING, "cost": FUSED}
row("add sub", FOLLOW, SUM, **LINEAR, traits=(STATE,))
row("add_any", FOLLOW, SUM, **LINEAR, traits=(STATE, CANCELS))
row("neg", FOLLOW, ONE, **LINEAR, traits=(STATE,))
row("sign", FOLLOW, NONE, BOUNDED, **LINEAR)
row("floor ceil round", FOLLOW, NONE, **LINEAR, traits=(JUMPS,))
row("abs clamp max min", FOLLOW, ONE, **LINEAR, traits=(KINKED,))
row("select_n", FOLLOW, ONE, **LINEAR, traits=(STATE,))
row("mul", FOLLOW, ONE, GROWS, saves=OTHERS, cost=FUSED, traits=(STATE,))
row("div", FOLLOW, ONE, GROWS, saves=OTHERS, cost=FUSED, traits=(STATE, POLE))
row("rem", FOLLOW, UNBOUNDED, saves=OPERANDS, cost=DEAR, traits=(JUMPS,))
row("sqrt", FOLLOW, ONE, saves=RESULT, cost=FUSED)
row("cbrt", FOLLOW, ONE, saves=RESULT, cost=DEAR)
row("tanh logistic", FOLLOW, ONE, BOUNDED, saves=RESULT, cost=DEAR)
row("atan atan2 erf", FOLLOW, ONE, BOUNDED, saves=OPERANDS, cost=DEAR)
row("asinh", FOLLOW, ONE, saves=OPERANDS, cost=DEAR)

# ---- float32: special functions -----------------------------------------------------------------

row("rsqrt", FULL, ONE, saves=OPERANDS, cost=FUSED, traits=(POLE,))
row("square", FULL, ONE, GROWS, saves=OPERANDS, cost=FUSED)
row("integer_pow", FULL, _power, GROWS, saves=OPERANDS, cost=FUSED, traits=(POLE,))
row("exp exp2", FULL, RANGE, GROWS, saves=RESULT, cost=DEAR)
row("expm1 sinh cosh", FULL, RANGE, GROWS, saves=OPERANDS, cost=DEAR)
row("log log1p log2", FULL, UNBOUNDED, saves=OPERANDS, cost=DEAR, traits=(POLE,))
row("pow", FULL, UNBOUNDED, GROWS, saves=OPERANDS, cost=DEAR, traits=(POLE,))
row("one_minus_square", FULL, UNBOUNDED, GROWS, saves=OPERANDS, cost=FUSED)
row("sin cos", FULL, UNBOUNDED, BOUNDED, saves=OPERANDS, cost=DEAR)
row("tan", FULL, UNBOUNDED, GROWS, saves=RESULT, cost=DEAR)
row("asin acos", FULL, UNBOUNDED, BOUNDED, saves=OPERANDS, cost=DEAR)
row("acosh", FULL, UNBOUNDED, saves=OPERANDS, cost=DEAR)
row("atanh", FULL, UNBOUNDED, saves=OPERANDS, cost=DEAR, traits=(POLE,))
row("erf_inv", FULL, UNBOUNDED, saves=RESULT, cost=DEAR, traits=(POLE,))
row("erfc", FULL, ONE, BOUNDED, saves=OPERANDS, cost=DEAR)
row("lgamma digamma", FULL, UNBOUNDED, GROWS, saves=OPERANDS, traits=(POLE,))
row("bessel_i0e bessel_i1e", FULL, ONE, BOUNDED)
row("igamma igammac regularized_incomplete_beta", FULL, UNBOUNDED, BOUNDED)
row("igamma_grad_a", FULL, UNBOUNDED)
row("random_gamma", FULL, UNBOUNDED, GROWS)
row("polygamma zeta", FULL, UNBOUNDED, GROWS, traits=(POLE,))

# ---- float32: sums and products over many -------------------------------------------------------

row("reduce_sum", FULL, SUM, GROWS, saves=NOTHING, cost=FUSED, traits=(REDUCES, CANCELS))
row("reduce_window_sum cumsum", FULL, SUM, GROWS, saves=NOTHING)
row("reduce_prod", FULL, UNBOUNDED, GROWS, cost=FUSED, traits=(REDUCES,))
row("cumprod", FULL, UNBOUNDED, GROWS)
row("cumlogsumexp", FULL, UNBOUNDED)
row("psum psum_invariant unreduced_psum reduce_scatter", FULL, SUM, GROWS, saves=NOTHING)
row("select_and_scatter_add", FULL, SUM, GROWS, saves=OTHERS)
row("scatter-add", FULL, SUM, GROWS, saves=NOTHING, traits=(NO_HALF_FORM, CANCELS))
row("scatter-sub fft", FULL, SUM, GROWS, saves=NOTHING, traits=(NO_HALF_FORM,))
row("scatter-mul", FULL, UNBOUNDED, GROWS, saves=OTHERS, traits=(NO_HALF_FORM,))

# ---- float32: linear algebra --------------------------------------------------------------------

row(
    "cholesky_update eig geqrf hessenberg householder_product ormqr schur tridiagonal "
    "tridiagonal_solve",
    *(FULL, UNBOUNDED, GROWS),
    traits=(NO_HALF_FORM,),
)
row("eigh lu qr svd", FULL, UNBOUNDED, GROWS, saves=RESULT, traits=(NO_HALF_FORM,))
row("cholesky", FULL, UNBOUNDED, saves=RESULT, traits=(NO_HALF_FORM,))
row("symmetric_product", FULL, SUM, GROWS, traits=(NO_HALF_FORM,))
row("triangular_solve", FULL, UNBOUNDED, GROWS, traits=(POLE,))

# ---- moves --------------------------------------------------------------------------------------

VIEW = (SAME_PARAMETER,)
row("copy reshape squeeze transpose", MOVE, ONE, **LINEAR, traits=(*VIEW, SAME_CONSTANT))
row("stop_gradient", MOVE, NONE, **LINEAR, traits=VIEW)
row("broadcast_in_dim", MOVE, ONE, **LINEAR, traits=(*VIEW, SAME_CONSTANT, SUMS_BACK))
row("reduce_max reduce_min", MOVE, ONE, **LINEAR, traits=(REDUCES, KINKED))
HELD: dict[str, Any] = {"saves": NOTHING, "cost": NEVER}
row("layout_constraint optimization_barrier", MOVE, ONE, **HELD, traits=VIEW)
row("rev reshard sharding_constraint", MOVE, ONE, **HELD, traits=VIEW)
row("dynamic_slice slice split unstack", MOVE, ONE, **HELD, traits=(*VIEW, PART))
row("gather", MOVE, ONE, **HELD, traits=(*VIEW, SUMS_BACK, FRESH, LOOKS_UP))
row("pvary", MOVE, ONE, **HELD, traits=(*VIEW, SAME_CONSTANT, SUMS_BACK))
row("all_gather pbroadcast tile", MOVE, ONE, **HELD, traits=(SUMS_BACK,))
row("concatenate", MOVE, ONE, **HELD, traits=(FRESH,))
row("dynamic_update_slice scatter", MOVE, ONE, **HELD, traits=(STATE,))
row("all_gather_invariant all_gather_reduced all_to_all name pad ppermute stack", MOVE, ONE, **HELD)
row("vary_unreduced_cast vary_unreduced_cast_p", MOVE, ONE, **HELD)
row("cummax cummin pmax pmin", MOVE, ONE, **HELD, traits=(KINKED,))
row("sort top_k", MOVE, ONE, **HELD, traits=(KINKED, RANKS))
row("reduce_window_max reduce_window_min", MOVE, ONE, traits=(KINKED,))

# ---- no float results, or no float operands -----------------------------------------------------

row("eq ge gt is_finite le lt ne", COMPARE, NONE, **LINEAR)
row("argmax argmin", COMPARE, NONE, **LINEAR, traits=(REDUCES, RANKS))

# ---- only the traits of these rows count: no dtype of their own, or left alone -------------------

row("convert_element_type", PROGRAM, ONE, **LINEAR, traits=(*VIEW, SAME_CONSTANT))
row("custom_jvp_call", FOLLOW, ONE, cost=DEAR, traits=(KINKED,))
row("closed_call cond custom_partitioning custom_vjp_call custom_vmap_call ffi_call", PROGRAM)
row("jit linear_call pallas_call remat2 scan shard_map while", PROGRAM)
LEFT = "unknown"
row("and iota not or", LEFT, NONE, **LINEAR)
row("rng_uniform", LEFT, NONE, **HELD)
row("bitcast_convert_type", LEFT, UNBOUNDED, GROWS, traits=(NO_HALF_FORM,))
row("reduce", LEFT, UNBOUNDED, GROWS, traits=(REDUCES, NO_HALF_FORM))
row("complex geqp3 reduce_window", LEFT, UNBOUNDED, GROWS, traits=(NO_HALF_FORM,))
row("scatter-max scatter-min", LEFT, ONE, traits=(NO_HALF_FORM,))


def register_rule(primitive: Any, need: str, **columns: Any) -> None:
    """Tells `autocast` how to treat your own primitive, or changes mpjax's rule for one.

    Register the rule before JAX traces a function that uses the primitive, because `autocast`
    caches its traces. Rules of primitives play the part of the op lists of PyTorch, Apex, Paddle
    and MindSpore.

    Args:
        primitive: The primitive, or its name.
        need: The dtype it computes in: "half" (16-bit operands and float32 accumulation, as in a
            matmul), "full" (float32), "follow" (float32, elementwise arithmetic) or "move" (no
            arithmetic; the dtype of its operands).
        **columns: Further properties. The defaults assume the worst: an operation that amplifies
            errors, may leave the range of float16, and is never recomputed.

            - ``gain``: by how much it amplifies a relative error of an operand: "none", "one",
              "sum", "range" or "unbounded" (the default), or a function from the equation's
              parameters to one of these.
            - ``span``: the size of its result for operands in the range of float16: "keeps" (in
              that range), "bounded" (a small number) or "grows" (the default).
            - ``saves``: the values that its derivative reads: "nothing", "others" (the other
              operands of a product), "operands" (the default) or "result".
            - ``cost``: the cost of recomputing it: "fused" (none), "dear" (that of a special
              function) or "never" (the default).
            - ``traits``: a sequence of further properties; the error message lists the valid ones.

    Returns:
        None. The rule applies to all functions that are traced afterwards.

    Raises:
        ValueError: If ``need``, the name of a column or its value is invalid.

    Example:
        >>> import mpjax
        >>> mpjax.register_rule(
        ...     *("tanh", "follow"),
        ...     **dict(gain="one", span="bounded", saves="result", cost="dear"),
        ... )
    """
    name = getattr(primitive, "name", primitive)
    if not isinstance(name, str):
        raise ValueError(
            f"primitive={brief(primitive)} must be a JAX primitive, such as jax.lax.exp_p, or its "
            "name, such as 'exp'."
        )
    meant = primitives_of(name) if name not in _jax.primitive_names() else ""
    if meant:
        raise ValueError(f"register_rule: JAX has no primitive named {brief(name)}.{meant}")
    columns = {"need": need, "gain": UNBOUNDED, "span": GROWS, **columns}
    for column, value in columns.items():
        if not _is_valid(column, value):
            valid = ", ".join(map(repr, CHOICES.get(column, CHOICES)))
            what = "is invalid" if column in CHOICES else "is not a column of a rule"
            raise ValueError(
                f"register_rule: {column}={brief(value)} {what} (primitive {brief(name)}). Choose "
                f"one of {valid}."
            )
    RULES[name] = Rule(**{**columns, "traits": frozenset(columns.get("traits", ()))})


def _is_valid(column: str, value: Any) -> bool:
    if column == "traits":
        return not isinstance(value, str) and all(trait in CHOICES[column] for trait in value)
    return value in CHOICES.get(column, ()) or (column == "gain" and callable(value))


CHOICES: dict[str, Any] = {
    "need": (HALF, FULL, FOLLOW, MOVE),
    "gain": (NONE, ONE, SUM, RANGE, UNBOUNDED),
    "span": (KEEPS, BOUNDED, GROWS),
    "saves": (NOTHING, OTHERS, OPERANDS, RESULT),
    "cost": (FUSED, DEAR, NEVER),
    "traits": (
        *(REDUCES, NO_HALF_FORM, HAS_WIDE_FORM, SUMS_BACK),
        *(SAME_PARAMETER, SAME_CONSTANT, FRESH, KINKED, PART, LOOKS_UP, STATE, CANCELS),
        *(POLE, JUMPS, RANKS),
    ),
}

# What the rewrite inserts.
for _name in _jax.BARRIERS:
    # What is behind an again_barrier is recomputed from what is stored, not stored itself.
    row(_name, MOVE, ONE, **(LINEAR if _name == "again_barrier" else HELD))
row("rounded carrier carried", MOVE, ONE, **LINEAR)
row("linear_recurrence", FULL, SUM, GROWS, saves=OPERANDS)

# ---- families: primitives that several passes treat as one ---------------------------------------

CAST = "convert_element_type"
DOT, SELECT, SPREAD = "dot_general", "select_n", "broadcast_in_dim"
ADD, SUB, MUL, DIV = "add", "sub", "mul", "div"
IOTA, JOIN, OR = "iota", "concatenate", "or"
BITCAST, SHIFT = "bitcast_convert_type", "shift_right_logical"
CLAMPS = frozenset(["clamp", "max", "min"])
SCATTER_ADD = "scatter-add"
SCATTERS = frozenset([SCATTER_ADD, "scatter-sub"])
SUMS_OF_TWO = frozenset(["add", "add_any", "sub"])
ADDITIONS = SUMS_OF_TWO - {"sub"}
PRODUCTS = frozenset(names_where(lambda rule: rule.multiplies))  # and quotients
MATMULS = frozenset(names_where(lambda rule: rule.need == HALF))
PRODUCTS_OF_MANY = frozenset(["cumprod", "reduce_prod"])
EXPONENTIALS = frozenset(["exp", "exp2"])
LOGARITHMS = frozenset(["log", "log2"])
SQUARES = frozenset(["integer_pow", "square"])
ROOTS = frozenset(["rsqrt", "sqrt"])
LARGEST = frozenset(["max", "reduce_max"])
SMALLEST = frozenset(["min", "reduce_min"])
WAVES = frozenset(["cos", "sin", "tan"])
EXTREMES = frozenset(["reduce_max", "reduce_min"])
ORDERS = frozenset(["ge", "gt", "le", "lt"])
EQUALITIES = frozenset(["eq", "ne"])
COMPARISONS = ORDERS | EQUALITIES
LOGIC = frozenset(["and", "not", "or"])
# The same entries in another shape or order, or several times.
VIEWS = frozenset(["broadcast_in_dim", "copy", "pvary", "reshape", "squeeze", "transpose"])
RESHAPES = frozenset(["reshape", "squeeze"])
# Return their operands, one by one.
BARRIERS = frozenset(["optimization_barrier", *_jax.BARRIERS])
# Sums over devices.
ALL_SUMS = frozenset(["psum", "psum_invariant", "unreduced_psum", "reduce_scatter"])
KERNELS = frozenset(["ffi_call", "pallas_call"])  # code that JAX does not see
