"""Reports as people see them: in a notebook, in 80 columns, with short names of files."""

import functools
import html
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import mpjax
from mpjax._src.core.base.lines import where
from mpjax._src.tools.document import text
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.instruments.nonfinite import Range

PACKAGES = sysconfig.get_paths()["purelib"]


class Wide(nn.Module):
    """A module whose scopes have long names, and whose attention overflows in float16."""

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.Dense(8, name=f"a_projection_with_a_name_that_is_rather_long_{i}")(x)
        return x + jax.nn.softmax((x * 3e3) @ x.T) @ x


MODEL = Wide()
RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 8), np.float32)
PARAMS = jax.tree.map(
    lambda p: 0.35 * RNG.standard_normal(p.shape, np.float32) * (len(p.shape) > 1),
    jax.eval_shape(MODEL.init, jax.random.key(1), X),
)
HALF_PARAMS = jax.tree.map(lambda x: x.astype(np.float16), PARAMS)


def loss(params, x):
    return jnp.mean(MODEL.apply(params, x) ** 2)


def forward(params, x):
    return MODEL.apply(params, x)


@functools.cache
def overflow():
    init, step = mpjax.build_train_step(
        lambda p, b: jnp.sum(p["w"] * b),
        optax.sgd(0.1),
        "mixed_float16",
        report_overflow=True,
        report_underflow=True,
    )
    return step(init({"w": np.ones(3, np.float32)}), np.float32([1, np.inf, 0]))[1]


def drifting(params):
    return {"w": params["w"] + jnp.ones(3)}


REPORTS = {
    "explain": lambda: mpjax.explain(loss, "mixed_bfloat16", 0)(PARAMS, X),
    "compare": lambda: mpjax.compare(loss, "mixed_bfloat16")(PARAMS, X),
    "agreement": lambda: mpjax.compare(forward, mpjax.autocast(forward, "O3"))(PARAMS, X),
    "find_nonfinite": lambda: mpjax.find_nonfinite(loss, "mixed_float16")(PARAMS, X * 20),
    "tune": lambda: mpjax.debug.tune(loss, "mixed_bfloat16", 1e-3, max_runs=9)(PARAMS, X),
    "calibrate": lambda: mpjax.debug.calibrate(loss, "mixed_bfloat16", 0.1)(PARAMS, X),
    "histogram": lambda: mpjax.debug.gradient_histogram(PARAMS),
    "loss_scale": lambda: mpjax.debug.recommend_loss_scale(mpjax.debug.gradient_histogram(PARAMS)),
    "devices": mpjax.hardware.device_report,
    "overflow": lambda: overflow()["overflow"],
    "underflow": lambda: overflow()["underflow"],
    "lint": lambda: mpjax.lint(drifting)({"w": jnp.ones(3, jnp.bfloat16)}),
    "precision": lambda: mpjax.debug.measure_precision(jax.grad(loss))(HALF_PARAMS, X * 20)[1],
    "stalled": lambda: mpjax.reports.Stalled(
        jnp.ones(30), tuple(f"{n}/layer" * 15 for n in range(30))
    ),
}


@functools.cache
def report(name):
    return REPORTS[name]()


class Printer:
    """What IPython hands to `_repr_pretty_`."""

    def __init__(self):
        self.shown = ""

    def text(self, text):
        self.shown += text


SLOW = ("calibrate", "compare", "find_nonfinite", "tune")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.thorough) if n in SLOW else n for n in REPORTS],
)
def test_a_report_shows_itself_in_a_notebook_and_fits(name):
    shown, printer = report(name), Printer()
    shown._repr_pretty_(printer, cycle=False)
    assert printer.shown == str(shown)
    assert max(map(len, str(shown).splitlines())) <= text.WIDTH
    assert PACKAGES not in str(shown) and "site-packages" not in str(shown)
    page = shown.to_html()
    assert html.escape(str(shown)).replace("&#x27;", "&#39;").replace("&quot;", "&#34;") in page
    assert PACKAGES not in page and shown._repr_html_().startswith("<iframe")


def test_every_public_report_is_a_report_class():
    words = ("Report", "Comparison", "Tuning", "Histogram", "Advice", "flow", "Stalled")
    words += ("ment", "Calibration")
    # Classes are imported when they are first asked for: by name, so that none is missed.
    found = [getattr(mpjax.reports, name) for name in mpjax.reports.__all__ if name.endswith(words)]
    found += [mpjax.reports.LargestBatch, mpjax.reports.MemoryFit]
    found += [mpjax.reports.Survey, mpjax.reports.SurveyedStep]
    assert {*found} == {*Report.__subclasses__()} - {Range}


def test_the_users_line_comes_before_the_librarys():
    here = f"{__file__}:{line_of('nn.Dense(8, name')}"
    rows = [row for row in report("compare").rows if row.primitive == "dot_general" and row.path]
    assert rows and all(row.source == here for row in rows)
    assert all(row.library.startswith(f"{PACKAGES}/flax/linen/linear.py:") for row in rows)
    explained = [row for row in report("explain").rows if row.path and row.flops]
    assert {row.source for row in explained} == {here}
    assert where(rows[0].source, rows[0].library).endswith(
        f"({rows[0].library.removeprefix(PACKAGES + '/')})"
    )


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)
