"""`survey` on scripts: which steps it finds, how it ends them, and what it tells."""

import contextlib
import io
import json
import sys

import jax
import pytest

import mpjax
import mpjax.scripts
from mpjax._src.tools.cli import commands
from mpjax._src.tools.scripts import compiled, examine, survey
from mpjax._src.tools.scripts import surveyed as surveyed_classes
from mpjax._src.tools.scripts.ending import PATIENCE
from mpjax._src.tools.scripts.survey import Options

GAN = '''
"""Two steps, which share a module."""
import argparse, functools, pathlib, sys
import jax, jax.numpy as jnp
from jax import grad

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float)
parser.add_argument("--log")
rate = parser.parse_args().rate
log = open(parser.parse_args().log, "a")

def net(p, x):
    return jnp.tanh(x @ p["a"]) @ p["b"]

def d_loss(d, g, z, x):
    return jnp.mean(net(d, net(g, z)) - net(d, x))

def g_loss(g, d, z):
    return -jnp.mean(net(d, net(g, z)))

def updated(p, gradient):
    return jax.tree.map(lambda a, b: a - rate * b, p, gradient)

@functools.partial(jax.jit, donate_argnums=0)
def d_step(d, g, z, x):
    return updated(d, grad(d_loss)(d, g, z, x))

@functools.partial(jax.jit, static_argnames="times")
def g_step(g, d, z, times):
    for _ in range(times):
        g = updated(g, grad(g_loss)(g, d, z))
    return g

@jax.jit
def evaluated(g, z):
    return net(g, z)

@jax.jit
def validated(g, z):
    return jnp.mean(grad(lambda z: jnp.sum(net(g, z)))(z) ** 2), g

def made(key, inner, out):
    a, b = jax.random.split(jax.random.key(key))
    return {"a": jax.random.normal(a, (inner, 32)), "b": jax.random.normal(b, (32, out))}

g, d = made(0, 4, 16), made(1, 16, 1)
for _ in range(2):
    validated(g, jnp.ones((8, 4)))
jax.eval_shape(lambda d: d_step(d, g, jnp.ones((8, 4)), jnp.ones((8, 16))), d)
try:
    for step in range(3):
        print("step", step, file=log, flush=True)
        z = jax.random.normal(jax.random.key(step), (8, 4))
        d = d_step(d, g, z, jnp.ones((8, 16)))
        try:
            g = g_step(g, d, z, times=2)
        except Exception:
            print("swallowed", file=log)
    print(evaluated(g, z), file=log)
finally:
    print("closed", float(g["a"].sum()), float(d["a"].sum()), file=log, flush=True)
    log.close()
'''
LINES = GAN.splitlines()


@pytest.fixture
def gan(tmp_path):
    (tmp_path / "gan.py").write_text(GAN)
    return tmp_path


@pytest.fixture
def compiles_nothing(monkeypatch):
    """Compilations for this machine are not made, which take most of the time."""
    program = surveyed_classes.SurveyedProgram("this CPU", 100, 10, 1e3)
    monkeypatch.setattr(compiled, "_compiled_here", lambda *args: program)


def line_of(text):
    return LINES.index(text) + 1


def surveyed(folder, name="gan.py", args=(), **options):
    options = {"policies": "mixed_bfloat16", "run": False, "progress": False, **options}
    return mpjax.scripts.survey(folder / name, args, **options)


