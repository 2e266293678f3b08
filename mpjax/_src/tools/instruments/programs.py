"""The program that trains (a function and its gradients) as one flat jaxpr, for the instruments."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.autocast.classify import Outline
from mpjax._src.core.autocast.transform import call, called, trace
from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import at_least_float32
from mpjax._src.core.base.errors import warn_at
from mpjax._src.core.base.patterns import path_of
from mpjax._src.core.base.trees import all_finite
from mpjax._src.core.policy.policy import Policy
from mpjax._src.core.program import gradient
from mpjax._src.core.program.graph import Block, Op
from mpjax._src.core.program.interpret import enters
from mpjax._src.core.program.site import NUMBER, Site
from mpjax._src.core.program.trace import Flat, parameters_of
from mpjax._src.core.training.loss_scale import (
    LossScale,
    NoOpLossScale,
    get_loss_scale,
    has_protocol,
)

# The least exponent that is tried as a loss scale: that of float16's smallest number.
LEAST_EXPONENT = -24

# The factor that the instruments keep between a loss scale and overflow.
ROOM = 4.0

GRADIENT = "gradient of "  # begins the names of results that are gradients


class Held(NamedTuple):
    """The loss scale of a state among the arguments of a function."""

    scale: float
    name: str  # its own, such as "state.loss_scale"
    place: int | None  # that of its array among the arguments, if the function itself reads it


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, or its value and gradients, as a program of flat arrays."""

    # The closed jaxpr. Its last argument is the loss scale, a float32 scalar.
    jaxpr: Any
    arrays: list[jax.Array]  # the other arguments
    names: tuple[str, ...]  # the names of these arguments: their paths
    results: tuple[str, ...]  # the names of the results: "loss", "gradient of w", "result"
    gradients: tuple[bool, ...]  # which results are gradients
    # The names of the differentiated arguments; of all arguments without gradients.
    parameters: tuple[str, ...]
    # The plan of the function. Its ops are numbered, and the equations of an op are in a scope with
    # its number.
    plan: Outline
    ran: Callable[[], None] = lambda: None  # is called before every run of the program
    # The function alone, without a backward pass, as a closed jaxpr of the arrays. Its equations
    # are numbered, and so are those of the program that come from them.
    alone: Any = None
    # The equations of ``alone`` by their numbers; empty if they are not numbered.
    equations: Sequence[Any] = ()
    held: Held | None = None  # the loss scale among the arguments
    traced: Any = None  # the function, traced and planned

    @functools.cached_property
    def ops(self) -> list[Op]:
        """The ops of the plan, by their numbers."""
        return [op for op, _ in self.plan.numbered]

    def lines(self, eqn: Any, place: Site) -> tuple[str, str]:
        """Returns "file:line" of an equation, or of the op that it comes from: the user's line,
        and that of the library that it calls there, or ""."""
        if place.op is None:
            return place.lines(eqn)
        op = self.ops[place.op]
        around = (*reversed(op.callers), *reversed(place.callers))
        return _jax.source_lines(eqn, op.eqn, *around)

    @property
    def follows_gradient(self) -> bool:
        """Whether the backward pass is part of the program."""
        return any(self.gradients)

    @property
    def scales_itself(self) -> bool:
        """Whether the function scales its loss, as a training step does, by an argument."""
        return self.held is not None and self.held.place is not None

    def inputs(self, scale: float) -> list[jax.Array]:
        """Returns what the program is called with at a loss scale."""
        if self.held is None or self.held.place is None:
            return [*self.arrays, jnp.float32(scale)]
        arrays, place = [*self.arrays], self.held.place
        arrays[place] = jnp.full_like(arrays[place], scale)
        return [*arrays, jnp.float32(1)]

    def arguments(self, scale: float) -> Iterator[tuple[Any, str]]:
        """Yields what the program is called with, and the name of each; "" for the loss scale."""
        return zip(self.inputs(scale), [*self.names, ""], strict=True)

    def named(self, outs: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        """Yields the results of a run by their names."""
        return zip(self.results, outs, strict=True)

    @functools.cached_property
    def compiled(self) -> Callable[..., list[jax.Array]]:
        """The program compiled as a whole: a function of the arrays and the loss scale."""
        jitted = jax.jit(functools.partial(_jax.eval_closed, self.jaxpr))

        def run(*arrays):
            self.ran()
            return jitted(*arrays)

        return run

    def at(self, scale: float) -> Iterator[tuple[str, Any]]:
        """Yields the results of the compiled program at a loss scale by their names."""
        return self.named(self.compiled(*self.inputs(scale)))

    def has_finite_gradients(self, scale: float) -> bool:
        """Returns whether every gradient of the compiled program is finite at a loss scale."""
        gradients = itertools.compress(self.at(scale), self.gradients)
        return bool(all_finite([x for _, x in gradients]))

    def largest_finite_scale(
        self,
        high: int,
        is_finite: Callable[[float], bool] | None = None,
        least: int = LEAST_EXPONENT,
    ) -> float | None:
        """Returns the largest power of two below 2**high at which every gradient is finite.

        ``is_finite`` says of a scale whether something else is. Below 2**least none is tried.
        """

        def finite(exponent: int) -> bool:
            return (is_finite or self.has_finite_gradients)(2.0**exponent)

        # Bisection: what is finite at one scale is so at every smaller one. 1 is tried before
        # scales below it, which few programs need.
        low = min(0, high - 1)
        if not finite(low):
            if least >= low or not finite(least):
                return None
            low = least
        while high - low > 1:
            middle = (high + low) // 2
            low, high = (middle, high) if finite(middle) else (low, middle)
        return 2.0**low


def check_concrete(tool: str, arrays: Sequence[Any]) -> list[jax.Array]:
    """Returns JAX arrays. Raises if one has no concrete values."""
    for x in arrays:
        if isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct):
            raise TypeError(
                f"{tool} runs the function and inspects its values, so it needs concrete arrays, "
                f"but was given {x}. Call it outside of jit, with concrete arguments."
            )
    return [jnp.asarray(x) for x in arrays]


