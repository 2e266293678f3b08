"""Edits for a loss scale: gradients through the optimizer, which is wrapped where it is created.

An optimizer and its state have the names that the script gives them where it updates:
``optimizer.update(grads, opt_state, params)``, ``state.apply_gradients(grads=grads)`` or, in Flax
NNX, ``optimizer.update(model, grads)``. What cannot be followed from there raises `Unknown`.
"""

import ast
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mpjax._src.tools.scripts.created import LOOP, Unknown, created, has_train_state
from mpjax._src.tools.scripts.differentiated import Gradient
from mpjax._src.tools.scripts.source import Edit, Source, dotted, insertion

SEVERAL = "docs/optimizers.md#several-optimizers"
ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)
JITS = ("jit", "filter_jit")
ACCEPTED = {"argnums", "has_aux", "axis_name"}  # options that ours have too


class Update(NamedTuple):
    """An update of parameters: how it is written, and the optimizer and state that it names."""

    node: ast.Call
    kind: str  # "optax", "linen" or "nnx"
    optimizer: Any
    state: Any

    def gradient(self, source: Source, name: str, plain: bool) -> tuple[str, str]:
        """Returns the function that takes gradients, and its argument after the loss."""
        state = source.code(self.state)
        if self.kind == "nnx":
            return f"{name}.nnx.value_and_grad", state
        if self.kind == "optax":
            return f"{source.code(self.optimizer)}.value_and_grad", state
        if plain and has_train_state(source):
            return f"{state}.value_and_grad", ""
        return f"{state}.tx.value_and_grad", f"{state}.opt_state"


class Calls(NamedTuple):
    """Where the function that a transformation makes is called.

    Attributes:
        nodes: The calls.
        kept: The expression that is assigned to a name; None if it is called where it is made.
        jitted: Whether it is jitted in between.
        alone: Whether the name has no other values, as in the branches of an ``if``.
    """

    nodes: Sequence[ast.Call]
    kept: Any = None
    jitted: bool = False
    alone: bool = True


def through_optimizer(
    source: Source, gradient: Gradient, name: str, policy: str
) -> tuple[set[Edit], Sequence[str]]:
    """Returns the edits that take a gradient through its optimizer, and what is left to the user.

    Args:
        source: The script.
        gradient: The transformation in it.
        name: The script's name of mpjax.
        policy: The policy, as a literal of Python.

    Raises:
        Unknown: If the script does not tell what to change.
    """
    _check(source, gradient)
    calls = _calls(source, gradient)
    updates = [_update(source, gradient, call) for call in calls.nodes]
    if len({(each.kind, *each.gradient(source, name, True)) for each in updates}) != 1:
        raise Unknown(f"its gradients go to several optimizers. See {SEVERAL}.")
    update = updates[0]
    edits = created(source, update.kind, update.optimizer, name, policy)
    edits |= _taken(source, gradient, calls, update, name)
    if gradient.transform == "grad":
        if not calls.alone:
            raise Unknown(f"the name of what it returns has other values too. See {LOOP}.")
        for call in calls.nodes:
            edits |= _without_value(source, gradient, call)
    aux = gradient.option("has_aux") or gradient.args[1:]
    undo = (
        "what the loss returns beside it is not undone after a skipped step. If it is new model "
        f"state, add new = {name}.select({source.code(update.state)}.finite, new, old) after the "
        f"update: {LOOP}."
    )
    return edits, [undo] if aux and update.kind == "optax" else []


def _check(source: Source, gradient: Gradient) -> None:
    last = gradient.name.rpartition(".")[2]
    if gradient.transform not in ("grad", "value_and_grad") or last.endswith("from_state"):
        raise Unknown(
            f"{last} has no loss to scale. Multiply what it differentiates by a loss scale "
            f"yourself, or use a bfloat16 policy: {LOOP}."
        )
    if "." not in gradient.name:
        raise Unknown(
            f"{source.code(gradient.base)} is a method, perhaps of a loss scale. Remove that one "
            "first: docs/coming_from/jax.md#flaxs-dynamicscale."
        )
    options = {each.arg for each in gradient.keywords} - ACCEPTED
    if options or any(isinstance(each, ast.Starred) for each in gradient.args):
        shown = ", ".join(sorted(each or "**" for each in options)) or "a starred argument"
        raise Unknown(f"{last} has the option {shown}, which the optimizer's has not. See {LOOP}.")