def test_two_steps_are_found_and_the_script_is_ended(gan, compiles_nothing):
    argv, main = [*sys.argv], sys.modules["__main__"]
    report = surveyed(gan, args=["--rate", "0.1", "--log", gan / "log"])
    assert report and report.ended == "stopped" and not report.error
    d, g = report.steps
    assert (d.name, d.source) == (
        "d_step",
        f"{gan}/gan.py:{line_of('@functools.partial(jax.jit, donate_argnums=0)')}",
    )
    assert g.name == "g_step" and (d.calls, g.calls) == (1, 1)
    assert (d.parameters, g.parameters) == (16 * 32 + 32, 4 * 32 + 32 * 16)
    assert d.losses[0].transform == "grad" and d.losses[0].name == "d_loss"
    assert (d.batch, g.batch) == (8, 8)
    as_written, half = d.rows
    assert (as_written.policy, half.policy) == ("float32", "mixed_bfloat16")
    assert as_written.half_flops == 0 and half.half_flops > 0.9 and d.matmul_flops > 0
    assert half.programs[0].target == "this CPU" and half.programs[0].temp_bytes == 10
    assert d.lint is not None and "probability" not in str(d.notes)
    # The script ran one step, and its `finally` block.
    log = (gan / "log").read_text().splitlines()
    assert [line.split()[0] for line in log] == ["step", "step", "closed"]
    assert (sys.argv, sys.modules["__main__"]) == (argv, main)
    validated, evaluated = report.not_covered[-2:]
    assert "evaluated" in evaluated and "--whole" in evaluated
    # What only differentiates is none, nor is what is only traced.
    assert "validated at gan.py" in validated and "no training step" in validated
    assert "does not see" not in str(report.not_covered)
    assert "mpjax.autocast(d_loss" in report.diff and "mpjax.autocast(g_loss" in report.diff
    assert json.loads(json.dumps(report.to_dict()))["steps"][0]["parameters"] == d.parameters
    text = str(report)
    assert "d_step" in text and "mixed_bfloat16" in text and "\n-    return updated(d, " in text
    assert "<html" in g.to_html()


@pytest.mark.thorough
def test_a_whole_run_has_the_results_of_the_script(gan):
    options = ["--rate", "0.1", "--log"]
    report = surveyed(gan, args=[*options, gan / "seen"], steps=None)
    assert report.ended == "ended" and [s.calls for s in report.steps] == [3, 3]
    mpjax.scripts.run(gan / "gan.py", [*options, gan / "plain"], "float32", tell=False)
    assert (gan / "seen").read_text() == (gan / "plain").read_text()


@pytest.mark.thorough
def test_steps_are_counted(gan):
    args = ["--rate", "0.1", "--log", gan / "log"]
    assert [s.calls for s in surveyed(gan, args=args, steps=2).steps] == [2, 2]


def test_what_is_known_is_told_after_an_interrupt(gan, monkeypatch):
    def interrupted(self, *args):
        raise KeyboardInterrupt

    monkeypatch.setattr(examine.Examined, "_compile", interrupted)
    report = surveyed(gan, args=["--rate", "0.1", "--log", gan / "log"])
    (step,) = report.steps
    assert report.ended == "interrupted" and step.rows[1].half_flops > 0.9
    assert "closed" in (gan / "log").read_text() and "autocast" in report.diff


OTHERS = {
    "fails": (
        "import jax\nprint('so far')\nraise OSError('no data')",
        "failed",
        "OSError: no data",
    ),
    "exits": ("import jax, sys\nsys.exit(3)", "ended", "exit status 3"),
    "forward": (
        "import jax\njax.jvp(lambda x: x * x, (1.0,), (1.0,))\njax.jit(lambda x: x)(1.0)",
        "ended",
        "",
    ),
    "child": (
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'train = 1'])",
        "ended",
        "",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_script_without_a_step_is_told(tmp_path, name, capsys):
    source, ended, error = OTHERS[name]
    (tmp_path / f"{name}.py").write_text(source)
    report = surveyed(tmp_path, f"{name}.py")
    assert not report and report.ended == ended and report.error.startswith(error)
    text = " ".join(str(report).split())
    assert "no training step" in text
    assert ("script failed before" if name == "fails" else "no function was differ") in text
    assert not report.diff
    if name == "fails":
        assert f"{tmp_path}/fails.py" in report.error and "Traceback" in capsys.readouterr().err
    if name == "forward":
        assert "forward mode" in text
    if name == "child":
        assert "train = 1" in text and "survey the script that trains there" in text


