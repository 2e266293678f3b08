"""The error of a gradient under a policy: two compiled programs, that of float32 and its own.

`compare` finds the same error, and what each operation adds to it, by running operations one at a
time. Only the gradients are shown here, so a whole program is compiled, which takes a fraction.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import building
from mpjax._src.core.base.contexts import constants_as_casts
from mpjax._src.core.base.dtypes import HALVES, dtype_of, is_float
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.policy.policy import Policy
from mpjax._src.core.program.interpret import Wide, interpret, widen
from mpjax._src.core.program.site import equations
from mpjax._src.tools.instruments.compare import error_of
from mpjax._src.tools.instruments.programs import GRADIENT, Program, make_program, training_scale
from mpjax._src.tools.instruments.shadows import SUSPICIOUS, capped, perturbed, size_of_terms
from mpjax._src.tools.scripts.steps import Loss, NoValues


class Worst(NamedTuple):
    """The gradient of the largest error."""

    gradient_error: float
    worst: str  # its name
    loss_scale: float


class Exact:
    """The gradients of a differentiated function in float32, at some values."""

    def __init__(self, loss: Loss, values: Sequence[Any]) -> None:
        program = dataclasses.replace(loss.program, jaxpr=_silent(loss.program.jaxpr))
        if building.acts(program.jaxpr.effects):  # effects happen once, not for a measurement
            raise NoValues("it calls back into Python")
        self.loss, self.values = dataclasses.replace(loss, program=program), values
        self.compilations = 0

    def worst(self, policy: Policy) -> tuple[Worst, str]:
        """Returns the gradient of the largest error under a policy, relative to these; and what is
        to be said of those that are 0, or ""."""
        program = self._program(policy)
        scale = training_scale(program, policy, "auto")
        self.compilations += 1
        found = {name: got for name, got in program.at(scale) if name in self.results}
        found = {n: got for n, got in found.items() if n.startswith(GRADIENT)} or found
        errors = {name: self._error(name, got) for name, got in found.items()}
        # Nothing is relative to 0, so what is 0 in float32 is told apart, if it is finite.
        zero = {n for n in found if errors[n] == np.inf and np.isfinite(found[n]).all()}
        if zero < {*errors}:
            errors = {n: e for n, e in errors.items() if n not in zero}
        name = max(errors, key=lambda name: capped(errors[name]))
        note = ""
        if not np.isfinite(errors[name]):
            own = np.isfinite(self.results[name]).all()
            note = f"{name} is not finite{'' if own else ', also in float32'}"
        elif zero:
            largest = max(zero, key=lambda name: float(np.abs(found[name]).max()))
            note = (
                f"{largest} is 0 in float32, and up to {float(np.abs(found[largest]).max()):.2g} "
                "here, which is no relative error"
            )
        return Worst(errors[name], name.removeprefix(GRADIENT), scale), note

    def _error(self, name: str, got: Any) -> float:
        exact = self.results[name]
        error = error_of(got, exact)
        if not (error > SUSPICIOUS and np.isfinite(got).all()):
            return error
        # Only rounding error in float32 perhaps, as the gradient of a bias before BatchNorm is.
        terms = size_of_terms(exact, self._of_perturbed[name])
        return error_of(got, exact, terms) if terms else error

    @functools.cached_property
    def _reference(self) -> Program:
        return self._program(get_policy("float32"))

    @functools.cached_property
    def results(self) -> dict[str, Any]:
        """The gradients, and what else it returns, by name."""
        self.compilations += 1
        pairs = self._run(self._reference.inputs(1.0))
        return {name: x for name, x in pairs.items() if is_float(x) and np.size(x)}

    @functools.cached_property
    def _of_perturbed(self) -> dict[str, Any]:
        *arrays, scale = self._reference.inputs(1.0)
        return self._run([*perturbed([*map(widen, arrays)]), scale])

    @functools.cached_property
    def _compiled(self) -> Any:
        """The reference as one program: with the casts of its own widened, where it has any."""
        jaxpr = self._reference.jaxpr
        inner, _ = _jax.open_jaxpr(jaxpr)
        values = (v for eqn, _, _ in equations(inner) for v in (*eqn.invars, *eqn.outvars))
        if not any(dtype_of(v.aval) in HALVES for v in values):
            return jax.jit(functools.partial(_jax.eval_closed, jaxpr))
        return jax.jit(lambda *arrays: interpret(jaxpr, [*arrays], Wide()))

    def _run(self, arrays: Sequence[Any]) -> dict[str, Any]:
        return dict(self._reference.named(self._compiled(*arrays)))

    def _program(self, policy: Policy) -> Program:
        loss = self.loss
        args, kwargs = loss.arguments(self.values)
        with constants_as_casts():
            return make_program(
                *("survey", loss.fun, policy, args, kwargs), loss.argnums, loss.site.has_aux
            )


def _silent(jaxpr: Any) -> Any:
    """Returns an open jaxpr without the equations at its top that only tell Python something."""
    kept = [
        eqn
        for eqn in jaxpr.eqns
        # Without results, writing to a reference is what else an effect may be.
        if eqn.outvars or not eqn.effects or any(hasattr(v.aval, "inner_aval") for v in eqn.invars)
    ]
    return jaxpr.replace(eqns=kept, effects=building.effects_of(kept))
