"""Casts at the boundary of a function: of its arguments before it runs, and of its results.

That is what a policy with ``casting="boundary"`` makes of a function. Its operations then run in
the dtypes that JAX gives them. States are not cast (`_declared`, `_continued`), because an average
in 16 bits stands still.
"""

import contextlib
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.contexts import PLANNED_FOR
from mpjax._src.core.base.dtypes import FLOAT32, FLOAT64, HALVES
from mpjax._src.core.base.errors import PrecisionWarning, warn_user
from mpjax._src.core.planner.exceptions import regions
from mpjax._src.core.policy.fields import OP_LISTS
from mpjax._src.core.policy.policy import Policy
from mpjax._src.core.program.graph import (
    ARGUMENTS,
    PLANNED,
    Block,
    Op,
    Value,
    build,
    walked,
    wires,
)
from mpjax._src.core.program.modules import leaves_trained
from mpjax._src.core.program.site import equations
from mpjax._src.core.program.states import Leaves, next_states
from mpjax._src.core.program.trace import Flat, Traced

BOUNDARY = "boundary"

# The settings of a policy that apply to op-level casting alone.
BY_OP = (*OP_LISTS, "storage", "fused_attention", "chunked_loss", "gather", "reduce")

# The keyword of `build_train_step` for the state of a model, which is a state whatever it contains.
MODEL_STATE = "model_state"

FLOATS = (FLOAT32, *HALVES)
NO_LISTS: dict[str, Any] = dict.fromkeys(OP_LISTS, ())


def casts_arguments(policy: Policy) -> bool:
    """Returns whether a policy casts the arguments of a function, and none of its operations.

    A policy that computes in float32 casts neither.
    """
    return policy.casting == BOUNDARY and policy.compute_dtype != FLOAT32


@contextlib.contextmanager
def scopes(policy: Policy) -> Iterator[None]:
    """Puts what a function runs under a policy into its scopes.

    An autocast around it leaves alone what is planned. Where arguments alone are cast nothing is,
    and without an autocast around it the linter takes its operations for the user's.
    """
    once = casts_arguments(policy)
    with contextlib.ExitStack() as stack:
        if once:
            stack.enter_context(jax.named_scope(ARGUMENTS))
        if not once or PLANNED_FOR.value is not None:
            stack.enter_context(jax.named_scope(PLANNED))
        yield


def of_operations(policy: Policy) -> Policy:
    """Returns what a policy asks of operations: nothing, if it casts arguments."""
    if not casts_arguments(policy):
        return policy
    return dataclasses.replace(policy, compute_dtype=FLOAT32, overrides=(), **NO_LISTS)


def warn_if_unused(policy: Policy) -> None:
    """Warns of settings of a policy that apply to operations, if it casts arguments alone."""
    unused = [name for name in BY_OP if getattr(policy, name) != getattr(Policy, name)]
    if unused and policy.casting == BOUNDARY:
        have = "has" if len(unused) == 1 else "have"
        warn_user(
            f"policy={str(policy)!r}: {' and '.join(unused)} {have} no effect, because the policy "
            "casts arguments once. Add casting=op to cast each operation by its rule."
        )


def program_of(
    call: Flat, policy: Policy, trace: Callable[[Sequence[Any]], Traced]
) -> tuple[Traced, Sequence[Any]]:
    """Traces a function of cast arguments; ``trace`` traces it for their abstract values.

    Returns:
        The program, and the abstract values of its arguments.
    """
    pairs = zip(call.avals, call.paths, strict=True)
    cast = [_cast(policy, aval, path) for aval, path in pairs]
    states, known = _declared(call), -1
    while len(states) > known:
        known = len(states)
        both = enumerate(zip(call.avals, cast, strict=True))
        seen = [aval if i in states else to for i, (aval, to) in both]
        with PLANNED_FOR(None):  # kernels are called as they are
            program = trace(seen)
        # Which arguments have a next value is known once the function has run.
        changed = (i for i in _continued(call, seen, program) if seen[i] is not call.avals[i])
        states.update(changed)
    if any(True for _ in regions(program.jaxpr)):
        warn_user(
            f"policy={str(policy)!r}: mpjax.precision has no effect, because the policy casts "
            "arguments once. Add casting=op to cast each operation by its rule.",
            PrecisionWarning,
        )
    return program, seen


def warn_of_refusal(policy: Policy, fun: Any, refused: Exception) -> None:
    """Warns that a function refuses cast arguments, so that its operations are cast instead."""
    reason = next(iter(str(refused).strip().splitlines()), "")
    warn_user(
        f"policy={str(policy)!r} casts the arguments of a function once, but "
        f"{getattr(fun, '__name__', 'it')} does not run on {policy.compute_dtype.name} arguments "
        f"({type(refused).__name__}: {reason}), so each of its operations is cast by its rule, as "
        "under casting=op. Add casting=op to the policy if you mean that. Otherwise pass the loss "
        "alone, and create its constants and initial carries in the dtype of its arguments.",
        PrecisionWarning,
    )


