"""JAX's internals are asked for in one place; what needs none of them works without any."""

import functools
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax._src.core.base._jax import internals
from mpjax._src.core.planner import kept
from mpjax.errors import PrecisionWarning, UnsupportedJaxError

P, X = {"w": jnp.ones((8, 8))}, jnp.ones((4, 8))


def loss(p, x):
    return jnp.mean(jnp.tanh(x @ p["w"]) ** 2)


class Without:
    """A module of JAX without some of its names."""

    def __init__(self, home, names):
        self.home, self.names = home, names

    def __getattr__(self, name):
        if name in self.names:
            raise AttributeError(name)
        return getattr(self.home, name)


@pytest.fixture
def hide(monkeypatch):
    """A function that hides internals of JAX from mpjax."""

    def hidden(*names):
        gone = {internals.PLACES[name][0] for name in names}
        lasts = {place.rpartition(".")[2] for place in gone}
        real = internals._found
        monkeypatch.setattr(internals, "_found", lambda place: Without(real(place), lasts))
        for name in names:
            monkeypatch.delitem(vars(internals), name, raising=False)
        kept._kept.cache_clear()

    return hidden


def causes(error):
    """Returns the types of the errors that led to one. JAX adds the places of operations."""
    found = []
    while error is not None:
        found.append(type(error))
        error = error.__cause__ or error.__context__
    return found


# ---- one that is missing ------------------------------------------------------------------------


def test_the_installed_jax_has_all_of_them():
    assert internals.missing() == []
    assert len(internals.PLACES) == sum(len(row.places) for row in internals.CONTRACTS)


def test_a_missing_one_is_named_with_the_versions_and_the_way_on(hide):
    hide("linearize_jaxpr")
    twice = lambda p, x: loss(p, jnp.tanh(jnp.tanh(x @ p["w"]) @ p["w"]))  # noqa: E731
    with pytest.raises(UnsupportedJaxError) as raised:
        jax.make_jaxpr(jax.grad(mpjax.autocast(twice, "mixed_bfloat16")))(P, X)
    said = str(raised.value)
    assert f"JAX {jax.__version__} has no jax._src.interpreters.ad.linearize_jaxpr" in said
    assert f"mpjax {mpjax.__version__} is tested with JAX up to {internals.TESTED}" in said
    assert '"O3:bfloat16"' in said and "pip install 'jax<0.13'" in said
    assert AttributeError in causes(raised.value)
    for policy in ("O3:bfloat16", "params=float32,compute=bfloat16,output=float32", "float32"):
        jax.make_jaxpr(jax.grad(mpjax.autocast(twice, policy)))(P, X)


def test_what_is_optional_is_done_without(hide):
    optional = [name for name, (_, row) in internals.PLACES.items() if row.optional]
    plan = lambda: str(jax.make_jaxpr(mpjax.autocast(loss, "mixed_float16"))(P, X))  # noqa: E731
    before = plan()
    hide(*optional)
    assert optional and plan() == before
    assert [place for place, _ in internals.missing()] == [
        internals.PLACES[name][0] for name in optional
    ]


def test_an_error_without_a_line_is_that_of_the_program(hide):
    hide("user_frames", "InternalFloatingPointError")
    log = mpjax.autocast(lambda x: jnp.log(-x), "params=float32,compute=bfloat16,output=float32")
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        log(X)


# ---- an untested version ------------------------------------------------------------------------