# Where gradients are taken


def _calls(source: Source, gradient: Gradient) -> Calls:
    """Returns where the gradient function is called. All these calls are known, or it raises."""
    scope: Any
    passed = Unknown(
        "its result is passed on or returned, so the state of the optimizer is not known here. "
        f"See {LOOP}."
    )
    if gradient.decorates:
        above = [each for each in gradient.fun.decorator_list if each.lineno < gradient.node.lineno]
        name = ast.Name(gradient.fun.name)
        scope = source.scope_of(gradient.fun)
        if isinstance(scope, ast.ClassDef) or not all(_is_jit(source, each) for each in above):
            raise passed
        return Calls(_called(source, name, scope, passed), gradient.fun)
    node: Any = gradient.node
    jitted = False
    for parent, field in source.around(node):
        if isinstance(parent, ast.Call) and field == "func":
            return Calls([parent], None, jitted)
        if isinstance(parent, ast.Call) and _is_jit(source, parent) and parent.args == [node]:
            node, jitted = parent, True
            continue
        targets: Any = getattr(parent, "targets", None) or [getattr(parent, "target", None)]
        target: Any = targets[0]
        bound = source.values(target) if isinstance(target, ast.Name) else ()
        if len(targets) > 1 or not bound:
            raise passed
        scope, _ = source.resolve(target.id, target)
        calls = _called(source, target, scope, passed)
        if len(bound) > 1:  # of the branches of an `if`, this one
            block = source.parents[source.statement(parent)]
            near = [each for each in calls if source.parents[source.statement(each)] == block]
            calls = near or calls
        return Calls(calls, gradient.node, jitted, len(bound) == 1)
    raise passed


def _is_jit(source: Source, node: Any) -> bool:
    """Returns whether an expression is jit, or a call of it without options."""
    if isinstance(node, ast.Call):
        return _is_jit(source, node.func) and not node.keywords
    return source.qualified(node).rpartition(".")[2] in JITS


def _called(source: Source, name: ast.Name, scope: Any, otherwise: Unknown) -> list[ast.Call]:
    calls = []
    for use in source.uses(name.id, scope):
        parent, field = source.parents[use]
        if not isinstance(parent, ast.Call) or field != "func":
            raise otherwise
        calls.append(parent)
    if not calls:
        raise otherwise
    return calls


def _taken(
    source: Source, gradient: Gradient, calls: Calls, update: Update, name: str
) -> set[Edit]:
    """Returns the edits of the transformation, and of the calls of what it makes."""
    plain = not gradient.args and gradient.option("argnums") is None
    function, state = update.gradient(source, name, plain)
    if gradient.decorates:
        first, last = gradient.node.lineno - 1, gradient.node.end_lineno
        edits = {Edit(source.starts[first], source.starts[last], "")}
        inner = _arguments(source, gradient, gradient.fun.name, state)
        for call in calls.nodes:
            edits.add(Edit(*source.span(call.func), f"{function}({inner})"))
        return edits
    kept = calls.kept
    if kept is None or all(_reaches(source, kept, each, update) for each in calls.nodes):
        return _replaced(source, gradient, function, state, "", "")
    if not calls.alone:
        raise Unknown(f"the name of what it returns has other values too. See {LOOP}.")
    optimizer = _root(update.state if update.kind == "linen" else update.optimizer)
    mine = update.state if update.kind == "nnx" else None
    here = source.resolve(optimizer.id, gradient.node)[0]
    if mine is None and here is not source.resolve(optimizer.id, update.node)[0]:
        raise Unknown(
            f"it is made where {optimizer.id} is not known. Make it where its result is used, as "
            f"in {LOOP}."
        )
    # The state changes from call to call, so the gradient function becomes one of it.
    parameter = "optimizer" if update.kind == "nnx" else "opt_state"
    parts = (gradient.fun, *gradient.args, *(each.value for each in gradient.keywords))
    read = {getattr(node, "id", "") for part in parts for node in ast.walk(part)}
    parameter += "_" * (parameter in read)
    keywords = any(call.keywords for call in calls.nodes)
    rest = "*args, **kwargs" if keywords else "*args"
    if calls.jitted:
        first, last = f"lambda {parameter}, {rest}: ", f"({rest})"
        edits = {insertion(_opening(source, call), f"{state}, ") for call in calls.nodes}
    else:
        first, last = f"lambda {parameter}: ", ""
        edits = {insertion(source.span(call.func)[1], f"({state})") for call in calls.nodes}
    if update.kind == "linen":
        raise Unknown(f"it is made outside of the step that has the state. See {LOOP}.")
    return edits | _replaced(source, gradient, function, parameter, first, last)


