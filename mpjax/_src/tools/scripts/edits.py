"""The lines to change in somebody's training script, as a diff, or why they are not known."""

import ast
import dataclasses
import difflib
import json
import linecache
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpjax._src.core.base.dtypes import HALVES
from mpjax._src.core.base.lines import is_library, short
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.policy.policy import Policy
from mpjax._src.tools.scripts.created import LOOP, Unknown
from mpjax._src.tools.scripts.differentiated import MINE, Gradient, Use, is_planned, name_of, of_use
from mpjax._src.tools.scripts.scaled import through_optimizer
from mpjax._src.tools.scripts.source import Edit, Source, dotted, insertion

LIBRARIES = "docs/libraries.md"
# Their functions change modules while they run, so that nothing may trace them in between.
LIFTED = ("flax.linen.", "haiku.")


class Proposal(NamedTuple):
    """What to change in a script.

    Attributes:
        diff: A unified diff that ``git apply`` takes in the folder ``root``, or "".
        root: The folder that the diff's paths are relative to.
        missing: What the diff does not change, each with its line, the reason and a page.
    """

    diff: str
    root: str
    missing: tuple[str, ...]


def proposed(uses: Sequence[Use], policy: str) -> Proposal:
    """Returns the lines to change so that a script computes in mixed precision.

    Args:
        uses: The calls of transformations that were seen while the script ran.
        policy: The policy.

    Returns:
        A `Proposal`. Files of installed packages are never in its diff.
    """
    files = [Path(use.file) for use in uses if not is_library(use.file)]
    root = _root(files)
    if refused := _refused(get_policy(policy)):
        return Proposal("", str(root), (refused,))
    sources: dict[Path, Source] = {}
    edits: dict[Path, set[Edit]] = defaultdict(set)
    missing: dict[str, None] = {}  # in order, each once
    for use in dict.fromkeys(uses):
        try:
            source = _source(use, root, sources)
            for gradient in _gradients(source, use):
                at = short(f"{use.file}:{source.line_of(source.span(gradient.node)[0])}")
                added, notes = _changed(source, gradient, policy)
                edits[source.path] |= added
                missing |= dict.fromkeys(f"{at}: {note}" for note in notes)
        except Unknown as reason:
            missing[f"{short(f'{use.file}:{use.line}')}: {reason}"] = None
    for path, changed in edits.items():
        changed |= {*_import(sources[path], changed)}
    diffs = [_diff(sources[path], changed, root) for path, changed in edits.items() if changed]
    return Proposal("".join(diffs), str(root), tuple(missing))


def _refused(policy: Policy) -> str:
    """Returns why a policy is not a matter of a few lines, or ""."""
    if policy.param_dtype in HALVES:
        return (
            f"policy={str(policy)!r} stores parameters in {policy.param_dtype}, and so changes "
            "what the script creates and saves. Create them as docs/weights.md shows."
        )
    if policy.compute_dtype not in HALVES and not policy.overrides:
        return f"policy={str(policy)!r} computes in float32, as the script does: nothing to change."
    return ""


def _changed(source: Source, gradient: Gradient, policy: str) -> tuple[set[Edit], Sequence[str]]:
    """Returns the edits for one gradient, and what the user has to look at."""
    chosen, name = get_policy(policy), _name_of_mpjax(source)
    kept = dataclasses.replace(chosen, moments="float32") == chosen
    if chosen.needs_loss_scaling or not kept:
        return through_optimizer(source, gradient, name, _quoted(policy))
    return {*_autocast(source, gradient, name, policy)}, ()


def _autocast(source: Source, gradient: Gradient, name: str, policy: str) -> list[Edit]:
    """Returns the edits that put what is differentiated under autocast."""
    if gradient.decorates:
        end = source.after(gradient.node.end_lineno)
        first = source.indent(gradient.node.lineno)
        text = f"{first}@{name}.autocast(policy={_quoted(policy)}){source.newline}"
        return [insertion(end, text)]
    start, end = source.span(gradient.fun)
    return [insertion(start, f"{name}.autocast("), insertion(end, f", {_quoted(policy)})")]


def _quoted(policy: str) -> str:
    return repr(policy) if '"' in policy else json.dumps(policy)


# Sources


def _root(files: Sequence[Path]) -> Path:
    """Returns the folder of the first file's repository, or the folder of the file."""
    first = next((file.absolute() for file in files if file.is_file()), Path.cwd() / "script")
    folders = [folder for folder in first.parents if (folder / ".git").exists()]
    return folders[0] if folders else first.parent


