"""Checks that the installed JAX has the internals that mpjax needs, and names what is broken.

    python tests/helpers/canary.py                  # names first, then tests/core/base/_jax
    python tests/helpers/canary.py -k tracing_key   # further arguments go to pytest

First, each name of JAX is looked up that `mpjax/_src/core/base/_jax` uses: the private ones of its
table (`internals.CONTRACTS`), then the public ones in its code. Then the contract tests run, which
check what the names do. The exit status is 1 if anything is broken.
"""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
INSIDE = ROOT / "mpjax" / "_src" / "core" / "base" / "_jax"


def table() -> Any:
    """Returns the module of private names by itself: a public one may stop that of the others."""
    spec = importlib.util.spec_from_file_location("internals", INSIDE / "internals.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


internals = table()

# The features that tests of public extension points protect.
PUBLIC = {
    "barriers": "autocast on CPUs and GPUs: barriers that keep values in 16 bits",
    "convolutions": "autocast over several devices: gradients of convolutions",
    "differentiating": "`mpjax run`: rules of custom derivatives are planned apart",
    "keys": "autocast outside of jit: what was compiled is compiled again at each call",
    "matmuls": "autocast on CPUs and GPUs: matmuls are compiled in a form that is slow",
    "recurrences": "autocast of linear recurrences, as in state space models",
    "rounded": "autocast: streams would be float32",
    "wire": "autocast over several devices: matmuls that send half precision, and vmap of them",
}


class Use(NamedTuple):
    """A name of JAX, and the line that uses it.

    Attributes:
        name: The name with its module, such as "jax._src.core.set_current_trace".
        place: "module.py:line" in `mpjax/_src/core/base/_jax`.
        stops_import: Whether mpjax cannot be imported without it.
    """

    name: str
    place: str
    stops_import: bool


def uses(path: Path) -> Iterator[Use]:
    """Yields each name of JAX that a module uses, at its first line."""
    tree = ast.parse(path.read_text())
    bound: dict[str, str] = {}
    found: dict[str, tuple[int, bool]] = {}
    top, nodes = {id(node) for node in tree.body}, [*ast.walk(tree)]
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.split(".")[0]
                bound[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found.setdefault(whole, (node.lineno, id(node) in top))

    def whole_name(node):
        if isinstance(node, ast.Name):
            return bound.get(node.id)
        outer = whole_name(node.value) if isinstance(node, ast.Attribute) else None
        return outer and f"{outer}.{node.attr}"

    inner = {id(n.value) for n in nodes if isinstance(n, ast.Attribute)}
    for node in nodes:
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        if name := whole_name(node):
            found.setdefault(name, (node.lineno, False))
    for name, (line, stops) in sorted(found.items()):
        if name.split(".")[0] == "jax":
            yield Use(name, f"{path.name}:{line}", stops)


def is_private(name: str) -> bool:
    return any(part.startswith("_") and part[:2] != "__" for part in name.split("."))


def is_there(name: str) -> bool:
    """Returns whether JAX has a name, and imports the modules on its path."""
    parts = name.split(".")
    thing = None
    for i, part in enumerate(parts):
        if thing is not None and hasattr(thing, part):
            thing = getattr(thing, part)
            continue
        try:
            thing = importlib.import_module(".".join(parts[: i + 1]))
        except (ImportError, AttributeError):
            return False
    return True


def missing_names() -> list[str]:
    """Returns a paragraph for each name that the installed JAX lacks."""
    told = []
    for place, contract in internals.missing():
        files = ", ".join(f"mpjax/_src/core/base/_jax/{m}.py" for m in contract.modules)
        told.append(
            f"{place} is missing\n"
            f"  used in        {files}\n"
            f"  what breaks    {contract.breaks}\n"
            f"  public then?   {contract.instead}"
        )
    for path in sorted(INSIDE.glob("*.py")):
        for use in uses(path):
            if is_there(use.name):
                continue
            breaks = PUBLIC.get(path.stem, "")
            if use.stops_import:
                breaks = f"mpjax.autocast cannot be imported. It serves {breaks}" if breaks else ""
            told.append(
                f"{use.name} is missing\n"
                f"  used in        mpjax/_src/core/base/_jax/{use.place}\n"
                f"  what breaks    {breaks or 'mpjax.autocast cannot be imported'}"
            )
    return told


class Broken:
    """A pytest plugin that keeps a description of each failure, and what was skipped."""

    def __init__(self):
        self.told = []
        self.skipped = []

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.keep(report)
        elif report.skipped:
            self.skipped.append(f"Not checked: {report.nodeid} ({report.longrepr[-1]})")

    def pytest_collectreport(self, report):
        if report.failed:
            self.keep(report)

    def keep(self, report):
        path, _, test = report.nodeid.partition("::")
        crash = getattr(report.longrepr, "reprcrash", None)
        said = (crash.message if crash else str(report.longrepr)).strip().splitlines()
        modules = sorted(modules_of(ROOT / path, test.partition("[")[0]))
        rows = [c.breaks for c in internals.CONTRACTS if {*modules} & {*c.modules}]
        rows += [PUBLIC[m] for m in modules if m in PUBLIC]
        used = ", ".join(f"mpjax/_src/core/base/_jax/{m}.py" for m in modules)
        self.told.append(
            f"{test.removeprefix('test_').replace('_', ' ') or path} does not hold\n"
            f"  test           {report.nodeid}\n"
            f"  error          {said[0] if crash else said[-1]}\n"
            f"  used in        {used or 'see the test'}\n"
            f"  what breaks    {'; '.join(rows) or 'see the test'}"
        )


def modules_of(path: Path, test: str) -> set[str]:
    """Returns the modules of `core/base/_jax` whose functions a test, or a whole file, calls.

    The module that the file is named after is one of them: a test may look at what JAX makes of it.
    """
    homes = {
        node.name: module.stem
        for module in INSIDE.glob("*.py")
        for node in ast.parse(module.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    tree = ast.parse(path.read_text())
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == test]
    named = {
        n.attr for f in functions or [tree] for n in ast.walk(f) if isinstance(n, ast.Attribute)
    }
    same = path.stem.removeprefix("test_")
    found = {homes[name] for name in named & set(homes)}
    return found | {same} & {module.stem for module in INSIDE.glob("*.py")}


def main(arguments: list[str]) -> int:
    import jax
    import jaxlib

    print(f"JAX {jax.__version__}, jaxlib {jaxlib.__version__}")
    told = missing_names()
    plugin = Broken()
    options = ["-q", "--no-header", "--no-summary", "--tb=no", "-p", "no:cacheprovider"]
    options += ["-m", "thorough or not thorough"]
    status = pytest.main(
        [*options, str(ROOT / "tests" / "core" / "base" / "_jax"), *arguments], plugins=[plugin]
    )
    told += plugin.told
    if status and not plugin.told:
        told.append(f"the contract tests did not run: pytest ended with status {int(status)}")
    print("", *told, *plugin.skipped, sep="\n\n")
    print(f"\nBroken contracts: {len(told)}" if told else "Every contract holds.")
    return bool(told)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
