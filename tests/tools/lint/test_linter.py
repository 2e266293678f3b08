"""`lint`: which rules run, where findings stand, how they are silenced, and what is written."""

import importlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from pairs import bf16, f32

import mpjax
from mpjax._src.tools.document.text import WIDTH
from mpjax._src.tools.lint import linter
from mpjax._src.tools.lint.rule import HLO, JAXPR, NEEDS, VALUES, Hit, Rule
from mpjax._src.tools.lint.table import RULES

PAGE = Path(__file__).parents[3] / "docs/lint_rules.md"


def summed(x):
    return jax.lax.reduce_sum(x, (0,))


def twice(x):
    return jax.lax.reduce_sum(x, (0,)) + jax.lax.reduce_sum(x, (0,)) + jnp.cumsum(x)[-1]


def silenced(x):
    return (
        jax.lax.reduce_sum(x, (0,)) + 1  # mpjax: ignore[half-sum, double-rounding]
    )


def silenced_for_others(x):
    return jax.lax.reduce_sum(x, (0,))  # mpjax: ignore[double-*]


def silenced_whole(x):
    return jax.lax.reduce_sum(x, (0,))  # why not  # mpjax: ignore


def silenced_in_another_case(x, kind="sum"):
    match kind:
        case "none":
            return x  # mpjax: ignore
        case _:
            return jax.lax.reduce_sum(x, (0,))


def test_one_line_and_rule_is_one_finding():
    (found,) = mpjax.lint(twice)(bf16(300)).findings
    assert found.count == 3 and found.rule == "half-sum"
    assert found.source == f"{__file__}:{twice.__code__.co_firstlineno + 1}"


def test_comments_silence_a_line():
    functions = silenced, silenced_for_others, silenced_whole, silenced_in_another_case
    for fun, findings in zip(functions, (0, 1, 0, 1), strict=True):
        report = mpjax.lint(fun)(bf16(300))
        assert (len(report.findings), len(report.suppressed)) == (findings, 1 - findings)
    assert "suppressed: " in str(mpjax.lint(silenced)(bf16(300)))


def test_select_and_ignore_choose_the_rules():
    assert mpjax.lint(summed, select="half-*", ignore=["half-collective"])(bf16(300)).findings
    assert not mpjax.lint(summed, ignore="half-sum")(bf16(300)).findings
    assert mpjax.lint(summed, select=("double-rounding",))(bf16(300)).ran == ("double-rounding",)
    with pytest.raises(ValueError, match="select='half_sum' matches no rule. Did you mean 'half-s"):
        mpjax.lint(summed, select="half_sum")
    with pytest.raises(ValueError, match="ignore=3 matches no rule"):
        mpjax.lint(summed, ignore=[3])


def test_lint_names_wrong_arguments():
    with pytest.raises(TypeError, match="fun=3 must be a function"):
        mpjax.lint(3)
    with pytest.raises(ValueError, match="run='no' must be True or False"):
        mpjax.lint(summed, run="no")
    with pytest.raises(ValueError, match="h10000"):
        mpjax.lint(summed, target="h10000")
    with pytest.raises(TypeError, match="must return one real floating number"):
        mpjax.lint(summed, argnums=0)(bf16(300, 2))


def on_values(program, op, ins, outs):
    if op.name == "sin" and float(jnp.max(jnp.abs(outs[0]))) > 0.5:
        yield Hit(f"sin makes {float(outs[0].max())}", op)


def on_hlo(program, compiled):
    assert compiled.target == "cpu" and "HloModule" in compiled.before + compiled.after
    if "sine" in compiled.after:
        yield Hit("a sine", scope="somewhere")


@pytest.fixture
def others(monkeypatch):
    """Rules that look at values and at HLO."""
    words = ("finds something", "It matters.", "Write something else.")
    rules = (Rule("of-values", VALUES, *words, on_values), Rule("of-hlo", HLO, *words, on_hlo))
    monkeypatch.setattr(linter, "chosen", lambda select, ignore: rules)


def waves(x):
    return jax.lax.scan(lambda c, x: (c, jax.jit(jnp.sin)(x)), 0.0, x)[1]


def test_rules_that_could_not_run_are_listed_and_not_passed(others):
    for options, args, reasons in (
        ({}, (f32(3),), ("jax.ShapeDtypeStruct", "pass target='cpu'")),
        ({"run": False}, (jnp.ones(3),), ("run=False", "pass target='cpu'")),
    ):
        report = mpjax.lint(waves, **options)(*args)
        assert not report.ran and not report.findings
        assert [*report.not_run] == ["of-values", "of-hlo"]
        for reason, shown in zip(reasons, report.not_run.values(), strict=True):
            assert reason in shown and shown in " ".join(str(report).split())


def test_rules_of_values_and_of_hlo_run(others):
    report = mpjax.lint(waves, target="cpu")(jnp.array([0.1, 1.0, 0.2, 1.5]))
    assert report.ran == ("of-values", "of-hlo") and not report.not_run
    line = f"{__file__}:{waves.__code__.co_firstlineno}"
    (of_hlo,) = [f for f in report.findings if f.rule == "of-hlo"]
    assert (of_hlo.source, of_hlo.scope) == (line, "somewhere")
    (of_values,) = [f for f in report.findings if f.rule == "of-values"]
    assert of_values.source == f"{__file__}:{waves.__code__.co_firstlineno + 1}"
    assert "0.84" in of_values.message, "of the first turn in which it is so"


