"""Imports point one way, JAX's internals are reached from one file, and importing is light."""

import ast
import subprocess
import sys
from pathlib import Path

import mpjax

PACKAGE = Path(mpjax.__file__).parent
# From the bottom up; a module imports only what stands before it.
ORDER = [
    *(
        "errors",
        "_jax",
        "dtypes",
        "patterns",
        "trees",
        "ops",
        "order",
        "watch",
        "histogram",
        "logs",
        "policy",
        "devices",
        "targets",
        "hlo",
        "hlo_costs",
        "compiler_child",
        "compiler",
        "aot_report",
        "aot",
        "batch_size",
    ),
    *(
        "graph",
        "reach",
        "classify",
        "demand",
        "decide",
        "plan",
        "islands",
        "derivatives",
        "environment",
        "rewrite",
        "autocast",
        "precision",
        "explain",
    ),
    *("loss_scale", "gradients", "optimizers", "train_step"),
    *("programs", "interpret", "nonfinite", "compare", "tune", "__init__"),
    # The command line, which `import mpjax` does not import.
    *("load", "doctor", "show", "tables", "options", "cli", "__main__"),
]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_has_its_place():
    assert {path.stem for path in PACKAGE.glob("*.py")} == set(ORDER)


def test_imports_point_one_way():
    for place, module in enumerate(ORDER):
        for name in imports(PACKAGE / f"{module}.py"):
            if name.startswith("mpjax."):
                first = name.split(".")[1]
                imported = first if first in ORDER else "__init__"
                assert ORDER.index(imported) < place, f"{module} imports {name}"


def test_internals_of_jax_are_reached_from_one_file():
    for module in ORDER:
        internal = [name for name in imports(PACKAGE / f"{module}.py") if "jax._src" in name]
        assert module == "_jax" or not internal, f"{module} imports {internal}"


def test_importing_loads_no_optional_package():
    code = (
        "import sys, mpjax; heavy = {'flax', 'matplotlib', 'sklearn', 'orbax', 'equinox'};"
        "heavy |= {'click', 'rich'};"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_everything_public_is_documented_with_an_example():
    for name in mpjax.__all__:
        thing = getattr(mpjax, name)
        assert thing.__doc__, name
        if callable(thing) and not isinstance(thing, type):
            for section in ("Args:", "Returns:", "Example:"):
                assert section in thing.__doc__ or (name, section) == (
                    "raise_if_diverged",
                    "Returns:",
                ), (name, section)
