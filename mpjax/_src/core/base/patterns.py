"""Glob patterns over parameter paths such as "Dense_0/kernel"."""

import difflib
import fnmatch
from collections.abc import Iterable
from typing import Any

import jax


def path_of(keys: Any) -> str:
    """Joins a JAX key path with "/": ``(DictKey("a"), SequenceKey(0))`` gives "a/0"."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def name_of(argument: str, keys: Any) -> str:
    """Returns the name of a leaf in messages: ``params['Dense_0/kernel']``, or just ``params``."""
    return f"{argument}[{path_of(keys)!r}]" if keys else argument


def paths(tree: Any) -> list[str]:
    """Returns the path of every leaf of ``tree``, in the order of its leaves."""
    return [path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(tree)]


def difference(wanted: set[str], actual: set[str], more: set[str] | None = None) -> str:
    """Returns what ``actual`` lacks and has beyond ``wanted``, for messages; "" if nothing."""
    parts = ("lacks", wanted - actual), ("holds", actual - wanted if more is None else more)
    return " and ".join(f"{verb} {', '.join(sorted(names)[:3])}" for verb, names in parts if names)


def matches(pattern: str, path: str) -> bool:
    """Returns whether a glob matches a path.

    Letter case does not matter, "*" also matches "/", and a leading "*/" also matches at the root.
    Boxes such as ``nnx.Param`` and ``nn.Partitioned`` put "/value" at the end of a path; a pattern
    may leave it out.

    Example:
        >>> matches("*/head/*", "head/kernel")
        True
    """
    pattern, path = pattern.lower(), path.lower()
    spellings = {path, path.removesuffix("/value")}
    if pattern.startswith("*/"):
        spellings |= {"/" + spelling for spelling in spellings}
    return any(fnmatch.fnmatchcase(spelling, pattern) for spelling in spellings)


def nearest_paths(pattern: str, candidates: Iterable[str], count: int = 5) -> list[str]:
    """Returns the paths that are most similar to a pattern, best first, for error messages."""
    wanted = pattern.lower().strip("*/")

    def likeness(path: str) -> float:
        # Users may write the name of a layer alone, so each part of a path is compared too.
        parts = [path, *path.split("/")]
        return max(difflib.SequenceMatcher(None, wanted, part.lower()).ratio() for part in parts)

    return sorted(dict.fromkeys(candidates), key=likeness, reverse=True)[:count]
