"""Trials: a program with some places in float32, run by a mask or as it trains.

A mask's program is compiled once for all sets of places (`masked`). The reference of both is the
program in float32.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.autocast.classify import PROGRAM
from mpjax._src.core.base.contexts import constants_as_casts
from mpjax._src.core.base.progress import advance
from mpjax._src.core.base.rules import BARRIERS
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.policy.policy import Policy
from mpjax._src.core.program.interpret import is_precise, root_of
from mpjax._src.tools.hardware.targets import Target
from mpjax._src.tools.instruments.contributions import Rounding, ratio
from mpjax._src.tools.instruments.masked import masked, readers, reads_half, unfollowed
from mpjax._src.tools.instruments.places import Place, Places, overridden, own_pattern
from mpjax._src.tools.instruments.programs import Program, training_scale
from mpjax._src.tools.instruments.shadows import SUSPICIOUS, perturbed, size_of_terms

# The error of a gradient is relative to at least this share of the norm of all gradients together.
SMALL = 1e-3

# Longer error vectors are projected to this many entries, which about keeps their inner products
# (random projections; Johnson and Lindenstrauss, 1984).
ENTRIES = 64

RUN = "run"  # what progress counts


class OutOfRuns(Exception):
    """All runs are used up."""


class Trial:
    """Runs the program with some places in float32, by the mask or as it trains."""

    def __init__(
        self,
        make: Callable[..., Program],
        policy: Policy,
        max_runs: int,
        loss_scale: Any,
        target: Target,
    ):
        self.policy, self.max_runs, self.target = policy, max_runs, target
        # Parameters that are stored in 16 bits arrive as float32.
        self._float32 = get_policy("float32").replace(param_dtype=policy.param_dtype)
        self.runs = 0
        self._make = functools.partial(make, ran=self._count)
        self.program = self._make(policy=policy)
        stopped = self._stopped(self.program)
        self.places = Places(self.program.plan, stopped)
        self.scale = training_scale(self.program, policy, loss_scale)
        self.rounding = self._rounding(policy, self.places.owners(None))
        self.unfollowed = unfollowed(self.rounding.block, policy)
        numbers = [entry.step.site.op for entry in self.rounding.entries]
        owners = {n: self.places.owners(n) for n in {*numbers}}
        self._owners = [owners[n] for n in numbers]
        found = readers(self.rounding.block, self.places.owners(None) - stopped)
        self._readers = [
            set[int]() if n in stopped else found.get(id(entry.step), set())
            for n, entry in zip(numbers, self.rounding.entries, strict=True)
        ]
        self._written = self._own(self.rounding)
        # On the host: the types of what runs in shard_map name its mesh, and others do not.
        self.wanted = jax.device_get(self._exact())
        self._norms = {name: float(norm) for name, norm in _norms(self.wanted).items()}
        longest = max((x.size for x in self.wanted.values()), default=0)
        self._signs = np.random.default_rng(0).choice([-1.0, 1.0], longest).astype(np.float32)
        self._terms: dict[str, float] = {}  # the sizes of canceled terms, by result
        # What was measured: by the ops that round, and by policy.
        self._known: dict[frozenset[int], tuple[dict[str, float], list[np.ndarray]]] = {}
        self._trained: dict[Policy, tuple[dict[str, float], list[np.ndarray]]] = {}

    def _count(self) -> None:
        if self.runs >= self.max_runs:
            raise OutOfRuns
        self.runs += 1
        advance(RUN)

    def _rounding(self, policy: Policy, operands: Collection[int] = ()) -> Rounding:
        """Returns the program under a policy with a mask."""
        with constants_as_casts():
            return Rounding(self._make(policy=policy), operands)

    def _stopped(self, program: Program) -> set[int]:
        """Returns the ops, by number, whose results are rounded unless an override names them."""
        rounded = {
            n
            for n in _rounded(program) - Places(program.plan).owners(None)
            # An override of what holds a program would move all of it.
            if (op := program.ops[n]).has_float32 and program.plan.rulings[op].kind != PROGRAM
        }
        named = {own_pattern(program.ops[n]): "float32" for n in rounded}
        if not named or self.policy.casting != "op":  # others have no overrides of operations
            return set()
        return rounded - _rounded(self._make(policy=self.policy.override(named)))

    # ---- measurements ---------------------------------------------------------------------------

    def _named(self, outs: Iterable[tuple[str, Any]]) -> dict[str, jax.Array]:
        # An auxiliary result of a loss trains nothing, so the tolerance does not concern it.
        return {
            name: x
            for name, x in outs
            if jnp.issubdtype(x.dtype, jnp.floating)
            and not (name.startswith("aux") and self.program.follows_gradient)
        }

    def _own(self, rounding: Rounding) -> np.ndarray:
        """Returns the mask of what rounds in the float32 reference too: the program's own casts."""
        numbers = (entry.step.site.op for entry in rounding.entries)
        return np.array([self.places.is_written(n) for n in numbers], bool)

    def _exact(self, arrays: Any = None) -> dict[str, jax.Array]:
        """Returns the results in float32, of these arrays if any are given."""
        program = self._make(policy=self._float32)
        if arrays is not None:
            program = dataclasses.replace(program, arrays=arrays)
        if program.traced.as_written:
            return self._named(program.at(self.scale))
        # A region asks for 16 bits under this policy too.
        rounding = self._rounding(self._float32)
        return self._by_mask(rounding, self._own(rounding), program)

    def _by_mask(
        self, rounding: Rounding, mask: np.ndarray, program: Program | None = None
    ) -> dict[str, jax.Array]:
        self._count()
        outs = rounding.at((program or self.program).inputs(self.scale), mask.astype(float))
        return self._named(zip(rounding.names, outs, strict=True))

    def masked(self, moved: frozenset[int]) -> tuple[dict[str, float], list[np.ndarray]]:
        """Returns the error of each result, and its error vector, with some ops in float32."""
        return self.alone(self.places.owners(None) - moved)

    def alone(self, ops: frozenset[int]) -> tuple[dict[str, float], list[np.ndarray]]:
        """Returns the same with these ops alone in 16 bits."""
        if ops not in self._known:
            if self.unfollowed:
                moved = [p for p in self.places.finest() if p.ops.isdisjoint(ops)]
                self._known[ops] = self.trained(overridden(self.policy, moved))
            else:
                # A cast for several ops is none for those in float32; the others round for
                # themselves what they read.
                each = zip(self._owners, self._readers, strict=True)
                rounds = [b <= ops if b else not ops.isdisjoint(a) for a, b in each]
                outs = self._by_mask(self.rounding, np.array(rounds, bool) | self._written)
                self._known[ops] = self._errors(outs)
        return self._known[ops]

    def trained(self, policy: Policy) -> tuple[dict[str, float], list[np.ndarray]]:
        """Returns the same under a policy, compiled as it trains."""
        if policy not in self._trained:
            program = self.program if policy == self.policy else self._make(policy=policy)
            self._trained[policy] = self._errors(self._named(program.at(self.scale)))
        return self._trained[policy]

    def _errors(self, got: dict[str, jax.Array]) -> tuple[dict[str, float], list[np.ndarray]]:
        distances = jax.device_get(_distances(got, self.wanted, self._signs))
        sizes = self._sizes({name: float(d) for name, (d, _) in distances.items()})
        errors = {name: ratio(d, sizes[name]) for name, (d, _) in distances.items()}
        return errors, [_of_length(v, errors[name]) for name, (_, v) in distances.items()]

    def _sizes(self, distances: dict[str, float]) -> dict[str, float]:
        """Returns what each result's error is relative to."""
        is_gradient = dict(zip(self.program.results, self.program.gradients, strict=True))
        everything = math.hypot(*(norm for name, norm in self._norms.items() if is_gradient[name]))
        norms = {
            name: max(norm, SMALL * everything) if is_gradient[name] else norm
            for name, norm in self._norms.items()
        }
        odd = (n for n, d in distances.items() if norms[n] * SUSPICIOUS < d < math.inf)
        if any(name not in self._terms for name in odd):
            # One more run tells results that are noise in float32 from results that are wrong.
            changed = self._exact(perturbed(self.program.arrays))
            self._terms = {n: size_of_terms(x, changed[n]) for n, x in self.wanted.items()}
        return {name: max(norm, self._terms.get(name, 0.0)) for name, norm in norms.items()}


