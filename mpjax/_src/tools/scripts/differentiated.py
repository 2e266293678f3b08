"""Finds in a script's source the calls of transformations that were seen while it ran."""

import ast
import functools
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

from mpjax._src.tools.scripts.source import Source, dotted

# What differentiates its first argument, by its last name: of JAX, and of libraries on top of it.
# To each the name of JAX's own transformation that runs.
TRANSFORMATIONS = {
    **{name: name for name in ("grad", "value_and_grad", "vjp", "linearize", "jacrev", "hessian")},
    **{f"filter_{name}": name for name in ("grad", "value_and_grad", "vjp", "jacrev", "hessian")},
    "jacobian": "jacobian",
    "fwd_and_bwd": "fwd_and_bwd",
    "value_and_grad_from_state": "value_and_grad",
}
FIRST = ("fun", "f", "fn", "func")  # keywords of what is differentiated
MINE = "mpjax"


class Use(NamedTuple):
    """A call of a transformation that was seen while a script ran.

    Attributes:
        file: The file of the user's call.
        line: Its line.
        transform: The transformation as ``jax`` names it, such as "value_and_grad".
        fun: The name of the differentiated function, if it has one.
    """

    file: str
    line: int
    transform: str
    fun: str | None


class Gradient(NamedTuple):
    """A transformation in the source, applied to a function.

    Attributes:
        node: The call of the transformation, or the decorator.
        name: Its full name, such as "equinox.filter_grad".
        base: The expression that names it in the source; None if it is named elsewhere.
        fun: What is differentiated: an expression, or the function that is decorated.
        args: Its further positional arguments.
        keywords: Its keyword arguments, also those of a ``functools.partial``.
    """

    node: Any
    name: str
    base: Any
    fun: Any
    args: Sequence[Any]
    keywords: Sequence[ast.keyword]

    @property
    def decorates(self) -> bool:
        return isinstance(self.fun, (ast.FunctionDef, ast.AsyncFunctionDef))

    @property
    def transform(self) -> str:
        return TRANSFORMATIONS[self.name.rpartition(".")[2]]

    def option(self, name: str) -> Any:
        """Returns the expression of a keyword, or None."""
        return next((each.value for each in self.keywords if each.arg == name), None)


@functools.lru_cache(maxsize=16)
def gradients(source: Source) -> Sequence[Gradient]:
    """Returns all transformations that a script applies to a function."""
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and (made := _applied(source, node)):
            found.append(made)
        for decorator in getattr(node, "decorator_list", ()):
            made = _transformation(source, decorator)
            if made and made.fun is None and not isinstance(node, ast.ClassDef):
                found.append(made._replace(node=decorator, fun=node))
    return found


def _applied(source: Source, call: ast.Call) -> Gradient | None:
    """Returns what a call differentiates, if it does."""
    base = _transformation(source, call.func)
    if base is None:  # functools.partial(jax.grad, loss)
        made = _transformation(source, call)
        return made if made and made.fun is not None else None
    first = [each.value for each in call.keywords if each.arg in FIRST]
    if base.fun is not None or not (call.args or first):
        return None
    fun, *args = call.args or first
    rest = [each for each in call.keywords if each.arg not in FIRST]
    keywords = [*base.keywords, *rest]
    return base._replace(node=call, fun=fun, args=[*base.args, *args], keywords=keywords)


def _transformation(source: Source, node: Any, depth: int = 4) -> Gradient | None:
    """Returns the transformation that an expression is, with what it fixes, if it is one."""
    full = source.qualified(node)
    if full.rpartition(".")[2] in TRANSFORMATIONS and full.split(".")[0] != MINE:
        return Gradient(node, full, node, None, (), ())
    if isinstance(node, ast.Attribute) and node.attr in TRANSFORMATIONS and not full:
        # A method, such as that of flax's DynamicScale.
        return Gradient(node, node.attr, node, None, (), ())
    if isinstance(node, ast.Call):
        if source.qualified(node.func) == "functools.partial" and node.args:
            inner, *args = node.args
            if base := _transformation(source, inner, depth):
                fun = args[0] if args else None
                return base._replace(node=node, fun=fun, args=args[1:], keywords=node.keywords)
        elif not node.args and all(each.arg not in FIRST for each in node.keywords):
            base = _transformation(source, node.func, depth)  # nnx.grad(has_aux=True)
            return base and base._replace(node=node, keywords=node.keywords)
    if isinstance(node, ast.Name) and depth:
        bound = source.values(node)
        if len(bound) == 1 and bound[0].kind == "value":
            made = _transformation(source, bound[0].value, depth - 1)
            return made and made._replace(node=node, base=None)
    return None


