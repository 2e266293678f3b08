"""A loop primitive that mpjax has never seen needs two rows, and no other file knows its name."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal, Primitive
from jax.extend.core.primitives import scan_p
from jax.interpreters import ad, mlir
from support import thorough_but

import mpjax
from mpjax._src.core.base import _jax, higher_order, rules
from mpjax._src.tools.watching.order import backward_order

INSIDE = Path(mpjax.__file__).parent / "_src"

# ---- the primitive: a scan whose program is the parameter `body` --------------------------------

scan2_p = Primitive("scan2")
scan2_p.multiple_results = True


def run_scan(*args, body, **params):
    return scan_p.bind(*args, jaxpr=body, **params)


def with_scan2(fun):
    """Returns a function with scan2 in place of each scan, from the same lines."""

    @functools.wraps(fun)
    def run(*args):
        closed = jax.make_jaxpr(fun)(*args)
        env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env |= zip(closed.jaxpr.invars, jax.tree.leaves(args), strict=True)

        def read(atom):
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn in closed.jaxpr.eqns:
            ins = [read(atom) for atom in eqn.invars]
            with _jax.location(eqn, eqn.source_info.name_stack):
                if eqn.primitive is scan_p:
                    params = {**eqn.params}
                    outs = scan2_p.bind(*ins, body=params.pop("jaxpr"), **params)
                else:
                    outs = _jax.bind(eqn, ins)
            env |= zip(eqn.outvars, outs, strict=True)
        outs = [read(atom) for atom in closed.jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(fun, *args)), outs)

    return run


def filled(args, moving, given):
    """Returns operands with some of them replaced."""
    return [*({**dict(enumerate(args)), **dict(zip(moving, given, strict=True))}.values())]


def jvp(primals, tangents, **params):
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    linear = []

    def forward(*primals):
        some = [primals[i] for i in moving]
        outs, pushed = jax.linearize(
            lambda *x: run_scan(*filled(primals, moving, x), **params), *some
        )
        converted, residuals = jax.closure_convert(pushed, *some)
        linear.append(converted)
        return outs, residuals

    outs, residuals = with_scan2(forward)(*primals)
    return outs, with_scan2(linear[-1])(*[tangents[i] for i in moving], *residuals)


def transpose(cts, *args, **params):
    moving = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    known = [None if i in moving else x for i, x in enumerate(args)]

    def back(known, cts):
        pushed = lambda *x: run_scan(*filled(known, moving, x), **params)  # noqa: E731
        return jax.linear_transpose(pushed, *[args[i].aval for i in moving])(cts)

    found = with_scan2(back)(known, [*map(ad.instantiate_zeros, cts)])
    return filled([None] * len(args), moving, found)


scan2_p.def_impl(run_scan)
scan2_p.def_abstract_eval(lambda *a, body, **p: scan_p.abstract_eval(*a, jaxpr=body, **p)[0])
mlir.register_lowering(scan2_p, mlir.lower_fun(run_scan, multiple_results=True))
ad.primitive_jvps[scan2_p], ad.primitive_transposes[scan2_p] = jvp, transpose


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    """Registers it: its two rows."""
    monkeypatch.setattr(rules, "RULES", {**rules.RULES})
    rules.row("scan2", rules.PROGRAM)
    loop = ("length", "reverse", "unroll")
    monkeypatch.setitem(higher_order.HIGHER_ORDER, "scan2", higher_order.scanning("body", loop))


# ---- what mpjax says of it ----------------------------------------------------------------------

HALF = "mixed_bfloat16"
W, X = jnp.eye(32) * 0.6 + 0.01, jnp.linspace(-1, 1, 128).reshape(4, 32)


def layers(w, x):
    """A recurrent layer, whose states are summed too, from the last row to the first."""

    def step(carry, row):
        h, total = carry
        h = jnp.tanh(h @ w + row)
        return (h, total + h), jnp.exp(row) * h

    (h, total), ys = jax.lax.scan(step, (x[0], x[0]), x, reverse=True)
    return jnp.mean(h * total) + jnp.mean(ys)


def test_new_loop_primitive_computes_and_differentiates_as_scan():
    jaxpr = jax.make_jaxpr(jax.grad(with_scan2(layers)))(W, X)
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    assert names.count("scan2") == 2 and "scan" not in names
    both = [jax.jit(jax.grad(fun))(W, X) for fun in (layers, with_scan2(layers))]
    np.testing.assert_array_equal(*both)


@pytest.mark.parametrize("gradient", [False, True])
def test_autocast_runs_a_new_loop_primitive_in_16_bits(gradient):
    plain, new = (mpjax.autocast(fun, "mixed_bfloat16") for fun in (layers, with_scan2(layers)))
    if gradient:
        plain, new = jax.value_and_grad(plain), jax.value_and_grad(new)
    text = str(jax.make_jaxpr(new)(W, X))
    assert "scan2[" in text and "scan[" not in text and "bf16[32,32]" in text
    for one, other in zip(*(jax.tree.leaves(jax.jit(f)(W, X)) for f in (plain, new)), strict=True):
        np.testing.assert_array_equal(one, other)


def accumulated(x):
    """A sum in 16 bits of more terms than they can count."""
    return jax.lax.scan(lambda total, row: (total + jnp.sin(row), None), x[0] * 0, x)[0]


def step(fun):
    """Returns the last report of a training step that is watched."""

    @jax.jit
    def train(w, x):
        loss, grad = jax.value_and_grad(mpjax.autocast(fun, "mixed_float16"))(w, x)
        return w - 0.1 * grad, {"loss": loss}

    return mpjax.watch_precision(train)(W, X)[1]["precision"]


def order(fun):
    """Returns the order in which the gradients are finished."""
    vjp = jax.make_jaxpr(lambda w, x, ct: jax.vjp(fun, w, x)[1](ct))(W, X, 1.0)
    return backward_order(vjp.jaxpr)


# Each report, and what it says of the inside of the loop.
REPORTS = {
    "explain": (lambda fun: mpjax.explain(fun, HALF)(W, X), "dot_general 1"),
    "explain gradient": (lambda fun: mpjax.explain(fun, HALF, argnums=0)(W, X), "dot_general 3"),
    "compare": (lambda fun: mpjax.compare(fun, HALF, argnums=None)(W, X), "x scan 3"),
    "compare gradient": (lambda fun: mpjax.compare(fun, HALF, argnums=0)(W, X), "backward w scan"),
    "find_nonfinite": (lambda fun: mpjax.find_nonfinite(fun)(W, X * 100), "exp produced Inf"),
    "find_nonfinite gradient": (
        lambda fun: mpjax.find_nonfinite(fun, "mixed_float16", argnums=0, loss_scale=2.0**24)(W, X),
        "iteration scan 0",
    ),
    "watch_precision gradient": (step, "backward/dot_general/result, turn"),
    "lint gradient": (lambda fun: mpjax.lint(fun, argnums=0)(W, X), "no findings"),
    "order of gradients": (order, "stride=1, descending=False"),
}
QUICK = [name for name in REPORTS if name not in ("explain", "compare", "find_nonfinite")]


@pytest.mark.parametrize("name", thorough_but(REPORTS, *QUICK))
def test_reports_of_a_new_loop_primitive_equal_those_of_scan(name):
    report, words = REPORTS[name]
    plain, new = (
        " ".join(str(report(fun)).replace("scan2", "scan").split())
        for fun in (layers, with_scan2(layers))
    )
    # JAX moves casts of constants out of a scan, to where no operation of the program is known.
    new = re.sub(r"(2 KiB bf16\[32,32\]) 4 scan \S+", r"\1", new)
    assert new == plain and words in plain


def test_lint_finds_a_sum_that_a_new_loop_primitive_carries():
    x = jax.ShapeDtypeStruct((300, 4), jnp.bfloat16)
    plain, new = (mpjax.lint(fun)(x) for fun in (accumulated, with_scan2(accumulated)))
    assert [f.rule for f in new.findings] == ["half-accumulator"] and str(new) == str(plain)


# ---- that no other file knows it ----------------------------------------------------------------

KNOW = {f"core/base/{name}.py" for name in ("rules", "higher_order")} | {
    f"core/program/{name}.py" for name in ("rebuild", "interpret")
}
LOOPS = re.compile(
    r"""["'](scan|while|cond)["']|params\[["'](length|reverse|unroll|branches|(cond|body)_jaxpr)["']"""
)


def test_no_other_file_names_a_loop_or_its_parameters():
    # Instructions of compiled programs have names of their own, "while" among them.
    paths = {str(path.relative_to(INSIDE)): path for path in INSIDE.rglob("*.py")}
    asking = {name for name, path in paths.items() if LOOPS.search(path.read_text())}
    assert {name for name in asking if not name.startswith("tools/hardware/")} <= KNOW
