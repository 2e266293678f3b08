"""What is asked of each operation: by its primitive, a list, an override, a region or its program.

The planner has these from the program itself (`planner.exceptions`). Here they are for whoever
looks at the program as it is written: replacements, warnings and reports.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.dtypes import FLOAT32, HALVES
from mpjax._src.core.base.higher_order import turns_of
from mpjax._src.core.base.patterns import matches
from mpjax._src.core.policy.policy import Policy
from mpjax._src.core.program.graph import PLANNED, REGION, Block, Op, build, is_float
from mpjax._src.core.program.site import overriding

# The kinds of operations: a program; a matmul; a matmul that runs as it is written; a cast; what
# computes; what moves values or compares them; what has no rule; what has no float32, or another
# autocast or a kernel's author planned.
PROGRAM, MATMUL, WRITTEN, CAST, COMPUTES, MOVES, UNKNOWN, ELSEWHERE = range(8)

# Kinds whose dtype a list, an override or a region may change.
CHANGEABLE = (MATMUL, COMPUTES, MOVES, UNKNOWN)


class Ruling(NamedTuple):
    """What is asked of an operation."""

    kind: int = ELSEWHERE
    half: np.dtype | None = None  # the 16-bit dtype in which it would run
    forced: str = ""  # "half" or "full" if something asks for this
    precision: Any = None  # that of a matmul which runs as it is written because of it

    @property
    def in_force(self) -> str:
        """What decides its dtype: "half" or "full", of a matmul "half" if nothing is forced."""
        return self.forced or ("half" if self.kind == MATMUL else "")


NO_RULING = Ruling()


class Rulings(dict[Op, Ruling]):
    """What is asked of each operation."""

    def __missing__(self, op: Op) -> Ruling:
        return NO_RULING


@dataclasses.dataclass(frozen=True)
class Outline:
    """A program as it is written, and what is asked of its operations.

    Attributes:
        block: The graph.
        policy: The policy.
        rulings: What is asked of each operation.
        used_patterns: The patterns of the policy's overrides that match something.
    """

    block: Block
    policy: Policy
    rulings: Rulings
    used_patterns: frozenset[str]

    @functools.cached_property
    def as_written(self) -> bool:
        """Whether the policy, its lists and overrides, regions and kernels ask for no 16-bit dtype.

        Then the program runs as it was traced.
        """
        return all(self.rulings[op].half is None for op in self.block.walk())

    @functools.cached_property
    def rows(self) -> dict[Op, int]:
        """The numbers of ops in reports."""
        return {op: row for row, (op, _) in enumerate(self.numbered)}

    @functools.cached_property
    def numbered(self) -> list[tuple[Op, int]]:
        """The ops that have rows in reports, in order, and how often each runs.

        An activation with its own rule is one row.
        """
        return [*_numbered(self.block, self.rulings)]


def _numbered(block: Block, rulings: Rulings, times: int = 1) -> Iterator[tuple[Op, int]]:
    for op in block.ops:
        yield op, times
        if rulings[op].kind == PROGRAM:
            for sub in op.subs:
                yield from _numbered(sub.program, rulings, times * turns_of(op.eqn))


def outline(jaxpr: Any, consts: Sequence[Any], policy: Policy, paths: Sequence[str]) -> Outline:
    """Returns what is asked of the operations of a program.

    Args:
        jaxpr: The program.
        consts: The values of its constants: arrays or tracers.
        policy: The policy.
        paths: The path of each argument, for the policy's overrides.
    """
    block = build(jaxpr, consts, (), paths)
    return Outline(block, policy, *classify(block, policy))


def classify(block: Block, policy: Policy) -> tuple[Rulings, frozenset[str]]:
    """Returns what is asked of every op, and the override patterns that matched."""
    lists = {"half": policy.half_ops, "full": policy.full_ops, "": policy.follow_ops}
    listed = {op: name for name, ops in lists.items() for op in ops}
    paths = {path for value in block.invars for path in value.paths}
    # A pattern may only say how a parameter is stored: no operation has to match it.
    used = {p for p, _ in policy.overrides for path in paths if matches(p, path)}
    half = policy.compute_dtype if policy.compute_dtype in HALVES else None
    rulings = Rulings()
    for op in _post_order(block):
        ruling = _by_primitive(op, rulings, half)
        ruling = _by_lists(op, ruling, listed)
        ruling = _by_overrides(op, ruling, policy, used)
        ruling = _by_region(op, ruling)
        if ruling.half is None and ruling.kind != PROGRAM:
            ruling = ruling._replace(forced="full")
        rulings[op] = ruling
    return rulings, frozenset(used)


def _post_order(block: Block) -> Iterator[Op]:
    """Yields the ops of a program, those inside an op before it."""
    for op in block.ops:
        for sub in op.subs:
            yield from _post_order(sub.program)
        yield op


# ---- what a primitive asks for ------------------------------------------------------------------

KINDS = {rules.FULL: COMPUTES, rules.FOLLOW: COMPUTES, rules.COMPARE: MOVES, rules.MOVE: MOVES}


def _by_primitive(op: Op, rulings: Rulings, half: Any) -> Ruling:
    wide_form = rules.HAS_WIDE_FORM in op.spec.traits
    if not op.has_float32 and not op.subs and not wide_form:
        return Ruling(ELSEWHERE, half)
    if op.subs:
        elementwise = op.inside.one_operation and _is_elementwise(op, rulings)
        return Ruling(COMPUTES if elementwise else PROGRAM, half)
    if op.spec.need == rules.HALF:
        precision = _jax.own_precision(op.params)
        # JAX writes its default precision into each matmul. Only another one is the user's own.
        if precision is not None and precision != _jax.default_precision():
            return Ruling(WRITTEN, half, precision=precision)
        return Ruling(_matmul(op), half)
    if op.name == rules.CAST:
        return Ruling(CAST, half)
    return Ruling(KINDS.get(op.spec.need, UNKNOWN), half)


def _matmul(op: Op) -> int:
    operands = {v.aval.dtype for v in op.ins if is_float(v)}
    wanted = op.params.get("preferred_element_type")
    wide = op.outs[0].is_f32
    if operands <= {FLOAT32, *HALVES} and (wide or wanted in HALVES):
        own = wide and rules.HAS_WIDE_FORM in op.spec.traits
        return MATMUL if FLOAT32 in operands or own else ELSEWHERE
    return WRITTEN if FLOAT32 in operands else ELSEWHERE


def _is_elementwise(op: Op, rulings: Rulings) -> bool:
    """Returns whether a custom_jvp function is elementwise, of primitives that have rules."""
    inside = [rulings[o].kind for o in op.subs[0].program.walk()]
    return not {MATMUL, WRITTEN, UNKNOWN, PROGRAM} & {*inside}


# ---- what the user asks for ---------------------------------------------------------------------


def _by_lists(op: Op, ruling: Ruling, listed: Mapping[str, str]) -> Ruling:
    name = listed.get(op.name)
    if name == "full":  # the user asks for the float32 that a precision gives a matmul
        ruling = ruling._replace(precision=None)
    if name is None or ruling.kind not in CHANGEABLE:
        return ruling
    return ruling._replace(forced=name)


def _by_overrides(op: Op, ruling: Ruling, policy: Policy, used: set[str]) -> Ruling:
    dtype = None if ruling.kind == ELSEWHERE else override_of(op, policy, used)
    if dtype is None:
        return ruling
    if dtype in HALVES:
        lifted = ruling.precision is not None  # the override is about this program
        kind = _matmul(op) if lifted else ruling.kind
        return ruling._replace(kind=kind, half=dtype, precision=None)
    return _in_full(ruling)


def _in_full(ruling: Ruling) -> Ruling:
    """Returns what is asked of an operation if that is float32: what moves values has no dtype."""
    fixed = ruling.kind not in CHANGEABLE or ruling.kind == MOVES
    return ruling._replace(forced=ruling.forced if fixed else "full", precision=None)


def override_of(op: Op, policy: Policy, used: set[str]) -> Any:
    """Returns the dtype of the first override that matches an op, and adds all to ``used``."""
    if not policy.overrides:
        return None
    paths = [path for v in op.ins for path in v.paths]
    matching = overriding(policy.overrides, op.scopes, op.name, paths)
    used.update(pattern for pattern, _ in matching)
    return matching[0][1] if matching else None


def _by_region(op: Op, ruling: Ruling) -> Ruling:
    # Its author planned it already, perhaps in another dtype.
    if PLANNED in op.scopes:
        return ruling._replace(kind=ELSEWHERE, forced="", precision=None)
    if op.kernel:
        return ruling._replace(forced="", precision=None)
    # The innermost region decides.
    name = next((name for name in reversed(op.scopes) if name.startswith(REGION)), None)
    if name is None:
        return ruling
    dtype = np.dtype(name.removeprefix(REGION))
    if dtype not in HALVES:
        return _in_full(ruling)
    if ruling.kind not in CHANGEABLE:
        return ruling
    computes = ruling.kind in (MATMUL, COMPUTES) and rules.NO_HALF_FORM not in op.spec.traits
    return ruling._replace(half=dtype, forced="half" if computes else "")
