"""`mpjax run`: a script in mixed precision, from a shell, ends and prints as it would without."""

import atexit
import json
import os
import subprocess
import sys
from multiprocessing import spawn
from pathlib import Path

import pytest

import mpjax.scripts
from mpjax._src.tools.cli.commands import main
from mpjax._src.tools.scripts.launch import restored
from mpjax._src.tools.scripts.running import Run
from mpjax._src.tools.scripts.started import runs_python, words_of

PY = "/usr/bin/python3.11"

TRAIN = """
import atexit, os, sys, threading
assert "jax" not in sys.modules, "the script sets the environment of its JAX"
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "float32"
import jax, jax.numpy as jnp
from jax import value_and_grad

def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)

@jax.jit
def step(w, x):
    value, grads = value_and_grad(loss)(w, x)
    return w - 0.1 * grads, value

def train(name):
    w, x = jnp.linspace(-1, 1, 64).reshape(8, 8), jnp.linspace(-1, 1, 32).reshape(4, 8)
    for _ in range(3):
        w, value = step(w, x)
    print(name, float(value).hex(), sys.argv[1:], jax.config.jax_default_matmul_precision)

train("main")
atexit.register(lambda: jax.jit(train, static_argnums=0) and train("at exit"))
thread = threading.Thread(target=train, args=("thread",))
thread.start()
if "--fail" in sys.argv:
    raise RuntimeError("own")
"""
SPAWNING = """
import multiprocessing, sys
def work(n):
    import jax, jax.numpy as jnp
    return "bf16" in str(jax.make_jaxpr(jax.grad(lambda w: jnp.sum(w @ w)))(jnp.ones((n, n))))
if __name__ == "__main__":
    for kind in ("spawn", "forkserver"):
        with multiprocessing.get_context(kind).Pool(1) as pool:
            print(kind, pool.map(work, [4]))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "spawning.py").write_text(SPAWNING)
    return tmp_path


def ran(*args, **env):
    command = [sys.executable, *args]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})


@pytest.mark.thorough
def test_a_script_under_float32_prints_what_it_prints_alone(folder):
    plain = ran("train.py", "--fail", "-x")
    same = ran("-m", "mpjax", "run", "train.py", "--fail", "-x", MPJAX_POLICY="float32")
    assert plain.returncode == same.returncode == 1 and same.stdout == plain.stdout
    assert same.stderr.startswith(plain.stderr.strip())


def test_a_script_runs_in_mixed_precision_and_ends_as_it_would(folder):
    half = ran("-m", "mpjax", "run", "--report", "seen.json", "train.py", "--fail", "-x")
    assert half.returncode == 1
    assert half.stdout.count("['--fail', '-x'] float32") == 3
    # The traceback is the script's own, and the summary comes last.
    first, *_, error, last = half.stderr.splitlines()
    assert first == "Traceback (most recent call last):" and error == "RuntimeError: own"
    assert last == "mpjax: 1 function differentiated, 1 planned; 100% of matmul FLOPs in bfloat16"
    assert half.stderr.count("File ") == 1
    report = json.loads((folder / "seen.json").read_text())
    assert report["half_flops"] == 1 and report["rows"][0]["name"] == "loss"


def test_float16_is_refused_with_the_lines_to_change(folder, capsys):
    source = """
import jax, jax.numpy as jnp, optax
def penalty(w): return jnp.sum(w**2)
def loss(w, x): return jnp.mean((x @ w) ** 2) + jnp.sum(jax.grad(penalty)(w) ** 2)
optimizer = optax.adam(1e-2)
def step(w, opt_state, x):
    grads = jax.grad(loss)(w, x)
    updates, opt_state = optimizer.update(grads, opt_state, w)
    return optax.apply_updates(w, updates), opt_state
class Field:
    def grad(self, x): return x
Field().grad(3)
"""
    (folder / "loop.py").write_text(source)
    subprocess.run(["git", "init", "-q", "."], check=True)
    with pytest.raises(SystemExit) as end:
        Run("mixed_float16", str(folder / "loop.py")).begin()
    said = capsys.readouterr()
    assert end.value.code == 2 and "need a loss scale" in said.err
    assert "method" not in said.err + said.out  # of the script's own, which differentiates nothing
    subprocess.run(["git", "apply"], input=said.out, text=True, check=True)
    changed = (folder / "loop.py").read_text()
    assert 'mpjax.mixed_precision(optax.adam(1e-2), "mixed_float16")' in changed
    # What is differentiated inside of a loss stays as it is.
    assert "jax.grad(penalty)" in changed and "jax.grad(loss)" not in changed


def test_float16_is_refused_with_the_modules_beside_a_script(folder, capsys):
    (folder / "steps").mkdir()
    (folder / "main.py").write_text("import jax, steps.train as t\nfrom os import path\nt.run()\n")
    (folder / "steps" / "train.py").write_text("""
