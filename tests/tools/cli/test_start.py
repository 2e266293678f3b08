"""Without the extra `cli`, all but the command works, and the command says what is missing."""

import json
import subprocess
import sys

import pytest

from mpjax._src.tools.cli import start

# Nothing of the extra can be imported, and stderr is a terminal, which would show bars.
WITHOUT = """
import io, json, sys
for name in ("click", "rich", "tqdm"):
    sys.modules[name] = None

class Terminal(io.StringIO):
    def isatty(self):
        return True

import jax, jax.numpy as jnp, mpjax, numpy as np, optax
shown = sys.stderr = Terminal()
loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2)
args = {"w": np.ones((4, 4), np.float32)}, np.ones((2, 4), np.float32)
init, step = mpjax.build_train_step(loss, optax.sgd(0.1), "mixed_bfloat16")
state, metrics = jax.jit(step)(init(args[0]), args[1])
reports = {
    "gradient": float(jax.grad(mpjax.autocast(loss))(*args)["w"].sum()),
    "loss": float(metrics["loss"]),
    "explain": str(mpjax.explain(loss, argnums=0)(*args)),
    "lint": str(mpjax.lint(loss)(*args)),
    "find_nonfinite": str(mpjax.find_nonfinite(loss)(*args)),
    "compare": str(mpjax.compare(loss)(*args)),
}
reports["shown"] = shown.getvalue()
print(json.dumps(reports))
import runpy
sys.stderr, sys.argv = sys.__stderr__, ["mpjax", "--help"]
runpy.run_module("mpjax", run_name="__main__")
"""


def test_without_the_extra_all_but_the_command_works():
    command = [sys.executable, "-W", "error", "-c", WITHOUT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout, done.stderr
    reports = json.loads(done.stdout)
    assert reports["loss"] == 16 and reports["gradient"] == 32
    assert "of matmul FLOPs run in bfloat16" in reports["explain"]
    assert all(reports[name] for name in ("lint", "find_nonfinite", "compare"))
    assert not reports["shown"]
    assert done.stderr == (
        "Error: the mpjax command needs click and rich, which are not installed: "
        "pip install 'mpjax[cli]'.\n"
    )
    assert done.returncode == 2


def test_the_one_package_that_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(SystemExit) as caught:
        start.main(["--version"])
    assert caught.value.code == 2
    assert "needs rich, which is not installed: pip" in capsys.readouterr().err


def test_with_the_extra_the_command_runs(capsys):
    with pytest.raises(SystemExit) as caught:
        start.main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out.startswith("mpjax ")
