"""The derivative that is not finite is named by the operation that it belongs to, not by its parts.

A point of the table is one where the operation itself is finite, and its derivative is not.
"""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import xlogy
from primitives import ELEMENTWISE
from support import thorough_but

import mpjax
from mpjax._src.tools.instruments import programs

HALF_PI = np.float32(np.pi / 2)

# The operand that is differentiated, and all operands.
POINTS = {
    "sqrt": (0, 0.0),
    "cbrt": (0, 0.0),
    "asin": (0, 1.0),
    "acos": (0, -1.0),
    "acosh": (0, 1.0),
    "digamma": (0, 1e-20),
    "integer_pow -1": (0, 1e-20),
    "integer_pow -4": (0, 1e-9),
    "div": (1, 2.0, 1e-20),
    "rem": (1, 1e30, 1e-20),
    "pow": (0, 0.0, 0.5),
    "atan2": (0, 0.0, 0.0),
    "igamma": (1, 0.5, 0.0),
    "igammac": (1, 0.5, 0.0),
    "polygamma": (1, 0.0, 1e-20),
    "regularized_incomplete_beta": (2, 0.5, 0.5, 0.0),
}
# The same in float16; in float32 the derivative is finite there.
NARROW = {
    "cbrt": (0, 6e-8),
    "rsqrt": (0, 6e-8),
    "log": (0, 6e-8),
    "lgamma": (0, 6e-8),
    "tan": (0, HALF_PI),
    "integer_pow -1": (0, 2e-3),
    "div": (1, 2.0, 2e-3),
    "pow": (0, 6e-8, 0.25),
}
EXPRESSIONS = {
    "sqrt": "0.5 / sqrt(0)",
    "cbrt": "cbrt(0)**-2",
    "integer_pow -1": "1e-20**-2",
    "div": "1e-20**-2",
    "rem": "1e+30 / 1e-20",
    "pow": "0**(0.5 - 1)",
    "atan2": "0 / (0**2 + 0**2)",
    "digamma": "polygamma(1, 1e-20)",
}
# Elsewhere an operation is not finite either, or its derivative is.
FINITE = {
    *("neg", "abs", "sign", "floor", "ceil", "round", "tanh", "logistic", "erf", "atan", "asinh"),
    *("square", "exp", "exp2", "expm1", "sinh", "cosh", "sin", "cos", "erfc", "one_minus_square"),
    *("bessel_i0e", "bessel_i1e", "add", "sub", "mul", "add_any", "max", "min", "clamp"),
    *("log1p", "log2", "atanh", "erf_inv", "igamma_grad_a", "zeta"),
    *(f"integer_pow {y}" for y in (3, 4, 5, 20, 1000)),
}


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """Leaves out the verdict on the loss scale, for which the program is compiled."""
    monkeypatch.setattr(programs.Program, "largest_finite_scale", lambda *_: None)


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"# {text}"))
    return f"{__file__}:{number}"


def report_of(fun, *operands, policy=None, moving=0, dtype="float32"):
    arrays = [jnp.asarray(np.asarray(x, np.float32).astype(dtype)) for x in operands]

    def loss(*args):
        return jnp.sum(fun(*args).astype("float32"))

    return mpjax.find_nonfinite(loss, policy, argnums=moving)(*arrays)


def test_every_elementwise_operation_has_a_test_of_its_derivative():
    assert set(ELEMENTWISE) <= set(POINTS) | set(NARROW) | FINITE
    assert FINITE.isdisjoint([*POINTS, *NARROW])


@pytest.mark.parametrize(
    "key", thorough_but(POINTS, "sqrt", "integer_pow -1", "div", "rem", "pow", "atan2", "digamma")
)
def test_find_nonfinite_names_the_derivative_of_an_elementwise_operation(key):
    moving, *operands = POINTS[key]
    report = report_of(lambda *xs: ELEMENTWISE[key](*xs), *operands, moving=moving)
    name, *_ = key.split()
    assert report.derivative_of == name
    assert report.reaches and all("gradient" in r for r in report.reaches)
    assert report.headline.startswith(f"The derivative of {name} is {report.derivative} at ")
    assert report.headline.endswith("; the loss itself is finite")
    assert [r.low for r in report.inputs] == pytest.approx(operands)
    assert report.result.nans + report.result.infs == 1
    if key in EXPRESSIONS:
        assert report.expression == EXPRESSIONS[key]
        assert f"({report.expression})" in report.headline


