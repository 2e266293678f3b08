"""Counts what makes a house deep: rooms, floors, arrows, lines, arguments, comments, names.

    python tests/helpers/house.py [ROOT]    prints the totals of this tree, or of another
    python tests/helpers/house.py draw      prints the packages by floors, for docs/architecture.md

A room is a folder of mpjax/_src/core or mpjax/_src/tools, another folder of mpjax/_src, or a file
of mpjax itself. An arrow says that one imports another. Where a function of the core imports a leaf
or a tool, when a policy or an argument asks for it, there is no arrow: `asked_for` lists these. A
floor is one above the highest room that is imported.
Lines of code are neither blank, nor comments, nor docstrings.
"""

import ast
import collections
import functools
import graphlib
import io
import statistics
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
# What planning shares: the classes whose objects several passes may write into.
SHARED = ("Op", "Value", "Block", "Body", "Island")
WRITES = (
    "append",
    "extend",
    "insert",
    "add",
    "update",
    "remove",
    "discard",
    "pop",
    "clear",
    "sort",
)


# ---- modules ------------------------------------------------------------------------------------


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def imports(path):
    """Returns what a module imports, by its whole name."""
    return imported_in(tree_of(path))


def imported_in(tree):
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            within = "mpjax." * bool(node.level)  # modules at the top alone import so
            found += [f"{within}{node.module}.{alias.name}" for alias in node.names]
    return found


def modules_of(root):
    """Returns the path of each module, by its name: "autocast.plan", or "mpjax/nnx" at the top."""
    found = {}
    for path in sorted((root / "mpjax").rglob("*.py")):
        top, *inner = path.relative_to(root / "mpjax").with_suffix("").parts
        parts = [part for part in inner if part != "__init__"]
        name = ".".join(parts) if top == "_src" else f"mpjax/{top}"
        found |= {name: path} if name else {}
    return found


def in_core(path):
    return "_src/core/" in path.as_posix()


@functools.cache
def asked_for(path):
    """Returns what the functions of a module of the core import of the leaves and tools."""
    functions = (node for node in ast.walk(tree_of(path)) if isinstance(node, FUNCTIONS))
    found = {name for function in functions for name in imported_in(function)}
    ours = {name for name in found if name.startswith("mpjax._src.")} if in_core(path) else set()
    return {name for name in ours if not name.startswith("mpjax._src.core.")}


def graph_of(modules):
    """Returns the modules that each module imports."""

    def module_of(name):
        if not name.startswith("mpjax._src."):
            top = f"mpjax/{(name.split('.') + [''])[1]}"
            return (top if top in modules else "mpjax/__init__") if name[:5] == "mpjax" else None
        name = name.removeprefix("mpjax._src.")
        return name if name in modules else name.rpartition(".")[0]

    return {
        name: {module_of(each) for each in imports(path) if each not in asked_for(path)}
        & {*modules} - {name}
        for name, path in modules.items()
    }


def between(graph, key):
    """Returns a graph of groups of modules; `key` says to which one a module belongs, or None."""
    groups = collections.defaultdict(set)
    for name, imported in graph.items():
        if key(name):
            groups[key(name)] |= {key(other) for other in imported} - {key(name), None}
    return groups


def floors(graph):
    """Returns the floor of each node, from 0; raises a CycleError if there is a circle."""
    found = {}
    for name in graphlib.TopologicalSorter(graph).static_order():
        found[name] = 1 + max((found[other] for other in graph.get(name, ())), default=-1)
    return found


def circle(graph):
    """Returns the nodes of one circle, or nothing."""
    try:
        floors(graph)
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def house(title, graph):
    """Returns a line about the nodes of a graph, their floors, arrows and circles."""
    arrows, around = sum(map(len, graph.values())), circle(graph)
    high = "no floors" if around else f"{1 + max(floors(graph).values(), default=-1)} floors"
    said = f"a circle: {' -> '.join(around)}" if around else "no circle"
    return f"{title}: {len(graph)}, {high}, {arrows} arrows, {said}"


# ---- lines --------------------------------------------------------------------------------------


@functools.cache
def code_of(path):
    """Returns the numbers of a module's lines of code, and of its comments that stand alone."""
    text = path.read_text()
    code, comments = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            comments.add(token.start[0])
        elif token.type not in NO_CODE:
            code |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(tree_of(path)):
        body = getattr(node, "body", None)
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node):
            code -= {*range(body[0].lineno, body[0].end_lineno + 1)}
    return code, comments


def functions_of(path):
    """Yields (name, lines of code, number of arguments) of each function, also of inner ones."""
    code, _ = code_of(path)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, FUNCTIONS):
            a = node.args
            names = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
            count = sum(arg.arg not in ("self", "cls") for arg in names)
            yield node.name, len(code & {*range(node.lineno, node.end_lineno + 1)}), count


