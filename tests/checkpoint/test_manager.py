"""Checkpoints of a run: what is kept, what goes on, and what a signal makes of it."""

import functools
import os
import signal
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import resumed
from problems import bits
from support import thorough_but

import mpjax
from mpjax import checkpoint
from mpjax._src.checkpoint import packages

STATE = {"params": {"w": jnp.arange(3.0)}}


def fill(directory, numbers, losses=None, **options):
    """Saves a small state at each number; returns what is kept."""
    with checkpoint.Manager(directory, **options) as manager:
        for i, number in enumerate(numbers):
            metrics = None if losses is None else {"loss": losses[i], "aux": jnp.ones(3)}
            manager.save(number, STATE, metrics=metrics)
        return manager.steps()


KEPT = [
    ({}, [7, 8, 9]),
    ({"keep": 1}, [9]),
    ({"keep": None}, list(range(10))),
    ({"every": 4}, [0, 4, 8]),
    ({"keep": 2, "keep_period": 3}, [0, 3, 6, 8, 9]),
    ({"keep": 2, "every": 2, "keep_period": 4}, [0, 4, 6, 8]),
]


@pytest.mark.parametrize("options, kept", thorough_but(KEPT, 0, 2, 5))
def test_manager_keeps_the_checkpoints_that_its_options_say(options, kept, tmp_path):
    assert fill(tmp_path, range(10), **options) == kept


LOSSES = [5.0, 1.0, float("nan"), 3.0, float("-inf"), 2.0, 9.0]


BEST = [("min", 1, [1, 6], 1), ("min", 2, [1, 5, 6], 1), ("max", 1, [6], 6), ("max", 2, [0, 6], 6)]


@pytest.mark.parametrize("mode, keep_best, kept, best", thorough_but(BEST, 1, 3))
def test_manager_keeps_the_best_checkpoint_beside_the_last(mode, keep_best, kept, best, tmp_path):
    """A loss that is not finite is worst of all, whichever way one looks for the best."""
    options = {"best": "loss", "best_mode": mode, "keep_best": keep_best, "keep": 1}
    assert fill(tmp_path, range(7), LOSSES, **options) == kept
    with checkpoint.Manager(tmp_path, **options) as manager:  # read from the files
        assert manager.best() == best and manager.latest() == 6
        manager.save(7, STATE, metrics={"loss": jnp.float32(jnp.nan)})
        assert manager.best() == best
        assert manager.steps() == sorted(
            {*kept, 7} - ({6} if best != 6 and mode == "min" else set())
        )


def test_manager_names_a_missing_metric(tmp_path):
    with checkpoint.Manager(tmp_path, best="loss") as manager:
        for metrics in (None, {"lss": 1.0}):
            with pytest.raises(ValueError, match="lacks 'loss', the metric that best= names"):
                manager.save(0, STATE, metrics=metrics)
        assert manager.latest() is None and manager.best() is None


def test_saves_in_the_background_do_not_see_the_steps_after_them(tmp_path):
    """The state is donated right after, and the arrays of a CPU are memory of the host."""
    start, step, batch = resumed.program()
    state, seen = start(), {}
    with checkpoint.Manager(tmp_path, keep=None) as manager:
        for number in range(8):
            seen[number] = bits(jax.tree.map(lambda x: x.copy(), state))
            assert manager.save(number, state, data=number)
            state, _ = step(state, batch(number))
    end = bits(state)
    with checkpoint.Manager(tmp_path, keep=None) as manager:
        for number in range(8):
            assert bits(manager.restore(start(), number)) == seen[number]
            assert manager.describe(number).data == number
        for stopped in (0, 3):
            state = manager.restore(start(), stopped)
            for number in range(stopped, 8):
                state, _ = step(state, batch(number))
            assert bits(state) == end


def test_manager_save_numbers_must_rise_and_follow_every(tmp_path):
    with checkpoint.Manager(tmp_path, every=5, keep=None) as manager:
        assert [manager.save(n, STATE) for n in (0, 1, 5, 5)] == [True, False, True, False]
        assert manager.save(7, STATE, force=True) and not manager.save(7, STATE, force=True)
        with pytest.raises(ValueError, match="number=6 is less than 7.*new directory"):
            manager.save(6, STATE)
        for wrong in (-1, 1.5, None, True, 10**400):
            with pytest.raises(ValueError, match="number=.* must be an integer >= 0, below"):
                manager.save(wrong, STATE)
        with pytest.raises(ValueError, match="force='no' must be True or False"):
            manager.save(8, STATE, force="no")
        with pytest.raises(ValueError, match="metrics=3 must be a dict of numbers"):
            manager.save(8, STATE, metrics=3, force=True)
        assert manager.steps() == [0, 5, 7]