def test_a_step_that_fails_is_no_passed_rule(others):
    def fails(x):
        jax.debug.callback(stop, x)
        return jnp.sin(x)

    def stop(x):
        raise RuntimeError("stop")

    report = mpjax.lint(fails)(jnp.ones(3))
    assert "running one step failed" in report.not_run["of-values"]


@pytest.mark.parametrize("wrap", ["jit", "remat", "vmap", "cond", "while", "custom_jvp", "vjp"])
def test_lint_enters_programs_inside_transformations(wrap):
    def body(x):
        return jax.lax.reduce_sum(x, (0,))

    def wide(x):
        return x.astype(jnp.float32)

    custom = jax.custom_vjp(body)
    custom.defvjp(lambda x: (body(x), None), lambda kept, g: (g,))
    jvp = jax.custom_jvp(body)
    jvp.defjvp(lambda primals, tangents: (body(*primals), body(*tangents)))
    fun = {
        "jit": jax.jit(body, donate_argnums=0),
        "remat": jax.value_and_grad(lambda x: wide(jax.checkpoint(body)(jnp.sin(x)))),
        "vmap": lambda x: jax.vmap(body)(x[None]),
        "cond": lambda x: jax.lax.cond(x[0] > 0, body, lambda x: x[0], x),
        "while": lambda x: jax.lax.while_loop(lambda c: c < 3, lambda c: c + body(x), x[0]),
        "custom_jvp": jvp,
        "vjp": custom,
    }[wrap]
    found = mpjax.lint(fun, select="half-sum")(bf16(300)).findings
    assert [f.source for f in found] == [f"{__file__}:{body.__code__.co_firstlineno + 1}"]


def test_lint_leaves_nnx_modules_as_they_are():
    class Model(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
            self.calls = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1
            return summed(self.linear(x).astype(jnp.bfloat16))

    model = Model()
    report = mpjax.lint(lambda model, x: model(x))(model, f32(300, 3))
    assert [f.rule for f in report.findings] == ["half-sum"] and float(model.calls[...]) == 0


def test_lint_report_is_data():
    report = mpjax.lint(silenced_whole)(bf16(300))
    assert not report and mpjax.lint(twice)(bf16(300))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["suppressed"][0]["rule"] == "half-sum" and not data["findings"]
    assert set(data["ran"]) | set(data["not_run"]) == {rule.name for rule in RULES}


def test_lint_report_as_sarif_has_rules_and_locations(others):
    report = mpjax.lint(waves, target="cpu")(jnp.ones(3))
    log = json.loads(json.dumps(report.to_sarif()))
    (run,) = log["runs"]
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-2.1.0.json")
    rules = run["tool"]["driver"]["rules"]
    assert run["tool"]["driver"]["name"] == "mpjax lint"
    assert {result["ruleId"] for result in run["results"]} == {"of-values", "of-hlo"}
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] == "warning" and result["message"]["text"]
        (location,) = result["locations"]
        file = location["physicalLocation"]["artifactLocation"]["uri"]
        assert file.endswith("tests/tools/lint/test_linter.py") and " " not in file
        assert location["physicalLocation"]["region"]["startLine"] > 1
    quiet = mpjax.lint(waves)(f32(3)).to_sarif()["runs"][0]["invocations"][0]
    notes = [each["associatedRule"]["id"] for each in quiet["toolExecutionNotifications"]]
    assert quiet["executionSuccessful"] and notes == ["of-values", "of-hlo"]


def test_sarif_tells_what_is_suppressed():
    (result,) = mpjax.lint(silenced_whole)(bf16(300)).to_sarif()["runs"][0]["results"]
    assert result["suppressions"] == [{"kind": "inSource"}]


def test_every_lint_rule_has_needs_summary_why_and_instead():
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.needs in NEEDS and rule.name == rule.name.lower() and " " not in rule.name
        assert rule.summary[0].islower() and rule.summary[-1] != "."
        for text in (rule.why, rule.instead):
            assert not text[0].islower() or text.startswith(("float", "bfloat")), rule.name
            assert text[-1] == ".", rule.name
        assert rule.check.__doc__, f"{rule.name}: the docstring gives the threshold and its reason"


def test_every_rule_of_a_program_has_a_faulty_and_a_mended_one():
    names = [path.stem for path in Path(__file__).parent.glob("test_rules_of_*.py")]
    found = {pair.rule for name in names for pair in importlib.import_module(name).CASES.values()}
    assert {rule.name for rule in RULES if rule.needs in (JAXPR, VALUES)} <= found


def test_lint_page_lists_the_rules():
    rows = [f"| `{rule.name}` | {rule.needs} | {rule.summary} |" for rule in RULES]
    table = "\n".join(["| rule | needs | finds |", "| --- | --- | --- |", *rows])
    assert f"\n{table}\n\n" in PAGE.read_text(), f"docs/lint_rules.md: the table must be\n{table}"


def test_lint_report_text_fits_the_width():
    def long_name(x):
        with jax.named_scope("a_scope/" * 30):
            return twice(x)

    lines = str(mpjax.lint(long_name)(bf16(300))).splitlines()
    assert max(map(len, lines)) <= WIDTH
