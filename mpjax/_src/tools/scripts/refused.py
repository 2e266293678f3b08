"""The lines to change in a script that is refused, because its policy needs a loss scale."""

import ast
from pathlib import Path

from mpjax._src.core.base.lines import is_library
from mpjax._src.tools.scripts.differentiated import Gradient, Use, gradients, name_of
from mpjax._src.tools.scripts.edits import Proposal, proposed
from mpjax._src.tools.scripts.source import Source


def lines_to_change(script: str, policy: str) -> Proposal:
    """Returns what to change in a script, of which nothing has run.

    Args:
        script: Its file. A gradient that is written in another file of it is not found.
        policy: The policy that it is to run under.
    """
    return proposed(_uses(script), policy)


def _uses(script: str) -> list[Use]:
    """Returns the gradients that a script takes, without those inside of what it differentiates."""
    path = Path(script).absolute()
    if is_library(str(path)) or path.suffix != ".py":
        return []
    try:
        source = Source(path)
    except (OSError, SyntaxError, ValueError):
        return []
    every = [each for each in gradients(source) if _differentiates(source, each)]
    names = {id(each): name_of(each.fun) for each in every}
    found = []
    for each in every:
        around = {getattr(node, "name", "") for node in source.function_of(each.node)}
        if not around & {name for key, name in names.items() if key != id(each) and name}:
            found.append(Use(str(path), each.node.lineno, each.transform, names[id(each)] or None))
    return found


def _differentiates(source: Source, gradient: Gradient) -> bool:
    """Returns whether it is one of a library, or a method of this name that gets a function."""
    fun = gradient.fun
    named = source.values(fun) if isinstance(fun, ast.Name) else ()
    bound = (at for each in named for at in (each.node, each.value))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    is_function = [isinstance(at, functions) for at in (fun, *bound)]
    return "." in gradient.name or any(is_function)
