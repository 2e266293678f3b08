"""fit_memory: the search with programs of our own, and with the true compilers."""

import dataclasses
import functools
import json
import math

import jax
import pytest
from absent import compiles, shape
from ladders import BASE, FALLING, MIB, NAMES, SHORT, STEP, fitted, loss_fn, program

import mpjax
from mpjax._src.tools.hardware import fit, ladder
from mpjax._src.tools.hardware.targets import find_target


@pytest.mark.parametrize(
    ("available", "name", "count"),
    [(100, "first", 2), (95, "second", 3), (85, "third", 4), (70, "fourth", 4), (60, "fifth", 4)],
)
def test_fit_memory_finds_the_first_that_fits_with_few_programs(available, name, count):
    found, compiled = fitted(FALLING, available)
    assert found.fits and found.setting == name and len(compiled) == count
    assert found.report.total_bytes == FALLING[name][0] * MIB <= found.available_bytes
    assert not found.every and "every=True" in str(found)
    assert found.policy == "mixed_bfloat16" and found.checkpoint == ""


def test_fit_memory_goes_on_where_a_later_setting_is_faster():
    figures = FALLING | {"second": (90, 9.0), "third": (80, 9.0), "fourth": (70, 9.5)}
    found, compiled = fitted(figures, 100)
    assert compiled == ["first", "second", "third", "fourth"]
    assert found.setting == "second"  # of two equally fast ones that move as much, the first


def test_fit_memory_tries_all_if_the_ladder_does_not_fit():
    beside = [ladder.Setting("wrapped", BASE, "nothing_saveable")]
    figures = FALLING | {"third": (40, 12.0), "wrapped": (30, 20.0)}
    found, compiled = fitted(figures, 50, beside=beside)
    assert set(compiled) == {*NAMES, "wrapped"} and found.every
    assert found.setting == "third"
    found, _ = fitted(figures, 35, beside=beside)
    assert (found.setting, found.checkpoint) == ("wrapped", "nothing_saveable")
    assert "jax.checkpoint_policies.nothing_saveable" in str(found)


def test_fit_memory_says_what_the_smallest_setting_lacks():
    found, compiled = fitted(FALLING, 55)
    assert set(compiled) == {*NAMES} and not found.fits and found.policy is None
    assert found.setting == "fifth" and found.report.total_bytes == 60 * MIB
    text = " ".join(str(found).split())
    assert "NOTHING FITS 55.00 MiB" in text and "fifth, with 60.00 MiB: 5.00 MiB too much" in text


def test_fit_memory_compiles_every_setting_for_the_frontier():
    figures = FALLING | {"second": (100, 9.0), "fourth": (85, 30.0)}
    found, compiled = fitted(figures, 200, every=True)
    assert compiled == [*NAMES] and found.every and "every=True" not in str(found)
    frontier = {t.setting for t in found.tries if t.frontier}
    assert frontier == {"second", "third", "fifth"}  # the first is slower, the fourth larger
    assert [row[0] for row in found.document().tables[0].rows] == [
        *("second", "first", "third", "fifth", "fourth")
    ]


def test_fit_memory_is_told_by_a_compiler_that_refuses_all_as_too_large():
    found, _ = fitted(dict.fromkeys(NAMES), 100)
    assert not found.fits and found.report is None and found.setting == ""
    assert "its compiler refuses all settings" in " ".join(str(found).split())
    assert json.loads(json.dumps(found.to_dict()))["report"] is None


# ---- a batch that fits -------------------------------------------------------------------------


def smaller(fits_to, rows=64, target="h100", refuses=True, **leaves):
    found, _ = fitted(FALLING, 55)
    report = program(rows, 1.0)  # of the whole batch, a MiB for each row
    found, tried = dataclasses.replace(found, target=target, report=report), []

    def compile_cut(args):
        (n,) = {leaf.shape[0] for leaf in jax.tree.leaves(args[-1])}
        assert args[0] == "state"
        tried.append(n)
        if fits_to is None:
            raise TypeError("the step wants 64 rows")
        return program(n, 1.0) if n <= fits_to or not refuses else None

    batch = leaves or {"x": shape(rows, 3), "y": shape(rows)}
    found = dataclasses.replace(found, available_bytes=fits_to * MIB if fits_to else 0)
    return fit._with_rows(found, ("state", batch), compile_cut), tried


