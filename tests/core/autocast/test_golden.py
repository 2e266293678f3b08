"""Golden programs: what autocast makes of them, equation by equation.

    python tests/core/autocast/test_golden.py    records golden/jaxprs.json again (three minutes)

Of each program that the suite knows, under several policies: hashes of the printed jaxprs, forward
and gradient; in which dtypes the gradient's matmuls run; and the bytes kept from the forward to the
backward pass, by dtype. A difference is either meant, and its commit says why and changes nothing
else, or a bug. The command prints which programs changed, and how. A jaxpr is a fact of one version
of JAX: under another than the recorded one, nothing is compared.
"""

import collections
import contextlib
import importlib.metadata
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex

from mpjax._src.core.planner import rounding

SMALL = rounding.SMALL
GOLDEN = Path(__file__).parent / "golden" / "jaxprs.json"
POLICIES = {
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
    "lean": "mixed_bfloat16,storage=lean",
    "number": "mixed_bfloat16,storage=0.5",
    "8bit": "mixed_bfloat16,storage=8bit",
    "replaced": "mixed_bfloat16,fused_attention=true,chunked_loss=true",
}
KINDS = ("program", "construct", "model", "random", "spelling", "attention", "loss", "benchmark")
FOR_GPUS = ("construct", "spelling", "attention", "benchmark")  # traced for an H100
# What has attention and losses to replace. Those of two kinds are replaced under every policy.
REPLACED = tuple(f"benchmark {name}" for name in ("gpt2", "bert", "vit", "llama"))
LIBRARIES = ("jax", "flax", "equinox")  # whose versions the programs depend on
LONGEST = 20_000  # letters of a failure's message


# ---- the programs -------------------------------------------------------------------------------


def programs(kind=""):
    """Yields (name, function, arguments), of all kinds or one, differentiable in the first one."""
    made = {
        "program": small,
        "construct": lambda: of("construct", "CONSTRUCTS"),
        "model": models,
        "random": random,
        "spelling": lambda: of("spelling", "SPELLINGS"),
        "attention": lambda: of("attention", "ATTENTIONS"),
        "loss": lambda: of("loss", "LOSSES"),
        "benchmark": benchmarks,
    }
    for name in [kind] if kind else made:
        yield from made[name]()


def small():
    from programs import PROGRAMS, W, X

    for name, fun in PROGRAMS.items():
        yield f"program {name}", fun, (W, X)


def of(kind, table):
    import constructs

    for name, (fun, args) in getattr(constructs, table).items():
        yield f"{kind} {name}", fun, args


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


def benchmarks():
    """The models of the gate of memory and bytes, in its sizes."""
    from benchmarks.gate import CASES
    from benchmarks.models import MODELS

    for name, (sizes, _) in CASES.items():
        loss, params, rest, batch, _ = MODELS[name](**sizes)
        yield f"benchmark {name}", loss, (params, rest, batch)


# ---- what is recorded ---------------------------------------------------------------------------


def compared(want, policy, kind=""):
    """Returns the rows of all programs. Of those whose hashes are as wanted, nothing is counted."""
    rows = {}
    for name, fun, args in programs(kind):
        if policy == "replaced" and name not in REPLACED:
            continue
        with target(name):
            rows[f"{name}, {policy}"] = row(name, fun, args, policy, want.get(f"{name}, {policy}"))
    return rows


@contextlib.contextmanager
def target(name):
    """Gives the programs of a kind what they are traced for: a device, and arrays of any size."""
    from mpjax._src.core.base.devices import traced_for

    kind = name.split()[0]
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(rounding, "SMALL", SMALL if kind == "benchmark" else 1)
        if kind == "loss":
            stack.enter_context(fixed_losses())
        if kind in FOR_GPUS:
            stack.enter_context(traced_for("h100"))
        yield


@contextlib.contextmanager
def fixed_losses():
    """Small losses run by several blocks, of labels that no seed changes."""
    import test_cross_entropies as losses

    from mpjax._src.replacements import chunked

    labels = np.arange(losses.B * losses.T).reshape(losses.B, losses.T) % losses.WORDS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "ROWS", 16)
        patch.setattr(chunked, "OPERATIONS_PER_BYTE", 1)
        patch.setattr(losses, "LABELS", labels)
        patch.setattr(losses, "MASK", labels % 3 > 0)
        yield


def row(name, fun, args, policy, want):
    """Returns what is recorded of a program: the wanted row itself, if its hashes are the same."""
    import constructs
    from jaxprs import digest

    import mpjax

    auto = mpjax.autocast(fun, POLICIES[policy] + constructs.SETTINGS.get(name, ""))
    forward, shape = jax.make_jaxpr(auto, return_shape=True)(*args)
    has_aux = isinstance(shape, tuple)  # a loss, and what the model changes
    gradient = jax.make_jaxpr(jax.grad(auto, has_aux=has_aux, allow_int=True))(*args)
    hashes = {"forward": digest(forward), "gradient": digest(gradient)}
    if want and hashes.items() <= want.items():
        return want
    return {**hashes, "matmuls": matmuls(gradient), "kept": kept(auto, args, has_aux)}


