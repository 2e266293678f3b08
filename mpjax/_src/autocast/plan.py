"""The plan: what every operation computes in, and what every float32 value is stored in.

Pure analysis of a `graph.Block`, in five sweeps over the nested program:

1. `classify` gives each op its rule: a row of the op sets, or what the user or the program said.
2. `Sweep` (forward) infers where each value comes from and whether half would hold it, and decides
   which loop carries may be half.
3. `demand` (backward) collects what the readers of each value want.
4. `decide` (forward) picks each op's compute dtype and each value's storage dtype.
5. `store` picks what is kept for a backward pass, and what that computes again.

Nothing that runs or reports a plan changes it.

A float32 value is of one of three kinds. *half*: computed in half, or rounded to it for storage.
*full*: came out of a float32 operation. *flexible*: an argument or constant, or computed from such
alone; it is float32, and does not drag others up to it. Elementwise operations take full where an
operand is full, else half where one is half, else they stay flexible.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from mpjax._src.autocast.classify import classify
from mpjax._src.autocast.decide import decide
from mpjax._src.autocast.demand import demand, read_by
from mpjax._src.autocast.facts import Sweep, argument
from mpjax._src.autocast.graph import Block, build, number
from mpjax._src.autocast.lattices import Want
from mpjax._src.autocast.storage import FAST, store
from mpjax._src.dtypes import FLOAT32, HALVES
from mpjax._src.policy import Policy


@dataclasses.dataclass(frozen=True)
class Plan:
    """A planned program: the graph, with every decision on its ops and values."""

    block: Block
    policy: Policy
    used_patterns: frozenset[str]


def make_plan(*args: Any, **kwargs: Any) -> Plan:
    """Plans a program, for one who runs it: as `analyse`, and what is kept for a backward pass."""
    plan = analyse(*args, **kwargs)
    # A rule that gives tangents is transposed as it stands: nothing in it is kept by name.
    by = FAST if kwargs.get("linear") else plan.policy.storage
    fuse = plan.policy.fused_attention and not kwargs.get("linear")
    store(plan.block, by, {*plan.block.invars}, fuse)
    number(plan.block)
    return plan


def analyse(
    jaxpr: Any,
    consts: Sequence[Any],
    policy: Policy,
    in_dtypes: Sequence[Any],
    out_dtypes: Sequence[Any] | None = None,
    paths: Sequence[str] = (),
    scopes: tuple[str, ...] = (),
    linear: Sequence[int] = (),
) -> Plan:
    """Decides what a program computes in.

    Args:
        jaxpr: The program, with ``consts`` the values of its constants.
        consts: Arrays or tracers.
        policy: The policy.
        in_dtypes: What each float32 argument arrives in.
        out_dtypes: What each float32 result is handed out in; None where float32.
        paths: The path of each argument, for the policy's overrides.
        scopes: Names of the scopes around the program.
        linear: Which arguments are tangents: the program will be transposed in them as it stands.

    Returns:
        The plan, without what is kept for a backward pass. Nothing has been run.
    """
    block = build(jaxpr, consts, scopes)
    for value, path in zip(block.invars, paths, strict=False):
        value.paths = (path,)
    used = classify(block, policy)
    for value, dtype in zip(block.invars, in_dtypes, strict=True):
        if value.is_f32:
            half = dtype in HALVES
            value.kind, value.dtype, value.raw = "half" if half else "flexible", dtype, not half
    sweep = Sweep()
    for index, (value, dtype) in enumerate(zip(block.invars, in_dtypes, strict=True)):
        value.fact = argument(sweep.bit(value), dtype in HALVES, index in linear)
    sweep.block(block)
    out_dtypes = out_dtypes or [FLOAT32] * len(block.outvars)
    for place, (value, dtype) in enumerate(zip(block.outvars, out_dtypes, strict=True)):
        half = dtype in HALVES
        want = Want(full=not half, half=False, needed=not half, outside=half, returned=not half)
        read_by(value, place, want)
    demand(block)
    decide(block)
    return Plan(block, policy, used)
