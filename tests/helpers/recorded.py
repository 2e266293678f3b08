"""Reports of every class, as the suite records them: text, the command's tables, page and JSON.

    python tests/helpers/recorded.py [NAME ...]    records tests/recorded/NAME.txt again, or all

The command prints what changed. A report is the same on every machine: programs that run compute
with small integers, whose sums are exact in any order; errors, times and versions are given; and
the lines of code are those of a file that no disk has.
"""

import dataclasses
import difflib
import json
import linecache
import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import markupsafe
import numpy as np

import mpjax
import mpjax.scripts
from mpjax._src.core.base.devices import device_facts
from mpjax._src.tools.document.text import text_of
from mpjax._src.tools.hardware import batch_size, fit, ladder, trials
from mpjax._src.tools.hardware.devices import DeviceReport
from mpjax._src.tools.hardware.targets import find_target
from mpjax._src.tools.instruments.nonfinite import Range
from mpjax._src.tools.instruments.tune import TuneStep
from mpjax._src.tools.scripts.surveyed import SurveyRow
from mpjax._src.tools.watching.overflows import Overflow, Underflow

FOLDER = Path(__file__).parent.parent / "recorded"
RECORDED_WITH = "0.10.2"  # the version of JAX: another one has other equations
DIGITS = 4  # of floats: the last ones of a norm are another processor's

# ---- programs -----------------------------------------------------------------------------------

CODE = """\
def loss(params, x):
    with jax.named_scope("up"):
        h = jnp.maximum(x @ params["up"]["w"] + params["up"]["b"], 0)
    with jax.named_scope("down"):
        y = h @ params["down"]
    return jnp.sum(jnp.maximum(y, 0)) / 64

def outputs(params, x):
    return jnp.maximum(x @ params["up"]["w"] + params["up"]["b"], 0) @ params["down"]

def transformer(params, x):
    for layer in params:
        with jax.named_scope("attention"):
            q, k, v = (x @ layer[name] for name in "qkv")
            weights = jax.nn.softmax(q @ k.T / 4, axis=-1)
            x = x + weights @ v
        with jax.named_scope("norm"):
            x = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    return jnp.mean(jnp.linalg.norm(x, axis=-1) ** 2)

def heads(q):
    return jnp.sum(jax.nn.dot_product_attention(q, q, q, is_causal=True))

def drifting(state):
    return {"w": state["w"] + jnp.ones(3)}

def ignored(state):
    return {"w": state["w"] + jnp.ones(3)}  # mpjax: ignore

def trained(params, x):
    jax.jvp(outputs, (params, x), (params, x))
    return jax.jit(jax.grad(loss))(params, x)
"""
linecache.cache["model.py"] = (len(CODE), None, CODE.splitlines(keepends=True), "model.py")
MODEL = {"jax": jax, "jnp": jnp}
exec(compile(CODE, "model.py", "exec"), MODEL)
LOSS, OUTPUTS = MODEL["loss"], MODEL["outputs"]


def whole(seed, *shape, most):
    """Returns small integers, as float32."""
    return np.random.default_rng(seed).integers(-most, most, shape).astype(np.float32)


# The first weights need nine bits, and a bfloat16 has eight.
PARAMS = {
    "up": {"w": whole(0, 8, 16, most=500), "b": whole(1, 16, most=9)},
    "down": whole(2, 16, 4, most=3),
}
X = whole(3, 8, 8, most=3)
LAYERS = [{name: jax.ShapeDtypeStruct((64, 64), jnp.float32) for name in "qkv"}]
ROWS = jax.ShapeDtypeStruct((32, 64), jnp.float32)
HALF = jax.tree.map(lambda x: (x / 512).astype(jnp.bfloat16), PARAMS)
STATE = {"w": np.ones(3, jnp.bfloat16)}


# ---- reports ------------------------------------------------------------------------------------


def gradients():
    """A histogram of two parameters: zeros, then a count for each power of two from 2^-149."""
    counts = np.zeros((2, 2, 279), np.uint32)
    counts[0, 0, [0, 100, 130, 140]] = 5, 7, 300, 30
    counts[0, 1, [120, 165, 278]] = 50, 2, 1
    return mpjax.reports.GradientHistogram(counts, ("up/w", "down"), (342, 53))