@pytest.fixture
def untested(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.99.1.dev2")
    monkeypatch.setattr(internals, "_WARNED", set())
    kept._kept.cache_clear()


def test_an_untested_version_is_warned_of_once(untested):
    with pytest.warns(PrecisionWarning, match="JAX 0.99.1.dev2 is newer .* 0.12.*mpjax doctor"):
        jax.make_jaxpr(mpjax.autocast(loss, "mixed_bfloat16"))(P, X)
    jax.make_jaxpr(mpjax.autocast(loss, "mixed_float16"))(P, X)


def test_nothing_warns_where_nothing_is_planned(untested):
    for policy in ("O3:bfloat16", "float32"):
        jax.make_jaxpr(mpjax.autocast(loss, policy))(P, X)


# As if it were code of JAX.
SCOPE: dict = {}
CODE = "def changed(*args, **kwargs):\n    raise TypeError('takes another argument')"
exec(compile(CODE, f"{internals._JAX}changed.py", "exec"), SCOPE)
changed = SCOPE["changed"]


def test_a_changed_internal_of_an_untested_version_ends_in_the_same_error(untested, monkeypatch):
    monkeypatch.setattr(internals, "linearize_jaxpr", changed, raising=False)
    explain = mpjax.explain(loss, argnums=0)
    for call in (jax.grad(mpjax.autocast(loss)), explain, mpjax.compare(loss)):
        with warnings.catch_warnings(), pytest.raises(UnsupportedJaxError) as raised:
            warnings.simplefilter("ignore")
            call(P, X)
        assert "behaves otherwise than mpjax expects (TypeError: takes another" in str(raised.value)
        assert TypeError in causes(raised.value)


def test_a_changed_internal_of_a_tested_version_is_no_secret(monkeypatch):
    kept._kept.cache_clear()
    monkeypatch.setattr(internals, "linearize_jaxpr", changed, raising=False)
    with pytest.raises(TypeError, match="takes another argument"):
        jax.grad(mpjax.autocast(loss))(P, X)


@pytest.mark.filterwarnings("ignore:JAX 0.99")
def test_errors_of_users_stay_theirs(untested):
    def wrong(p, x):
        return x @ p["w"][:3]

    def missing(p, x):
        return p["v"]

    ruled = jax.custom_vjp(jnp.sin)
    ruled.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),))
    with pytest.raises(TypeError, match="forward-mode") as raised:
        jax.jvp(mpjax.autocast(lambda x: 2 * ruled(x), "O3:bfloat16"), (X,), (X,))
    assert not isinstance(raised.value, UnsupportedJaxError)
    for fun, kind in ((wrong, TypeError), (missing, KeyError), (jnp.matmul, Exception)):
        for policy in ("mixed_bfloat16", "O3:bfloat16"):
            with pytest.raises(kind) as raised:
                mpjax.autocast(fun, policy)(P, X)
            assert not isinstance(raised.value, UnsupportedJaxError), fun


def test_rules_that_jax_calls_otherwise_are_explained(untested):
    @internals.guarded
    def rule(args):
        return args

    def jaxs(*args):  # as JAX's code calls a rule
        return rule(*args)

    with pytest.raises(UnsupportedJaxError, match="behaves otherwise"):
        jaxs(1, 2)
    assert jaxs(1) == 1 and functools.partial(rule, 2)() == 2


# ---- none of them at all ------------------------------------------------------------------------

PRELUDE = """
import builtins, sys, types, warnings
import jax, jax.numpy as jnp, numpy as np, optax
hidden = sys.argv[1]
own = builtins.__import__
def refusing(name, scope=None, *args):
    ours = str((scope or {}).get("__name__", "")).startswith("mpjax")
    if hidden and ours and name.startswith("jax._src"):
        raise ImportError(f"{name} is hidden from {scope['__name__']}")
    return own(name, scope, *args)
builtins.__import__ = refusing
import mpjax
from mpjax._src.core.base._jax import internals
from mpjax.errors import UnsupportedJaxError
if hidden:
    internals._found = lambda place: types.SimpleNamespace()
warnings.simplefilter("ignore")
"""
WORKS = (
    PRELUDE
    + """
import tempfile
from flax import linen, nnx
params, x = {"w": jnp.linspace(-1, 1, 64).reshape(8, 8)}, jnp.linspace(0, 1, 32).reshape(4, 8)
big = jnp.arange(8.0)
CAST = "params=float32,compute=bfloat16,output=float32"

def loss(p, x, *, model_state=None):
    h = jax.checkpoint(lambda h: jnp.sin(h @ p["w"]))(x) + big.astype(x.dtype)
    h, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ p["w"]), None), h, None, length=2)
    if model_state is None:
        return jnp.mean(h**2)
    return jnp.mean(h**2), {"mean": 0.9 * model_state["mean"] + 0.1 * h.mean(0)}

def tell(name, *trees):
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(trees)]
    print(name, *(repr(float(x.sum())) for x in leaves))

for policy in ("O3:bfloat16", "O3:float16", CAST, "p=f32,c=f16,o=f32", "float32"):
    init, step = mpjax.build_train_step(loss, optax.adam(1e-2), policy)
    state, metrics = jax.jit(step)(init(params, model_state={"mean": jnp.zeros(8)}), x)
    tell(policy, metrics["loss"], state.params, state.loss_scale, state.model_state)
with tempfile.TemporaryDirectory() as folder:
    mpjax.checkpoint.save(folder + "/one", state)
    tell("checkpoint", mpjax.checkpoint.restore(folder + "/one", state).params)
for policy in ("O2:bfloat16,masters=split", "O3:bfloat16,moments=8bit", "mixed_float16"):
    optimizer = mpjax.mixed_precision(optax.adam(1e-2), policy)
    stored = optimizer.policy.cast_to_param(params)
    updates, _ = jax.jit(optimizer.update)(stored, optimizer.init(stored), stored)
    tell(policy, updates)
fun = mpjax.autocast(loss, CAST)
tell("calls", fun(params, x), fun(params, x + 1), jax.vmap(fun, (None, 0))(params, x[:, None]))
with jax.debug_nans(True):
    tell("debug", fun(params, x))
with jax.disable_jit():
    tell("no jit", fun(params, x))
model = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
tell("nnx", mpjax.autocast(lambda m, x: m(x), CAST)(model, x), nnx.state(model))
q = x.astype(jnp.bfloat16).reshape(1, 4, 2, 4)
tell("attention", jax.grad(lambda q: mpjax.dot_product_attention(q, q, q).sum().astype(float))(q))
heads = jax.grad(lambda h, w: mpjax.linear_cross_entropy(h, w, jnp.zeros(4, int)).mean(), (0, 1))
tell("cross entropy", jax.jit(heads)(x.astype(jnp.bfloat16), params["w"]))
if hidden:
    for tool in (mpjax.autocast, mpjax.explain, mpjax.lint, mpjax.compare, mpjax.find_nonfinite):
        setting = () if tool is mpjax.lint else ("mixed_bfloat16",)
        try:
            print(tool(loss, *setting)(params, x))
        except UnsupportedJaxError as error:
            print("refused", tool.__name__, error)
"""
)