def _rounded(program: Program) -> set[int]:
    """Returns the ops, by number, that are in 16 bits and not for what reads them.

    They compute in 16 bits, or autocast rounds what they make. 16-bit operations, such as matmuls,
    round what they read themselves: the op that made it does not stop that.
    """
    computes: set[Any] = set()
    stored: set[Any] = set()
    read: set[Any] = set()
    for block in masked(program.jaxpr, root_of(program.jaxpr)).blocks():
        readers: dict[Any, set[Any]] = {}  # the ops that read a value in 16 bits
        for step in reversed(block.steps):
            barrier = step.eqn.primitive.name in BARRIERS
            for i, v in enumerate(step.ins):
                if isinstance(v, int) and not is_precise(step.eqn):
                    through = readers.get(step.outs[i], ()) if barrier else [step.site.op]
                    readers.setdefault(v, set()).update(through)
        for step in block.places:
            others = set[Any]().union(*(readers.get(v, ()) for v in step.outs))
            into = computes if reads_half(step.eqn) else read if others else stored
            into.add(step.site.op)
    return (computes | stored - read) - {None}


def worst(errors: dict[str, float]) -> float:
    return max(errors.values(), default=0.0)


def ops_of(places: Iterable[Place]) -> frozenset[int]:
    return frozenset().union(*(p.ops for p in places))


@jax.jit
def _norms(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(lambda x: jnp.linalg.norm(jnp.ravel(x)), arrays)


@jax.jit
def _distances(
    got: dict[str, jax.Array], wanted: dict[str, jax.Array], signs: jax.Array
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns for each result the norm of its error, and `ENTRIES` sums of it with random signs."""

    def distance(got, wanted):
        # The difference of equal infinities would be NaN.
        error = jnp.ravel(jnp.where(got == wanted, 0, got - wanted))
        columns = min(error.size, ENTRIES)
        rows = -(-error.size // max(columns, 1))
        signed = jnp.pad(error * signs[: error.size], (0, rows * columns - error.size))
        return jnp.linalg.norm(error), signed.reshape(rows, columns).sum(0)

    return {name: distance(got[name], x) for name, x in wanted.items()}


def _of_length(vector: np.ndarray, length: float) -> np.ndarray:
    """Returns a vector of this norm and of the given direction, or of any if there is none."""
    size = float(np.linalg.norm(vector))
    if 0 < size < math.inf and length < math.inf:
        return vector * (length / size)
    return np.full(max(len(vector), 1), length / max(len(vector), 1) ** 0.5)
