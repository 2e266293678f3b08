"""What is known of each primitive with programs inside: one row of one table.

The planner, the rewrite, reports, `find_nonfinite`, `compare` and the order of gradients read it.
How the rewrite evaluates one of them under a plan is registered beside it, by `evaluates` in
`autocast.rewrite`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from mpjax._src import _jax

# kind: how its programs run.
CALL = "call"  # one, once, on all operands
MAP = "map"  # one, once, on a part of each operand for each device
SCAN = "scan"  # one, in turns over slices
WHILE = "while"  # a condition and a body, in turns
BRANCH = "branch"  # one of several, which the first operand chooses

# storage: what the plan decides of what is kept for a backward pass inside of it.
AROUND = "around"  # the same as around it
THEIRS = "theirs"  # nothing but how a pattern is derived: the author chose what is kept
NONE = "none"  # nothing: it has no backward pass


class Inside(NamedTuple):
    """A program inside of an equation, and how it is wired to the equation.

    Attributes:
        program: A jaxpr; in a plan, its block.
        ins: For each of its arguments, the operand that feeds it.
        outs: For each of its results, the equation's result that it becomes, or None.
        carry: Pairs (result, argument) that feed one turn's results to the next.
        consts: How many leading arguments are the same in every turn.
    """

    program: Any
    ins: Sequence[int]
    outs: Sequence[int | None]
    carry: Sequence[tuple[int, int]] = ()
    consts: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class HigherOrder:
    """The row of a primitive.

    Attributes:
        wire: Gives the programs inside of an equation.
        kind: How they run: CALL, MAP, SCAN, WHILE or BRANCH.
        storage: What is decided of storage inside: AROUND, THEIRS or NONE.
        knows: Whether a constant that enters it is known inside.
        pinned: Whether rules of its author's, traced elsewhere, expect the dtypes as written.
        as_one: Whether it is one operation where all inside is elementwise.
        backward: Whether its backward pass is its author's.
    """

    wire: Callable[[Any], Iterable[Inside]]
    kind: str = CALL
    storage: str = AROUND
    knows: bool = False
    pinned: bool = False
    as_one: bool = False
    backward: bool = False

    @property
    def loops(self) -> bool:
        return self.kind in (SCAN, WHILE)


def higher_order(name: str) -> HigherOrder:
    """Returns the row of a primitive; `FIRST_ORDER` where no program of it is known."""
    return HIGHER_ORDER.get(name, FIRST_ORDER)


def turns_of(eqn: Any) -> int:
    """Returns how often the programs inside of an equation run, as far as that is known."""
    return eqn.params["length"] if higher_order(eqn.primitive.name).kind == SCAN else 1


def _whole(param: str) -> Callable[[Any], Iterable[Inside]]:
    """A primitive that calls one program on all of its operands."""
    return lambda eqn: [Inside(eqn.params[param], range(len(eqn.invars)), range(len(eqn.outvars)))]


def _scan(eqn: Any) -> Iterable[Inside]:
    consts, carry = _jax.scan_counts(eqn.params)
    pairs = [(i, consts + i) for i in range(carry)]
    whole = range(len(eqn.invars)), range(len(eqn.outvars))
    yield Inside(eqn.params["jaxpr"], *whole, pairs, consts)


def _while(eqn: Any) -> Iterable[Inside]:
    cond, body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = range(cond + body, len(eqn.invars))
    yield Inside(eqn.params["cond_jaxpr"], [*range(cond), *carry], [None], (), cond)
    pairs = [(i, body + i) for i in range(len(carry))]
    ins = [*range(cond, cond + body), *carry]
    yield Inside(eqn.params["body_jaxpr"], ins, range(len(eqn.outvars)), pairs, body)


def _branches(eqn: Any) -> Iterable[Inside]:
    for branch in eqn.params["branches"]:
        yield Inside(branch, range(1, len(eqn.invars)), range(len(eqn.outvars)))


FIRST_ORDER = HigherOrder(lambda eqn: (), "")
HIGHER_ORDER: dict[str, HigherOrder] = {
    "scan": HigherOrder(_scan, SCAN, knows=True),
    "while": HigherOrder(_while, WHILE, NONE, knows=True),
    "cond": HigherOrder(_branches, BRANCH, knows=True),
    "jit": HigherOrder(_whole("jaxpr")),
    "remat2": HigherOrder(_whole("jaxpr"), CALL, THEIRS, knows=True),
    "shard_map": HigherOrder(_whole("jaxpr"), MAP),
    "custom_jvp_call": HigherOrder(_whole("call_jaxpr"), as_one=True),
    "custom_vjp_call": HigherOrder(_whole("call_jaxpr"), backward=True),
    "custom_vmap_call": HigherOrder(_whole("call"), pinned=True),
    "linear_call": HigherOrder(_whole("callee"), pinned=True),
    "closed_call": HigherOrder(_whole("call_jaxpr")),
}
HIGHER_ORDER |= {"pjit": HIGHER_ORDER["jit"], "checkpoint": HIGHER_ORDER["remat2"]}
HIGHER_ORDER |= dict.fromkeys(("core_call", "call"), HIGHER_ORDER["closed_call"])
