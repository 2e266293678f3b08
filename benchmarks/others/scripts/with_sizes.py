"""Runs a notebook's code cells, or a script, with other sizes: PATH [NAME=VALUE ...] [-- ARGS ...]

A published example trains for hours, with its sizes in its code. Here a name that is assigned at
the top of a cell, or that is a parameter with a default, gets the given value; nothing else
changes, and tracebacks name the example's own file. Lines for IPython (`%`, `!`) are left out.
"""

import ast
import json
import linecache
import os
import random
import sys
import types
from pathlib import Path

import numpy as np


def cells(path):
    """Returns the texts of the code cells of a notebook, or a script as one."""
    if path.suffix != ".ipynb":
        return [path.read_text()]
    found = json.loads(path.read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]
    return ["\n".join(line for line in text.split("\n") if line[:1] not in "%!") for text in texts]


class Sizes(ast.NodeTransformer):
    """Writes values for assigned names and for parameters with defaults."""

    def __init__(self, values):
        self.values = values
        self.used = set()

    def value(self, name, old):
        if name not in self.values:
            return old
        self.used.add(name)
        return ast.copy_location(ast.parse(self.values[name], mode="eval").body, old)

    def visit_Assign(self, node):
        target = node.targets[0]
        if isinstance(target, ast.Name) and node.col_offset == 0:
            node.value = self.value(target.id, node.value)
        return node

    def visit_FunctionDef(self, node):
        given = node.args
        late = given.args[len(given.args) - len(given.defaults) :]
        given.defaults = [
            self.value(x.arg, old) for x, old in zip(late, given.defaults, strict=True)
        ]
        given.kw_defaults = [
            old and self.value(x.arg, old)
            for x, old in zip(given.kwonlyargs, given.kw_defaults, strict=True)
        ]
        return node


def main():
    _, path, *args = sys.argv
    end = args.index("--") if "--" in args else len(args)
    path, values = Path(path), dict(x.split("=", 1) for x in args[:end])
    sys.argv[:] = [str(path), *args[end + 1 :]]
    sys.path[:0] = [str(path.parent), os.getcwd()]
    random.seed(0)
    np.random.seed(0)  # examples shuffle their data
    sizes = Sizes(values)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    for number, text in enumerate(cells(path)):
        name = f"{path}#{number}" if path.suffix == ".ipynb" else str(path)
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
        module.__dict__["__file__"] = name
        exec(compile(sizes.visit(ast.parse(text, name)), name, "exec"), module.__dict__)
    if unused := values.keys() - sizes.used:
        raise SystemExit(f"{path} has no sizes {sorted(unused)}")


if __name__ == "__main__":
    main()