@pytest.mark.parametrize(("fits_to", "rows"), [(63, 60), (60, 60), (5, 4), (3, 0), (1, 0)])
def test_fit_memory_finds_the_batch_that_fits_in_sixteenths(fits_to, rows):
    found, tried = smaller(fits_to)
    # The compiler refuses what does not fit, without a size.
    assert (found.fitting_rows, found.rows) == (rows, 64) and len(tried) <= 4
    assert len(smaller(fits_to, refuses=False)[1]) <= 2
    text = " ".join(str(found).split())
    assert (f"a batch of {rows} fits instead of 64" if rows else "no batch fits") in text


def test_fit_memory_finds_a_batch_that_the_devices_share():
    found, tried = smaller(40, rows=48, target="h100 x 8")
    assert found.fitting_rows == 40 and all(n % 8 == 0 for n in tried)


def test_fit_memory_says_nothing_of_a_batch_that_it_does_not_know():
    assert smaller(None)[0].fitting_rows is None  # the step does not take another
    found, tried = smaller(8, x=shape(64, 3), y=shape(32))
    assert found.fitting_rows is None and not tried
    assert smaller(8, x=shape())[1] == [] and "batch" not in str(found.document().lines)


# ---- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"target": "h1000"}, ValueError, "Unknown target='h1000'"),
        ({"make_step": 3}, TypeError, "make_step=3 must be a function"),
        ({"make_step": lambda: 3}, TypeError, r"make_step\(\) cannot be called with a policy: too"),
        ({"make_step": lambda policy, size: 3}, TypeError, "cannot be called .* missing.*'size'"),
        ({"policy": "bfloat16"}, ValueError, "policy='bfloat16' casts .*casting=op"),
        ({"policy": 3}, TypeError, "policy=3 must be a string"),
        ({"reserve": 1.0}, ValueError, "reserve=1.0 must be a share"),
        ({"timeout": 0}, ValueError, "timeout=0 must be a number"),
        ({"progress": 1}, ValueError, "progress=1 must be True or False"),
        ({"compiler_options": {"no": 1}}, ValueError, "compiler_options="),
    ],
)
def test_fit_memory_refuses_bad_arguments(change, error, match):
    call = {"target": "h100", "make_step": STEP, **change}
    target, make_step = call.pop("target"), call.pop("make_step")
    with pytest.raises(error, match=match):
        mpjax.hardware.fit_memory(target, make_step, **call)


def test_fit_memory_draws_its_frontier(tmp_path):
    found, _ = fitted(FALLING | {"second": None, "third": (80, 30.0)}, 85, every=True)
    figure = found.plot(tmp_path / "fit.png")
    assert (tmp_path / "fit.png").stat().st_size > 0
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    assert [*lines] == ["frontier", *("first", "fourth", "fifth", "third"), "available on h100"]
    assert [text.get_text() for text in axes.texts] == ["1", "2", "3", "4"]
    assert lines["frontier"].get_xydata()[:, 0].tolist() == [10.0, 13.0, 14.0]
    assert math.isclose(lines["available on h100"].get_ydata()[0], 85 / 1024)
    far = dataclasses.replace(found, available_bytes=2**40).plot().axes[0].lines
    assert "available on h100" not in {line.get_label() for line in far}
    none, _ = fitted(dict.fromkeys(NAMES), 100)
    with pytest.raises(ValueError, match="fit has no settings that compile"):
        none.plot()


# ---- with the compilers ------------------------------------------------------------------------


@pytest.mark.thorough
@compiles("v100")
def test_fit_memory_agrees_with_compile_for(monkeypatch):
    monkeypatch.setattr(ladder, "LADDER", SHORT)
    params, batch = [shape(512, 2048) for _ in range(4)], shape(2**15, 512)

    def make_step(policy, checkpoint):
        return jax.grad(mpjax.autocast(checkpoint(loss_fn), policy))

    compiled = {
        policy: mpjax.compile_for("v100", make_step(policy, lambda f: f), params, batch)
        for policy in ("mixed_float16", "mixed_float16,storage=lean")
    }
    fast, lean = (r.total_bytes for r in compiled.values())
    assert lean < fast
    memory = find_target("v100").memory
    call = functools.partial(
        *(mpjax.hardware.fit_memory, "v100", make_step, params, batch), policy="mixed_float16"
    )
    for share, policy in ((fast + 1, "mixed_float16"), (lean + 1, "mixed_float16,storage=lean")):
        found = call(reserve=1 - share / memory)
        assert found.policy == policy and found.report.total_bytes == compiled[policy].total_bytes
    none = call(reserve=1 - MIB / memory)
    assert not none.fits and none.fitting_rows == 0 and none.rows == 2**15
    checkpointed = {t.checkpoint for t in none.tries if not t.refused}
    assert {"", "nothing_saveable", "dots_saveable"} <= checkpointed