@pytest.mark.parametrize("key", thorough_but(NARROW, "rsqrt", "log", "div"))
def test_find_nonfinite_names_a_derivative_that_overflows_in_16_bits(key):
    moving, *operands = NARROW[key]
    report = report_of(ELEMENTWISE[key], *operands, moving=moving, dtype="float16")
    assert (report.derivative_of, report.kind) == (key.split()[0], "overflow")
    assert report.largest > 65504
    assert report.expression.endswith("in float16")


def test_find_nonfinite_names_the_derivative_of_an_exponent():
    report = report_of(jnp.power, -2.0, 2.0, moving=1)
    assert (report.derivative_of, report.derivative) == ("pow", "NaN")
    assert report.expression == "log(-2)"


MATRICES = {
    "eigh": (lambda x: jnp.linalg.eigh(x)[1], np.eye(2)),
    "lu": (lambda x: jax.lax.linalg.lu(x)[0], np.ones((2, 2))),
}


@pytest.mark.parametrize("name", MATRICES)
def test_find_nonfinite_names_the_derivative_of_a_decomposition(name):
    report = report_of(*MATRICES[name])
    assert report.derivative_of == name
    assert "epsilon to the operand" not in report.advice


@jax.custom_jvp
def doubled(x):
    return x * 2


doubled.defjvp(lambda xs, ts: (doubled(*xs), jnp.log(xs[0]) * ts[0]))  # tangent


@jax.custom_vjp
def tripled(x):
    return x * 3


tripled.defvjp(lambda x: (tripled(x), x), lambda x, ct: (ct / x,))  # cotangent


class TestCustomRules:
    @pytest.mark.parametrize("policy", [None, "mixed_float16"])
    def test_find_nonfinite_names_a_custom_rule_and_its_line(self, policy):
        report = report_of(doubled, 0.0, policy=policy)
        assert (report.derivative_of, report.expression) == ("doubled", "log(0)")
        assert report.source == line_of("tangent")
        report = report_of(tripled, 0.0, policy=policy)
        assert (report.derivative_of, report.expression) == ("tripled", "1 / 0")
        assert report.source == line_of("cotangent")

    def test_find_nonfinite_names_a_custom_rule_in_a_loop(self):
        def fun(x):
            return jax.lax.scan(lambda c, x: (c + tripled(x), None), 0.0, x)[0]

        report = report_of(fun, [1.0, 0.0, 2.0])
        assert (report.derivative_of, report.loops) == ("tripled", (("scan", 1),))
        assert report.source == line_of("cotangent")

    def test_find_nonfinite_names_a_rule_that_repeats_the_function(self):
        """Both compute log(0); the function masks it."""
        report = report_of(xlogy, 0.0, 0.0)
        assert (report.derivative_of, report.expression) == ("xlogy", "log(0)")


def in_scan(x):
    return jax.lax.scan(lambda c, x: (c + jnp.sqrt(x), None), 0.0, x)[0]  # root in scan


def in_scan_with_remat(x):
    layer = jax.checkpoint(lambda c, x: (jnp.sin(c + jnp.sqrt(x)), None))  # root in remat
    return jax.lax.scan(layer, 0.0, x)[0]


def constant_of_scan(x):
    return jax.lax.scan(lambda c, _: (c + jnp.sqrt(x[1]), None), 0.0, None, 2)[0]  # root of one


INSIDE = {
    "norm": (jnp.linalg.norm, ()),
    "std": (jnp.std, ()),
    "jit": (jax.jit(lambda x: jnp.sqrt(x)), ()),
    "vmap": (jax.vmap(lambda x: jnp.sqrt(x)), ()),
    "cond": (lambda x: jax.lax.cond(x[0] < 9, jnp.sqrt, jnp.sin, x), ()),
    "root in scan": (in_scan, (("scan", 1),)),
    "root in remat": (in_scan_with_remat, (("scan", 1),)),
    "root of one": (constant_of_scan, ()),
}


@pytest.mark.parametrize(
    ("name", "policy"),
    thorough_but(
        itertools.product(INSIDE, [None, "mixed_float16"]),
        *[("norm", None), ("cond", None), ("root in remat", None)],
        *[("jit", "mixed_float16"), ("root in scan", "mixed_float16")],
        ("root of one", "mixed_float16"),
    ),
)
def test_find_nonfinite_names_a_derivative_inside_other_functions(name, policy):
    fun, loops = INSIDE[name]
    x = [0.0, 0.0] if name in ("norm", "std") else [1.0, 0.0]
    report = report_of(fun, x, policy=policy)
    assert (report.derivative_of, report.expression) == ("sqrt", "0.5 / sqrt(0)")
    assert report.loops == loops
    if name.startswith("root"):
        assert report.source == line_of(name)


