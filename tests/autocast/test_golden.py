"""Golden plans: what autocast computes in and keeps for the backward pass, as data.

    python tests/autocast/test_golden.py    writes tests/golden/plans.json anew

Of each program that the suite knows: the bytes kept from the forward to the backward pass, by
dtype, and in which dtypes the gradient's matmuls run. A difference is either meant, and its
commit says why, or a bug.
"""

import collections
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex

GOLDEN = Path(__file__).parent / "golden" / "plans.json"
HALVES = ("bfloat16", "float16")
KINDS = ("program", "random", "model")  # the quickest first


def programs(kind=""):
    """Yields (name, function, arguments), of all kinds or one, differentiable in the first one."""
    made = {"program": small, "random": random, "model": models}
    for name in [kind] if kind else made:
        yield from made[name]()


def small():
    from programs import PROGRAMS, W, X

    for name, fun in PROGRAMS.items():
        yield f"program {name}", fun, (W, X)


def models():
    from models import MODELS

    for name, make in MODELS.items():
        loss, params = make()
        yield f"model {name}", loss, (params,)


def random():
    from programs import BINARY, NOT_REVERSED, UNARY, build

    everything = [name for name in (*UNARY, *BINARY) if name not in NOT_REVERSED]
    for seed in range(60):
        rng = np.random.default_rng(seed)
        steps = [
            (str(rng.choice(everything)), int(rng.integers(8)), int(rng.integers(8)), False)
            for _ in range(7)
        ]
        fun = build(steps)
        args = [jnp.asarray(rng.uniform(-1, 1, (4, 4)), jnp.float32) for _ in range(2)]
        yield f"random {seed}", lambda *xs, fun=fun: jnp.sum(fun(*xs)["last"]), tuple(args)


def plan(fun, args, half):
    """Returns the golden plan of a loss: kept bytes, and matmuls, by dtype."""
    from support import MATMULS, equations

    import mpjax

    auto = mpjax.autocast(fun, f"mixed_{half}")

    def residuals(*args):
        _, back = jax.vjp(lambda p: auto(p, *args[1:]), args[0])
        return [x for x in jax.tree.leaves(back) if isinstance(x, jax.Array)]

    jaxpr = jax.make_jaxpr(residuals)(*args).jaxpr
    kept: collections.Counter = collections.Counter()
    variables = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}
    for v in variables - set(jaxpr.invars) - set(jaxpr.constvars):
        kept[str(v.aval.dtype)] += int(np.prod(v.aval.shape)) * v.aval.dtype.itemsize
    gradient = jax.make_jaxpr(jax.grad(auto, allow_int=True))(*args)
    matmuls: collections.Counter = collections.Counter()
    for eqn in equations(gradient):
        if eqn.primitive.name in MATMULS:
            dtypes = [str(v.aval.dtype) for v in (*eqn.invars[:2], *eqn.outvars)]
            matmuls[" ".join(dtypes)] += 1
    return {"kept": dict(sorted(kept.items())), "matmuls": dict(sorted(matmuls.items()))}


def plans(half, kind=""):
    return {f"{name}, {half}": plan(fun, args, half) for name, fun, args in programs(kind)}


def test_every_kind_is_compared():
    assert {name.split()[0] for name in json.loads(GOLDEN.read_text())} == set(KINDS)


# The quick tier compares each kind in one 16-bit dtype, but for random programs.
CASES = [
    pytest.param(kind, half, marks=[pytest.mark.thorough] * (kind == "random" or place % 2 != turn))
    for place, kind in enumerate(KINDS)
    for turn, half in enumerate(HALVES)
]


@pytest.mark.skipif(jax.__version__ != "0.10.2", reason="plans of jax 0.10.2")
@pytest.mark.parametrize(("kind", "half"), CASES)
def test_plans_are_as_they_were(kind, half):
    everything, got = json.loads(GOLDEN.read_text()), plans(half, kind)
    want = {k: v for k, v in everything.items() if k.startswith(kind) and k.endswith(f", {half}")}
    assert want.keys() == got.keys()
    changed = {name: (want[name], got[name]) for name in want if want[name] != got[name]}
    assert not changed, f"{len(changed)} plans changed: {json.dumps(changed, indent=1)[:20000]}"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import conftest  # noqa: F401

    everything = {name: value for half in HALVES for name, value in plans(half).items()}
    GOLDEN.write_text(json.dumps(everything, indent=1) + "\n")
