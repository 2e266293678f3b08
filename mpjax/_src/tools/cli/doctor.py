"""The checks of `mpjax doctor`: versions, devices, and whether 16-bit dtypes work here.

Each check runs a few small programs on the default device, and returns one row.
"""

import collections
import dataclasses
import importlib.metadata
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from mpjax._src.core.base._jax import internals
from mpjax._src.core.base.devices import DeviceFacts
from mpjax._src.core.base.dtypes import HALVES
from mpjax._src.core.policy.recommend import recommend_policy
from mpjax._src.core.training.step import TrainState, build_train_step
from mpjax._src.tools.cli import advice
from mpjax._src.tools.cli.load import describe
from mpjax._src.tools.document.model import Document, words_in
from mpjax._src.tools.hardware.devices import DeviceReport, local_facts, matmul_size, matmul_time

PACKAGES = ("mpjax", "jax", "jaxlib", "flax", "optax", "jmp")
# Shown if they are installed.
PLUGINS = (
    *("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    *("jax-rocm60-plugin", "jax-rocm7-plugin", "libtpu"),
)
PASS, FAIL, NOTE = "pass", "FAIL", "note"
TIMED = "matmul time"


@dataclasses.dataclass(frozen=True)
class Check:
    """One row."""

    dtype: str  # the 16-bit dtype
    name: str  # the name of the check
    status: str  # "pass", "FAIL", or "note" for a finding that is neither right nor wrong
    found: str  # what was measured, in words
    value: float | None = None  # the measured number, or None


def examine(platforms: Sequence[str] = ()) -> dict[str, Any]:
    """Returns all findings as plain data, with advice for ``platforms`` even if they are absent."""
    checks = [run(check, dtype) for dtype in HALVES for check in CHECKS]
    devices = local_facts()
    # Devices that are present replace the zeros of platforms that the user asked about.
    counts = {**dict.fromkeys(platforms, 0), **collections.Counter(d.platform for d in devices)}
    return {
        "versions": versions(),
        "platforms": list(counts),
        "devices": [dataclasses.asdict(facts) for facts in devices],
        "problems": [*advice.problems(list(counts), versions()), *problems_of_jax()],
        "flags": list(advice.flags(counts, os.environ)),
        "policy": str(recommend_policy()),
        "matmul_times": {
            c.dtype: c.value for c in checks if c.name.startswith(TIMED) and c.value is not None
        },
        "checks": [dataclasses.asdict(check) for check in checks],
        "ok": all(check.status != FAIL for check in checks),
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python, mpjax, its dependencies and JAX's plugins."""
    installed = {"python": platform.python_version()}
    for name in (*PACKAGES, *PLUGINS):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in PACKAGES:
                installed[name] = "not installed"
    return {**installed, "mpjax": mpjax.__version__}


def problems_of_jax() -> Iterator[dict[str, str]]:
    """Yields what plans and reports lack in the installed JAX, as known problems are told."""
    told = {"package": f"jax {jax.__version__}", "source": "docs/release.md#internals-of-jax"}
    if said := internals.untested():
        advice = "compare a few steps with float32 (mpjax.compare), or install an older JAX"
        yield {**told, "what": said, "advice": advice}
    for place, row in internals.missing():
        otherwise = "policies that cast arguments once, such as O3:bfloat16, need none of it"
        advice = "nothing else is affected" if row.optional else otherwise
        yield {**told, "what": f"it has no {place} ({row.breaks})", "advice": advice}


def run(check: Callable[[np.dtype], Check], dtype: np.dtype) -> Check:
    """Runs a check. If it raises an exception, the result is a failed check with that error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # slow 16-bit dtypes are reported elsewhere
            return check(dtype)
    except Exception as error:
        # A check that raised has returned no row, which would have its name.
        name = (check.__doc__ or "").removesuffix(".")
        return Check(dtype.name, name, FAIL, describe(error))


# ---- the checks ----------------------------------------------------------------------------------


def matmul(dtype: np.dtype) -> Check:
    """matmul."""
    size = 256
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(size, size)), dtype) for _ in range(2))
    got = np.asarray(jax.jit(jnp.matmul)(a, b), np.float64)
    a64, b64 = np.asarray(a, np.float64), np.asarray(b, np.float64)
    want = a64 @ b64
    # Products are exact in float32. The result is rounded once, and so is every float32 sum,
    # which matrix units may truncate.
    unit = float(jnp.finfo(dtype).eps) / 2
    bound = unit * np.abs(want) + size * 2.0**-23 * (np.abs(a64) @ np.abs(b64))
    ratio = float(np.max(np.abs(got - want) / bound))
    status = PASS if ratio <= 1 else FAIL
    result = f"error is {ratio:.2f} of the bound for float32 sums that are rounded once"
    return Check(dtype.name, f"matmul, {size} x {size}", status, result, ratio)


def training(dtype: np.dtype) -> Check:
    """training."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(64, 32)), jnp.float32)
    params = {
        "a": jnp.asarray(rng.normal(size=(32, 32)) / 6, jnp.float32),
        "b": jnp.asarray(rng.normal(size=(32, 8)) / 6, jnp.float32),
    }

    def loss_fn(params, batch):
        return jnp.mean((jnp.tanh(batch @ params["a"]) @ params["b"] - batch[:, :8]) ** 2)

    state, losses = _train(loss_fn, dtype, params, x, steps=10)
    finite = bool(np.isfinite(losses).all()) and not int(state.skipped_steps)
    status = PASS if finite and losses[-1] < losses[0] else FAIL
    result = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {int(state.skipped_steps)} steps skipped"
    return Check(dtype.name, f"10 steps of mixed_{dtype.name}", status, result, losses[-1])


def overflow(dtype: np.dtype) -> Check:
    """overflow."""
    params = {"w": jnp.zeros((8, 8))}
    # The loss is 0, but each entry of its gradient is the sum of eight such numbers.
    huge = jnp.full((8, 8), float(jnp.finfo(dtype).max) / 4)
    state, losses = _train(lambda p, x: jnp.sum(x @ p["w"]), dtype, params, huge, steps=1)
    scale = float(state.loss_scale.loss_scale)
    skipped = int(state.skipped_steps) == 1 and not int(state.step)
    kept = not np.asarray(state.params["w"]).any()
    ok = np.isfinite(losses[0]) and skipped and kept and scale == 2.0**15
    result = f"{'skipped' if skipped else 'NOT skipped'}, loss scale 2^16 -> 2^{np.log2(scale):g}"
    return Check(dtype.name, "a gradient that overflows", PASS if ok else FAIL, result, scale)


def subnormals(dtype: np.dtype) -> Check:
    """subnormals."""
    # Four times the smallest number is subnormal too, so a device that flushes returns 0.
    tiny = jnp.finfo(dtype).smallest_subnormal
    got = jax.jit(lambda x, y: x * y)(jnp.asarray(tiny, dtype), jnp.asarray(4, dtype))
    kept = bool(np.asarray(got, np.float64) == 4 * float(tiny))
    power = int(np.log2(float(tiny)))
    result = f"4 x 2^{power} is {'exact' if kept else 'flushed to zero'}"
    return Check(dtype.name, "subnormal numbers", NOTE, result, float(np.asarray(got, np.float64)))


def speed(dtype: np.dtype) -> Check:
    """matmul time."""
    size, ratio = matmul_size(), matmul_time(dtype, 0.5)
    result = f"{ratio:.2f} times as long as float32, timed side by side"
    return Check(dtype.name, f"{TIMED}, {size} x {size}", NOTE, result, ratio)


CHECKS = (matmul, training, overflow, subnormals, speed)


def _train(
    loss_fn: Callable[..., Any], dtype: np.dtype, params: Any, batch: Any, steps: int
) -> tuple[TrainState, list[float]]:
    # A dynamic scale for bfloat16 too, which needs none: the check of an overflow reads it.
    init, step = build_train_step(
        loss_fn, optax.sgd(0.1), f"mixed_{dtype.name}", loss_scale="dynamic"
    )
    state, step = init(params), jax.jit(step)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def shown(results: Mapping[str, Any]) -> Document:
    """Returns what the command shows of `examine`."""
    facts = tuple(DeviceFacts(**each) for each in results["devices"])
    devices = DeviceReport(facts, jax.__version__, results["matmul_times"]).document()
    checks = ((c["dtype"], c["name"], c["status"], c["found"]) for c in results["checks"])
    flags = ((f["variable"], f["flag"], f["now"] or "-", f["why"]) for f in results["flags"])
    return Document(
        "This machine",
        ", ".join(f"{name} {version}" for name, version in results["versions"].items()),
        (
            f"Recommended policy: {results['policy']}",
            *devices.notes,
            *([advice.ONE_GPU] if advice.GPU in results["platforms"] else []),
        ),
        (
            *devices.tables,
            words_in("Tests", ("dtype", "test", "", "found"), checks),
            words_in("Flags", ("set in", "worth trying, not measured", "now", "why"), flags),
        ),
        tuple(
            "{package}: {what}. What to do: {advice}. ({source})".format(**problem)
            for problem in results["problems"]
        ),
    )
