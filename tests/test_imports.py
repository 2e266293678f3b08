"""Imports point one way, JAX's internals are reached from one package, and importing is light."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import surface
from house import CORE, circle, drawing, graph_of, imports, modules_of

import mpjax

PACKAGE = Path(mpjax.__file__).parent
INSIDE = PACKAGE / "_src"
# From the bottom up: a package imports only what stands before. So the core imports none of the
# tools, which are the rest.
ORDER = (
    *(
        "base",
        "program",
        "document",
        "policy",
        "planner",
        "replacements",
        "autocast",
        "training",
        "checkpoint",
        "frameworks",
    ),
    *("hardware", "watching", "lint", "instruments", "cli"),
)

RETURN_NOTHING = {"raise_if_diverged", "warn_if_stalled", "save", "save_safetensors"}


def modules(room):
    return (
        [INSIDE / f"{room}.py"]
        if (INSIDE / f"{room}.py").exists()
        else [*(INSIDE / room).rglob("*.py")]
    )


def test_every_package_has_its_place():
    assert {path.stem for path in INSIDE.iterdir() if path.stem[:2] != "__"} == set(ORDER)
    assert {path.stem for path in PACKAGE.iterdir()} - {"__pycache__"} == {
        "__init__",
        "__main__",
        "_src",
        "py",
        *("checkpoint", "debug", "errors", "hardware", "optim", "reports"),
        *("keras", "linen", "nnx"),
    }


@pytest.mark.parametrize("room", ORDER)
def test_imports_point_one_way_between_packages(room):
    for path in modules(room):
        for name in imports(path):
            if name.startswith("mpjax._src."):
                imported = name.split(".")[2]
                assert ORDER.index(imported) <= ORDER.index(room), f"{path} imports {name}"
            elif name.split(".")[0] == "mpjax":
                assert room == "cli", f"{path} imports {name}: only the command line is a user"


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
            internal = [
                name for name in imports(path) if "jax._src" in name and "mpjax" not in name
            ]
            assert "_jax" in path.parts or not internal, f"{path} imports {internal}"


def test_importing_loads_nothing_of_ours_or_others():
    """Nothing but JAX's own and what finds the rest: 50 ms over ``import jax`` are far away."""
    code = (
        "import jax, sys; before = {*sys.modules}; import mpjax;"
        "new = {n.split('.')[0] for n in {*sys.modules} - before}; print(*sorted(new));"
        "print(*sorted(n for n in sys.modules if n.startswith('mpjax')));"
        "mpjax.autocast; mpjax.get_policy; mpjax.mixed_precision; mpjax.build_train_step;"
        "heavy = {'flax', 'chex', 'click', 'rich', 'matplotlib', 'orbax', 'equinox', 'haiku',"
        "'keras', 'safetensors', 'scipy', 'tensorstore', 'xxhash', 'tqdm'};"
        "print(*sorted(heavy & {n.split('.')[0] for n in sys.modules}))"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    new, ours, heavy = out.split("\n")[:3]
    assert set(new.split()) <= {"mpjax", "jax"} and heavy == ""
    inside = (f"mpjax._src.base{name}" for name in ("", ".contexts", ".lazy"))
    assert ours.split() == ["mpjax", "mpjax._src", *inside]


def test_lazy_imports_compile_nothing_again():
    """A context of JAX's that is made while a step is traced would change the key of the step."""
    code = (
        "import jax, mpjax;"
        "f = jax.jit(lambda x: x + 1); f(1.0);"
        "[getattr(m, name) for m in (mpjax, mpjax.optim, mpjax.debug) for name in m.__all__];"
        "f(1.0); assert f._cache_size() == 1, 'compiled again'"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


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


def test_the_core_imports_no_tool():
    assert {*ORDER[: len(CORE)]} == CORE
    for room in CORE:
        for path in modules(room):
            ours = (name for name in imports(path) if name.startswith("mpjax._src."))
            tools = [name for name in ours if name.split(".")[2] not in CORE]
            assert not tools, f"{path} imports {tools}"


@pytest.mark.parametrize(
    ("missing", "code", "extra"),
    [
        ("keras", "import mpjax.keras", "keras"),
        ("keras", "mpjax.keras.mixed_precision", "keras"),
        ("matplotlib", "mpjax.debug.gradient_histogram(A).plot()", "plot"),
    ],
)
def test_import_error_names_a_missing_extra(missing, code, extra):
    block = f"sys.modules[{missing!r}] = None; A = jax.numpy.ones((2, 2))"
    program = f"import jax, sys; {block}; import mpjax; {code}"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert f"pip install 'mpjax[{extra}]'" in done.stderr.splitlines()[-1], done.stderr
