"""What a process differentiates is found and replaced, and nothing else."""

import contextlib
import functools
import inspect
import pickle
import sys
import threading
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import linear_call
from jax.experimental import sparse
from jax.scipy import optimize

from mpjax._src.core.base.contexts import HOOKED
from mpjax._src.tools.scripts.hooks import TRANSFORMS, hooked


def loss(w, x=2.0):
    return jnp.sum(jnp.sin(w) * x)


def doubled(fun, site):
    return lambda *args, **kwargs: jax.tree.map(lambda x: 2 * x, fun(*args, **kwargs))


@contextlib.contextmanager
def noting(around=lambda fun, site: fun, **options):
    sites = []

    def note(fun, site):
        sites.append(site)
        return around(fun, site)

    with hooked(note, **options):
        yield sites


def text(run):
    """Returns a program as text; nothing of it is compiled."""
    return str(jax.make_jaxpr(run)())


W = np.ones(3, np.float32)
CALLS = {
    "grad": lambda: jax.grad(loss)(W),
    "value_and_grad": lambda: jax.value_and_grad(loss, argnums=(0, 1))(W, 3.0)[1],
    "vjp": lambda: jax.vjp(loss, W)[1](1.0),
    "linearize": lambda: jax.linearize(loss, W)[1](W),
    "jacrev": lambda: jax.jacrev(fun=loss)(W),
    "jacobian": lambda: jax.jacobian(loss)(W),
    "hessian": lambda: jax.hessian(loss)(W),
    "fwd_and_bwd": lambda: jax.fwd_and_bwd(loss, 0, jitted=False)[0](W),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_a_transformation_differentiates_is_replaced_once(name):
    plain = text(CALLS[name])
    with noting(doubled) as sites:
        assert text(CALLS[name]) != plain
    assert [site.transform for site in sites] == [name]
    (site,) = sites
    assert site.fun == "loss" and site.file == __file__ and site.library == ""
    assert f"jax.{name}(" in Path(__file__).read_text().splitlines()[site.line - 1]
    assert text(CALLS[name]) == plain
    assert HOOKED.value is None and jax.grad.__module__ != "jax"


# The other functions of `jax` that take a function.
LEFT = {
    "forward mode, which is noted": ("jvp", "jacfwd"),
    "the derivative is the caller's": ("custom_gradient",),
    "it is linear already": ("linear_transpose",),
    "no derivative": (
        *("checkpoint", "closure_convert", "eval_shape", "jit", "make_jaxpr", "named_call"),
        *("pmap", "remat", "shard_map", "smap", "vmap"),
    ),
}


def test_each_public_function_of_jax_is_replaced_or_left_for_a_reason():
    known = {*TRANSFORMS, *(name for names in LEFT.values() for name in names)}
    for name, value in vars(jax).items():
        if callable(value) and not name.startswith("_"):
            with contextlib.suppress(ValueError, TypeError):  # of a builtin
                first = next(iter(inspect.signature(value).parameters), "")
                if first in ("f", "fun", "fn", "func", "function") and not inspect.isclass(value):
                    assert name in known, f"jax.{name} is new: does it differentiate?"


def test_what_jax_differentiates_for_the_user_is_replaced():
    matrix = sparse.BCOO.fromdense(np.eye(3, dtype=np.float32))
    calls = {
        "sparse.grad": lambda: sparse.grad(lambda m: (m @ W).sum())(matrix).data,
        "minimize": lambda: optimize.minimize(loss, W, method="BFGS", options={"maxiter": 1}).fun,
    }
    for name, run in calls.items():
        plain = text(run)
        with noting(doubled) as sites:
            assert text(run) != plain, name
            assert {site.file for site in sites} == {__file__}
        assert text(run) == plain


def test_blocks_of_threads_may_overlap():
    inside, end = threading.Event(), threading.Event()

    def other():
        with hooked(doubled, key=("other",)):
            inside.set()
            end.wait()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    with noting() as sites:
        end.set()
        thread.join()
        text(lambda: jax.grad(loss)(W))
        assert len(sites) == 1
    assert HOOKED.value is None and jax.grad.__module__ != "jax"


def test_only_the_outermost_is_replaced():
    inner = jax.grad(loss)  # made before: not seen
    with noting() as sites:
        made = jax.grad(loss)
        text(lambda: jax.grad(lambda w: made(w).sum() + inner(w).sum() + jax.vjp(loss, w)[0])(W))
        assert [site.fun for site in sites] == ["<lambda>"]
        text(lambda: jax.jacfwd(jax.jacrev(loss))(W))
        text(lambda: jax.jvp(jax.grad(loss), (W,), (W,)))
    assert [site.transform for site in sites] == ["grad", "jacrev", "grad"]


def test_rules_of_custom_derivatives_are_left_alone():
    @jax.custom_vjp
    def solve(w):
        return jnp.sum(jax.grad(loss)(w))

    def forward(w):
        return solve(w), w

    def backward(w, ct):
        return (jax.vjp(lambda w: jax.grad(loss)(w).sum(), w)[1](ct)[0],)

    solve.defvjp(forward, backward)

    @jax.custom_jvp
    def root(w):
        return w

    @root.defjvp
    def _(primals, tangents):
        return primals[0], jax.grad(loss)(primals[0]) * tangents[0]

    def turned(_, ct):  # the rule that transposes, as libraries of linear solvers have them
        return jax.vjp(lambda w: 2 * w, ct)[1](ct)[0]

    def linear(w):
        return jnp.sum(linear_call(lambda _, w: 2 * w, turned, (), w))

    old = {name: getattr(jax, name) for name in TRANSFORMS}
    with noting() as sites:
        text(lambda: jax.grad(linear)(W))
        assert [site.fun.rpartition(".")[2] for site in [*sites]] == ["linear"]
        sites.clear()
        text(lambda: jax.vjp(solve, W)[1](1.0))
        text(lambda: jax.jvp(root, (W,), (W,)))
        text(lambda: old["grad"](solve)(W))  # nobody covers it, but its rules are rules
        assert [site.fun for site in sites] == ["solve"]
        text(lambda: solve(W))  # no derivative of it is computed
    assert [site.fun for site in sites] == ["solve", "loss"]


def test_forward_mode_is_noted_where_nothing_inside_is_replaced():
    seen = []
    with noting(forward=seen.append) as sites:
        text(lambda: jax.jvp(loss, (W,), (W,)))
        text(lambda: jax.jacfwd(loss)(W))
        text(lambda: jax.jvp(jax.grad(loss), (W,), (W,)))
        text(lambda: jax.grad(lambda w: jax.jvp(loss, (w,), (w,))[1])(W))
    assert [(site.transform, site.fun) for site in seen] == [("jvp", "loss"), ("jacfwd", "loss")]
    assert len(sites) == 2


def test_a_jit_is_traced_again_inside_and_outside():
    count = []

    @jax.jit
    def step(w):
        count.append(1)
        return jax.grad(loss)(w)

    plain = step(W)
    for _ in range(2):
        with hooked(doubled, key=("doubled",)):
            assert (step(W) == 2 * plain).all()
        assert (step(W) == plain).all()
    assert len(count) == 2  # equal keys share a trace


def test_hooks_are_for_all_threads():
    found = []
    with noting(doubled) as sites:
        thread = threading.Thread(target=lambda: found.append(jax.jit(jax.grad(loss))(W)))
        thread.start()
        thread.join()
    assert len(sites) == 1 and (found[0] == 2 * jax.grad(loss)(W)).all()


def test_earlier_imports_are_found_and_given_back(monkeypatch):
    module = types.ModuleType("earlier")
    exec("from jax import grad as g, value_and_grad", vars(module))
    exec("def run(f, w): return g(f)(w)", vars(module))
    monkeypatch.setitem(sys.modules, "earlier", module)
    before = module.g
    with noting() as sites:
        module.run(loss, W)
        exec("from jax import hessian; from jax._src.api import grad", vars(module))
        assert module.grad is jax.grad is not before
        assert pickle.loads(pickle.dumps(jax.grad)) is jax.grad
    assert [site.fun for site in sites] == ["loss"]
    assert module.g is before is jax.grad is module.grad and module.hessian is jax.hessian


def test_what_holds_a_transformation_otherwise_is_named(monkeypatch):
    module = types.ModuleType("holding")
    source = """
import functools, jax
def of_default(f, grad=jax.grad): pass
def of_keyword(f, *, grad=jax.grad): pass
def outer(vjp):
    def of_closure(f): return vjp(f)
    return of_closure
closure = outer(jax.vjp)
partly = functools.partial(jax.value_and_grad, has_aux=True)
table = {"h": jax.hessian}
class Trainer: take = staticmethod(jax.grad)
"""
    exec(source, vars(module))
    module.made = jax.jit(jax.grad(loss))
    monkeypatch.setitem(sys.modules, "holding", module)
    for holder in (module.of_default, module.of_keyword, module.closure, module.Trainer):
        holder.__module__ = "holding"
    with hooked(doubled) as hook:
        of_hook = jax.grad(lambda w: loss(w))
        text = "\n".join(hook.missed)
    assert f"derivative of <lambda> ({__file__}" not in text, of_hook
    for phrase in (
        "jax.grad as a default of of_default (",
        "jax.grad as a default of of_keyword (",
        "jax.vjp in the closure of of_closure (",
        "jax.value_and_grad in holding.partly",
        "jax.hessian in holding.table",
        "jax.grad as holding.Trainer.take",
        f"the derivative of loss ({__file__}:",
    ):
        assert phrase in text, (phrase, text)


def test_partial_and_decorated_calls_have_their_lines():
    with noting() as sites:

        @functools.partial(jax.value_and_grad, argnums=1, has_aux=True)
        def both(w, x):
            return x * w.sum(), w

        text(lambda: both(W, 2.0))
    (site,) = sites
    assert site.argnums == 1 and site.has_aux and site.fun.endswith("both")


def test_calls_of_jax_and_mpjax_are_left_alone():
    import mpjax

    own = []
    with noting(own=own.append) as sites:
        text(lambda: mpjax.scaled_value_and_grad(loss, mpjax.NoOpLossScale())(W))
        with pytest.raises(TypeError):
            jax.grad(3)
        planned = mpjax.autocast(lambda w: jax.grad(loss)(w))
        text(lambda: planned(W))  # a plan is made of the whole
    assert not sites and [site.line for site in own] == [own[0].line]
    assert "mpjax.scaled" in Path(__file__).read_text().splitlines()[own[0].line - 1]


def test_a_gradient_of_a_library_in_a_trace_of_mpjax_is_the_librarys_own():
    """A survey traces the steps of libraries, which it does not compute itself."""
    from mpjax._src.core.program.trace import trace

    file, space, own = str(Path(jax.__file__).parents[1] / "trainer.py"), {"jax": jax}, []
    exec(compile("def step(fun, w):\n    return jax.grad(fun)(w)", file, "exec"), space)
    with noting(own=own.append) as sites:
        trace(functools.partial(space["step"], loss), [jax.typeof(W)], "step")
    assert not own and sites
    assert {site.library for site in sites} == {f"{file}:2"}
    assert {site.file for site in sites} == {__file__}