def make_program(
    tool: str,
    fun: Callable[..., Any],
    policy: Policy,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argnums: int | Sequence[int] | None,
    has_aux: bool,
    ran: Callable[[], None] = lambda: None,
    numbers: bool = False,
) -> Program:
    """Traces a function, or its value and gradients, to one program.

    The program includes gradients if ``argnums`` is given and the function returns a scalar loss.
    They are gradients of the scaled loss, unscaled again. The arguments are those of the public
    instruments; ``tool`` is the name of the instrument, for errors. ``ran`` is called before every
    run. With ``numbers``, the program says which equation of the function a derivative belongs to.
    """
    leaves = Flat.of((args, kwargs))
    if not leaves.arrays:
        raise ValueError(
            f"{tool}: the arguments contain no arrays: there is nothing to run. It is called like "
            f"explain: {tool}(fun, policy)(*args), with the arguments of fun."
        )
    arrays = check_concrete(tool, leaves.arrays)
    names = leaves.names(parameters_of(fun, args), lambda name, keys: path_of(keys) or name)
    with _noted(f"{tool}: the function failed while JAX traced it, before {tool} ran it."):
        traced = trace(fun, policy, args, kwargs, argnums is not None)
    outs = traced.returned()
    gradient.check_result(tool, outs, _jax.open_jaxpr(traced.jaxpr)[0].outvars)
    numbered, alone, equations = traced, None, list[Any]()
    if numbers:
        jaxpr, equations = _jax.numbered(traced.with_rows.jaxpr, NUMBER, enters)
        numbered = dataclasses.replace(traced, jaxpr=jaxpr)
        alone = _jax.trace(lambda *arrays: called(numbered, list(arrays)), traced.avals, tool)

    def evaluate(*arrays):
        return call(numbered, list(arrays), rows=not numbers)

    def forward(*inputs):
        return evaluate(*inputs[:-1])  # without the loss scale

    follows = argnums is not None and gradient.is_loss(outs, has_aux, tool)
    held = _held(fun, args, kwargs, traced.outline.block)
    pair = not (has_aux or (held and held.place is not None)) and gradient.is_pair_of_loss(outs)
    if argnums is not None and pair:
        warn_at(
            fun,
            f"{tool}: the function returned a pair whose first is one number, (loss, aux) perhaps, "
            "so its forward pass alone is looked at. For its gradients too pass has_aux=True; "
            "argnums=None says that the forward pass is what you want.",
        )
    active = (
        gradient.differentiated(tool, args, kwargs, argnums) if follows else [False] * len(names)
    )
    parameters = tuple(itertools.compress(names, active)) or names
    flat, results = forward, [f"result {path_of(keys)}".strip() for keys in traced.out.keys]
    if follows:
        flat, results = _gradients(
            lambda *arrays: traced.rebuild(evaluate(*arrays)), active, parameters, has_aux
        )
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    note = f"{tool} follows the gradient: for the forward pass alone, pass argnums=None."
    with _noted(note) if follows else contextlib.nullcontext():
        jaxpr = _jax.trace(flat, [*traced.avals, _jax.aval_of(scale)], tool)
    gradients = tuple(name.startswith(GRADIENT) for name in results)
    return Program(
        *(jaxpr, arrays, names, tuple(results), gradients, parameters),
        *(traced.outline, ran, alone, equations, held, traced),
    )


