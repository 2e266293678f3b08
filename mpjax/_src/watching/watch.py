"""Steps that are watched: `measure_precision` in a program, `watch_precision` around a step."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax

from mpjax._src import _jax
from mpjax._src.errors import brief, check_callable
from mpjax._src.training.loss_scale import whole_number
from mpjax._src.trees import is_array
from mpjax._src.watching.evaluate import evaluate, split, traced
from mpjax._src.watching.figures import Figures
from mpjax._src.watching.places import watch
from mpjax._src.watching.report import PrecisionReport, described

MEMORY = 8  # samples that growth is judged by

METRIC = "precision"


def measure_precision(fun: Callable[..., Any]) -> Callable[..., tuple[Any, PrecisionReport]]:
    """Returns a function that also measures what its half tensors hold.

    Measured is all that the function computes, gradients that it takes inside included: what each
    matmul and convolution reads and gives in half, each cast to half, and other half values that
    are stored. It works on any program, with `autocast` or casts by hand, in loops, branches,
    remat, shard_map and under jit, vmap and scan. The statistics are computed on the device by
    reductions beside the program; nothing waits for the host. The gradient of the result is that
    of ``fun``; what is computed in taking it is not measured: measure the function that takes it.

    Args:
        fun: Any function that `jax.jit` can trace, such as a training step.

    Returns:
        A function of the same arguments that returns ``(out, precision)``: what ``fun`` returns,
        and a `PrecisionReport`.

    Raises:
        TypeError: If ``fun`` is no function.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> def loss(w, x):
        ...     return jnp.sum((x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32))
        >>> measured = jax.jit(mpjax.measure_precision(jax.value_and_grad(loss)))
        >>> (value, grad), precision = measured(jnp.ones((4, 2)), jnp.full((3, 4), 1e4))
        >>> [(row.part, row.headroom < 1) for row in precision.rows if row.direction == "forward"]
        [('result', True), ('cast', False), ('cast', False)]

    NVIDIA's Transformer Engine logs such statistics of its own layers for PyTorch.
    """
    check_callable(fun, "fun")

    @functools.wraps(fun)
    def measured(*args: Any, **kwargs: Any) -> tuple[Any, PrecisionReport]:
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
        out_tree: Any = None

        def flat(*arrays):
            nonlocal out_tree
            filled = [*leaves]
            for i, array in zip(places, arrays, strict=True):
                filled[i] = array
            args, kwargs = jax.tree.unflatten(tree, filled)
            outs, out_tree = jax.tree.flatten(fun(*args, **kwargs))
            return outs

        arrays = [leaves[i] for i in places]
        jaxpr = _jax.trace(flat, [_jax.aval_of(x) for x in arrays], "measured")
        found = watch(jaxpr)
        outs, figures = _differentiable(jaxpr, found)(*arrays)
        report = PrecisionReport(figures, described(found.tensors))
        return jax.tree.unflatten(out_tree, outs), report

    return measured


def _differentiable(jaxpr: Any, found: Any) -> Callable[..., tuple[list[Any], Figures]]:
    """Returns a program that is measured; its derivative is that of the program as it was."""
    inner, consts = _jax.hoisted(jaxpr)

    def run(*args):
        return evaluate(inner, found, args)

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
    """Watches what the half tensors of a jitted training step hold, in every so many steps.

    A step that is not sampled is ``step`` itself, to the byte. A sampled one is a second program,
    compiled at the first call (the one exception to one compilation): the same step, with the
    statistics of `measure_precision` beside it. Which one runs is decided by a counter on the host;
    nothing waits for the device.

    Args:
        step: The training step, best jitted and with its state donated, as the loop calls it:
            ``jax.jit(step, donate_argnums=0)``; one that is not is jitted, without donation.
        every: Every how many calls to sample: 1 or more. The first call is sampled.
        start: The number of the first call, where a run goes on.

    Returns:
        A `WatchedStep`, to be called as ``step`` is. It returns what ``step`` returns; where that
        is a pair whose second is a dictionary (of metrics), a sampled step's has an entry
        "precision", a `PrecisionReport`, which `log_metrics` writes. The last one is also its
        ``latest``.

    Raises:
        TypeError: If ``step`` is no function that jit takes.
        ValueError: If ``every`` or ``start`` is not legal.

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
                f"step={brief(step)} is compiled by something else than jax.jit. Pass a function "
                "of arrays that jax.jit compiles: nnx.split and eqx.partition make one of a module."
            )
        step = jax.jit(step)
    interval, first = whole_number(every), whole_number(start)
    if interval is None or interval < 1:
        raise ValueError(f"every={brief(every)} must be a whole number of steps, 1 or more.")
    if first is None or first < 0:
        raise ValueError(f"start={brief(start)} must be the number of a step, 0 or more.")
    return WatchedStep(step, interval, first)


class WatchedStep:
    """A step that is sampled every so many calls; `watch_precision` makes it.

    Attributes:
        step: The step, jitted.
        every: Every how many calls it is sampled.
        calls: The number of the next call.
        latest: The `PrecisionReport` of the last sampled one, or None.
    """

    def __init__(self, step: Callable[..., Any], every: int, start: int):
        self.step, self.every, self.calls = step, every, start
        self.latest: PrecisionReport | None = None
        self._started = False
        self._past: collections.deque[tuple[int, jax.Array]] = collections.deque(maxlen=MEMORY - 1)
        self._programs: dict[Any, tuple[Any, Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        number, self.calls = self.calls, self.calls + 1
        if self._started and number % self.every:
            return self.step(*args, **kwargs)
        self._started = True
        out, figures, tensors = self._sample(args, kwargs)
        if self.latest is not None and self.latest.tensors != tensors:
            self._past.clear()  # of another program: a batch of another size
        steps, earlier = [s for s, _ in self._past], [x for _, x in self._past]
        self.latest = PrecisionReport(figures, tensors, tuple(earlier), (*steps, number))
        self._past.append((number, figures.largest))
        if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], dict):
            return out[0], {**out[1], METRIC: self.latest}
        return out

    def _sample(self, args: Any, kwargs: Any) -> tuple[Any, Figures, Any]:
        call = _jax.jit_call(self.step, args, kwargs)
        if call is None:
            raise ValueError(
                "step has static arguments. Bind them before it is jitted: "
                "jax.jit(functools.partial(step, flag=True))."
            )
        if call.jaxpr not in self._programs:
            found = watch(call.jaxpr)
            program = _jax.jit_of(traced(call.jaxpr, found), call.with_places())
            self._programs[call.jaxpr] = program, described(found.tensors)
        params, tensors = self._programs[call.jaxpr]
        outs = call.run(params)
        results, figures = split(outs)
        return jax.tree.unflatten(call.out_tree, results), figures, tensors
