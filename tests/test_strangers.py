"""The runner of other libraries' suites: what it wraps, and what it counts as a difference."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strangers
from support import matmul_dtypes

import mpjax

W, X = np.ones((3, 3), np.float32), np.ones((2, 3), np.float32)


def loss(w, x):
    return jnp.sum(x @ w), ("aux", x)


@pytest.mark.parametrize("policy", strangers.POLICIES)
def test_a_differentiated_function_runs_under_the_policy(policy):
    run = strangers.planning(jax.value_and_grad, strangers.around(policy))(loss, has_aux=True)
    w, x = np.ones((9, 9), np.float32), np.ones((2, 9), np.float32)
    (value, (word, same)), grad = run(w, x)
    assert word == "aux" and value == 162 and np.all(grad == 2) and np.all(same == x)
    half = policy.removeprefix("mixed_")
    expected = {half if half != policy else "float32"}
    assert {
        dtype for pair in matmul_dtypes(lambda w: run(w, x)[1], w) for dtype in pair
    } == expected


def test_function_that_mpjax_differentiates_is_not_planned_again():
    run = strangers.planning(jax.grad, lambda fun: pytest.fail("planned"))
    ours = {"__name__": "mpjax._src.core.program.gradient", "run": run}
    exec("def differentiate(fun, x): return run(fun)(x)", ours)
    assert ours["differentiate"](lambda x: x * x, 3.0) == 6


def test_the_control_accepts_arguments_and_results_of_any_type():
    seen = []
    fun = strangers.compiled(lambda x, name, scale=1: (seen.append(x), x * scale, name))
    _, value, name = fun(X, "name", scale=2)
    assert name == "name" and np.all(value == 2) and isinstance(seen[0], jax.core.Tracer)


def test_only_what_passes_under_the_control_is_a_difference(tmp_path, capsys):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuite><testcase classname="a" name="good"/>'
        '<testcase classname="a" name="bad"><failure message="TypeError: no"/></testcase>'
        '<testcase classname="a" name="not"><skipped/></testcase></testsuite>'
    )
    control = strangers.outcomes(report)
    assert control == {"a::good": "passed", "a::bad": "TypeError: no", "a::not": "skipped"}
    other = {"a::good": "AssertionError: 1 is not 2", "a::bad": "TypeError: another"}
    assert strangers.differences(control, other) == {"a::good": other["a::good"]}
    found = {"jit": control, "float32": other, "mixed_bfloat16": other, "mixed_float16": {}}
    assert strangers.tell("suite", "file", found) == 2  # of float32, and the absent test
    assert "mixed_bfloat16: 1 tolerances, 0 findings" in capsys.readouterr().out
    control = control | {"a::strict": "AssertionError: 1 is not 2"}  # as float32 numbers may
    other = dict.fromkeys(control, "passed")
    assert strangers.differences(control, other | {"a::strict": "assert False"}) == {}
    other |= {"a::strict": "TypeError: new"}
    assert strangers.differences(control, other) == {"a::strict": "TypeError: new"}
    assert strangers.tell("suite", "file", {"jit": control, "float32": other}, None) == 1
    assert "jit: 2 fail without float64" in capsys.readouterr().out
    assert strangers.tell("suite", "file", {"jit": control, "float32": other}, ["strict"]) == 0
    with pytest.raises(SystemExit, match="no test passes"):
        strangers.tell("suite", "file", {"jit": {}})


def test_the_pinned_suites_are_complete():
    suites = strangers.SUITES
    for suite in suites.values():
        if "sdist" in suite:
            assert "==" in suite["sdist"]
        else:
            assert len(suite["commit"]) == 40 and suite["repository"].startswith("https://")
        assert {*suite.get("installed", ())} <= {*suite["files"]}
        assert {*suite.get("beside", ())} <= {*suites}
        assert suite["files"]
        assert {*suite.get("skip", {}), *suite.get("only", {})} <= {*suite["files"]}
    assert all(mpjax.get_policy(policy) for policy in strangers.POLICIES[1:])
    assert any("installed" in suite for suite in suites.values())


@pytest.mark.parametrize("name", ["value_and_grad", "vjp", "jvp", "linearize"])
def test_a_judge_compares_each_derivative_with_matmuls_rounded_by_hand(name, tmp_path):
    judge = strangers.Judge("bfloat16", tmp_path / "judged")
    wrong = lambda fun: lambda *xs: [2 * y for y in fun(*xs)]  # noqa: E731
    transform = strangers.planning(getattr(jax, name), wrong, judge)

    def fun(w):
        return jnp.sum(X @ w)

    if name in ("vjp", "linearize"):
        value, linear = transform(fun, W)
        results = value, linear(W if name == "linearize" else np.float32(1))
    else:
        results = transform(fun, (W,), (W,)) if name == "jvp" else transform(fun)(W)
    assert results[0] == 36  # what the planned function gives
    jax.effects_barrier()
    rows = [json.loads(line) for line in judge.place.read_text().splitlines()]
    assert len(rows) == 2 and all("autocast is 1 off, rounded matmuls 0" in row[2] for row in rows)
    assert all(test.endswith(f"hand[{name}]") and share == 2**21 for test, share, _ in rows)


def test_a_function_that_changes_a_state_is_traced_once(tmp_path):
    judge = strangers.Judge("float16", tmp_path / "judged")
    turns = iter(range(1))
    run = strangers.planning(jax.value_and_grad, lambda fun: fun, judge)
    run(lambda w: (w * w).sum() + next(turns))(W)
    jax.effects_barrier()
    count = jax.new_ref(jnp.zeros((), jnp.int32))

    def counting(w):
        count[...] += 1
        return (w * count[...]).sum()

    run(counting)(W)  # each way finds another count: no judgment
    jax.effects_barrier()
    shares = [json.loads(row)[1] for row in judge.place.read_text().splitlines()]
    assert shares == [0, 0, None]  # the last says that it is not judged


def test_a_function_that_prints_is_judged(tmp_path):
    judge = strangers.Judge("float16", tmp_path / "judged")
    run = strangers.planning(jax.grad, lambda fun: fun, judge)
    run(lambda w: (jax.debug.print("value {}", w[0, 0]), (w * w).sum())[1])(W)
    jax.effects_barrier()
    assert [json.loads(row)[1] for row in judge.place.read_text().splitlines()] == [0]


def test_function_that_cannot_be_rounded_by_hand_is_not_judged(tmp_path):
    @jax.custom_vjp
    def three_times(w):
        return jax.lax.fori_loop(0, jnp.int32(3), lambda _, h: h @ W, w)

    three_times.defvjp(lambda w: (three_times(w), None), lambda _, ct: (ct @ W @ W @ W,))
    judge = strangers.Judge("float16", tmp_path / "judged")
    run = strangers.planning(jax.grad, strangers.around("mixed_float16"), judge)
    assert np.all(run(lambda w: three_times(w).sum())(W) == 27)
    rows = [json.loads(row) for row in judge.place.read_text().splitlines()]
    assert [row[1:] for row in rows] == [[None, "rounded by hand, a function raises ValueError"]]


def test_judgments_name_what_was_not_judged(tmp_path, monkeypatch, capsys):
    place = tmp_path / "judged"
    rows = [["f.py::test_a", 0.5, "words"], ["f.py::test_b", None, "it has effects"]]
    write = lambda *_: place.write_text("\n".join(map(json.dumps, rows)))  # noqa: E731
    monkeypatch.setattr(strangers, "run", write)
    tests = {"f::test_a", "f::test_b", "f::test_c"}
    judged = strangers.judgments(tmp_path, "f.py", "mixed_float16", {}, place, tests)
    strangers.tell_judged("mixed_float16", *judged)
    said = capsys.readouterr().out
    assert "0.50 of the bound: f.py::test_a: words" in said
    assert "not judged: f.py::test_b: it has effects" in said
    assert "not judged: f::test_c: no derivative" in said and "not judged: f.py::test_a" not in said


def test_float64_stays_off_where_a_suite_turns_it_on(monkeypatch):
    monkeypatch.setattr(jax.config, "update", jax.config.update)
    strangers.without_float64()
    jax.config.update("jax_enable_x64", True)
    assert jnp.asarray(np.float64(1)).dtype == jnp.float32
    jax.config.update("jax_debug_nans", jax.config.jax_debug_nans)  # others still work


def test_a_suite_with_float64_runs_both_ways_and_each_has_its_own_results(tmp_path, monkeypatch):
    ways = []

    def run(folder, file, policy, suite, report):
        ways.append(suite["float64"])
        return {"a::test": "passed"}

    monkeypatch.setattr(strangers, "HOME", tmp_path)
    monkeypatch.setattr(strangers, "run", run)
    monkeypatch.setattr(strangers, "source", lambda name, suite: tmp_path / name)
    monkeypatch.setattr("sys.argv", ["strangers", "diffrax", "optax", "--policies", "float32"])
    for _ in range(2):  # the second time, all is there
        with pytest.raises(SystemExit, match="^0$|^False$"):
            strangers.main()
    files = {name: len(strangers.SUITES[name]["files"]) for name in ("diffrax", "optax")}
    assert (
        ways
        == [True] * 2 * files["diffrax"]
        + [False] * 2 * files["diffrax"]
        + [True] * 2 * files["optax"]
    )
    stored = {place.parent.name for place in (tmp_path / "results").glob("*/*.json")}
    assert stored == {"diffrax", "diffrax-float64-off", "optax"}
    assert [suite["float64"] for _, suite in strangers.runs(["diffrax"], "off")] == [False]