class TestOtherFaults:
    @pytest.mark.parametrize("fun", [jnp.log, jnp.reciprocal, jnp.arctanh])
    def test_find_nonfinite_names_an_operation_that_is_nonfinite_itself(self, fun):
        report = report_of(fun, 1.0 if fun is jnp.arctanh else 0.0)
        assert not report.derivative_of
        assert "Inf in the forward pass" in report.headline

    def test_overflow_by_a_large_cotangent_is_no_derivative(self):
        """The derivative is finite; the gradient overflows, and a lower scale would help."""
        report = report_of(lambda x: jnp.sin(x * 60000) * 60000, 1.0, dtype="float16")
        assert report.backward and not report.derivative_of
        assert report.headline.startswith("mul produced Inf in the backward pass, ")

    def test_masked_value_that_the_gradient_reads_is_no_derivative(self):
        report = report_of(lambda x: jnp.where(x > 0, jnp.exp(x) * jnp.sin(x), 0), -1e9)
        assert not report
        report = report_of(lambda x, y: jnp.where(y > 0, x * jnp.log(y), 0), 1.0, 0.0)
        assert (report.primitive, report.derivative_of) == ("log", "")

    def test_find_nonfinite_advises_a_mask_before_the_operation(self):
        report = report_of(lambda x: jnp.where(x > 0, jnp.log(x), 0), 0.0)
        assert (report.derivative_of, report.derivative, report.made) == ("log", "Inf", "NaN")
        assert "before the operation, not after it" in report.advice


class TestDerivativesThatTheFunctionTakes:
    """They are part of the function: no numbers tell them apart, but lines and transforms do."""

    @pytest.mark.parametrize("policy", [None, "mixed_float16"])
    def test_find_nonfinite_names_a_derivative_that_the_function_takes(self, policy):
        def loss(w):
            return jnp.sum(jnp.sqrt(w))  # differentiated inside

        report = mpjax.find_nonfinite(jax.value_and_grad(loss), policy, argnums=None)(jnp.zeros(2))
        assert (report.derivative_of, report.expression) == ("sqrt", "0.5 / sqrt(0)")
        assert report.headline.endswith("(0.5 / sqrt(0))")
        assert report.source == line_of("differentiated inside")

    def test_find_nonfinite_names_a_derivative_in_a_penalty(self):
        def masked(w):
            return jnp.sum(jnp.where(w > 0, jnp.log(w), 0))

        report = report_of(lambda w: jax.grad(jax.jit(masked))(w) ** 2, [4.0, 0.0])
        assert (report.derivative_of, report.expression) == ("log", "1 / 0")
        assert report.reaches[0] == "loss" and "loss" not in report.headline

    def test_fault_of_the_function_on_the_same_line_is_no_derivative(self):
        def loss(w):
            return jnp.sum(jnp.sqrt(w) / w)

        report = mpjax.find_nonfinite(jax.value_and_grad(loss), argnums=None)(jnp.zeros(2))
        assert (report.primitive, report.made, report.derivative_of) == ("div", "NaN", "")


def test_report_of_a_derivative_prints_slope_and_advice():
    def loss(w):
        return jnp.sum(jnp.sqrt(w))  # printed

    report = report_of(loss, [4.0, 0.0])
    place = line_of("printed").rpartition("/")[2]
    text = " ".join(str(report).split())
    assert f"{place} (0.5 / sqrt(0)); the loss itself is finite" in text
    assert "inputs f32[2] 0 to 4 slope f32[2] 0.25 to 0.25, 1 x Inf" in text
    assert "Lowering the loss scale does not help: " in text
    assert report.primitive == "div" and not report.backward


def test_page_of_a_derivative_says_what_the_report_says():
    report = report_of(jnp.sqrt, [4.0, 0.0])
    document = report.document()
    (operation,) = document.drawing().operations
    assert document.sentence == report.headline
    assert operation.label == "sqrt"
    assert dict(operation.facts)["derivative"] == "0.5 / sqrt(0)"
    assert ("slope", str(report.result)) in document.tables[0].rows