def compared():
    """A comparison whose errors are given: they depend on how the CPU rounds what it sums."""
    report = mpjax.compare(LOSS, "mixed_bfloat16", loss_scale=1024.0)(PARAMS, X)
    ranked = []
    for place, row in sorted(zip(report.order, report.rows, strict=True), key=lambda pair: pair[0]):
        new, inherited, operands = (place % 5) / 400, (place % 7) / 500, (place % 3) / 600
        given = {"error": new + inherited, "new": new, "inherited": inherited, "operands": operands}
        given |= {"low": 2.0**-place, "high": 2.0**place, "overflow": 0.0, "noise": place == 20}
        ranked.append((place, dataclasses.replace(row, **given, underflow=(place == 9) / 4)))
    ranked.sort(key=lambda pair: -pair[1].blame)
    order, rows = zip(*ranked, strict=True)
    results = dict(zip(sorted(report.results), (0.0, 1e-5, 0.015, 12.5), strict=True))
    given = {"noise": ("gradient of up/b",), "unscaled": dict.fromkeys(report.unscaled, 0.5)}
    return dataclasses.replace(report, rows=rows, order=order, results=results, **given)


def tuned(patterns, **changes):
    """A search for float32 places that found these, each at half the error."""
    steps = tuple(
        TuneStep(pattern, i, 0.25, 2e-6 * i, 0.01 / 2**i, 0.005 / 2**i, 0.02 / i)
        for i, pattern in enumerate(patterns, 1)
    )
    policy = mpjax.get_policy("mixed_bfloat16").override(dict.fromkeys(patterns, "float32"))
    error = 0.01 / 2 ** (1 + len(steps))
    results = {"loss": error, "gradient of down": error / 3}
    fields = {"runs": 9, "places": len(steps), "cost": 6e-6, "bound": 5e-6, "before": 0.0125}
    fields |= {"totals": ((2048, 1e-5), (4096, 1.6e-5))}
    return mpjax.reports.Tuning(
        policy, error < 0.003, error, 0.003, results, steps, **fields | changes
    )


def calibrated():
    """A calibration that found these parts."""
    part = mpjax.reports.CalibratedPart
    parts = (
        part("up/w", "range", "values up to 4.2e+06", 1, 0.5, 2e-6, None),
        part("down", "amplified", "exp amplifies it up to 278 times", 1, 0.25, 1e-6, 0.18),
    )
    tuning = tuned(("up/w", "down"))
    return mpjax.reports.Calibration(
        *(tuning.policy, tuning.met, float("inf"), tuning.error, 0.003, tuning.results),
        *(parts, "h100", 2, tuning, 3e-6),
    )


def overflow(index, **changes):
    fields = {"layer": -1, "nonfinite": 0.0, "largest": 100.0, "loss_scale": 2.0**15} | changes
    return Overflow(index, paths=("up/w", "down"), **jax.tree.map(np.float32, fields))


def compiled(target, name="scan"):
    from absent import report

    return dataclasses.replace(report(target, name), jax_version="1.2.3")


def largest(limit):
    """A search among programs whose memory is given, and whose times are set."""
    template = compiled("h100")

    def compiled_for(setting, batch, what):
        return dataclasses.replace(template, temp_bytes=batch * 2**28)

    room, plain = (0.25, 2**34), ladder.Setting("", mpjax.get_policy("float32"))
    search = batch_size.Search(find_target("h100"), *room, 4, limit, compiled_for, lambda n: n)
    found = search.result(search.found(plain), plain)
    tries = tuple(dataclasses.replace(t, seconds=1.5) for t in found.tries)
    return dataclasses.replace(found, tries=tries)


def fitted(available, every=False):
    """A search among settings whose figures are given, and whose times are set."""
    template = compiled("h100")
    policy = mpjax.get_policy("mixed_bfloat16")
    lean = policy.replace(storage="lean")
    settings = {
        ladder.Setting("as given", policy): (2**30, 5.0),
        ladder.Setting("fused attention", policy.replace(fused_attention=True)): (2**29, 4.5),
        ladder.Setting("storage lean", lean): (2**28, 6.0),
        ladder.Setting("jax.checkpoint, dots_saveable", policy, "dots_saveable"): (2**28, 7.0),
    }

    def compile_setting(setting):
        temp, ms = settings[setting]
        return dataclasses.replace(template, temp_bytes=temp, memory_ms=ms, bytes_accessed=3e9 * ms)

    tried = trials.Trials(compile_setting, available)
    tried.measure_all(settings)
    found = fit.fit_of(tried, find_target("h100"), 0.25, every)
    tries = tuple(dataclasses.replace(t, seconds=1.5) for t in found.tries)
    return dataclasses.replace(found, tries=tries)


