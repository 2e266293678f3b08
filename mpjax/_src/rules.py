"""What is known of each primitive: one row of one table, in the names of JAX's primitives.

A row states properties of the primitive alone, each of which a test can refute; what they mean to a
program is decided in `autocast`. Which primitives need float32 merges the lists of torch, Apex,
Paddle, MindSpore and TensorFlow's graph pass. A primitive without a row is left alone.

How an error is judged. ``gain`` is the largest ``|x f'(x)|`` over the larger of ``|f(x)|`` and, for
a bounded function, its bound: by how much a relative error of an operand grows. An array's entries
err apart, so theirs add up. A sum has no such number, for its terms may cancel: by convention its
error counts against its terms' magnitudes. Floats are those of half, and results those of float32.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from mpjax._src import _jax
from mpjax._src.errors import brief

# ---- the columns --------------------------------------------------------------------------------

# need: what it computes in.
HALF = "half"  # half operands on the matrix units, float32 accumulation inside
FULL = "full"  # float32 from operands to result
FOLLOW = "follow"  # elementwise arithmetic: the dtype of its operands
MOVE = "move"  # no arithmetic: the dtype that needs the fewest casts
COMPARE = "compare"  # gives no float: takes whatever its operands are stored in
PROGRAM = "program"  # a program inside, or a kernel: a matter of its own

# gain: by how much it amplifies a relative error of its operands.
NONE = "none"  # its derivative is zero
ONE = "one"  # at most about once (a small power: a few times)
SUM = "sum"  # at most once, against the magnitudes of its terms
RANGE = "range"  # more, though no more than the exponents of float32 allow (exp: 88)
UNBOUNDED = "unbounded"  # a phase, a pole, a condition number
AMPLIFIES = (RANGE, UNBOUNDED)

# span: how large its result is where its operands are in the range of float16.
KEEPS = "keeps"  # in it as well, or as much larger as a sum of two
BOUNDED = "bounded"  # at most a small number, whatever the operand
GROWS = "grows"  # may leave it

# saves: what its derivative reads.
NOTHING = "nothing"  # or masks
OTHERS = "others"  # of a product: the other operands; of a quotient the divisor too
OPERANDS = "operands"  # perhaps its result too
RESULT = "result"

# cost: what computing it again takes.
FUSED = "fused"  # nothing: compilers repeat it in every reader without being told to
DEAR = "dear"  # a special function: repeated where that saves memory
NEVER = "never"  # memory traffic or many operations

# traits: what else is true of some.
REDUCES = "reduces"  # a small result of large operands
NO_HALF_FORM = "no half form"  # compilers have none, whatever a list or a region asks for
HAS_WIDE_FORM = "has wide form"  # can hand out its float32 accumulator, on any hardware
SUMS_BACK = "sums back"  # a linear move whose transpose sums
FROM_BITS = "from bits"  # floats made of bits or integers: half has too few bits for them
SAME_PARAMETER = "same parameter"  # its result is still the parameter to a path pattern
SAME_CONSTANT = "same constant"  # of a known constant it makes a known constant
FRESH = "fresh"  # a move whose result is a new array, not a view of its operand
KINKED = "kinked"  # piecewise linear: its derivative asks on which side of a kink it was
PART = "part"  # takes one of a stack, or a part of an array
LOOKS_UP = "looks up"  # takes rows of a table, as a matmul by one-hot rows does
STATE = "state"  # running sums and averages go through it from one turn of a loop to the next
CANCELS = "cancels"  # a sum that differentiation writes: its terms cancel by nature
POLE = "pole"  # infinite at some finite operand
SUBTRACTS = "subtracts"  # of equal operands it makes zero
JUMPS = "jumps"  # its result changes at once at some operands other than zero
RANKS = "ranks"  # puts entries in an order, or tells which is first
FLATTENS = "flattens"  # its derivative is a difference, and lost where its parts are rounded


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """The row of a primitive.

    Attributes:
        need: What it computes in: one of HALF, FULL, FOLLOW, MOVE, COMPARE, PROGRAM.
        gain: By how much it amplifies a relative error of an operand: one of NONE, ONE, SUM, RANGE,
            UNBOUNDED, or a function from the equation's parameters to one of these.
        span: How large its result may be: KEEPS, BOUNDED or GROWS.
        saves: What its derivative reads: NOTHING, OTHERS, OPERANDS or RESULT.
        steady: Whether its derivative stands a rounding of its operands: it is then bounded, or of
            the size of the result or of an operand. A bool, or a function as for ``gain``.
        cost: What computing it again takes: FUSED, DEAR or NEVER.
        traits: Any of the names above.
    """

    need: str = PROGRAM
    gain: str | Callable[[dict[str, Any]], str] = SUM
    span: str = KEEPS
    saves: str = OPERANDS
    steady: bool | Callable[[dict[str, Any]], bool] = False
    cost: str = NEVER
    traits: frozenset[str] = frozenset()

    def amplifies(self, params: dict[str, Any]) -> bool:
        """Tells whether an equation with these parameters amplifies an error of its operands."""
        return self.gain_of(params) in AMPLIFIES

    @property
    def runs_again(self) -> bool:
        """Whether a backward pass may run it a second time to save memory: no matmul, reduction,
        collective or kernel; slices and concatenations are read where they are used."""
        sliced = not self.traits.isdisjoint((PART, FRESH)) and LOOKS_UP not in self.traits
        return (self.cost != NEVER or sliced) and REDUCES not in self.traits

    @property
    def linear(self) -> bool:
        """Whether its derivative reads no operand: it is linear in each, or in pieces of each."""
        return self.saves == NOTHING

    @property
    def multiplies(self) -> bool:
        """Whether it is a product or a quotient, entry by entry."""
        return self.need == FOLLOW and self.saves == OTHERS

    def gain_of(self, params: dict[str, Any]) -> str:
        """Returns the gain of an equation with these parameters."""
        return self.gain(params) if callable(self.gain) else self.gain

    def steady_of(self, params: dict[str, Any]) -> bool:
        """Tells whether the derivative of an equation with these parameters is steady."""
        return self.steady(params) if callable(self.steady) else self.steady


UNKNOWN = Rule("unknown", UNBOUNDED, GROWS)
RULES: dict[str, Rule] = {}


def rule_of(name: str) -> Rule:
    """Returns the row of a primitive; `UNKNOWN` where there is none."""
    return RULES.get(name, UNKNOWN)


def names_where(test: Callable[[Rule], bool]) -> Iterator[str]:
    """Yields the names of the primitives whose row passes a test."""
    return (name for name, rule in RULES.items() if test(rule))


def having(trait: str) -> frozenset[str]:
    """Returns the names of the primitives that have a trait."""
    return frozenset(names_where(lambda rule: trait in rule.traits))


def row(names: str, need: str, gain: Any = SUM, span: str = KEEPS, **columns: Any) -> None:
    """Adds the same row for each of some names."""
    traits = frozenset(columns.pop("traits", ()))
    RULES.update(dict.fromkeys(names.split(), Rule(need, gain, span, traits=traits, **columns)))


def _power(params: dict[str, Any]) -> str:
    size = abs(params["y"])
    return ONE if size <= 4 else RANGE if size <= 100 else UNBOUNDED


def _is_small_power(params: dict[str, Any]) -> bool:
    return 0 <= params["y"] <= 4


# ---- matrix units -------------------------------------------------------------------------------

row("dot_general", HALF, SUM, GROWS, saves=OTHERS, traits=(HAS_WIDE_FORM, CANCELS))
row("ragged_dot_general", HALF, SUM, GROWS, saves=OTHERS, traits=(HAS_WIDE_FORM,))
row("conv_general_dilated", HALF, SUM, GROWS, saves=OTHERS, traits=(CANCELS,))

# ---- elementwise arithmetic ---------------------------------------------------------------------

LINEAR: dict[str, Any] = {"saves": NOTHING, "cost": FUSED}
row("add", FOLLOW, SUM, **LINEAR, traits=(STATE,))
row("sub", FOLLOW, SUM, **LINEAR, traits=(STATE, SUBTRACTS))
row("add_any", FOLLOW, SUM, **LINEAR, traits=(STATE, CANCELS))
row("neg", FOLLOW, ONE, **LINEAR, traits=(STATE,))
row("sign", FOLLOW, NONE, BOUNDED, **LINEAR)
row("floor ceil round", FOLLOW, NONE, **LINEAR, traits=(JUMPS,))
row("abs max min", FOLLOW, ONE, **LINEAR, traits=(KINKED,))
row("clamp", FOLLOW, ONE, **LINEAR, traits=(KINKED,))
row("select_n", FOLLOW, ONE, **LINEAR, traits=(STATE,))
row("mul", FOLLOW, ONE, GROWS, saves=OTHERS, steady=True, cost=FUSED, traits=(STATE,))
row("div", FOLLOW, ONE, GROWS, saves=OTHERS, cost=FUSED, traits=(STATE, POLE, FLATTENS))
row("rem", FOLLOW, UNBOUNDED, saves=OPERANDS, cost=DEAR, traits=(JUMPS,))
row("sqrt", FOLLOW, ONE, saves=RESULT, cost=FUSED)
row("cbrt", FOLLOW, ONE, saves=RESULT, cost=DEAR)
row("tanh logistic", FOLLOW, ONE, BOUNDED, saves=RESULT, steady=True, cost=DEAR, traits=(FLATTENS,))
row("erf", FOLLOW, ONE, BOUNDED, saves=OPERANDS, steady=True, cost=DEAR)
row("atan", FOLLOW, ONE, BOUNDED, saves=OPERANDS, steady=True, cost=DEAR)
row("asinh", FOLLOW, ONE, saves=OPERANDS, steady=True, cost=DEAR)
row("atan2", FOLLOW, ONE, BOUNDED, saves=OPERANDS, cost=DEAR, traits=(FLATTENS,))

# ---- float32: special functions -----------------------------------------------------------------

row("rsqrt", FULL, ONE, saves=OPERANDS, cost=FUSED, traits=(POLE,))
row("square", FULL, ONE, GROWS, saves=OPERANDS, steady=True, cost=FUSED)
POWER: dict[str, Any] = {"saves": OPERANDS, "steady": _is_small_power, "cost": FUSED}
row("integer_pow", FULL, _power, GROWS, **POWER, traits=(POLE,))
row("exp exp2", FULL, RANGE, GROWS, saves=RESULT, cost=DEAR)
row("expm1 sinh cosh", FULL, RANGE, GROWS, saves=OPERANDS, cost=DEAR)
row("log log1p log2", FULL, UNBOUNDED, saves=OPERANDS, cost=DEAR, traits=(POLE,))
row("pow", FULL, UNBOUNDED, GROWS, saves=OPERANDS, cost=DEAR, traits=(POLE,))
row("one_minus_square", FULL, UNBOUNDED, GROWS, saves=OPERANDS, steady=True, cost=FUSED)
row("sin cos", FULL, UNBOUNDED, BOUNDED, saves=OPERANDS, cost=DEAR)
row("tan", FULL, UNBOUNDED, GROWS, saves=RESULT, cost=DEAR)
row("asin acos", FULL, UNBOUNDED, BOUNDED, saves=OPERANDS, cost=DEAR)
row("acosh", FULL, UNBOUNDED, saves=OPERANDS, cost=DEAR)
row("atanh", FULL, UNBOUNDED, saves=OPERANDS, cost=DEAR, traits=(POLE,))
row("erf_inv", FULL, UNBOUNDED, saves=RESULT, cost=DEAR, traits=(POLE,))
row("erfc", FULL, ONE, BOUNDED, saves=OPERANDS, steady=True, cost=DEAR)
row("lgamma digamma", FULL, UNBOUNDED, GROWS, saves=OPERANDS, traits=(POLE,))
row("bessel_i0e", FULL, ONE, BOUNDED, traits=(FLATTENS,))
row("bessel_i1e", FULL, ONE, BOUNDED, steady=True, traits=(FLATTENS,))
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
row("scatter-sub", FULL, SUM, GROWS, saves=NOTHING, traits=(NO_HALF_FORM,))
row("scatter-mul", FULL, UNBOUNDED, GROWS, saves=OTHERS, traits=(NO_HALF_FORM,))
row("fft", FULL, SUM, GROWS, saves=NOTHING, traits=(NO_HALF_FORM,))

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
row("pvary", MOVE, ONE, **HELD, traits=(*VIEW, SUMS_BACK))
row("all_gather pbroadcast tile", MOVE, ONE, **HELD, traits=(SUMS_BACK,))
row("concatenate", MOVE, ONE, **HELD, traits=(FRESH,))
row("dynamic_update_slice", MOVE, ONE, **HELD, traits=(STATE,))
row("all_gather_invariant all_gather_reduced all_to_all name pad ppermute stack", MOVE, ONE, **HELD)
row("vary_unreduced_cast vary_unreduced_cast_p", MOVE, ONE, **HELD)
row("cummax cummin pmax pmin", MOVE, ONE, **HELD, traits=(KINKED,))
row("sort top_k", MOVE, ONE, **HELD, traits=(KINKED, RANKS))
row("reduce_window_max reduce_window_min", MOVE, ONE, traits=(KINKED,))

# ---- no floats out, or none in ------------------------------------------------------------------

row("eq ge gt is_finite le lt ne", COMPARE, NONE, **LINEAR)
row("argmax argmin", COMPARE, NONE, **LINEAR, traits=(REDUCES, RANKS))

# ---- rows of which only a trait counts: they have no dtype of their own, or are left alone -------

row("convert_element_type", PROGRAM, ONE, **LINEAR, traits=(*VIEW, SAME_CONSTANT))
row("custom_jvp_call", FOLLOW, ONE, cost=DEAR, traits=(KINKED,))
row("closed_call cond custom_partitioning custom_vjp_call custom_vmap_call ffi_call", PROGRAM)
row("jit linear_call pallas_call remat2 scan shard_map while", PROGRAM)
LEFT = "unknown"
row("and not or", LEFT, NONE, **LINEAR)
row("iota", LEFT, NONE, **LINEAR, traits=(FROM_BITS,))
row("rng_uniform", LEFT, NONE, **HELD, traits=(FROM_BITS,))
row("bitcast_convert_type", LEFT, UNBOUNDED, GROWS, traits=(FROM_BITS, NO_HALF_FORM))
row("reduce", LEFT, UNBOUNDED, GROWS, traits=(REDUCES, NO_HALF_FORM))
row("complex geqp3 reduce_window", LEFT, UNBOUNDED, GROWS, traits=(NO_HALF_FORM,))
row("scatter-max scatter-min", LEFT, ONE, traits=(NO_HALF_FORM,))


def register_rule(primitive: Any, need: str, **columns: Any) -> None:
    """Adds what autocast is to know of a primitive, or replaces it.

    Register before the functions that use the primitive are traced: traces are kept.

    Args:
        primitive: The primitive, or its name.
        need: What it computes in: "half" (half operands, as a matmul), "full" (float32), "follow"
            (the dtype of its operands) or "move" (no arithmetic).
        **columns: The other columns of `Rule`; unless given, the worst is assumed: an operation
            that amplifies errors, may leave float16's range, and is never computed again.

    Returns:
        Nothing.

    Raises:
        ValueError: If ``need`` or a column is not legal.

    Example:
        >>> import mpjax
        >>> mpjax.register_rule(
        ...     *("tanh", "follow"),
        ...     **dict(gain="one", span="bounded", saves="result", steady=True, cost="dear"),
        ... )
    """
    name = getattr(primitive, "name", primitive)
    if not isinstance(name, str):
        raise ValueError(
            f"primitive={brief(primitive)} must be a JAX primitive, or the name of one."
        )
    columns = {"need": need, "gain": UNBOUNDED, "span": GROWS, **columns}
    for column, value in columns.items():
        if not _is_legal(column, value):
            known = ", ".join(map(repr, CHOICES.get(column, CHOICES)))
            what = "is not legal" if column in CHOICES else "is not a column"
            raise ValueError(
                f"register_rule: {column}={brief(value)} {what} (primitive {brief(name)}). Legal: "
                f"{known}."
            )
    RULES[name] = Rule(**{**columns, "traits": frozenset(columns.get("traits", ()))})


def _is_legal(column: str, value: Any) -> bool:
    if column == "traits":
        return not isinstance(value, str) and all(trait in CHOICES[column] for trait in value)
    return value in CHOICES.get(column, ()) or (column in ("gain", "steady") and callable(value))


CHOICES: dict[str, Any] = {
    "need": (HALF, FULL, FOLLOW, MOVE),
    "gain": (NONE, ONE, SUM, RANGE, UNBOUNDED),
    "span": (KEEPS, BOUNDED, GROWS),
    "saves": (NOTHING, OTHERS, OPERANDS, RESULT),
    "steady": (True, False),
    "cost": (FUSED, DEAR, NEVER),
    "traits": (
        *(REDUCES, NO_HALF_FORM, HAS_WIDE_FORM, SUMS_BACK, FROM_BITS, SAME_PARAMETER),
        *(SAME_CONSTANT, FRESH, KINKED, PART, LOOKS_UP, STATE, CANCELS, POLE),
        *(SUBTRACTS, JUMPS, RANKS, FLATTENS),
    ),
}

# What the rewrite adds itself.
for _name in _jax.BARRIERS:
    row(_name, MOVE, ONE, **HELD)