EAGER = """
import jax, jax.numpy as jnp
from threading import Thread

early = jax.vmap(jax.grad(lambda w, x: jnp.sum(jnp.tanh(w @ x))), (None, 0))

def loss(w, batch):
    print("called")
    return jnp.mean((batch @ w) ** 2), batch

class Once:
    # It is called once, as functions of Flax NNX are.
    def __init__(self):
        self.held = [loss]
        self.__qualname__ = "loss"

    def __call__(self, w, batch):
        return self.held.pop()(w, batch)

def train():
    w = jnp.ones((8, 8))
    for _ in range(3):
        (value, aux), gradient = jax.value_and_grad(Once(), has_aux=True)(w, jnp.ones((4, 8)))
        w = w - 0.1 * gradient
    raise RuntimeError("not ended")

early(jnp.ones((8, 8)), jnp.ones((3, 8)))

def chosen(w):
    return jnp.sum(w @ w) if w.sum() > 0 else w.sum()

jax.grad(chosen)(jnp.ones((4, 4)))
thread = Thread(target=train)
thread.start()
thread.join()
jax.jit(lambda w: w - jax.grad(lambda w: loss(w, w)[0])(w)).lower(jnp.ones((8, 8))).compile()
"""


def test_gradients_outside_of_jit_are_steps_and_threads_are_ended(tmp_path, capfd):
    (tmp_path / "eager.py").write_text(EAGER)
    report = surveyed(tmp_path, "eager.py", policies=("mixed_bfloat16", "float32"), time=True)
    first, second = report.steps
    assert first.name.endswith("<lambda>") and "no roofline" in report.not_covered[0]
    _, unseen, chosen = report.not_covered[:3]
    assert "does not see" in unseen and "chosen" in chosen and "cannot be looked into" in chosen
    assert second.name == "gradient of loss" and second.batch == 4
    assert second.rows[1].half_flops == 1 and second.rows[1].time_ms > 0
    assert second.rows[2].speed > 0 and second.rows[2].half_flops == 0
    assert report.ended == "stopped" and second.calls == 1
    printed = capfd.readouterr()
    assert "not ended" not in printed.err and printed.out.count("called") == 1


TRAINER = """
import jax

class Trainer:
    def __init__(self, loss):
        self.loss = loss
        self.step = jax.jit(self._step)

    def _step(self, w, x):
        return w - 0.1 * jax.grad(self.loss)(w, x)

    def train(self, w, x):
        return self.step(w, x)
"""

TRAINED = """
import sys
sys.path.insert(0, "site-packages")
import jax.numpy as jnp, trainer

def loss(w, x):
    return jnp.mean((x @ w) ** 2)

trained, w = trainer.Trainer(loss), jnp.ones((4, 4))
while True:
    try:
        w = trained.train(w, jnp.ones((2, 4)))
    except:
        print("caught", flush=True)
"""


def test_a_librarys_step_has_the_users_line_and_an_endless_one_ends(tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "trainer.py").write_text(TRAINER)
    monkeypatch.chdir(tmp_path)
    told = []

    def ended(report):
        told.append(report)
        raise SystemExit  # which the command's end of the process cannot be here

    options = Options("mixed_bfloat16", (), 1, False, False, None, progress=False)
    caught = io.StringIO()
    script = TRAINED.replace("except:", f"except:\n        if n > {PATIENCE}: raise").replace(
        "while True:", "for n in range(100):"
    )
    (tmp_path / "trained.py").write_text(script)
    with contextlib.redirect_stdout(caught):
        report = survey.surveyed(options, "trained.py", (), False, ended)
    assert caught.getvalue().count("caught") == PATIENCE and report.ended == "stopped"
    assert any("caught what ends it" in note for note in told[0].not_covered)
    assert any("no roofline on this CPU" in note for note in report.not_covered)
    (step,) = report.steps
    line = TRAINED.splitlines().index("        w = trained.train(w, jnp.ones((2, 4)))") + 1
    assert step.source == f"{tmp_path}/trained.py:{line}" and not step.notes[1:]
    assert step.losses[0].source == step.source and step.losses[0].name == "loss"
    assert step.rows[1].half_flops > 0 and (report.diff or report.missing)