def unchanged():
    """What a loop differentiates, once in forward mode alone."""
    with mpjax.scripts.autocast_gradients("mixed_bfloat16", tell=False) as report:
        MODEL["trained"](PARAMS, X)
    report._hook = types.SimpleNamespace(missed=("a partial (model.py:1)",))
    return report


def surveyed():
    """A survey of a step whose figures are given."""
    program = mpjax.reports.SurveyedProgram("h100", 3 * 2**30, 2**30, 4e9, 12.5, "memory", True, 96)
    rows = (
        SurveyRow("float32", 0.0, None, programs=(program,)),
        SurveyRow("mixed_bfloat16", 1.0, 0.0125, "up/w", time_ms=1.5, speed=2.25),
        SurveyRow("mixed_float16", notes=("refused: an error",)),
    )
    loss = mpjax.reports.SurveyedLoss("loss", "model.py:1", "value_and_grad", 208, 832)
    lint = mpjax.lint(MODEL["drifting"])(STATE)
    explained = mpjax.explain(LOSS, "mixed_bfloat16", argnums=0)(PARAMS, X)
    step = ("step", "model.py:30", (loss,), 6 * 10**9, 8, rows, lint, 1, ("a note",), explained)
    return mpjax.reports.SurveyedStep(*step)


def survey():
    diff = "--- a/train.py\n+++ b/train.py\n@@ -1 +1,2 @@\n+import mpjax\n import jax\n"
    not_covered = ("evaluation was jitted, and not called",)
    return mpjax.reports.Survey(
        "train.py", (surveyed(),), "stopped", "", not_covered, diff, "/code", ("a line",), 3, 9
    )


def errors():
    """A report of errors whose figures are given."""
    row = mpjax.reports.ErrorRow
    forward = (
        "dot_general",
        "model.py:9",
        "",
        "body",
        "up/w",
        False,
        "bf16,bf16->bf16",
        "a reason",
    )
    backward = ("add_any", "model.py:12", "flax.py:3", "", "", True, "bf16,bf16->bf16", "backward")
    rows = (row(4, *forward, 0.012, 0.001, True), row(None, *backward, 0.003, 0.0, False, 8, (5,)))
    results = {"loss": 0.001, "gradient of up/w": 0.02}
    return mpjax.reports.ErrorReport(rows, 0.0125, 0.001, 0.05, 0.0124, results, 1e-4)


def devices(*names):
    return DeviceReport(tuple(map(device_facts, names)), "1.2.3", {"bfloat16": 0.5, "float16": 2.0})