def told(program, hidden):
    command = [sys.executable, "-c", program, hidden]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.thorough
def test_what_plans_nothing_needs_public_functions_alone():
    """Policies that cast arguments, optimizers, checkpoints and replacements: the same numbers."""
    without, refused = told(WORKS, "all"), []
    while without[-1].startswith("refused"):
        refused.append(without.pop())
    assert without == told(WORKS, "")
    assert len(refused) == 5
    for line in refused:
        assert " has no jax." in line and "is tested with JAX up to" in line, line


EACH = (
    PRELUDE
    + """
from mpjax._src.core.planner import kept
import mpjax._src.core.autocast.transform
every, found = [*internals._WAITING], internals._found
x = jnp.ones((4, 8))

def loss(p, x):
    h = jax.checkpoint(lambda h: jnp.tanh(h @ p["w"]))(x)
    h, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ p["w"]), None), h, None, length=2)
    return jnp.mean(jax.jit(lambda h: h @ p["w"])(h) ** 2)

class Without:
    def __init__(self, home, last):
        self.home, self.last = home, last
    def __getattr__(self, name):
        if name == self.last:
            raise AttributeError(name)
        return getattr(self.home, name)

def programs():
    init, step = mpjax.build_train_step(loss, optax.adam(1e-3), "O3:bfloat16")
    once = str(jax.make_jaxpr(step)(init({"w": jnp.ones((8, 8))}), x))
    kept._kept.cache_clear()
    internals._WAITING[:] = every
    try:
        return once, str(jax.make_jaxpr(jax.grad(mpjax.autocast(loss)))({"w": x.T @ x}, x))
    except UnsupportedJaxError as error:
        return once, error

before, refused = programs(), []
for name, (place, row) in internals.PLACES.items():
    outer, _, last = place.rpartition(".")
    internals._found = lambda p: Without(found(p), last) if p == outer else found(p)
    for cached in internals.PLACES:
        vars(internals).pop(cached, None)
    once, planned = programs()
    assert once == before[0], name
    if isinstance(planned, UnsupportedJaxError):
        assert place in str(planned), (name, planned)
        refused.append(name)
    else:
        assert planned == before[1], name
print(*refused)
"""
)


@pytest.mark.thorough
def test_each_missing_name_is_refused_or_changes_nothing():
    (refused,) = told(EACH, "")
    always = {"primitive_linearizations", "custom_staging_rules", "lowerings", "scan_impl"}
    assert always <= {*refused.split()}
    aside = {"DeviceList", "user_frames", "const_fold_rules", "plugin_callbacks", "params"}
    assert not aside & {*refused.split()}
