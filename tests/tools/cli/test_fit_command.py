"""The command `mpjax fit`."""

import dataclasses
import json
import re
import sys

import pytest
from absent import report
from click.testing import CliRunner
from ladders import SHORT

from mpjax._src.tools.cli import commands
from mpjax._src.tools.hardware import fit, ladder, trials

PROGRAM = """
import functools, jax, jax.numpy as jnp, mpjax, optax

def loss_fn(params, x):
    return jnp.mean(jnp.sin(jnp.tanh(x @ params) @ params))

shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)

def step(policy="mixed_bfloat16"):
    print("a function may print")
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), policy)
    return step, (jax.eval_shape(init, shape((64, 64))), shape((32, 64)))

def wrapped(policy, checkpoint):
    loss = checkpoint(loss_fn)
    return jax.grad(mpjax.autocast(loss, policy)), [shape((64, 64)), shape((32, 64))]

number = 3
def nothing(): return step()
def demanding(policy, size): return step(policy)
def wrong(policy): return 3
def raises(policy): return [][1]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the user's program, and compilers for which lean storage halves the memory."""
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(sys, "path", [*sys.path])

    def compiled(self, setting, args):
        total = (4 if setting.keeping or setting.policy.storage == "lean" else 8) * 2**30
        found = report("h100")
        return dataclasses.replace(found, temp_bytes=total, memory_ms=2.0**40 / total)

    monkeypatch.setattr(ladder, "LADDER", SHORT)
    monkeypatch.setattr(fit, "require", lambda target: None)
    monkeypatch.setattr(trials.Steps, "compiled", compiled)
    yield tmp_path
    sys.modules.pop("train", None)


def run(*arguments):
    return CliRunner().invoke(commands.cli, ["fit", *arguments])


def test_fit_prints_the_policy_to_copy(folder):
    result = run("train:step", "--target", "v100", "--policy", "mixed_float16")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "train:step under mixed_float16 and settings that save memory"
    assert "the fastest setting that fits is as given, with 8.00 GiB of 11.83 GiB" in lines[1]
    assert lines[2] == "policy  mixed_float16"
    assert "a function may print" in result.stderr
    lean = run("train:step", "--target", "v100", "--reserve", "0.5")
    assert lean.exit_code == 0 and "policy  mixed_bfloat16,storage=lean" in lean.stdout


def test_fit_exits_with_1_if_nothing_fits(folder):
    result = run("train:wrapped", "--target", "v100", "--reserve", "0.9")
    assert result.exit_code == 1 and "nothing fits v100" in result.stderr
    assert "NOTHING FITS" in result.stdout and "nothing_saveable" in result.stdout


def test_fit_writes_json_a_picture_and_a_page(folder):
    files = "--plot", "f.png", "--html", "f.html"
    result = run("train:wrapped", "--target", "v100", "--every", "--json", *files)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["target"], found["policy"]) == ("train:wrapped", "mixed_bfloat16")
    assert found["result"]["policy"] == "mixed_bfloat16" and found["result"]["every"]
    assert {t["checkpoint"] for t in found["result"]["tries"]} > {"", "nothing_saveable"}
    assert (folder / "f.png").stat().st_size and "train:wrapped on v100" in (
        folder / "f.html"
    ).read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train:nothing", "--target", "v100"], "cannot be called with policy: .*FUNCTION takes a"),
        (["train:demanding", "--target", "v100"], "cannot be called with policy: missing.*'size'"),
        (["train:wrong", "--target", "v100"], r"train:wrong\(\) returned an int. For fit"),
        (["train:number", "--target", "v100"], "train:number is an int, not a function. For fit"),
        (["train:raises", "--target", "v100"], r"train:raises\(\) failed: IndexError.*train.py:"),
        (["train:lost", "--target", "v100"], "train has no 'lost'.*For fit, FUNCTION takes a poli"),
        (["train", "--target", "v100"], "'train' must be MODULE:FUNCTION.*For fit"),
        (["train:step"], "Missing option '--target'"),
        (["train:step", "--target", "v10"], "Unknown target='v10'. Did you mean 'v100'"),
        (["train:step", "--target", "v100", "--reserve", "1"], "'--reserve': 1.0 is not in"),
        (["train:step", "--target", "v100", "--policy", "bf16"], "policy='p=bf16,.*casting=op"),
    ],
)
def test_fit_refuses_a_wrong_command_line(folder, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and not result.stdout and "Traceback" not in result.stderr
    assert re.search(message, result.stderr), result.stderr
