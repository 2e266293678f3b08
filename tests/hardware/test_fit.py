"""fit_memory: the search with programs of our own, and with the true compilers."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from absent import compiles, report, shape

import mpjax
from mpjax._src.hardware import fit, ladder
from mpjax._src.hardware.targets import find_target

H100 = find_target("h100")
BASE = mpjax.get_policy("mixed_bfloat16")
NAMES = ("first", "second", "third", "fourth", "fifth")
LADDER = [ladder.Setting(name, BASE) for name in NAMES]
MIB = 2**20


def program(mib, ms):
    """A report of a program that takes so much memory and time."""
    found = report("h100")
    other = found.total_bytes - found.temp_bytes
    times = {"memory_ms": ms, "compute_ms": 0.0, "bytes_accessed": ms}
    return dataclasses.replace(found, temp_bytes=int(mib * MIB) - other, **times)


def fitted(figures, available, every=False, beside=()):
    """Searches settings of given (MiB, ms); returns the result and the names of the compiled."""
    compiled = []

    def compile_setting(setting):
        compiled.append(setting.name)
        found = figures[setting.name]
        if isinstance(found, Exception):
            raise found
        return found and program(*found)

    trials = fit.Trials(compile_setting, available * MIB)
    every = every or not trials.climb(LADDER)
    if every:
        trials.all_of([*LADDER, *beside])
    assert len(set(compiled)) == len(compiled)
    return trials.result(H100, 0.25, every), compiled


FALLING = {name: (100 - 10 * i, 10.0 + i) for i, name in enumerate(NAMES)}  # 100 to 60 MiB


@pytest.mark.parametrize(
    ("available", "name", "count"),
    [(100, "first", 2), (95, "second", 4), (85, "third", 5), (70, "fourth", 4), (60, "fifth", 4)],
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


def test_fit_memory_takes_the_one_that_moves_fewer_bytes_of_equally_fast_ones():
    trials = fit.Trials(lambda s: program(1, 1.0), 2 * MIB)
    for setting, moved in zip(LADDER, (3.0, 2.0, 2.5), strict=False):
        trials.measure(setting)
        trials.tries[setting] = dataclasses.replace(trials.tries[setting], bytes_accessed=moved)
    assert trials.best().name == "second"


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


def test_a_tenth_of_a_percent_is_no_frontier():
    figures = FALLING | {"second": (1000, 9.999), "third": (999.5, 12.0), "fifth": (69.95, 13.0)}
    found, _ = fitted(figures | {"first": (1001, 10.0)}, 2000, every=True)
    assert [t.frontier for t in found.tries] == [True, True, False, True, True]


def test_fit_memory_names_the_same_program_once():
    first = program(10, 1.0)
    trials = fit.Trials(lambda s: first if s.name != "third" else program(5, 2.0), 20 * MIB)
    trials.all_of(LADDER)
    found = trials.result(H100, 0.25, True)
    assert [t.same_as for t in found.tries] == ["", "first", "", "first", "first"]
    assert [t.frontier for t in found.tries] == [True, False, True, False, False]
    assert "All settings give the same program" not in str(found)
    alike = fit.Trials(lambda s: first, 20 * MIB)
    alike.all_of(LADDER)
    assert "All settings give the same program" in str(alike.result(H100, 0.25, True))


def test_fit_memory_leaves_out_what_a_compiler_refuses():
    figures = FALLING | {"second": None, "third": mpjax.errors.CompileError("no kernel")}
    found, _ = fitted(figures, 65, every=True)
    assert found.setting == "fifth"
    refused = {t.setting: t.refused for t in found.tries if t.refused}
    assert refused == {"second": fit.TOO_LARGE, "third": "CompileError: no kernel"}
    assert all(t.total_bytes is None and not t.fits for t in found.tries if t.refused)
    assert "no kernel" in str(found)
    with pytest.raises(mpjax.errors.CompileError, match="no kernel"):
        fitted(FALLING | {"first": mpjax.errors.CompileError("no kernel")}, 65)


def test_fit_memory_is_told_by_a_compiler_that_refuses_all_as_too_large():
    found, _ = fitted(dict.fromkeys(NAMES), 100)
    assert not found.fits and found.report is None and found.setting == ""
    assert "its compiler refuses all settings" in " ".join(str(found).split())
    assert json.loads(json.dumps(found.to_dict()))["report"] is None


# ---- a batch that fits -------------------------------------------------------------------------


def smaller(fits_to, rows=64, target="h100", **leaves):
    found, _ = fitted(FALLING, 55)
    found = dataclasses.replace(found, target=target)
    tried = []

    def compile_cut(args):
        (n,) = {leaf.shape[0] for leaf in jax.tree.leaves(args[-1])}
        assert args[0] == "state"
        tried.append(n)
        if fits_to is None:
            raise TypeError("the step wants 64 rows")
        return program(n, 1.0) if n <= fits_to else None

    batch = leaves or {"x": shape(rows, 3), "y": shape(rows)}
    found = dataclasses.replace(found, available_bytes=fits_to * MIB if fits_to else 0)
    return fit._with_rows(found, ("state", batch), compile_cut), tried


@pytest.mark.parametrize(("fits_to", "rows"), [(63, 60), (60, 60), (5, 4), (3, 0), (1, 0)])
def test_fit_memory_finds_the_batch_that_fits_in_sixteenths(fits_to, rows):
    found, tried = smaller(fits_to)
    assert (found.fitting_rows, found.rows) == (rows, 64) and len(tried) <= 4
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


def loss_fn(params, batch):
    h = batch
    for w in params:
        h = h + jax.nn.gelu(h @ w) @ w.T
    return jnp.mean(h**2)


STEP = functools.partial(mpjax.build_train_step, loss_fn, optax.sgd(0.1))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"target": "h1000"}, ValueError, "target='h1000' is not known"),
        ({"make_step": 3}, TypeError, "make_step=3 must be a function"),
        ({"policy": "bfloat16"}, ValueError, "policy='bfloat16' casts at the boundary"),
        ({"policy": 3}, TypeError, "policy=3 must be a string"),
        ({"reserve": 1.0}, ValueError, "reserve=1.0 must be a share"),
        ({"timeout": 0}, ValueError, "timeout=0 must be a number"),
        ({"progress": 1}, TypeError, "progress=1 must be True or False"),
        ({"compiler_options": {"no": 1}}, ValueError, "compiler_options="),
    ],
)
def test_fit_memory_refuses_bad_arguments(change, error, match):
    call = {"target": "h100", "make_step": STEP, **change}
    target, make_step = call.pop("target"), call.pop("make_step")
    with pytest.raises(error, match=match):
        mpjax.hardware.fit_memory(target, make_step, **call)


def steps(make_step):
    return fit.Steps(H100, make_step, 600.0, {})


def test_fit_memory_takes_the_step_of_build_train_step_and_donates_its_state():
    step = steps(STEP)._step(LADDER[0])
    state = jax.eval_shape(STEP("mixed_bfloat16").init, [shape(4, 8)])
    lowered = step.lower(state, shape(2, 4))
    assert all(info.donated for info in jax.tree.leaves(lowered.args_info[0][0]))
    assert steps(lambda policy: jnp.sin)._step(LADDER[0]) is jnp.sin
    with pytest.raises(TypeError, match=r"make_step\('mixed_bfloat16'\) returned a tuple, but"):
        steps(lambda policy: (jnp.sin, 3))._step(LADDER[0])


def test_fit_memory_hands_a_checkpoint_to_functions_that_take_one():
    taken = []

    def make_step(policy, checkpoint):
        taken.append(checkpoint(loss_fn))
        return jnp.sin

    wrapped = next(s for s in ladder.checkpoints(LADDER) if s.keeping == "nothing_saveable")
    taking = steps(make_step)
    assert taking.wraps and not steps(STEP).wraps and not steps(print).wraps
    taking._step(LADDER[0])
    taking._step(wrapped)
    assert taken[0] is loss_fn and taken[1] is not loss_fn


def test_the_ladder_of_a_step_leaves_out_what_does_not_change_it():
    args = [shape(8, 4)], shape(2, 8)
    make_step = lambda policy: jax.grad(mpjax.autocast(loss_fn, policy))  # noqa: E731
    found = steps(make_step).ladder(BASE, args)
    assert found[0].name == ladder.AS_GIVEN and len(found) > 1
    assert not any(setting.policy.fused_attention for setting in found)  # there is no attention
    beside = steps(make_step).beside(found, args)
    assert {s.name for s in beside} == {s.name for s in found[1:]}
    assert [s.name for s in steps(lambda policy: loss_fn).ladder(BASE, args)] == [ladder.AS_GIVEN]


def test_the_ladder_keeps_a_setting_that_cannot_be_traced_for_the_table():
    def make_step(policy):
        if policy.storage == "lean":
            raise NotImplementedError("not lean")
        return jax.grad(mpjax.autocast(loss_fn, policy))

    args = [shape(8, 4)], shape(2, 8)
    making = steps(make_step)
    found = making.ladder(BASE, args)
    assert any(setting.policy.storage == "lean" for setting in found)
    trials = fit.Trials(lambda setting: making._lowered(setting, args) and program(1, 1.0), MIB)
    trials.all_of(found)
    refused = {t.refused for t in trials.tries.values() if "storage=lean" in t.policy}
    assert refused == {"NotImplementedError: not lean"}


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
def test_fit_memory_agrees_with_compile_for():
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