def writes_of(path, fields):
    """Yields the lines that set or change a field of what planning shares."""

    def field(node):
        node = node.value if isinstance(node, ast.Subscript) else node
        known = isinstance(node, ast.Attribute) and node.attr in fields
        return known and not (isinstance(node.value, ast.Name) and node.value.id == "self")

    for node in ast.walk(tree_of(path)):
        targets = []
        if isinstance(node, ast.Assign):
            targets = [t for top in node.targets for t in getattr(top, "elts", [top])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in WRITES:
            targets = [node.func.value]
        if any(map(field, targets)):
            yield node.lineno


def shared_fields(paths):
    """Returns the fields of the classes whose objects planning shares."""
    return {
        line.target.id
        for path in paths
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and node.name in SHARED
        for line in node.body
        if isinstance(line, ast.AnnAssign)
    }


# ---- the drawing --------------------------------------------------------------------------------

# What the core reaches by name alone, when it is asked for.
LEAVES = ("optim", "replacements", "checkpoint")


def drawing(root):
    """Yields the packages by floors, the highest first, those of the core before the tools."""
    graph = between(graph_of(modules_of(root)), room_of)
    rooms = {n: high for n, high in floors(graph).items() if "mpjax/" not in n}
    floor = {n: 1 + high for n, high in rooms.items() if n not in ("core", "tools")}
    rows = []
    for high in sorted({*floor.values()}, reverse=True):
        rooms = sorted(name for name in floor if floor[name] == high)
        core, leaves, tools = (
            "  ".join(r.removeprefix(f"{wing}.") for r in rooms if wing_of(r) == wing)
            for wing in ("core", "leaves", "tools")
        )
        rows.append((str(high), core, leaves, tools))
    rows = [("floor", "core", "leaves", "tools"), *rows]
    wide, wider = (max(len(row[i]) for row in rows) + 4 for i in (1, 2))
    for high, core, leaves, tools in rows:
        yield f"{high:>5}   {core:{wide}}{leaves:{wider}}{tools}".rstrip()


def wing_of(room):
    return "leaves" if room in LEAVES else room.partition(".")[0]


# ---- totals -------------------------------------------------------------------------------------


def spread(numbers):
    """Returns the median, the 90th percentile and the largest of some numbers, as text."""
    numbers = sorted(numbers)
    p90 = numbers[round(0.9 * (len(numbers) - 1))]
    return f"median {statistics.median(numbers):g}, p90 {p90}, most {numbers[-1]}"


def primitives(modules):
    """Returns the names that have a row in base/rules, in the modules of a tree."""
    calls = (
        node
        for name in modules
        if name.endswith("base.rules")
        for node in ast.walk(tree_of(modules[name]))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "row"
    )
    constants = (call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant))
    return {name for text in constants for name in text.split()}


def spelled(modules):
    """Returns how often each other module spells out the name of a primitive."""
    names = primitives(modules)
    return {
        module: sum(
            isinstance(node, ast.Constant) and node.value in names for node in ast.walk(tree)
        )
        for module, tree in ((module, tree_of(path)) for module, path in modules.items())
        if not module.endswith(("base.rules", "base.higher_order"))
    }


def room_of(name):
    top, *inner = name.split(".")
    return f"{top}.{inner[0]}" if top in ("core", "tools") and inner else top


def totals(root):
    """Yields the lines of the report."""
    modules = modules_of(root)
    graph = graph_of(modules)
    yield house("rooms", between(graph, room_of))
    for room in sorted({room_of(name) for name in modules if name != room_of(name)}):
        inside = between(graph, lambda name: name if name.startswith(f"{room}.") else None)  # noqa: B023
        yield house(f"modules of {room}", inside)
    yield house("all modules", graph)
    named = {
        name: sum(
            isinstance(node, ast.Constant) and str(node.value).startswith("mpjax._src.")
            for node in ast.walk(tree_of(path))
        )
        for name, path in modules.items()
    }
    yield f"modules named by a string: {sum(named.values())}, in {[n for n in named if named[n]]}"

    found = [count for count in spelled(modules).values() if count]
    yield f"primitives named by strings outside base/rules: {sum(found)}, in {len(found)} modules"

    planner = {n: p for n, p in modules.items() if room_of(n) in ("core.autocast", "core.program")}
    fields = shared_fields(planner.values())
    writes = {name: len({*writes_of(path, fields)}) for name, path in planner.items()}
    places = {name: count for name, count in writes.items() if count}
    yield f"lines that write into {', '.join(SHARED)}: {sum(places.values())}, in {len(places)}"
    yield from (
        f"  {count:6} {name}" for name, count in sorted(places.items(), key=lambda r: -r[1])
    )

    lines = collections.Counter()
    comments = collections.Counter()
    for name, path in modules.items():
        code, alone = code_of(path)
        lines[room_of(name)] += len(code)
        comments[room_of(name)] += len(alone)
    yield f"lines of code: {lines.total()}"
    yield from (f"  {count:6} {room}" for room, count in lines.most_common())
    rate = 1000 * comments.total() / lines.total()
    yield f"own-line comments per 1,000 lines of code: {rate:.0f}"
    rates = {room: 1000 * comments[room] / lines[room] for room in lines if lines[room]}
    yield from (f"  {rates[room]:6.0f} {room}" for room, _ in lines.most_common(10))

    functions = [(*f, name) for name, path in modules.items() for f in functions_of(path)]
    yield f"functions: {len(functions)}"
    yield f"  lines of code: {spread([f[1] for f in functions])}"
    for name, length, _, module in sorted(functions, key=lambda f: -f[1])[:10]:
        yield f"    {length:4} {module}.{name}"
    yield f"  arguments: {spread([f[2] for f in functions])}"
    for name, _, count, module in sorted(functions, key=lambda f: -f[2])[:5]:
        yield f"    {count:4} {module}.{name}"

    stub = tree_of(root / "mpjax" / "__init__.pyi")
    top = [a.name for n in stub.body if isinstance(n, ast.ImportFrom) and n.module for a in n.names]
    yield f"names at the top: {len(top)}"
    graphs = [name for name in modules if name.rpartition(".")[2] == "graph"]
    importers = [name for name, imported in graph.items() if imported & {*graphs}]
    yield f"importers of {' '.join(graphs)}: {len(importers)}"


if __name__ == "__main__":
    lines = drawing(ROOT) if sys.argv[1:] == ["draw"] else totals(Path((*sys.argv, ROOT)[1]))
    print(*lines, sep="\n")
