"""The table of primitives: its names, and how a row is added. Its columns: test_rules_*.py."""

import jax
import jax.experimental.pallas
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from primitives import CASES, ELEMENTWISE, NEWER, UNTRIED
from support import assert_near, found, normal

import mpjax
from mpjax._src.core.base import _jax, rules

# Names that one of the two versions of JAX lacks.
OLD, NEW = (
    {"closed_call", "vary_unreduced_cast_p"},
    {"log2", "vary_unreduced_cast", "one_minus_square"},
)
LACKING = OLD if NEWER else NEW


def test_every_row_is_of_a_primitive():
    assert mpjax.autocast  # it makes primitives of its own where it is imported
    assert set(rules.RULES) - _jax.primitive_names() <= LACKING


def test_every_row_is_tested():
    tested = {key.split()[0] for key in (*ELEMENTWISE, *CASES)}
    programs = set(rules.names_where(lambda rule: rule.need == rules.PROGRAM))
    missing = set(rules.RULES) - tested - programs - UNTRIED.keys() - {"custom_jvp_call"}
    assert missing <= LACKING, f"Add these to helpers/primitives.py, or to UNTRIED: {missing}"
    assert tested | UNTRIED.keys() <= rules.RULES.keys()


def test_columns_of_rules_have_legal_values():
    for name, row in rules.RULES.items():
        for column in ("span", "saves", "cost"):
            assert getattr(row, column) in rules.CHOICES[column], (name, column)
        assert row.traits <= set(rules.CHOICES["traits"]), name


# ---- register_rule ------------------------------------------------------------------------------


def new_operation(name):
    """Returns a primitive that JAX does not know, and a function that binds it: a leaky relu."""
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x: x)
    lowering = mlir.lower_fun(lambda x: jnp.maximum(x, x / 4), multiple_results=False)
    mlir.register_lowering(primitive, lowering)
    return primitive, primitive.bind


def planned(fun, name):
    """Returns what a plan has a primitive compute in and give, and why."""
    rows = mpjax.explain(fun, "mixed_bfloat16")(normal(0, 8, 8)).rows
    return next((row.after, row.reason) for row in rows if row.primitive == name)


@pytest.mark.parametrize(
    ("need", "after", "reason"),
    [
        (
            None,
            "f32->f32",
            "a primitive without a rule, left in float32; mpjax.register_rule adds a rule, and "
            "mpjax.half_inputs runs a kernel in 16 bits",
        ),
        ("follow", "f32->f32", "float32: only matmuls are rounded"),
        ("full", "f32->f32", "float32: only matmuls are rounded"),
        ("move", "bf16->bf16", "follows its operands"),
        ("half", "bf16->bf16", "16-bit list"),
    ],
)
def test_a_plan_goes_by_the_row(table, need, after, reason):
    primitive, bind = new_operation(f"leaky_{need}")
    if need is not None:
        mpjax.register_rule(primitive, need)

    def fun(x):
        return -bind(x @ x) @ x

    assert planned(fun, primitive.name) == (after, reason)
    auto, x = mpjax.autocast(fun, "mixed_bfloat16"), normal(0, 8, 8)
    dtype = {"f32": "float32", "bf16": "bfloat16"}[after.split("-")[0]]
    assert found(auto, x, names=[primitive.name]) == [(primitive.name, (dtype,), dtype)]
    assert_near(jax.jit(auto)(x), jax.jit(fun)(x))


def test_register_rule_defaults_to_the_worst(table):
    mpjax.register_rule("mine", "follow")
    row = rules.rule_of("mine")
    assert (row.gain, row.span, row.saves, row.cost) == ("unbounded", "grows", "operands", "never")
    assert row.traits == frozenset()


def test_a_known_row_is_replaced(table):
    assert planned(lambda x: jnp.exp(x @ x) @ x, "exp")[0] == "f32->f32"
    mpjax.register_rule("exp", "move")
    assert planned(lambda x: jnp.exp(x @ x) @ x.T, "exp")[0] == "bf16->bf16"


@pytest.mark.parametrize(
    ("need", "columns", "message"),
    [
        ("double", {}, "need='double' is invalid .primitive 'mine'.*'half', 'full', 'follow'"),
        ("compare", {}, "need='compare' is invalid"),
        ("full", {"gain": "small"}, "gain='small' is invalid.*'none', 'one', 'sum', 'range'"),
        ("full", {"gian": "one"}, "gian='one' is not a column.*'gain', 'span', 'saves', 'cost'"),
        ("full", {"span": lambda params: "keeps"}, "span=.* is invalid"),
        ("full", {"traits": ["kinked", "round"]}, "traits=.*'round'.* is invalid.*'kinked'"),
        ("full", {"traits": "kinked"}, "traits='kinked' is invalid"),
    ],
)
def test_register_rule_errors_name_what_is_legal(table, need, columns, message):
    with pytest.raises(ValueError, match=message):
        mpjax.register_rule("mine", need, **columns)
    assert "mine" not in table


def test_register_rule_refuses_what_is_no_primitive(table):
    with pytest.raises(ValueError, match="primitive=3 must be a JAX primitive, such as"):
        mpjax.register_rule(3, "full")