def alike(avals: Sequence[Any]) -> list[Any]:
    """Returns abstract values with one dtype for all that the casts may give another one."""
    floats = (getattr(aval, "dtype", None) in FLOATS for aval in avals)
    return [_jax.retyped(a, FLOAT32) if yes else a for a, yes in zip(avals, floats, strict=True)]


def _cast(policy: Policy, aval: Any, path: str) -> Any:
    """Returns the abstract value of an argument when it is cast."""
    dtype, named = getattr(aval, "dtype", None), policy.override_for(path)
    # JAX makes float64 only on request, so that an override alone may change it.
    cast = dtype in FLOATS or (dtype == FLOAT64 and named is not None)
    return _jax.retyped(aval, named or policy.compute_dtype) if cast else aval


def _declared(call: Flat) -> set[int]:
    """Returns which arrays of a call are states by what they are, whatever the function returns.

    They are variables of Flax NNX that are no parameters (statistics, caches), and what is passed
    by the keyword ``model_state``, as `build_train_step` does.
    """
    leaves = zip(leaves_trained(call.filled(call.arrays)), call.traced, strict=True)
    fixed = [not is_trained for (_, is_trained), is_array in leaves if is_array]
    # The root is (args, kwargs): the first key chooses one, the second an argument in it.
    named = [kind.idx == 1 and which.key == MODEL_STATE for kind, which, *_ in call.keys]
    return {i for i, is_state in enumerate(map(max, fixed, named)) if is_state}


def _continued(call: Flat, seen: Sequence[Any], program: Traced) -> set[int]:
    """Returns which arrays of a call are states because the function returns their next values.

    A returned tree with the structure and shapes of an argument, as batch statistics, is its next
    value, but for three: one that is the argument itself; gradients, which a backward pass makes;
    and a tree of which a matmul reads an array, which is what a policy casts.
    """
    jaxpr, consts = _jax.open_jaxpr(program.jaxpr)
    flow = _Flow(functools.cache(functools.partial(build, jaxpr, consts)))
    if any(site.backward for _, site, _ in equations(jaxpr)) and flow.updated:
        name = call.paths[min(flow.updated)]
        raise ValueError(
            f"it adds gradients to {name or 'an argument'} itself, which 16 bits would round away"
        )

    def is_state(arguments: Leaves, results: Leaves) -> bool:
        pairs = [(i, o) for i, o in zip(arguments, results, strict=True) if i is not None]
        return (
            any(jaxpr.invars[i] is not jaxpr.outvars[o] for i, o in pairs)
            and flow.multiplied.isdisjoint(arguments)
            and flow.differentiated.isdisjoint(results)
        )

    results = [v.aval for v in jaxpr.outvars]
    pairs = next_states(call, alike(seen), program.out, alike(results), is_state)
    return {i for arguments, _ in pairs for i in arguments if i is not None}


def _is_transposed(op: Op) -> bool:
    return "transpose" in _jax.transforms(op.stack)


class _Flow:
    """What a program makes of its arguments. They and its results are named by their places.

    It is asked of few functions, so the graph is made when it is.
    """

    def __init__(self, block: Callable[[], Block]) -> None:
        self._block = block

    @functools.cached_property
    def multiplied(self) -> set[int]:
        """The arguments that matmuls read, moved or cast at most, in loops and branches too."""
        matmuls = (op for op in self._block().walk() if op.spec.need == rules.HALF)
        return self._arguments(v for op in matmuls for v in op.ins)

    @functools.cached_property
    def differentiated(self) -> set[int]:
        """The results that depend on a backward pass."""
        made: set[Value] = set()
        for op in self._block().ops:
            inside = (each for sub in op.subs for each in sub.program.walk())
            if not made.isdisjoint(op.ins) or any(map(_is_transposed, (op, *inside))):
                made.update(op.outs)
        return {i for i, v in enumerate(self._block().outvars) if v in made}

    @functools.cached_property
    def updated(self) -> set[int]:
        """The arguments to which a result adds what a backward pass makes."""
        results = [self._block().outvars[i] for i in self.differentiated]
        sums = {
            op.outs[0]: op
            for op in self._block().walk()
            if op.name in rules.SUMS_OF_TWO and not _is_transposed(op)
        }
        added = (sums[v] for v in self._behind(results) if v in sums)
        return self._arguments(v for op in added for v in op.ins)

    @functools.cached_property
    def _sources(self) -> dict[Value, list[Value]]:
        """Of each value those that it is, moved or cast."""
        sources: dict[Value, list[Value]] = defaultdict(list)
        for op in self._block().walk():
            if rules.SAME_PARAMETER in op.spec.traits:
                sources[op.outs[0]].append(op.ins[0])
            for source, value in wires(op):
                sources[value].append(source)
        return sources

    def _behind(self, values: Iterable[Value]) -> set[Value]:
        """Returns some values and all that they are, moved or cast."""
        return {*walked(values, self._sources.__getitem__)}

    def _arguments(self, values: Iterable[Value]) -> set[int]:
        behind = self._behind(values)
        return {i for i, v in enumerate(self._block().invars) if v in behind}
