"""Case "searches": `tune` beside searches of others, on the same sums and programs.

Of 220 sums of 9 errors, the optimum is known: the share of the sums where a search is within 5% of
it, its mean cost relative to the optimum, and the mean number of sets that it measures, single
places included. On programs, `tune` runs with each search in place of its own, so that all measure
by the same mask, and what they find is compiled and measured.
"""

import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models import MODELS, SMALL
from benchmarks.on_cpu.codes import drawn
from benchmarks.on_cpu.searching import KINDS, RIVALS, SEEDS, Sums
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.tools.hardware.targets import find_target
from mpjax._src.tools.instruments import tune
from mpjax._src.tools.instruments.programs import make_program
from mpjax._src.tools.instruments.trials import ops_of, worst

OURS = "mpjax"
SEARCHES = {OURS: None, **RIVALS}
SUMS = "sums of 9 errors"
TARGET, MOST = "h100", 1000
PART = 4  # the tolerance is this part of the policy's error
NEAR = 1.05
ROUNDS = 5


def case(smoke: bool) -> Iterator[tuple[str, Any]]:
    for name in SEARCHES:
        yield f"{SUMS}, {name}", functools.partial(of_sums, name, SEEDS[:1] if smoke else SEEDS)
    for program in [*PROGRAMS][-1:] if smoke else PROGRAMS:
        for name in SEARCHES:
            yield f"{program}, {name}", functools.partial(of_program, program, name)


# ---- sums ----------------------------------------------------------------------------------------


def of_sums(name: str, seeds: range) -> dict[str, Any]:
    """Returns how a search fares on sums of errors."""
    costs, counts = [], []
    for kind, seed in itertools.product(KINDS, seeds):
        sums = Sums(seed, 9, *kind)
        if name == OURS:
            search = sums.search()
            search.run()
            found = search.best
            counts.append(len(sums.terms) + len(search.tried))  # each alone, too
        else:
            enough = functools.cache(sums.enough)
            found = RIVALS[name](len(sums.terms), enough, sums.cost)
            counts.append(len(sums.measured))
        if found is None or sums.error(found) > sums.tolerance:
            raise ValueError(f"{name} found nothing that is enough: {kind}, {seed}")
        costs.append(sums.cost(found) / sums.cheapest())
    return {
        "cases": len(costs),
        "near": float(np.mean(np.array(costs) <= NEAR)),
        "cost": float(np.mean(costs)),
        "measured": float(np.mean(counts)),
    }


# ---- programs ------------------------------------------------------------------------------------


def model(name: str, **sizes: Any) -> tuple[Any, tuple[Any, ...]]:
    loss, params, rest, batch, _ = MODELS[name](**SMALL[name] | sizes)
    args = drawn(params, 0), drawn(rest, 1), drawn(batch, 2, data=True)
    return lambda params: loss(params, *args[1:])[0], args[:1]


def fourier() -> tuple[Any, tuple[Any, ...]]:
    """Returns the loss of an MLP on sines of large phases, which rounding spoils."""

    def loss(params, x, y):
        with jax.named_scope("features"):
            phase = x @ params["frequencies"]
            h = jnp.concatenate([jnp.sin(phase), jnp.cos(phase)], axis=-1)
        for name in ("first", "second"):
            with jax.named_scope(name):
                h = jax.nn.gelu(h @ params[name])
        with jax.named_scope("last"):
            return jnp.mean((h @ params["last"] - y) ** 2)

    shapes = {"first": (64, 128), "second": (128, 128), "last": (128, 8)}
    params = drawn({k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}, 0)
    like = jax.ShapeDtypeStruct((8, 32), jnp.float32), jax.ShapeDtypeStruct((64, 8), jnp.float32)
    frequencies, x = drawn(like, 1, data=True)
    return loss, ({**params, "frequencies": 8 * frequencies}, x, jnp.sin(x))


POLICY = get_policy("mixed_bfloat16")
PROGRAMS = {  # with the policy that is tuned
    # Of these operations each is a place, not only matmuls: 63 of them.
    "gpt2, 2 layers": (
        functools.partial(model, "gpt2", layers=2),
        POLICY.with_ops(half=("add", "mul", "sub", "div")),
    ),
    "vit": (functools.partial(model, "vit"), POLICY),
    "fourier features": (fourier, POLICY),
}


class Rival(tune.Tuner):
    """Runs a program as `tune` does; with a rival's algorithm it searches by that."""

    algorithm: Any = None

    def _search(self, places, tolerance):
        if self.algorithm is None:
            return super()._search(places, tolerance)

        def ops(chosen):
            return ops_of(places[i] for i in chosen)

        def enough(chosen):
            return worst(self.masked(ops(chosen))[0]) <= tolerance

        found = self.algorithm(
            len(places), enough, lambda chosen: self.places.seconds(ops(chosen), self.target)
        )
        return [places[i] for i in sorted(found)], 0.0


def of_program(program: str, name: str) -> dict[str, Any]:
    """Returns what a search finds in a program, and what it takes."""
    make_loss, policy = PROGRAMS[program]
    loss, args = make_loss()
    make = functools.partial(
        make_program, "tune", loss, args=args, kwargs={}, argnums=0, has_aux=False
    )
    start = time.process_time()
    trial = Rival(make, policy, MOST, "auto", find_target(TARGET))
    trial.algorithm = RIVALS.get(name)
    tolerance = worst(trial.trained(policy)[0]) / PART
    told = trial.report(tolerance)
    seconds = time.process_time() - start
    return {
        "places": len(trial.places.finest()),
        "float32": told.places,
        "runs": told.runs,
        "processor_seconds": seconds,
        "gradients": seconds / gradient_seconds(loss, args),
        "cost": told.cost,
        "error": told.error / tolerance,
        "met": told.met,
    }


def gradient_seconds(loss: Any, args: tuple[Any, ...]) -> float:
    """Returns the processor time of one gradient in float32."""
    gradient = jax.jit(jax.value_and_grad(loss))
    jax.block_until_ready(gradient(*args))
    start = time.process_time()
    for _ in range(ROUNDS):
        jax.block_until_ready(gradient(*args))
    return (time.process_time() - start) / ROUNDS
