"""Imports point one way, JAX's internals are reached from one package, and importing is light."""

import functools
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import canary
import numpy as np
import pytest
import surface
from house import LEAVES, asked_for, circle, drawing, graph_of, imports, in_core, modules_of

import mpjax

PACKAGE = Path(mpjax.__file__).parent
INSIDE = PACKAGE / "_src"
# From the bottom up: a package imports only what stands before. So the core imports none of the
# leaves, and neither imports the tools.
IN_CORE = ("base", "program", "policy", "planner", "autocast", "training", "frameworks")
TOOLS = ("document", "hardware", "watching", "lint", "instruments", "scripts", "cli")
ORDER = (*(f"core/{room}" for room in IN_CORE), *LEAVES, *(f"tools/{room}" for room in TOOLS))
# What the core imports when a policy or an argument asks for it.
ASKED_FOR = {
    "core.autocast.transform": {"replacements.finder.Finder"},
    "core.training.levels": {
        "optim.moments.with_8bit_moments",
        "optim.rounding.with_stochastic_rounding",
    },
    "core.training.step": {
        "tools.watching.overflows.first_overflow",
        "tools.watching.overflows.observer",
        "tools.watching.overflows.underflow",
        "tools.watching.stalled.Stalled",
        "tools.watching.stalled.stalled",
    },
}

RETURN_NOTHING = {"raise_if_diverged", "warn_if_stalled", "save", "save_safetensors"}


def modules(room):
    return [*(INSIDE / room).rglob("*.py")]


def test_every_package_has_its_place():
    folders = [*INSIDE.glob("*"), *INSIDE.glob("core/*"), *INSIDE.glob("tools/*")]
    rooms = {path.relative_to(INSIDE).as_posix() for path in folders if path.stem[:2] != "__"}
    assert rooms == {*ORDER, "core", "tools"}
    assert {path.stem for path in PACKAGE.iterdir()} - {"__pycache__"} == {
        "__init__",
        "__main__",
        "_src",
        "py",
        *("checkpoint", "debug", "errors", "hardware", "optim", "reports", "scripts"),
        *("jmp", "keras", "linen", "nnx"),
    }


@pytest.mark.parametrize("room", ORDER)
def test_imports_point_one_way_between_packages(room):
    for path in modules(room):
        for name in {*imports(path)} - asked_for(path):
            if name.startswith("mpjax._src."):
                parts = name.split(".")[2:]
                imported = parts[0] if parts[0] in ORDER else "/".join(parts[:2])
                assert ORDER.index(imported) <= ORDER.index(room), f"{path} imports {name}"
            elif name.split(".")[0] == "mpjax":
                assert room == "tools/cli", f"{path} imports {name}: only the command is a user"


def test_no_circle_between_modules():
    assert not circle(graph_of(modules_of(PACKAGE.parent)))


def test_no_function_is_hidden_by_a_module_of_its_name():
    for room in ORDER:
        for path in modules(room):
            module = importlib.import_module(
                ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            )
            assert inspect.ismodule(module), path
    for name, thing in surface.PUBLIC.items():
        assert not inspect.ismodule(thing), name


def test_internals_of_jax_are_reached_from_one_package():
    for room in ORDER:
        for path in modules(room):
            inside = path.parent.name == "_jax" and path.stem == "internals"
            names = [use.name for use in canary.uses(path) if canary.is_private(use.name)]
            assert not names, f"{path} uses {names}"
            assert inside or "jax._src" not in path.read_text().replace("mpjax._src", ""), path


IMPORTS = """
import jax, sys
before = {*sys.modules}
import mpjax
print(*sorted({name.split(".")[0] for name in {*sys.modules} - before}))
print(*sorted(name for name in sys.modules if name.startswith("mpjax")))
f = jax.jit(lambda x: x + 1)
f(1.0)
mpjax.autocast, mpjax.get_policy, mpjax.mixed_precision, mpjax.build_train_step
print(*sorted({name.split(".")[0] for name in sys.modules}))
import jax.numpy as jnp, optax
loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2)
init, step = mpjax.build_train_step(loss, optax.adam(1e-3), "mixed_float16")
state, _ = jax.jit(step)(init({"w": jnp.ones((8, 8))}), jnp.ones((4, 8)))
print(*(name for name in sys.modules if name.startswith("mpjax._src.")))
print(*sorted({name.split(".")[0] for name in sys.modules}))
f(1.0)
compiled = f._cache_size()
[getattr(m, name) for m in (mpjax, mpjax.optim, mpjax.debug) for name in m.__all__]
f(1.0)
print(compiled, f._cache_size())
"""
HEAVY = {
    *("flax", "chex", "click", "rich", "matplotlib", "orbax", "equinox", "haiku", "keras"),
    *("safetensors", "scipy", "tensorstore", "xxhash", "tqdm"),
}