def _held(fun: Callable[..., Any], args: Any, kwargs: Any, block: Block) -> Held | None:
    """Returns the loss scale among the arguments; of several the smallest, as a gradient does."""
    pairs = jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=has_protocol)
    scales = [(keys, x) for keys, x in pairs if has_protocol(x)]
    scales = [pair for pair in scales if not isinstance(pair[1], NoOpLossScale)] or scales
    arrays = [(keys, jax.tree.leaves(x.loss_scale)[0]) for keys, x in scales]
    arrays = [(keys, x) for keys, x in arrays if np.size(x) == 1]
    if not arrays:
        return None
    keys, array = min(arrays, key=lambda pair: float(pair[1]))
    leaves = Flat.of((args, kwargs))
    (name,) = dataclasses.replace(leaves, keys=(keys,)).names(parameters_of(fun, args))
    read = {value for op in block.ops for value in op.ins}
    places = (i for i, x in enumerate(leaves.arrays) if x is array and block.invars[i] in read)
    return Held(float(array), name, next(places, None))


def training_scale(program: Program, policy: Policy, loss_scale: LossScale | str | float) -> float:
    """Returns the loss scale that an instrument uses for a program.

    "auto" is the scale that a step would train with: none, or if something computes in float16, the
    dynamic scale, lowered until the gradients are finite. Some headroom is added, because a program
    that runs one operation at a time rounds values to 16 bits that the compiled one keeps in
    float32.
    """
    scale = float(get_loss_scale(policy, loss_scale).loss_scale)
    chosen = not (isinstance(loss_scale, str) and loss_scale.lower() == "auto")
    if chosen or scale == 1 or not program.follows_gradient:
        return scale
    if program.has_finite_gradients(scale * ROOM):
        return scale
    largest = program.largest_finite_scale(round(math.log2(scale * ROOM)))
    return 1.0 if largest is None else min(scale, largest / ROOM)


@contextlib.contextmanager
def _noted(note: str):
    """Adds a note to an error of the user's function, which stays what it is."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


def _gradients(
    run: Callable[..., Any], active: Sequence[bool], parameters: Sequence[str], has_aux: bool
) -> tuple[Callable[..., Any], list[str]]:
    """Returns the value and gradients of the scaled loss, and their names, known once it ran."""
    results: list[str] = []

    def flat(*inputs):
        *arrays, scale = inputs
        pulled = gradient.pull_back(run, active, arrays, has_aux, lambda loss: _wide(loss) * scale)
        aux = (f"aux {path}".strip() for path in pulled.aux)
        results[:] = ["loss", *aux, *(GRADIENT + name for name in parameters)]
        return [pulled.loss, *pulled.aux.values(), *(_wide(g) / scale for g in pulled.gradients())]

    return flat, results


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(at_least_float32(x.dtype))
