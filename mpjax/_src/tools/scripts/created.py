"""Edits where an optimizer is created: optax's, that of Flax NNX, or the state of Flax linen."""

import ast
from collections.abc import Iterator
from typing import Any

from mpjax._src.core.base.errors import first_of
from mpjax._src.core.base.lines import short
from mpjax._src.tools.scripts.source import (
    FUNCTIONS,
    Binding,
    Edit,
    Source,
    beside,
    dotted,
    insertion,
)

LOOP = "docs/frameworks.md#change-your-loop"
STATE = "flax.training.train_state.TrainState"
NNX = "flax.nnx.Optimizer"


class Unknown(Exception):
    """What a script does not tell: a sentence for its user, with a page."""


def created(source: Source, kind: str, optimizer: Any, name: str, policy: str) -> set[Edit]:
    """Returns the edits that create an optimizer with a policy.

    Args:
        source: The script.
        kind: "optax", "linen" or "nnx".
        optimizer: The expression that names the optimizer, or linen's state, where it updates.
        name: The script's name of mpjax.
        policy: The policy, as a literal of Python.

    Raises:
        Unknown: If the script does not tell where.
    """
    try:
        return _created(source, kind, optimizer, name, policy)
    except Unknown as unknown:
        if not (places := [*_elsewhere(source)]):
            raise
        raise Unknown(f"{unknown} Optimizers are created at {first_of(places, 3)}.") from None


def _created(source: Source, kind: str, optimizer: Any, name: str, policy: str) -> set[Edit]:
    if kind == "nnx":
        return _of_nnx(source, name, policy)
    if kind == "linen" and has_train_state(source):
        return _of_linen(source, name, policy)
    wrapped = _Wrapped(source, name, policy)
    if kind == "linen":
        wrapped.field("tx")
    else:
        wrapped.expression(optimizer)
    return wrapped.edits


def _of_nnx(source: Source, name: str, policy: str) -> set[Edit]:
    calls = [node for node in _calls(source) if source.qualified(node.func) == NNX]
    if not calls:
        raise Unknown(
            f"{NNX} is not called in this file. Create {name}.nnx.Optimizer(model, tx, {policy}, "
            f"wrt=nnx.Param) in its place: {LOOP}."
        )
    edits = {Edit(*source.span(call.func), f"{name}.nnx.Optimizer") for call in calls}
    return edits | {_keyword(source, call, policy, 2) for call in calls}


def has_train_state(source: Source) -> bool:
    """Returns whether a script creates linen's state, or a subclass of it."""
    return bool(_states(source))


def _states(source: Source) -> list[tuple[ast.Call, list[Any]]]:
    """Returns the calls that create a state, each with the expressions that name flax's class."""
    found = []
    for call in _calls(source):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "create":
            bases = [*_flax_classes(source, call.func.value)]
            found += [(call, bases)] if bases else []
    return found


def _flax_classes(source: Source, node: Any) -> Iterator[Any]:
    if source.qualified(node) == STATE:
        yield node
    elif isinstance(node, ast.Name):
        for bound in source.values(node):
            if isinstance(bound.node, ast.ClassDef):
                for base in bound.node.bases:
                    yield from _flax_classes(source, base)


def _of_linen(source: Source, name: str, policy: str) -> set[Edit]:
    edits = set()
    for call, bases in _states(source):
        edits |= {Edit(*source.span(base), f"{name}.linen.TrainState") for base in bases}
        edits.add(_keyword(source, call, f"policy={policy}", -1))
    return edits


def _keyword(source: Source, call: ast.Call, text: str, after: int) -> Edit:
    """Returns the edit that adds an argument before the first keyword."""
    if not call.keywords or any(isinstance(each, ast.Starred) for each in call.args):
        raise Unknown(
            f"{source.code(call.func)} is called without keywords in line {call.lineno}. Add "
            f"{text} yourself: {LOOP}."
        )
    if after >= 0 and len(call.args) != after:
        text = f"policy={text}"
    start = source.span(call.keywords[0])[0]
    before = source.text[source.starts[source.line_of(start) - 1] : start]
    return insertion(start, f"{text}, " if before.strip() else f"{text},{source.newline}{before}")


def _calls(source: Source) -> Iterator[ast.Call]:
    return (node for node in ast.walk(source.tree) if isinstance(node, ast.Call))


def _elsewhere(source: Source) -> Iterator[str]:
    """Yields "file:line" where modules that a script imports create optimizers."""
    for other in beside(source):
        found = {call for call in _calls(other) if _creates(other.qualified(call.func))}
        for call in found:
            if found.isdisjoint(at for at, _ in other.around(call)):
                yield short(f"{other.path}:{call.lineno}")


def _creates(full: str) -> bool:
    """Returns whether a function, by its full name, creates an optimizer."""
    import optax

    annotations = getattr(getattr(optax, full.removeprefix("optax."), None), "__annotations__", {})
    return full == NNX or "GradientTransformation" in str(annotations.get("return"))