def _source(use: Use, root: Path, sources: dict[Path, Source]) -> Source:
    path = Path(use.file).absolute()
    if is_library(use.file):
        raise Unknown(
            f"{use.transform} is called in an installed package, which is not edited. Give it a "
            f"function under {MINE}.autocast: {LIBRARIES}."
        )
    if path.suffix == ".ipynb" or not path.is_file():
        line = linecache.getline(use.file, use.line).strip()
        raise Unknown(
            f"this is no file of Python code. Wrap what is differentiated in {MINE}.autocast"
            f"{f', in the line {line!r}' if line else ''}: {LOOP}."
        )
    if not os.access(path, os.W_OK) or not path.is_relative_to(root):
        raise Unknown(f"this file is not writable, or outside of {root}. See {LOOP}.")
    try:
        return sources.setdefault(path, sources.get(path) or Source(path))
    except (SyntaxError, ValueError) as error:
        raise Unknown(
            f"this file cannot be read as Python in UTF-8 ({error}). See {LOOP}."
        ) from None


def _gradients(source: Source, use: Use) -> list[Gradient]:
    """Returns the transformations of a use that can be edited."""
    found = of_use(source, use)
    if not found:
        raise Unknown(
            f"no call of {use.transform} is written here"
            f"{f', of {use.fun}' if use.fun else ''}. If a library takes the gradient, pass it a "
            f"function under {MINE}.autocast: {LIBRARIES}. See also {LOOP}."
        )
    for each in found:
        if is_planned(source, each.fun) or _is_mine(source, each):
            raise Unknown(f"{name_of(each.fun) or 'the function'} is under {MINE} already.")
        if each.name.startswith(LIFTED):
            raise Unknown(
                f"{each.name} differentiates a function that changes modules. Use autocast on the "
                f"whole loss: {LOOP}."
            )
        if any(isinstance(at, ast.JoinedStr) for at, _ in source.around(each.node)):
            raise Unknown(f"{use.transform} is called inside of an f-string. See {LOOP}.")
        if isinstance(each.fun, ast.Starred):
            raise Unknown(f"the function is in {source.code(each.fun)}. See {LOOP}.")
    return found


def _is_mine(source: Source, gradient: Gradient) -> bool:
    """Returns whether a method is called that may be one of mpjax's optimizers or states."""
    if gradient.name != dotted(gradient.base).rpartition(".")[2] or "." in gradient.name:
        return False
    names = [
        bound for scope in source.bindings.values() for each in scope.values() for bound in each
    ]
    return any(each.kind == "import" and each.value.split(".")[0] == MINE for each in names)


# Imports


def _name_of_mpjax(source: Source) -> str:
    """Returns the name under which a script has mpjax, or will have it."""
    for name, bound in source.bindings[source.tree].items():
        for each in bound:
            if each.value == MINE and each.node in source.tree.body:
                return name
    every = (each for names in source.bindings.values() for each in names.get(MINE, ()))
    other = any(each.value != MINE for each in every)
    return f"{MINE}_" if other else MINE


def _import(source: Source, edits: set[Edit]) -> list[Edit]:
    """Returns the line that imports mpjax after other imports, before its first use."""
    name = _name_of_mpjax(source)
    bound = source.bindings[source.tree].get(name, ())
    if not edits or any(each.value == MINE and each.node in source.tree.body for each in bound):
        return []
    text = f"import {MINE}" if name == MINE else f"import {MINE} as {name}"
    at = _place_of_import(source, min(edits).start)
    lead = "" if at == source.offset(source.line_of(at), 0) or not at else source.newline
    return [insertion(at, f"{lead}{text}{'' if lead else source.newline}")]


def _place_of_import(source: Source, before: int) -> int:
    """Returns where a line of its own belongs: after the imports, or else after the docstring, or
    the comments at the top, which may be a "#!" line or name the encoding."""
    found = re.match(r"(?:[ \t]*#[^\r\n]*(?:\r\n|\r|\n))*", source.text[source.starts[0] :])
    place = source.starts[0] + (found.end() if found else 0)
    body: list[Any] = source.tree.body
    for i, node in enumerate(body):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and not i
        # Lines that a statement shares with code belong to that.
        others = (each for each in body if each is not node and not isinstance(each, IMPORTS))
        shared = any(e.lineno <= node.end_lineno and node.lineno <= e.end_lineno for e in others)
        if (is_text or isinstance(node, IMPORTS)) and not shared and source.span(node)[1] < before:
            place = source.after(node.end_lineno)
    return place


IMPORTS = (ast.Import, ast.ImportFrom)


# Diffs


def _diff(source: Source, edits: set[Edit], root: Path) -> str:
    """Returns the diff of a file for ``git apply``, which ends lines at newlines alone."""
    old, new = (
        re.findall(r"[^\n]*\n|[^\n]+", text) for text in (source.text, source.edited(edits))
    )
    path = source.path.relative_to(root).as_posix()
    first, second = f"a/{path}", f"b/{path}"
    if re.search(r'["\\\x00-\x1f]', path):
        first, second = (json.dumps(each, ensure_ascii=False) for each in (first, second))
    tab = "\t" * (" " in path)
    out = difflib.unified_diff(old, new, first + tab, second + tab)
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in out
    )