def matmuls(gradient):
    """Returns the number of matmuls, by the dtypes of operands and result."""
    from support import MATMULS, equations

    counts: collections.Counter = collections.Counter()
    for eqn in equations(gradient):
        if eqn.primitive.name in MATMULS:
            counts[" ".join(str(v.aval.dtype) for v in (*eqn.invars[:2], *eqn.outvars))] += 1
    return dict(sorted(counts.items()))


def kept(auto, args, has_aux):
    """Returns the bytes that the forward pass hands to the backward pass, by dtype."""

    def residuals(*args):
        _, back, *_ = jax.vjp(lambda p: auto(p, *args[1:]), args[0], has_aux=has_aux)
        return [x for x in jax.tree.leaves(back) if isinstance(x, jax.Array)]

    jaxpr = jax.make_jaxpr(residuals)(*args).jaxpr
    counts: collections.Counter = collections.Counter()
    variables = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}
    for v in variables - set(jaxpr.invars) - set(jaxpr.constvars):
        counts[str(v.aval.dtype)] += int(np.prod(v.aval.shape)) * v.aval.dtype.itemsize
    return dict(sorted(counts.items()))


def changes(want, got):
    """Returns a line for each program that is another one, and says how."""
    lines = [f"{name}: no longer there" for name in want.keys() - got.keys()]
    for name, row in got.items():
        old = want.get(name)
        if old is None:
            lines.append(f"{name}: new")
        elif old != row:
            parts = [key for key in ("forward", "gradient") if old[key] != row[key]]
            parts += [
                f"{key} {dtypes} {old[key].get(dtypes, 0)} -> {row[key].get(dtypes, 0)}"
                for key in ("matmuls", "kept")
                for dtypes in sorted({*old[key], *row[key]})
                if old[key].get(dtypes) != row[key].get(dtypes)
            ]
            lines.append(f"{name}: {', '.join(parts)}")
    return lines


def versions():
    return {name: importlib.metadata.version(name) for name in LIBRARIES}


def recorded():
    return json.loads(GOLDEN.read_text())


# ---- tests --------------------------------------------------------------------------------------

RECORDED_WITH = recorded()["versions"] if GOLDEN.exists() else versions()
OF_THIS_JAX = pytest.mark.skipif(
    jax.__version__ != RECORDED_WITH["jax"],
    reason=f"jaxprs were recorded with JAX {RECORDED_WITH['jax']}",
)
# The quick tier compares the small programs. CI compares the others too (make test-part).
QUICK = (
    "program bfloat16",
    "construct bfloat16",
    "construct 8bit",
    "attention bfloat16",
)
CASES = [
    pytest.param(kind, policy, marks=[pytest.mark.thorough] * (f"{kind} {policy}" not in QUICK))
    for kind in KINDS
    for policy in POLICIES
    if policy != "replaced" or any(name.startswith(kind) for name in REPLACED)
]


def test_a_changed_program_is_described():
    old = {"forward": "a", "gradient": "b", "matmuls": {"half": 2}, "kept": {"float32": 8}}
    new = {"forward": "a", "gradient": "c", "matmuls": {"half": 1, "full": 1}, "kept": {}}
    assert changes({"p": old, "q": old, "r": old}, {"p": new, "q": old, "s": old}) == [
        "r: no longer there",
        "p: gradient, matmuls full 0 -> 1, matmuls half 2 -> 1, kept float32 8 -> 0",
        "s: new",
    ]


def test_golden_programs_are_recorded_for_every_kind_and_policy():
    rows = recorded()["programs"]
    assert {name.split()[0] for name in rows} == {*KINDS}
    assert {name.rpartition(", ")[2] for name in rows} == {*POLICIES}


@OF_THIS_JAX
@pytest.mark.parametrize(("kind", "policy"), CASES)
def test_plans_of_golden_programs_are_as_recorded(kind, policy):
    everything = recorded()["programs"]
    want = {k: v for k, v in everything.items() if k.startswith(kind) and k.endswith(f", {policy}")}
    lines = changes(want, compared(want, policy, kind))
    assert not lines, (
        f"{len(lines)} programs changed (recorded with {RECORDED_WITH}, here {versions()}):\n"
        + "\n".join(lines)[:LONGEST]
    )


if __name__ == "__main__":
    root = Path(__file__).parents[3]
    sys.path[:0] = [str(root / "tests" / "helpers"), str(root / "tests"), str(root)]
    import conftest  # noqa: F401

    old = recorded()["programs"] if GOLDEN.exists() else {}
    new = {k: v for policy in POLICIES for k, v in compared(old, policy).items()}
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in new.items())
    head = f'"versions": {json.dumps(versions())}'
    GOLDEN.write_text(f'{{{head}, "programs": {{\n{rows}\n}}}}\n')
    lines = changes(old, new)
    print(*lines, f"{len(lines)} of {len(new)} programs changed", sep="\n")
