"""Where equations stand: their scopes, passes and callers, and how often they run."""

import contextlib

import jax
import jax.numpy as jnp

from mpjax._src.core.program.site import NUMBER, ROOT, ROW, Site, equations, shown


def loss(x):
    def step(c, _):
        with jax.named_scope("inner"):
            return jax.lax.scan(lambda c, _: (jnp.tanh(c), None), c, None, 2)[0], None

    with jax.named_scope("outer"):
        return jax.lax.scan(step, x, None, 3)[0]


def named(fun, name):
    return [
        row for row in equations(jax.make_jaxpr(fun)(1.0).jaxpr) if row[0].primitive.name == name
    ]


def test_an_equation_in_two_loops_stands_in_both():
    ((_, site, times),) = named(loss, "tanh")
    assert times == 6 and site.scopes == ("outer", "inner") and not site.backward
    assert [eqn.params["length"] for eqn in site.callers] == [3, 2]
    ((*_, first), (*_, second)) = named(loss, "scan")
    assert (first, second) == (1, 3)


def test_site_tells_the_backward_pass_by_transformations_around():
    backward = {site.backward for _, site, _ in named(jax.grad(loss), "mul")}
    assert True in backward and not named(loss, "mul")
    assert all("test_site.py:" in site.lines(eqn)[0] for eqn, site, _ in named(loss, "tanh"))


def test_site_may_count_scopes_that_an_equation_repeats_once():
    ((eqn, site, _),) = named(jax.named_scope("a")(jnp.tanh), "tanh")
    assert site.scopes == ("a",) and site.at(eqn).scopes == ("a", "a")
    assert site.at(eqn, repeats=False) == site
    assert Site(("b",)).at(eqn, repeats=False).scopes == ("b", "a")


def test_site_reads_row_and_numbers_from_scopes():
    def fun(x):
        with contextlib.ExitStack() as scopes:
            for name in (f"{ROW}3", f"{NUMBER}1", f"{NUMBER}7", "layer"):
                scopes.enter_context(jax.named_scope(name))
            return jnp.sin(x)

    ((_, site, _),) = named(fun, "sin")
    assert site.op == 3 and site.numbers == (1, 7) and shown(site.scopes) == ["layer"]
    assert ROOT.op is None and ROOT.turn("scan", 4).loops == (("scan", 4),)