import jax
from .optimizers import make, tx
def run(w, opt_state):
    grads = jax.grad(loss)(w)
    return tx.update(grads, opt_state, w)
""")
    (folder / "steps" / "optimizers.py").write_text("""
import optax
from . import train
schedule = optax.cosine_decay_schedule(1, 9)
tx = optax.chain(optax.clip(1.0), optax.adam(schedule))
""")
    with pytest.raises(SystemExit):
        Run("mixed_float16", str(folder / "main.py")).begin()
    said = capsys.readouterr()
    assert "train.py:5: where tx is created is not known" in said.err and not said.out
    assert "Optimizers are created at steps/optimizers.py:5." in said.err


@pytest.mark.parametrize(
    ("command", "counted"),
    [
        (([PY, "train.py"], None), True),
        ((["x", "train.py"], PY), True),
        (("CUDA_VISIBLE_DEVICES=0 python3.11 train.py", None), True),
        ((["/bin/sh", "-c", "python -u 'my train.py' && echo"], None), True),
        ((["env", "A=1", PY, "-m", "package.train"], None), True),
        ((["nice", b"python", Path("train.py")], None), True),
        (([PY, "-m", "mpjax", "run", "train.py"], None), False),
        (([PY, "-c", "from multiprocessing.spawn import spawn_main"], None), False),
        ((["mpjax", "run", "train.py"], None), False),
        ((["git", "log", "train.py"], None), False),
    ],
)
def test_commands_that_run_python_are_told_from_others(command, counted):
    args, program = command
    assert runs_python(words_of(program, args)) == counted


def test_processes_that_the_script_starts_are_counted(folder):
    starts = """
import os, subprocess, sys
for options in ({}, {"close_fds": False}):
    subprocess.run([sys.executable, "-S", "-c", "0"], **options)
os.system(f"{sys.executable} -S -c 0")
subprocess.run(["true"])
if not os.fork():
    os._exit(0)
os.execv(sys.executable, [sys.executable, "-S", "-c", "print('last')"])
"""
    (folder / "starts.py").write_text(starts)
    done = ran("-m", "mpjax", "run", "starts.py")
    assert done.stdout == "last\n" and "JAX was not imported" in done.stderr
    assert "4 processes of Python that the script started plan nothing: put `mpj" in done.stderr


@pytest.mark.thorough
def test_processes_that_are_spawned_plan_too(folder):
    done = ran("-m", "mpjax", "run", "spawning.py")
    assert done.stdout == "spawn [True]\nforkserver [True]\n", done.stderr
    assert "processes of multiprocessing plan as this one" in done.stderr


def test_a_refused_policy_is_judged_at_once(folder, capsys):
    Run("mixed_bfloat16,storage=lean").judge()
    with pytest.raises(SystemExit) as end:
        Run("O1:float16").judge()
    assert end.value.code == 2 and "need a loss scale" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_policy_is_judged_before_the_script_does_anything(folder):
    (folder / "train.py").write_text("import pathlib\npathlib.Path('ran').touch()\nimport jax\n")
    command = [sys.executable, "-m", "mpjax", "run", "--policy", "O1:float16", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "need a loss scale" in done.stderr
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["nowhere.py"], "Error: there is no file 'nowhere.py'"),
        (["-m", "nowhere"], "Error: there is no module 'nowhere'"),
        (["--policy", "mixed_bfloat", "train.py"], "Error: Unknown policy 'mixed_bfloat'"),
        (["--policy", "O2:bfloat16", "train.py"], "stores parameters in bfloat16"),
    ],
)
def test_what_cannot_run_is_refused_with_status_2(folder, args, match, monkeypatch, capsys):
    # Nothing of it has to be undone: a process of the command ends here.
    monkeypatch.setattr(spawn, "get_preparation_data", spawn.get_preparation_data)
    monkeypatch.setattr(atexit, "register", lambda run: None)
    with restored(), pytest.raises(SystemExit) as end:
        main(["run", *args])
    assert end.value.code == 2 and match in capsys.readouterr().err


def test_a_script_runs_in_a_process_that_has_jax(folder, capsys):
    alone = TRAIN.replace('assert "jax" not in', "0 and").partition("atexit.register")[0]
    (folder / "train.py").write_text(alone)
    main = sys.modules["__main__"]
    report = mpjax.scripts.run("train.py", [1], tell=False)
    assert report.half_flops == 1 and capsys.readouterr().out.startswith("main ")
    assert sys.modules["__main__"] is main
    (folder / "ends.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    assert mpjax.scripts.run("ends.py", [0], tell=False).rows == ()
    with pytest.raises(SystemExit):
        mpjax.scripts.run("ends.py", [3])
    assert "no function was differentiated" in capsys.readouterr().err