@functools.cache
def imported():
    """Returns the words of each line that a process of `IMPORTS` prints."""
    command = [sys.executable, "-W", "error", "-c", IMPORTS]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [line.split() for line in out.splitlines()]


def test_importing_loads_nothing_of_ours_or_others():
    """Nothing but JAX's own and what finds the rest: 50 ms over ``import jax`` are far away."""
    new, ours, loaded, *_ = imported()
    assert {*new} <= {"mpjax", "jax"} and "mpjax" in loaded and not {*loaded} & HEAVY
    inside = (f"mpjax._src.core{name}" for name in ("", ".base", ".base.contexts", ".base.lazy"))
    assert ours == ["mpjax", "mpjax._src", *inside]


def test_lazy_imports_compile_nothing_again():
    """A context of JAX's that is made while a step is traced would change the key of the step.

    So would what JAX is told before the first plan.
    """
    assert imported()[5] == ["1", "1"]


TOP = """
    DynamicLossScale NoOpLossScale Policy StaticLossScale TrainState all_finite autocast
    build_train_step cast compare compile_for current_policy dot_product_attention explain
    find_nonfinite get_policy half_inputs linear_cross_entropy lint mixed_precision precision
    raise_if_diverged recommend_policy register_rule scaled_value_and_grad select watch_precision
"""


def test_mpjax_has_27_names_at_its_top():
    assert mpjax.__all__ == TOP.split() and len(mpjax.__all__) == 27
    assert {*mpjax.__all__} | {"optim", "debug", "reports"} < {*dir(mpjax)}


@pytest.mark.parametrize("module", surface.MODULES, ids=surface.NAMES)
def test_a_public_module_suggests_a_name(module):
    assert len(module.__all__) == len({*module.__all__}) > 0
    name = module.__all__[-1]
    with pytest.raises(AttributeError, match=rf"'{module.__name__}' has.*mean '{name}'"):
        getattr(module, f"{name}_")


def test_public_class_says_that_it_is_where_users_find_it():
    for name, thing in surface.PUBLIC.items():
        place = f"{thing.__module__}.{thing.__qualname__}"
        assert place == name if isinstance(thing, type) else place.startswith("mpjax._src."), name


def test_everything_public_is_documented_with_an_example():
    for place, thing in surface.PUBLIC.items():
        name = place.rpartition(".")[2]
        assert thing.__doc__, name
        if callable(thing) and not isinstance(thing, type):
            for section in ("Args:", "Returns:", "Example:"):
                nothing = section == "Returns:" and name in RETURN_NOTHING
                nothing |= section == "Args:" and not inspect.signature(thing).parameters
                assert section in thing.__doc__ or nothing, (name, section)


def test_the_architecture_page_draws_the_floors_and_names_every_module():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    drawn = "\n".join(drawing(PACKAGE.parent))
    assert drawn in page, f"The floors have changed. Put this drawing on the page:\n{drawn}"
    for room in ORDER:
        for path in modules(room):
            listed = re.search(rf"[`/]{path.stem}\b", page)
            assert path.stem == "__init__" or listed, f"{path} is not on the page"


def test_the_core_imports_leaves_and_tools_only_where_they_are_asked_for():
    found = {name: asked_for(path) for name, path in modules_of(PACKAGE.parent).items()}
    short = lambda names: {name.removeprefix("mpjax._src.") for name in names}  # noqa: E731
    assert {name: short(names) for name, names in found.items() if names} == ASKED_FOR
    assert all(in_core(modules_of(PACKAGE.parent)[name]) for name in ASKED_FOR)


def test_a_step_loads_the_core_alone():
    loaded = [name.removeprefix("mpjax._src.") for name in imported()[3]]
    assert "core.training.step" in loaded
    assert not [name for name in loaded if name.split(".")[0] != "core"]


def test_training_does_not_import_flax():
    after = imported()[4]
    assert "optax" in after and "flax" not in after


def test_import_error_names_a_missing_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'mpjax\[plot\]'"):
        mpjax.debug.gradient_histogram(np.ones((2, 2))).plot()
    program = "import sys; sys.modules['keras'] = None; import mpjax; mpjax.keras.mixed_precision"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'mpjax[keras]'" in done.stderr.splitlines()[-1], done.stderr
