"""The flags that are tried on a step: timed in turn on one state, or expected of another device."""

from types import SimpleNamespace

import click
import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner

import mpjax
from benchmarks import flags

STEP = """
import jax, jax.numpy as jnp
def step():
    def new(state, batch):
        return {"w": state["w"] - 0.1 * batch.mean()}, state["w"].sum()
    return jax.jit(new, donate_argnums=0), ({"w": jnp.ones(4)}, jnp.ones(3))
def shapes():
    fun, args = step()
    return fun, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
"""


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train_with_flags.py"
    path.write_text(STEP)
    return path


def test_each_set_is_timed_on_the_step_that_a_file_names(train):
    more = ("--try", "xla_gpu_no_such_flag=1", "--try", "--xla_cpu_enable_fast_math=false")
    done = CliRunner().invoke(flags.main, [f"{train}:step", "--smoke", *more])
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line.split()[1:] for line in done.output.splitlines() if "--" in line}
    for known in flags.SETS[1:]:
        assert float(rows[flags.written(known)][0]) > 0  # this jaxlib knows it
    assert rows["--xla_gpu_no_such_flag=1"][0] == "-"
    assert float(rows["--xla_cpu_enable_fast_math=false"][0]) > 0
    assert "timed on" in done.output


def test_every_turn_continues_on_the_state_of_the_last_one(monkeypatch):
    """So that one state is enough for all programs, though each donates it."""
    seen = []
    run = flags._run

    def noted(program, state, rest, steps):
        seen.append(float(state["n"]))
        return run(program, state, rest, steps)

    monkeypatch.setattr(flags, "_run", noted)
    fun = jax.jit(lambda state: {"n": state["n"] + 1}, donate_argnums=0)
    flags.timed(fun, ({"n": jnp.zeros(())},), [{}, {}], 3, 0.0)
    assert seen == [1, 3, 4, 5, 6, 7, 8, 9]  # each program also runs once to load


@pytest.mark.parametrize(("fast", "best"), [(0.5, {"xla_b": 1}), (1.0, None), (1.5, None)])
def test_winner_is_surely_faster_than_no_flag(monkeypatch, fast, best):
    noise = iter(range(10**6))

    def run(program, state, rest, steps):
        return steps * (program + 0.001 * (next(noise) % 5)), state

    programs = iter([1.0, 1.2, fast])
    step = SimpleNamespace(lower=lambda *_: step, compile=lambda **_: Program(next(programs)))
    monkeypatch.setattr(flags, "_run", run)
    rows, found = flags.timed(step, (jnp.ones(2),), [{}, {"xla_a": 1}, {"xla_b": 1}], 8, 1.0)
    assert found == best and len(rows) == 3


class Program(float):
    def __call__(self, state):
        return state


def test_step_that_cannot_run_again_is_refused():
    fun = jax.jit(lambda x: {"other": x + 1}, donate_argnums=0)
    with pytest.raises(click.ClickException, match="Return the new"):
        flags.timed(fun, (jnp.ones(3),), [{}], 1, 0.0)


def test_shapes_are_compiled_for_the_target_and_not_timed(train, monkeypatch):
    asked = []

    def compile_for(target, fun, *args, compiler_options):
        asked.append((target, dict(compiler_options)))
        if "xla_gpu_triton_gemm_any" in compiler_options:
            raise mpjax.errors.CompileError("no tiles")
        fast = compiler_options.get("xla_gpu_enable_triton_gemm") is False
        return SimpleNamespace(expected_ms=9.0 if fast else 12.0, kernels_ms=5.0)

    monkeypatch.setattr(mpjax, "compile_for", compile_for)
    done = CliRunner().invoke(flags.main, [f"{train}:shapes", "--target", "h200"])
    assert done.exit_code == 0, done.output
    assert asked == [("h200", each) for each in flags.SETS]
    assert "expected on h200, not timed" in done.output and "no tiles" in done.output
    assert (
        "be the fastest: --xla_gpu_enable_triton_gemm=false" in done.output
        and "0.75" in done.output
    )


@pytest.mark.parametrize("text", ["triton=1", "xla_a", "xla_a=1,b=2"])
def test_sets_of_flags_are_names_and_values(text):
    assert flags.parsed("--xla_a=True, xla_b=4") == {"xla_a": True, "xla_b": "4"}
    with pytest.raises(click.BadParameter, match="must be such as"):
        flags.parsed(text)