class _Wrapped:
    """Follows an optax optimizer to where it is created, and wraps it there."""

    def __init__(self, source: Source, name: str, policy: str):
        self.source, self.name, self.policy = source, name, policy
        self.edits: set[Edit] = set()
        self.followed: set[ast.AST] = set()

    def expression(self, node: Any) -> None:
        """Wraps what an expression of an optimizer means."""
        source = self.source
        if node in self.followed:
            return
        self.followed.add(node)
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return self._wrap(node, node)
        bound = source.values(node)
        if not bound and isinstance(node, ast.Attribute):
            return self.field(node.attr)
        if not bound or any(each.kind in ("import", "def") for each in bound):
            raise self._unknown(node)
        for each in self._last(node, bound):
            if each.kind == "parameter":
                self._arguments(node, each)
            elif each.kind == "value":
                self._wrap(each.value, node)
            else:
                self._after(node, each)

    def field(self, attribute: str) -> None:
        """Wraps what is passed by the keyword of an attribute, as ``tx=`` of a state."""
        keywords = (each for call in _calls(self.source) for each in call.keywords)
        given = [each.value for each in keywords if each.arg == attribute]
        given = [each for each in given if not self._is_field(each)]
        if not given:
            raise self._unknown(attribute)
        for each in given:
            self.expression(each)

    def _is_field(self, node: Any) -> bool:  # state.replace(tx=state.tx)
        return isinstance(node, ast.Attribute) and not self.source.values(node)

    def _last(self, node: Any, bound: list[Binding]) -> list[Binding]:
        """Returns the bindings to wrap: the last one, if it is made from those before."""
        reads = [
            each
            for each in bound
            if each.kind == "value"
            and any(dotted(part) == dotted(node) for part in ast.walk(each.value))
        ]
        if not reads:
            return bound
        blocks = {self.source.parents[self.source.statement(each.node)] for each in bound}
        if len(blocks) > 1 or any(each.kind != "value" for each in bound):
            raise self._unknown(node)
        return [max(bound, key=lambda each: self.source.span(each.node))]

    def _wrap(self, value: Any, node: Any) -> None:
        calls = {self.source.qualified(each) for each in ast.walk(value)}
        if any(call.split(".")[0] == "mpjax" for call in calls):
            return
        if isinstance(value, (ast.Name, ast.Attribute)):
            return self.expression(value)
        if not (self._is_optimizer(value) or self._is_init(node)):
            raise self._unknown(node)
        start, end = self.source.span(value)
        self.edits |= {
            insertion(start, f"{self.name}.mixed_precision("),
            insertion(end, f", {self.policy})"),
        }

    def _after(self, node: Any, bound: Binding) -> None:
        """Wraps a part of a tuple in a line of its own."""
        statement = bound.node
        alone = isinstance(node, ast.Name) and isinstance(statement, ast.Assign)
        if not alone or not self._ends(statement):
            raise self._unknown(node)
        if not (self._is_optimizer(statement.value) or self._is_init(node)):
            raise self._unknown(node)
        source = self.source
        end, indent = source.after(statement.end_lineno), source.indent(statement.lineno)
        text = f"{indent}{node.id} = {self.name}.mixed_precision({node.id}, {self.policy})"
        self.edits.add(insertion(end, f"{text}{source.newline}"))

    def _ends(self, statement: ast.stmt) -> bool:
        """Returns whether lines hold nothing but a statement, and end."""
        source, (start, end) = self.source, self.source.span(statement)
        line = source.text[end : source.after(statement.end_lineno)]
        first = source.starts[statement.lineno - 1]
        rest = line.split("#")[0].strip()
        return not source.text[first:start].strip() and not rest and line.endswith("\n")

    def _is_optimizer(self, value: Any, depth: int = 3) -> bool:
        """Returns whether an expression makes optax optimizers, itself or in a function."""
        for node in ast.walk(value):
            if self.source.qualified(node).split(".")[0] == "optax":
                return True
            if depth and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                for bound in self.source.values(node):
                    inner = bound.value if bound.kind == "value" else bound.node
                    if bound.kind in ("value", "def") and self._is_optimizer(inner, depth - 1):
                        return True
        return False

    def _is_init(self, node: Any) -> bool:
        """Returns whether the script makes a state with an expression, as ``tx.init(params)``."""
        read = map(dotted, ast.walk(self.source.tree))
        return bool(dotted(node)) and f"{dotted(node)}.init" in read

    def _arguments(self, node: Any, bound: Binding) -> None:
        """Follows a parameter to what the script passes for it."""
        source = self.source
        function = next(at for at, _ in source.around(bound.node) if isinstance(at, FUNCTIONS))
        given = [*self._passed(function, bound.node.arg)]
        if not given:
            raise self._unknown(node)
        for each in given:
            self.expression(each)

    def _passed(self, function: Any, parameter: str, depth: int = 3) -> Iterator[Any]:
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        defaults = dict(zip(reversed(names), reversed(function.args.defaults), strict=False))
        if parameter in defaults and not isinstance(defaults[parameter], ast.Constant):
            yield defaults[parameter]
        name = getattr(function, "name", "")
        for called in _aliases(self.source, name, self.source.scope_of(function)):
            index = names.index(parameter) if parameter in names else -1
            yield from (each.value for each in called.keywords if each.arg == parameter)
            before = called.args[: index + 1]
            if not any(isinstance(each, ast.Starred) for each in before) and index >= 0:
                yield from before[index:]

    def _unknown(self, node: Any) -> Unknown:
        text = node if isinstance(node, str) else self.source.code(node)
        return Unknown(
            f"where {text} is created is not known. Wrap it there: "
            f"{self.name}.mixed_precision({text}, {self.policy}). See {LOOP}."
        )


def _aliases(source: Source, name: str, scope: Any, depth: int = 3) -> Iterator[ast.Call]:
    """Yields the calls of a function, also of what a call around it returns, as ``jit(step)``."""
    for use in source.uses(name, scope) if name and depth else ():
        parent, field = source.parents[use]
        if isinstance(parent, ast.Call) and field == "func":
            yield parent
        elif isinstance(parent, ast.Call) and field == "args":
            above, field = source.parents[parent]
            if isinstance(above, ast.Call) and field == "func":
                yield above
            elif isinstance(above, ast.Assign) and isinstance(above.targets[0], ast.Name):
                target = above.targets[0]
                around = source.resolve(target.id, target)[0]
                yield from _aliases(source, target.id, around, depth - 1)