def of_use(source: Source, use: Use, lines: Container[int] = ()) -> list[Gradient]:
    """Returns the transformations that a use can mean: several only if they are on one line.

    Those on a line of another use are that one's: ``lines`` are those of all uses of the file.
    """
    every = gradients(source)
    heads = [each for each in every if on_line(getattr(each.node, "func", each.node), use.line)]
    inside = [each for each in every if on_line(each.node, use.line)]
    small = min((each.node.end_lineno - each.node.lineno for each in inside), default=0)
    inside = [each for each in inside if each.node.end_lineno - each.node.lineno == small]
    if found := heads or inside or _called(source, every, use):
        return _outermost(source, _likely(found, use))
    alike = [each for each in every if each.transform == use.transform]
    named = [each for each in alike if use.fun and name_of(each.fun) == use.fun]
    named = [each for each in named if each.node.lineno not in lines]
    return named if len(named) == 1 else []


def on_line(node: Any, line: int) -> bool:
    return node.lineno <= line <= node.end_lineno


def _called(source: Source, every: Sequence[Gradient], use: Use) -> list[Gradient]:
    """Returns the transformations whose result is called on a line, such as ``grad_fn(params)``."""
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and on_line(node.func, use.line):
            for bound in source.values(node.func):
                at = bound.value if bound.kind == "value" else bound.node
                inside = {*_made_by(at)} if bound.kind in ("value", "def") else set()
                found += [each for each in every if each.node in inside]
    return found


def _made_by(node: Any) -> Iterator[ast.AST]:
    """Yields the calls around a value, as in ``jit(grad(loss))``, or a function's decorators."""
    yield from getattr(node, "decorator_list", ())
    if isinstance(node, (ast.Call, ast.IfExp)):
        yield node
        parts = [node.func, *node.args] if isinstance(node, ast.Call) else [node.body, node.orelse]
        for each in parts:
            yield from _made_by(each)


def _likely(found: list[Gradient], use: Use) -> list[Gradient]:
    """Returns those of the same function and transformation, if there are any."""
    name = (use.fun or "").rpartition(".")[2]  # of a method: its last part
    tests = (
        lambda each: name_of(each.fun) == name,
        lambda each: each.transform == use.transform,
    )
    for test in tests:
        found = [each for each in found if test(each)] or found
    return found


def _outermost(source: Source, found: list[Gradient]) -> list[Gradient]:
    nodes = {each.node for each in found}
    return [each for each in found if not nodes & {at for at, _ in source.around(each.node)}]


def name_of(fun: Any) -> str:
    """Returns the name that a function has, as far as its expression tells."""
    if isinstance(fun, ast.Lambda):
        return "<lambda>"
    if isinstance(fun, ast.Call) and fun.args:  # of partial(loss, ...) or jit(loss)
        return name_of(fun.args[0])
    return getattr(fun, "name", "") or dotted(fun).rpartition(".")[2]


def is_planned(source: Source, fun: Any, depth: int = 4) -> bool:
    """Returns whether a function is under `autocast` already."""
    if not depth:
        return False
    own = lambda node: source.qualified(node).startswith(f"{MINE}.")  # noqa: E731
    decorators = getattr(fun, "decorator_list", ())
    if any(own(getattr(each, "func", each)) for each in decorators):
        return True
    calls = (node for node in ast.walk(fun) if isinstance(node, ast.Call))
    if isinstance(fun, ast.expr) and any(own(each.func) for each in calls):
        return True
    for bound in source.values(fun) if isinstance(fun, (ast.Name, ast.Attribute)) else ():
        at = bound.value if bound.kind == "value" else bound.node
        if bound.kind in ("value", "def") and is_planned(source, at, depth - 1):
            return True
    return False
