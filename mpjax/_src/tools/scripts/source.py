"""The source of a script: where its names are bound, and edits by ranges of characters.

Only the characters that an edit names change: comments, formatting, quotes and line ends stay.
"""

import ast
import bisect
import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mpjax._src.core.base.lines import is_library

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
SCOPES = (*FUNCTIONS, ast.ClassDef, ast.Module)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
PARAMETERS = ("args", "posonlyargs", "kwonlyargs", "vararg", "kwarg")


class Edit(NamedTuple):
    """Text that replaces the characters from ``start`` to ``end``."""

    start: int
    end: int
    text: str


def insertion(at: int, text: str) -> Edit:
    return Edit(at, at, text)


class Binding(NamedTuple):
    """Where a name gets its meaning.

    Attributes:
        kind: "import", "value", "parameter", "def" or "other" (loops, parts of tuples, ...).
        node: The statement, argument or expression that binds it.
        value: The full name of what is imported, or the expression that is assigned.
    """

    kind: str
    node: Any
    value: Any = None


class Source:
    """A parsed script. Raises a SyntaxError or UnicodeDecodeError if it is not Python in UTF-8."""

    def __init__(self, path: Path):
        # A byte order mark stays in the text, but no position of the parser counts it.
        self.path, self.text = path, path.read_bytes().decode("utf-8")
        self.mark = self.text[:1] == "\ufeff"
        self.tree = ast.parse(self.text[self.mark :])
        ends = re.finditer(r"\r\n|\r|\n", self.text)
        self.starts = [int(self.mark), *(end.end() for end in ends)]
        end = re.search(r"\r?\n", self.text)
        self.newline = end[0] if end else "\n"
        self.parents: dict[ast.AST, tuple[ast.AST, str]] = {}
        for parent in ast.walk(self.tree):
            for field, value in ast.iter_fields(parent):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self.parents[child] = parent, field
        self.scopes: dict[ast.AST, ast.AST] = {}
        self.bindings: dict[ast.AST, dict[str, list[Binding]]] = defaultdict(dict)
        self._bind()

    # Positions

    def offset(self, line: int, column: int) -> int:
        """Returns the place of a character; columns of the parser count bytes of UTF-8."""
        start = self.starts[line - 1]
        return start + len(self.text[start : self.after(line)].encode()[:column].decode())

    def span(self, node: Any) -> tuple[int, int]:
        """Returns the range of an expression or statement in the text."""
        first = self.offset(node.lineno, node.col_offset)
        return first, self.offset(node.end_lineno, node.end_col_offset)

    def code(self, node: Any) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def after(self, line: Any) -> int:
        """Returns the place where the line after a line begins."""
        return self.starts[line] if line < len(self.starts) else len(self.text)

    def line_of(self, offset: int) -> int:
        return bisect.bisect_right(self.starts, offset)

    def indent(self, line: int) -> str:
        """Returns the white space before the code of a line."""
        return re.match(r"[ \t\f]*", self.text[self.starts[line - 1] :])[0]  # type: ignore[index]

    # Surroundings

    def around(self, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
        """Yields what a node stands in, from the inside out, and in which of its fields."""
        while node in self.parents:
            node, field = self.parents[node]
            yield node, field

    def scope_of(self, node: ast.AST) -> ast.AST:
        """Returns the function, class or module whose names a node sees first."""
        if node not in self.scopes:
            self.scopes[node] = self._scope_of(node)
        return self.scopes[node]

    def _scope_of(self, node: ast.AST) -> ast.AST:
        inner = ""
        for parent, field in self.around(node):
            # Defaults, annotations and decorators are evaluated outside of their function.
            parameter = field == "args" and inner in PARAMETERS
            own = field == "body" or (parameter and isinstance(node, ast.arg))
            if isinstance(parent, SCOPES) and (own or isinstance(parent, ast.Module)):
                return parent
            inner = field
        return self.tree

    def loop_of(self, node: ast.AST) -> ast.AST:
        """Returns the innermost loop or scope in which a node stands."""
        scope = self.scope_of(node)
        inside = (at for at, _ in self.around(node) if isinstance(at, LOOPS) or at is scope)
        return next(inside, scope)

    def function_of(self, node: ast.AST) -> list[ast.AST]:
        """Returns the scopes that a node stands in, from the inside out."""
        scopes = [self.scope_of(node)]
        while not isinstance(scopes[-1], ast.Module):
            scopes.append(self.scope_of(scopes[-1]))
        return scopes

    def statement(self, node: ast.AST) -> Any:
        """Returns the statement that an expression is a part of."""
        chain = [node, *(at for at, _ in self.around(node))]
        return next(at for at in chain if isinstance(at, ast.stmt))

    # Names

    def resolve(self, name: str, node: ast.AST) -> tuple[ast.AST | None, list[Binding]]:
        """Returns the scope whose name a node reads, and all that binds it there."""
        for i, scope in enumerate(self.function_of(node)):
            hidden = isinstance(scope, ast.ClassDef) and i > 0
            if name in self.bindings[scope] and not hidden:
                return scope, self.bindings[scope][name]
        return None, []

    def uses(self, name: str, scope: ast.AST | None) -> list[ast.Name]:
        """Returns all places that read a name of a scope."""
        found = (n for n in ast.walk(self.tree) if isinstance(n, ast.Name) and n.id == name)
        loads = (n for n in found if isinstance(n.ctx, ast.Load))
        return [n for n in loads if self.resolve(name, n)[0] is scope]

    def qualified(self, node: Any, depth: int = 8) -> str:
        """Returns the full name of what an expression reads from a module, or ""."""
        root, *rest = (dotted(node) or "").split(".")
        if not root or not depth:
            return ""
        _, bound = self.resolve(root, node)
        if bound and all(each.kind == "import" for each in bound):
            return ".".join([bound[0].value, *rest])
        if len(bound) == 1 and bound[0].kind == "value":
            whole = self.qualified(bound[0].value, depth - 1)
            return ".".join([whole, *rest]) if whole else ""
        return ""

    def values(self, node: Any) -> list[Binding]:
        """Returns what is assigned to a name, or to an attribute such as ``self.tx``."""
        if isinstance(node, ast.Name):
            return self.resolve(node.id, node)[1]
        found, text = [], dotted(node)
        classes = [at for at, _ in self.around(node) if isinstance(at, ast.ClassDef)]
        for each in ast.walk(classes[-1] if classes else self.tree):
            pairs = _pairs(each) if text else ()
            found += [Binding("value", each, value) for at, value in pairs if dotted(at) == text]
        return found

    def _bind(self) -> None:
        taken: set[ast.AST] = set()  # names that are bound to a known value
        elsewhere = {
            (self.scope_of(node), name): isinstance(node, ast.Global)
            for node in ast.walk(self.tree)
            if isinstance(node, (ast.Global, ast.Nonlocal))
            for name in node.names
        }

        def add(name: str, node: ast.AST, binding: Binding) -> None:
            scope = self.scope_of(node)
            if (scope, name) in elsewhere:
                is_global = elsewhere[scope, name]
                scope = self.tree if is_global else self.scope_of(scope)
            self.bindings[scope].setdefault(name, []).append(binding)

        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for name, full in _imported(node):
                    add(name, node, Binding("import", node, full))
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                add(node.name, node, Binding("def", node))
            elif isinstance(node, ast.arg):
                add(node.arg, node, Binding("parameter", node))
            for target, value in _pairs(node):
                if isinstance(target, ast.Name):
                    taken.add(target)
                    add(target.id, target, Binding("value", node, value))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in taken:
                add(node.id, node, Binding("other", self.statement(node)))

    # Edits

    def edited(self, edits: set[Edit]) -> str:
        """Returns the text after edits, which may not overlap."""
        parts, last = [], 0
        for start, end, text in sorted(edits):
            parts += [self.text[last:start], text]
            last = end
        return "".join([*parts, self.text[last:]])


def beside(source: Source) -> Iterator[Source]:
    """Yields the modules in a script's folders that it imports, and those that these import."""
    known, waiting = {source.path}, [source]
    while waiting:
        each = waiting.pop(0)
        bound = (
            b for names in each.bindings.values() for several in names.values() for b in several
        )
        for full in dict.fromkeys(b.value for b in bound if b.kind == "import"):
            path = _file_of(each.path, full)
            if path is not None and path not in known:
                known.add(path)
                with contextlib.suppress(OSError, SyntaxError, ValueError):
                    waiting.append(Source(path))
                    yield waiting[-1]


def _file_of(importer: Path, full: str) -> Path | None:
    """Returns the file of a module, or of what is imported from it, if no package is installed."""
    names = full.lstrip(".").split(".")
    dots = len(full) - len(full.lstrip("."))
    # A script's own folder is on the path, or one above it, as of `python -m package.train`.
    for folder in importer.parents[dots - 1 : dots] if dots else importer.parents[:3]:
        for count in range(len(names), 0, -1):
            stem = folder.joinpath(*names[:count])
            files = (stem.with_suffix(".py"), stem / "__init__.py")
            if found := [file for file in files if file.is_file()]:
                return None if is_library(str(found[0])) else found[0]
    return None


def dotted(node: Any) -> str:
    """Returns "a.b.c" if an expression is a name with attributes, otherwise ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yields the names that an import binds, with the full names of what they mean."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield alias.asname or alias.name, f"{module}.{alias.name}"
        elif alias.asname:
            yield alias.asname, alias.name
        else:
            root = alias.name.split(".")[0]
            yield root, root


def _pairs(node: ast.AST) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Yields the targets of an assignment, each with its value; of tuples part by part."""
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        pairs = [(node.target, node.value)]
    else:
        return
    while pairs:
        target, value = pairs.pop()
        if isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
            parts = [*target.elts, *value.elts]
            starred = any(isinstance(part, ast.Starred) for part in parts)
            if not starred and len(target.elts) == len(value.elts):
                pairs += zip(target.elts, value.elts, strict=True)
        else:
            yield target, value