def test_each_target_has_its_figures_or_a_reason(gan, monkeypatch):
    args = ["--rate", "0.1", "--log", gan / "log"]
    sizes = []

    def report(job, program):
        shape = program.lowered.in_avals[0][0].shape
        sizes.append((job.target.name, shape))
        if job.target.name == "v100":
            raise MemoryError("too large\nfor this")

        class Report:
            total_bytes, temp_bytes, bytes_accessed = 2**30, 2**20, 1e9
            roofline_ms, bound, fits = 1.5, "memory", True

        return Report()

    def require(target):
        if target.platform == "tpu":
            raise ImportError(f"compiling for target={target.name!r} needs libtpu.")

    monkeypatch.setattr(compiled, "require", require)
    monkeypatch.setattr(compiled, "compile_program", report)
    found = surveyed(gan, args=args, targets=["h100", "v5e", "v100"], batches=False)
    one, other = found.steps[0].rows[1].programs
    assert (one.target, one.roofline_ms, one.largest_batch) == ("h100", 1.5, None)
    assert other.refused == "MemoryError: too large" and other.total_bytes is None
    assert "libtpu" in found.not_covered[0] and len(sizes) == found.compilations == 8
    assert "On h100" in str(found) and "MemoryError: too large" in str(found)


def test_what_is_asked_for_wrongly_is_refused(gan, tmp_path):
    for options in ({"policies": "mixed_bfloat61"}, {"targets": "h1000"}, {"steps": 0}):
        with pytest.raises(ValueError, match=r"61|h1000|steps=0"):
            surveyed(gan, **options)
    with pytest.raises(LookupError, match=r"Did you mean .*gan\.py"):
        surveyed(tmp_path, "gan")


@pytest.mark.thorough
def test_the_command(gan, capsys, monkeypatch):
    monkeypatch.chdir(gan)
    arguments = ["survey", "--no-run", "--policy", "mixed_bfloat16", "--html", "page.html"]
    script = ["gan.py", "--rate", "0.1", "--log", "log"]
    with pytest.raises(SystemExit) as end:
        commands.main([*arguments, "--json", *script])
    assert end.value.code == 0
    data = json.loads(capsys.readouterr().out)
    assert [step["name"] for step in data["steps"]] == ["d_step", "g_step"]
    assert (gan / "page-1.html").exists() and (gan / "page-2.html").exists()
    (gan / "none.py").write_text("print('its own')")
    with pytest.raises(SystemExit) as end:
        commands.main(["survey", "none.py"])
    out = capsys.readouterr().out
    assert end.value.code == 2 and "its own" in out and "no training step" in out
    with pytest.raises(SystemExit) as end:
        commands.main(["survey", "--policy", "mixed_bfloat61", "gan.py"])
    assert end.value.code == 2 and "mixed_bfloat61" in capsys.readouterr().err
    jax.clear_caches()


OWN = """
import jax, jax.numpy as jnp, optax, mpjax

def loss(w, x):
    return jnp.mean((x @ w) ** 2)

init, step = mpjax.build_train_step(loss, optax.sgd(0.1), "mixed_bfloat16")
step, state = jax.jit(step), init(jnp.ones((8, 8)))
for _ in range(3):
    state, metrics = step(state, jnp.ones((4, 8)))
"""


@pytest.mark.thorough
def test_a_step_of_mpjax_has_one_row(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    report = surveyed(tmp_path, "own.py")
    (step,) = report.steps
    assert step.source == f"{tmp_path}/own.py:10" and step.batch == 4 and step.calls == 1
    (row,) = step.rows
    assert row.policy == "as written" and row.half_flops == 1 and not report.diff
    assert "mpjax computes the gradient" in step.notes[0] and "already in 16 bits" in str(report)