REPORTS = {
    "explain": lambda: mpjax.explain(
        MODEL["transformer"], 'mixed_bfloat16,overrides={"0/v": "f32"}'
    )(LAYERS, ROWS),
    "explain_gradient": lambda: mpjax.explain(
        MODEL["transformer"], "mixed_float16,storage=lean", argnums=0
    )(LAYERS, ROWS),
    "explain_attention": lambda: mpjax.explain(
        MODEL["heads"], "mixed_bfloat16,fused_attention=true", target="h100"
    )(jax.ShapeDtypeStruct((1, 128, 2, 32), jnp.float32)),
    "error_report": errors,
    "compare": compared,
    "agreement": lambda: mpjax.compare(OUTPUTS, mpjax.autocast(OUTPUTS, "O3"))(PARAMS, X),
    "find_nonfinite": lambda: mpjax.find_nonfinite(LOSS, "mixed_float16")(PARAMS, X * 60),
    "find_nonfinite_none": lambda: mpjax.find_nonfinite(LOSS, "mixed_bfloat16")(PARAMS, X),
    "range": lambda: Range("f16", (8, 16), -60000.0, 4.5, 1, 2, "up/w"),
    "tune": lambda: tuned(("up/w", "down")),
    "tune_cut_short": lambda: tuned((), cut_short=True),
    "calibrate": calibrated,
    "histogram": gradients,
    "loss_scale": lambda: mpjax.debug.recommend_loss_scale(gradients()),
    "overflow": lambda: overflow(1, layer=3, nonfinite=0.25),
    "overflow_none": lambda: overflow(-1),
    "overflow_forward": lambda: overflow(-1, loss_finite=False),
    "underflow": lambda: Underflow(*map(np.float32, (0.5, 0.125, 0.0625)), "float16"),
    "stalled": lambda: mpjax.reports.Stalled(np.float32([0, 0.25, 0.5]), ("up/w", "up/b", "down")),
    "stalled_none": lambda: mpjax.reports.Stalled(np.zeros(2, np.float32), ("up/w", "down")),
    "lint": lambda: mpjax.lint(MODEL["drifting"])(STATE),
    "lint_ignored": lambda: mpjax.lint(MODEL["ignored"])(STATE),
    "lint_none": lambda: mpjax.lint(OUTPUTS)(PARAMS, X),
    "precision": lambda: mpjax.debug.measure_precision(OUTPUTS)(HALF, X.astype(jnp.bfloat16))[1],
    "precision_at_risk": lambda: mpjax.debug.measure_precision(OUTPUTS)(
        HALF, (X * 2.0**125).astype(jnp.bfloat16)
    )[1],
    "compile_v100": lambda: compiled("v100"),
    "compile_h100": lambda: compiled("h100"),
    "compile_v5e": lambda: compiled("v5e"),
    "largest_batch": lambda: largest(2**20),
    "largest_batch_limited": lambda: largest(8),
    "fit": lambda: fitted(2**30),
    "fit_none": lambda: dataclasses.replace(fitted(2**27, True), rows=64, fitting_rows=24),
    "gradients": unchanged,
    "survey": survey,
    "surveyed_step": surveyed,
    "devices": lambda: devices("h100", "h100", "v100", "v5e", "t4"),
}


# ---- as text ------------------------------------------------------------------------------------


def written(report):
    """Returns a report's text, page and JSON as one text, whose lines can be compared."""
    text = str(report)
    parts = {
        "class": type(report).__name__,
        "text": text,
        "command": command(report),
        "page": page(report.to_html(), text_of(report.document())),
        "json": on_lines(report.to_dict()),
    }
    return "".join(f"=== {name}\n{part}\n" for name, part in parts.items())


def command(report):
    """Returns what the command line prints of a report into a file, of which it lists some rows."""
    if type(report) not in (mpjax.reports.CastReport, mpjax.reports.Comparison):
        return ""
    return text_of(report.document(4), sys.maxsize)


def page(source, text):
    """Returns a page without style, script and the text at its end, and with its data on lines."""
    shown = str(markupsafe.escape(text))
    assert shown in source
    source = source.replace(shown, "(the text)")
    source = re.sub(r"<(style|script)>.*?</\1>", "", source, flags=re.DOTALL)
    source = re.sub(r"<meta .*?>\n", "", source)
    data = r'(<script type="application/json"[^>]*>)([^<]*)'
    source = re.sub(data, lambda found: found[1] + on_lines(json.loads(found[2])), source)
    return "\n".join(line.rstrip() for line in source.splitlines() if line.strip())


def on_lines(plain):
    """Returns plain data as JSON: a line for each name, and for each entry of a list."""
    lines = []
    for name, value in rounded(plain).items():
        each = value if isinstance(value, list) else [value]
        lines += [f"{name}:", *(f"  {json.dumps(x, ensure_ascii=False)}" for x in each)]
    return "\n".join(lines)


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


if __name__ == "__main__":
    if jax.__version__ != RECORDED_WITH:
        sys.exit(f"RECORDED_WITH is {RECORDED_WITH}, and this is JAX {jax.__version__}.")
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or REPORTS:
        path, new = FOLDER / f"{name}.txt", written(REPORTS[name]())
        old = path.read_text() if path.exists() else ""
        print(
            *difflib.unified_diff(*map(str.splitlines, (old, new)), name, name, lineterm=""),
            sep="\n",
        )
        path.write_text(new)