def _reaches(source: Source, made: Any, call: ast.Call, update: Update) -> bool:
    """Returns whether the state of a call is that where the gradient function is made."""
    if source.loop_of(made) is not source.loop_of(call):
        return False
    scope, bound = source.resolve(_root(update.state).id, made)
    if scope is not source.resolve(_root(update.state).id, call)[0]:
        return False
    before = [source.span(each.node)[0] < source.span(made)[0] for each in bound]
    between = [
        source.span(made)[0] < source.span(each.node)[0] < source.span(call)[0] for each in bound
    ]
    return any(before) and not any(between)


def _replaced(
    source: Source, gradient: Gradient, function: str, state: str, first: str, last: str
) -> set[Edit]:
    """Returns the edits that write another function in the place of the transformation."""
    call, (start, end) = gradient.node, source.span(gradient.fun)
    opening = _opening(source, call)
    direct = call.func is gradient.base and call.args and call.args[0] is gradient.fun
    if direct and not source.text[opening:start].strip():
        edits = {Edit(*source.span(call.func), first + function)}
        if state:
            edits.add(insertion(end, f", {state}"))
        after = source.span(call)[1]
        return edits | ({insertion(after, last)} if last else set())
    inner = _arguments(source, gradient, "", state)
    begin, after = source.span(call)
    return {Edit(begin, start, f"{first}{function}("), Edit(end, after, f"{inner}){last}")}


def _arguments(source: Source, gradient: Gradient, fun: str, state: str) -> str:
    """Returns the arguments of a gradient: the function, the state, and the options."""
    options = [source.code(each) for each in (*gradient.args, *gradient.keywords)]
    return ", ".join([fun, *([state] if state else []), *options])


def _opening(source: Source, call: ast.Call) -> int:
    """Returns the place after the bracket that opens a call's arguments."""
    return source.text.index("(", source.span(call.func)[1]) + 1


def _without_value(source: Source, gradient: Gradient, call: ast.Call) -> set[Edit]:
    """Returns the edits that drop the value, which ``jax.grad`` does not return."""
    aux = gradient.option("has_aux") or next(iter(gradient.args[1:]), None)
    if aux is None or (isinstance(aux, ast.Constant) and aux.value is False):
        end = source.span(call)[1]
        return {insertion(end, "[1]")}
    parent, _ = source.parents[call]
    targets = parent.targets if isinstance(parent, ast.Assign) else []
    if len(targets) == 1 and isinstance(targets[0], ast.Tuple) and len(targets[0].elts) == 2:
        grads, extra = map(source.code, targets[0].elts)
        return {Edit(*source.span(targets[0]), f"(_, {extra}), {grads}")}
    raise Unknown(
        "it returns gradients and aux, where value_and_grad returns ((value, aux), gradients). "
        f"Unpack them in a line of their own. See {LOOP}."
    )


# Where they are used


