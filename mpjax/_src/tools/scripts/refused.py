"""The lines to change in a script that is refused, because its policy needs a loss scale."""

import ast
import contextlib
from pathlib import Path

from mpjax._src.core.base.lines import is_library
from mpjax._src.tools.scripts.differentiated import Gradient, Use, gradients, name_of
from mpjax._src.tools.scripts.edits import Proposal, proposed
from mpjax._src.tools.scripts.source import Source, beside


def lines_to_change(script: str, policy: str) -> Proposal:
    """Returns what to change in a script, of which nothing has run.

    Args:
        script: Its file. If it takes no gradient, the first module beside it that does is changed.
        policy: The policy that it is to run under.
    """
    path = Path(script).absolute()
    uses: list[Use] = []
    if not is_library(str(path)) and path.suffix == ".py":
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            source = Source(path)
            uses = next(filter(None, map(_uses, (source, *beside(source)))), [])
    return proposed(uses, policy)


def _uses(source: Source) -> list[Use]:
    """Returns the gradients that a script takes, without those inside of what it differentiates."""
    every = [each for each in gradients(source) if _differentiates(source, each)]
    names = {id(each): name_of(each.fun) for each in every}
    found = []
    for each in every:
        around = {getattr(node, "name", "") for node in source.function_of(each.node)}
        if not around & {name for key, name in names.items() if key != id(each) and name}:
            found.append(
                Use(str(source.path), each.node.lineno, each.transform, names[id(each)] or None)
            )
    return found


def _differentiates(source: Source, gradient: Gradient) -> bool:
    """Returns whether it is one of a library, or a method of this name that gets a function."""
    fun = gradient.fun
    named = source.values(fun) if isinstance(fun, ast.Name) else ()
    bound = (at for each in named for at in (each.node, each.value))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    is_function = [isinstance(at, functions) for at in (fun, *bound)]
    return "." in gradient.name or any(is_function)