@pytest.mark.parametrize(
    "options",
    [
        {"every": 0},
        {"keep": 0},
        {"keep": True},
        {"keep_period": 0.5},
        {"keep_best": None},
        {"best_mode": "mni"},
        {"policy": "O9"},
        {"best": range(3)},
        {"best": ""},
        {"best_mode": []},
        {"best_mode": np.ones(2)},
        {"catch_sigterm": "yes"},
        {"read_only": 1},
    ],
    ids=str,
)
def test_manager_names_wrong_options(options, tmp_path):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name}="):
        checkpoint.Manager(tmp_path / "c", **options)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("package", packages.ALL)
def test_without_a_package_of_the_extra_nothing_is_made(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    for call in (checkpoint.Manager, functools.partial(checkpoint.save, state=STATE)):
        with pytest.raises(ImportError, match=r"pip install 'mpjax\[checkpoint\]'"):
            call("runs/c")
    assert not [*tmp_path.iterdir()]


def test_manager_names_a_metric_that_is_no_number(tmp_path):
    with checkpoint.Manager(tmp_path, best="loss") as manager:
        for wrong in ("2", None, 1j, np.ones(2), [1.0], object()):
            with pytest.raises(ValueError, match=r"metrics\['loss'\]=.* must be one real number"):
                manager.save(0, STATE, metrics={"loss": wrong})
        for wrong in ("loss", 3, [("loss", 1.0)]):
            with pytest.raises(ValueError, match="metrics=.* must be a dict"):
                manager.save(0, STATE, metrics=wrong)
        for number, right in enumerate((2, np.float16(1), jnp.bfloat16(3), 10**400, np.nan)):
            assert manager.save(number, STATE, metrics={"loss": right})
        assert manager.best() == 1


def test_manager_names_the_checkpoints_that_there_are(tmp_path):
    with checkpoint.Manager(tmp_path) as manager:
        for ask in (manager.describe, functools.partial(manager.restore, STATE)):
            with pytest.raises(FileNotFoundError, match="no checkpoint"):
                ask()
        manager.save(3, STATE)
        with pytest.raises(FileNotFoundError, match=r"number=4: .* the checkpoints \[3\]"):
            manager.describe(4)
        for wrong in (3.0, "3", True, -3):
            with pytest.raises(ValueError, match=r"number=.* must be an integer >= 0.* or None"):
                manager.restore(STATE, wrong)
        assert manager.path(np.int64(3)) == f"{tmp_path}/3"


def test_manager_describes_its_policy(tmp_path):
    with checkpoint.Manager(tmp_path, policy="O2:float16") as manager:
        manager.save(0, STATE)
        assert mpjax.get_policy(manager.describe().policy) == mpjax.get_policy("O2:float16")


def test_checkpoint_of_a_manager_is_restored_by_its_own_path(tmp_path):
    fill(tmp_path, [4, 12])
    assert bits(checkpoint.restore(tmp_path / "12", STATE)) == bits(STATE)
    with pytest.raises(checkpoint.CheckpointError, match="directory of a Manager.*4, 12.*12'"):
        checkpoint.restore(tmp_path, STATE)


def test_sigterm_saves_whatever_the_number_and_the_second_one_ends(tmp_path):
    caught = []
    before = signal.signal(signal.SIGTERM, lambda *_: caught.append(1))
    try:
        with checkpoint.Manager(tmp_path, every=100, catch_sigterm=True) as manager:
            assert not manager.save(1, STATE) and not manager.stopping
            os.kill(os.getpid(), signal.SIGTERM)
            assert not manager.stopping and not caught  # nothing is saved yet
            assert manager.save(2, STATE) and manager.stopping
            assert (tmp_path / "2" / "about").exists()
            os.kill(os.getpid(), signal.SIGTERM)
            assert caught == [1]
        with checkpoint.Manager(tmp_path, catch_sigterm=True):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert caught == [1, 1]  # given back at the end
        with checkpoint.Manager(tmp_path):
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught == [1, 1, 1]  # not taken unless asked for
    finally:
        signal.signal(signal.SIGTERM, before)


def test_catch_sigterm_needs_the_main_thread(tmp_path):
    raised = []

    def make():
        try:
            checkpoint.Manager(tmp_path, catch_sigterm=True)
        except ValueError as error:
            raised.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "only in the main thread" in raised[0]


def test_manager_takes_numpy_numbers(tmp_path):
    with checkpoint.Manager(tmp_path, every=np.int64(2)) as manager:
        assert manager.save(np.int32(4), STATE) and manager.steps() == [4]