def _update(source: Source, gradient: Gradient, call: ast.Call) -> Update:
    """Returns the update that reads the gradients which a call returns."""
    of_nnx = gradient.name.startswith("flax.nnx")
    for i, scope in enumerate(scopes := source.function_of(call)):
        inner = scopes[i - 1] if i > 0 else None
        if isinstance(scope, ast.Module) and inner:
            break
        found = _reading(source, scope, call, getattr(inner, "name", ""), of_nnx)
        if len(found) > 1:
            raise Unknown(f"its gradients go to several updates. See {SEVERAL}.")
        # A function that is made outside of the loop may be jitted with the first state.
        if inner and any(source.loop_of(inner) is not source.loop_of(u.node) for u in found):
            break
        if found:
            _check_state(source, call, found[0])
            return found[0]
    if call.args and dotted(call.args[0]).endswith(".params") and has_train_state(source):
        state = call.args[0].value  # type: ignore[attr-defined]
        return Update(call, "linen", state, state)
    raise Unknown(
        "no update of an optimizer reads these gradients in the same function, such as "
        f"optimizer.update(grads, opt_state, params). See {LOOP}."
    )


def _reading(
    source: Source, scope: ast.AST, call: ast.Call, inner: str, of_nnx: bool
) -> list[Update]:
    """Returns the updates in a scope that read what a call, or an inner function, computed.

    The nearest are returned: a name such as ``updates`` may be used again for others.
    """
    nodes: list[Any] = [node for node in ast.walk(scope) if source.scope_of(node) is scope]
    updates = [
        each for node in nodes if isinstance(node, ast.Call) for each in _as_update(node, of_nnx)
    ]
    statements = [node for node in nodes if isinstance(node, ASSIGNMENTS) and node.value]
    names = {inner}

    def reads(value: Any) -> bool:
        inside = {*ast.walk(value)}
        return call in inside or any(getattr(node, "id", None) in names for node in inside)

    count = -1
    while count != len(names):
        if found := [update for update, grads in updates if reads(grads)]:
            return found
        count = len(names)
        targets = [
            target
            for each in statements
            if reads(each.value)
            for target in getattr(each, "targets", None) or [getattr(each, "target", None)]
        ]
        found_names = (node for target in targets for node in ast.walk(target))
        names |= {node.id for node in found_names if isinstance(node, ast.Name)}
    return []


def _as_update(node: ast.Call, of_nnx: bool) -> Iterator[tuple[Update, Any]]:
    """Yields what a call can be as an update, with its expression of the gradients."""
    if not isinstance(node.func, ast.Attribute) or _root(node.func.value) is None:
        return
    base, given = node.func.value, {each.arg: each.value for each in node.keywords}
    if node.func.attr == "apply_gradients" and "grads" in given:
        yield Update(node, "linen", base, base), given["grads"]
    if node.func.attr != "update" or not node.args:
        return
    second = node.args[1] if len(node.args) > 1 else given.get("state")
    if of_nnx and second is not None:
        yield Update(node, "nnx", base, base), second
    elif not of_nnx and _root(second) is not None:
        yield Update(node, "optax", base, second), node.args[0]


def _check_state(source: Source, call: ast.Call, update: Update) -> None:
    """Refuses a state that is not the same where gradients are taken, or whose fields are read."""
    text = source.code(update.state)
    scope, bound = source.resolve(_root(update.state).id, call)
    last = source.span(source.statement(update.node))[0]
    between = [each for each in bound if source.span(call)[1] <= source.span(each.node)[0] < last]
    if scope is not source.resolve(_root(update.state).id, update.node)[0] or between:
        raise Unknown(
            f"{text} is not known here, or changes before the update. Pass it to the function that "
            f"takes gradients. See {LOOP}."
        )
    for node in ast.walk(source.tree) if update.kind == "optax" else ():
        if isinstance(node, (ast.Attribute, ast.Subscript)) and dotted(node.value) == text:
            raise Unknown(
                f"{source.code(node)} is read in line {node.lineno}, which is "
                f"{text}.inner_state of a wrapped optimizer: docs/optimizers.md#inside-optaxchain."
            )


def _root(node: Any) -> Any:
    """Returns the name that an expression of attributes and items begins with, or None."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node if isinstance(node, ast.Name) else None
