"""Watches 16-bit tensors: `measure_precision` in a program, `watch_precision` around a step."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax

from mpjax._src.core.base import _jax
from mpjax._src.core.base.contexts import unchecked
from mpjax._src.core.base.errors import brief, check_callable, check_count
from mpjax._src.core.base.public import public
from mpjax._src.core.base.trees import is_array
from mpjax._src.core.program.trace import Flat, trace
from mpjax._src.tools.watching.evaluate import evaluate, split, traced
from mpjax._src.tools.watching.figures import Figures
from mpjax._src.tools.watching.places import watch
from mpjax._src.tools.watching.report import PrecisionReport, described

MEMORY = 8  # the number of samples that growth is computed from

METRIC = "precision"


def measure_precision(fun: Callable[..., Any]) -> Callable[..., tuple[Any, PrecisionReport]]:
    """Returns a function that also measures its 16-bit tensors.

    It measures everything that the function computes, including gradients that are computed inside
    it: the 16-bit operands and results of each matmul and convolution, each cast to 16 bits, and
    other stored 16-bit values. It works on any program, under `autocast` or with casts by hand, in
    loops, branches, remat and shard_map, and under jit, vmap and scan. The statistics are
    reductions on the device; nothing waits for the host. The returned function has the same
    gradient as ``fun``, but a gradient that is computed outside is not measured; wrap the function
    that takes it instead.

    Args:
        fun: Any function that ``jax.jit`` can trace, such as a training step.

    Returns:
        A function of the same arguments that returns ``(out, precision)``: the result of ``fun``,
        and a `PrecisionReport`.

    Raises:
        TypeError: If ``fun`` is not a function.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> def loss(w, x):
        ...     return jnp.sum((x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32))
        >>> measured = jax.jit(mpjax.debug.measure_precision(jax.value_and_grad(loss)))
        >>> (value, grad), precision = measured(jnp.ones((4, 2)), jnp.full((3, 4), 1e4))
        >>> [(row.part, row.headroom < 1) for row in precision.rows if row.direction == "forward"]
        [('result', True), ('cast', False), ('cast', False)]

    NVIDIA's Transformer Engine logs similar statistics of its own layers in PyTorch.
    """
    check_callable(fun, "fun")

    @functools.wraps(fun)
    @unchecked()
    def measured(*args: Any, **kwargs: Any) -> tuple[Any, PrecisionReport]:
        call = Flat.of((args, kwargs), is_array)
        program = trace(call.on(fun), call.avals, "measured")
        watched = watch(program.jaxpr)
        outs, figures = _differentiable(program.jaxpr, watched)(*call.arrays)
        return program.rebuild(outs), PrecisionReport(figures, described(watched.tensors))

    return measured


def _differentiable(jaxpr: Any, watched: Any) -> Callable[..., tuple[list[Any], Figures]]:
    """Returns the measured program, with the derivative of the original program."""
    inner, consts = _jax.hoisted(jaxpr)

    def run(*args):
        return evaluate(inner, watched, args)

    # JAX refuses most effects in a custom_jvp. Its own derivative is the same, because `measure`
    # stops gradients.
    if inner.effects:
        return functools.partial(run, *consts)
    call = jax.custom_jvp(run)

    @call.defjvp
    def jvp(primals, tangents):
        outs, figures = run(*primals)
        plain = functools.partial(_jax.eval_closed, inner)
        _, moved = jax.jvp(plain, primals, tangents)
        return (outs, figures), (moved, jax.tree.map(_jax.zero_tangent, figures))

    return functools.partial(call, *consts)


def watch_precision(step: Callable[..., Any], every: int = 100, start: int = 0) -> "WatchedStep":
    """Measures the 16-bit tensors of a jitted training step, in one of every ``every`` calls.

    A call that is not sampled runs ``step`` itself, unchanged. A sampled call runs a second
    program, compiled at the first call: the same step with the statistics of `measure_precision`. A
    counter on the host decides which one runs; nothing waits for the device.

    Args:
        step: The training step, preferably jitted and with its state donated, as your loop calls
            it: ``jax.jit(step, donate_argnums=0)``. A function that is not jitted is jitted,
            without donation.
        every: The sampling interval in calls, 1 or more. The first call is sampled.
        start: The number of the first call, for a run that is resumed.

    Returns:
        A `WatchedStep`, called like ``step``. It returns the result of ``step``. If that is a pair
        whose second element is a dictionary (of metrics), a sampled call adds the entry
        "precision", a `PrecisionReport`, which `log_metrics` can write. The last report is also
        its attribute ``latest``.

    Raises:
        TypeError: If ``step`` is not a function that jit accepts.
        ValueError: If ``every`` or ``start`` is invalid.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax, optax
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((batch @ params["w"]) ** 2)
        >>> init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), "mixed_bfloat16")
        >>> step = mpjax.watch_precision(jax.jit(step, donate_argnums=0), every=100)
        >>> state = init({"w": jnp.ones((4, 2))})
        >>> for batch in jnp.ones((3, 8, 4)):
        ...     state, metrics = step(state, batch)
        >>> step.latest.steps, step.latest.risks
        ((0,), [])
    """
    check_callable(step, "step")
    if not (hasattr(step, "trace") and hasattr(step, "lower")):
        if hasattr(step, "lower"):
            raise TypeError(
                f"step={brief(step)} is not compiled by jax.jit. Pass a function of arrays that "
                "jax.jit compiles; for a module, split it with nnx.split or eqx.partition."
            )
        step = jax.jit(step)
    return WatchedStep(step, check_count("every", every), check_count("start", start, least=0))


@public("mpjax.debug")
class WatchedStep:
    """A step that is measured in some calls; `watch_precision` returns it.

    Attributes:
        step: The jitted step.
        every: The sampling interval in calls.
        calls: The number of the next call.
        latest: The `PrecisionReport` of the last sampled call, or None.
    """

    def __init__(self, step: Callable[..., Any], every: int, start: int):
        self.step, self.every, self.calls = step, every, start
        self.latest: PrecisionReport | None = None
        self._started = False
        self._past: collections.deque[tuple[int, jax.Array]] = collections.deque(maxlen=MEMORY - 1)
        self._programs: dict[Any, tuple[Any, Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        number, self.calls = self.calls, self.calls + 1
        # The first call is sampled even if a resumed run begins between two samples.
        if self._started and number % self.every:
            return self.step(*args, **kwargs)
        self._started = True
        out, figures, tensors = self._sample(args, kwargs)
        if self.latest is not None and self.latest.tensors != tensors:
            self._past.clear()  # another program, for example for another batch size
        steps, earlier = tuple(s for s, _ in self._past), tuple(x for _, x in self._past)
        self.latest = PrecisionReport(figures, tensors, earlier, (*steps, number))
        self._past.append((number, figures.largest))
        if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], dict):
            return out[0], {**out[1], METRIC: self.latest}
        return out

    def _sample(self, args: Any, kwargs: Any) -> tuple[Any, Figures, Any]:
        call = _jax.jit_call(self.step, args, kwargs)
        if call is None:
            raise ValueError(
                "step has static arguments, which watch_precision does not support. Bind them "
                "before jit: jax.jit(functools.partial(step, flag=True))."
            )
        if call.jaxpr not in self._programs:
            watched = watch(call.jaxpr)
            # The jit's own parameters, so that donation and shardings stay those of the step.
            params = _jax.jit_of(traced(call.jaxpr, watched), call.with_places())
            self._programs[call.jaxpr] = params, described(watched.tensors)
        params, tensors = self._programs[call.jaxpr]
        with unchecked():  # the report says what is not finite
            outs = call.run(params)
        results, figures = split(outs)
        return jax.tree.unflatten(call.out_tree, results), figures, tensors
