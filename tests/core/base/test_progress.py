"""Bars on a terminal, with what is counted; nothing elsewhere, nor if the caller wants none."""

import io
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._src.core.base.progress import advance, progress_bar
from mpjax._src.tools.hardware import aot, batch_size, fit, trials


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch):
    """Makes stderr a terminal. No fixture, because pytest sets stderr anew before a test."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


def loss(w, x):
    return jnp.sum(jax.lax.scan(lambda c, _: (jnp.tanh(c), None), x * w, None, 3)[0])


ARGS = np.full(4, 0.5, np.float32), np.ones(4, np.float32)
INSTRUMENTS = {
    "compare": lambda **shown: mpjax.compare(loss, **shown)(*ARGS),
    "compare of two": lambda **shown: mpjax.compare(jnp.sin, jnp.cos, **shown)(ARGS[0]),
    "lint": lambda **shown: mpjax.lint(loss, argnums=0, **shown)(*ARGS),
    "tune": lambda **shown: mpjax.debug.tune(loss, "mixed_bfloat16", 0.9, max_runs=7, **shown)(
        *ARGS
    ),
}


@pytest.mark.parametrize("name", INSTRUMENTS)
def test_instruments_show_a_bar(name, monkeypatch):
    stderr = terminal(monkeypatch)
    INSTRUMENTS[name]()
    shown = stderr.getvalue()
    assert shown.startswith(f"\r{name.split()[0]}: ") and shown.endswith("\r")  # it is cleared
    if name == "tune":
        assert "/7 [" in shown and "run" in shown
    INSTRUMENTS[name](progress=False)
    assert stderr.getvalue() == shown


@pytest.mark.parametrize("name", ["lint", "tune"])
def test_progress_writes_nothing_outside_of_a_terminal(name, capsys):
    INSTRUMENTS[name]()
    assert capsys.readouterr().err == ""


def test_compile_for_and_largest_batch_show_progress(monkeypatch):
    seen, stderr = [], terminal(monkeypatch)

    def compile_program(*_):
        seen.append(stderr.getvalue())
        raise mpjax.errors.CompileError

    program = aot.Program(b"", jax.jit(jnp.sin).lower(1.0))
    monkeypatch.setattr(batch_size, "require", lambda target: None)
    for module in (aot, trials):
        monkeypatch.setattr(module, "lower", lambda *args: program)
        monkeypatch.setattr(module, "compile_program", compile_program)
    monkeypatch.setattr(aot, "require", lambda target: None)
    make_args = lambda n: (jax.ShapeDtypeStruct((n,), jnp.float32),)  # noqa: E731
    with pytest.raises(mpjax.errors.CompileError):
        mpjax.compile_for("h100", jnp.sin, *make_args(2))
    with pytest.raises(mpjax.errors.CompileError):
        mpjax.hardware.largest_batch("h100", make_args, jnp.sin)
    assert "compile for h100: " in seen[0] and "compiling" in seen[0]
    assert "batches for h100: 0 compiled [00:00, compiling a batch of 1]" in seen[1]
    for call in (mpjax.compile_for, lambda target, f, **shown: mpjax.lint(f, **shown)):
        with pytest.raises(ValueError, match="progress='no' must be True or False"):
            call("h100", jnp.sin, progress="no")


def test_fit_memory_shows_which_setting_it_traces_and_compiles(monkeypatch):
    seen, stderr = [], terminal(monkeypatch)

    def stop(*_):
        seen.append(stderr.getvalue())
        raise mpjax.errors.CompileError

    monkeypatch.setattr(fit, "require", lambda target: None)
    monkeypatch.setattr(trials, "compile_program", stop)
    x = jax.ShapeDtypeStruct((2,), jnp.float32)
    with pytest.raises(mpjax.errors.CompileError):
        mpjax.hardware.fit_memory("h100", lambda policy: jnp.sin, x)
    assert "fit for h100" not in seen[0] and "fit h100: 0 compiled" in seen[0]
    assert "tracing as given" in seen[0] and "compiling as given" in seen[0]


def test_progress_bar_counts_its_own_unit(monkeypatch):
    stderr = terminal(monkeypatch)
    with progress_bar(True, "outer", "run", total=2):
        with progress_bar(True, "inner", "operation"):
            advance("run")
            advance("operation", "adding")
        advance("run", "the first")
    shown = stderr.getvalue()
    assert "inner: 1 operation [00:00, adding]" in shown and "1/2 [" in shown
    advance("run")  # no bar is open
