"""The table of JAX primitives that contain programs (loops, branches, calls), one row each.

The planner, reports, `find_nonfinite`, `compare`, `lint` and the order of gradients read it: a new
primitive of a kind that is known needs its row here, its row in `rules`, and nothing else.
`program.rebuild` and `program.interpret` have one function for each kind.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from mpjax._src.core.base import _jax

# kind: how its programs run.
CALL = "call"  # one program, once, on all operands
MAP = "map"  # one program, once per device, on that device's part of each operand
SCAN = "scan"  # one program, repeatedly, over slices
WHILE = "while"  # a condition and a body, repeatedly
BRANCH = "branch"  # one of several programs; the first operand selects it


class Inside(NamedTuple):
    """A program inside an equation, and its connections to the equation."""

    # The jaxpr. In a plan, its block.
    program: Any
    # For each argument of the program, the index of the operand that it receives.
    ins: Sequence[int]
    # For each result of the program, the index of the equation's result, or None.
    outs: Sequence[int | None]
    # Pairs (result, argument): the result of one iteration is the argument of the next.
    carry: Sequence[tuple[int, int]] = ()
    consts: int = 0  # the number of leading arguments that are the same in every iteration


@dataclasses.dataclass(frozen=True, slots=True)
class HigherOrder:
    """The row of a primitive."""

    wire: Callable[[Any], Iterable[Inside]]  # a function from an equation to the programs inside it
    kind: str = CALL  # how the programs run: CALL, MAP, SCAN, WHILE or BRANCH
    # The parameters that contain the programs, in the order of ``wire``. One of a BRANCH contains
    # all of them, as a tuple.
    params: tuple[str, ...] = ()
    # Of a SCAN, the parameters that say how often it turns, whether from the last slice to the
    # first, and how many turns are compiled as one.
    loop: tuple[str, str, str] | None = None
    knows: bool = False  # whether constants that enter it are still known as constants inside
    # Whether its dtypes must stay as written, because rules that its author traced elsewhere expect
    # them.
    pinned: bool = False
    # Whether it counts as one operation if everything inside is elementwise.
    one_operation: bool = False
    backward: bool = False  # whether its author wrote its backward pass

    @property
    def loops(self) -> bool:
        """Whether it is a loop."""
        return self.kind in (SCAN, WHILE)

    def holding(self, programs: Sequence[Any]) -> dict[str, Any]:
        """Returns the parameters that contain the programs, with these in their place."""
        values = [tuple(programs)] if self.kind == BRANCH else programs
        return dict(zip(self.params, values, strict=True))

    def turns(self, eqn: Any) -> tuple[int, bool, Any]:
        """Returns how often a SCAN turns, whether from the last slice, and how it is unrolled."""
        assert self.loop is not None
        length, reverse, unroll = map(eqn.params.get, self.loop)
        return length, reverse, unroll


def higher_order(name: str) -> HigherOrder:
    """Returns the row of a primitive, or `FIRST_ORDER` if it contains no program that is known."""
    return HIGHER_ORDER.get(name, FIRST_ORDER)


def turns_of(eqn: Any) -> int:
    """Returns how often the programs inside an equation run; 1 if that is not known."""
    row = higher_order(eqn.primitive.name)
    return row.turns(eqn)[0] if row.loop else 1


def calling(param: str, kind: str = CALL, **columns: Any) -> HigherOrder:
    """Returns the row of a primitive that calls one program on all of its operands."""

    def wire(eqn: Any) -> Iterable[Inside]:
        yield Inside(eqn.params[param], range(len(eqn.invars)), range(len(eqn.outvars)))

    return HigherOrder(wire, kind, params=(param,), **columns)


def scanning(param: str, loop: tuple[str, str, str]) -> HigherOrder:
    """Returns the row of a primitive that scans one program: constants, carries, then slices."""

    def wire(eqn: Any) -> Iterable[Inside]:
        consts, carry = _jax.scan_counts(eqn.params)
        pairs = [(i, consts + i) for i in range(carry)]
        whole = range(len(eqn.invars)), range(len(eqn.outvars))
        yield Inside(eqn.params[param], *whole, pairs, consts)

    return HigherOrder(wire, SCAN, params=(param,), loop=loop, knows=True)


def _while(eqn: Any) -> Iterable[Inside]:
    cond, body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = range(cond + body, len(eqn.invars))
    # The result of the condition is no result of the loop, hence the None.
    yield Inside(eqn.params["cond_jaxpr"], [*range(cond), *carry], [None], (), cond)
    pairs = [(i, body + i) for i in range(len(carry))]
    ins = [*range(cond, cond + body), *carry]
    yield Inside(eqn.params["body_jaxpr"], ins, range(len(eqn.outvars)), pairs, body)


def _branches(eqn: Any) -> Iterable[Inside]:
    for branch in eqn.params["branches"]:
        yield Inside(branch, range(1, len(eqn.invars)), range(len(eqn.outvars)))


def _planned(eqn: Any) -> Iterable[Inside]:
    # The equation of a linear part shows no jaxpr (`_jax.held`), but holds its cut.
    program = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["cut"].tangent.written
    yield Inside(program, range(len(eqn.invars)), range(len(eqn.outvars)))


# Their author's rules say how they are differentiated: JAX traces these later.
CUSTOM = ("custom_jvp_call", "custom_vjp_call")

FIRST_ORDER = HigherOrder(lambda eqn: (), "")
HIGHER_ORDER: dict[str, HigherOrder] = {
    "scan": scanning("jaxpr", ("length", "reverse", "unroll")),
    "while": HigherOrder(_while, WHILE, ("cond_jaxpr", "body_jaxpr"), knows=True),
    "cond": HigherOrder(_branches, BRANCH, params=("branches",), knows=True),
    "jit": calling("jaxpr"),
    "remat2": calling("jaxpr", knows=True),
    "shard_map": calling("jaxpr", MAP),
    "custom_jvp_call": calling("call_jaxpr", one_operation=True),
    "custom_vjp_call": calling("call_jaxpr", backward=True),
    "custom_vmap_call": calling("call", pinned=True),
    "linear_call": calling("callee", pinned=True),
    "closed_call": calling("call_jaxpr"),
    "call": calling("call_jaxpr"),
}
REMATS = ("remat2",)  # `jax.checkpoint`
# What autocast planned. Nobody else may change these programs.
PLANNED = ("planned", "planned_jvp", "planned_linear")
HIGHER_ORDER |= dict.fromkeys(PLANNED, HigherOrder(_planned))
