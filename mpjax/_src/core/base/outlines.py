"""What a state contains, as a text that fits a terminal whatever the size of the model."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from mpjax._src.core.base.errors import brief
from mpjax._src.core.base.trees import NUMBER, is_array, is_key

WIDTH, LINES, DEEPEST = 80, 24, 8
FEW = 8  # a container with more entries is counted, not listed


def outline(state: Any) -> str:
    """Returns what a state contains, in at most 24 lines of 80 columns.

    Scalars are shown by value, other arrays by dtype and shape; large containers are counted.

    Example:
        >>> outline({"step": np.int32(3), "w": np.ones((2, 3)), "rng": None})
        "{'step': 3, 'w': float64[2, 3], 'rng': None}"
    """
    # Which depth fits depends on the widths of all entries, so each is tried, the deepest first.
    for depth in range(DEEPEST, 0, -1):
        lines = _outlined(state, depth, WIDTH)
        if len(lines) <= LINES:
            break
    return "\n".join(lines[:LINES])


def _outlined(node: Any, depth: int, room: int) -> list[str]:
    parts = _parts(node) if depth else None
    if parts is None:
        text = _text(node)
        return [text if len(text) <= room else f"{text[: max(room - 3, 0)]}..."]
    begin, rows, end = parts
    inner = []
    for label, child in rows:
        left = room - 3 - len(label)  # indented, and with a comma
        first, *rest = _outlined(child, depth - 1, left)
        inner.append([label + first, *rest])
    line = f"{begin}{', '.join(lines[0] for lines in inner)}{end}"
    if len(line) <= room and all(len(lines) == 1 for lines in inner):
        return [line]
    for lines in inner:
        lines[-1] += ","
    return [begin, *(f"  {line}" for lines in inner for line in lines), end]


def _parts(node: Any) -> tuple[str, list[tuple[str, Any]], str] | None:
    """Returns the entries of a container that are listed, and what surrounds them."""
    kind = type(node).__name__
    # An optax optimizer is a named tuple of functions, whose entries say nothing.
    if _is_optimizer(node):
        return None
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return f"{kind}(", [(f"{n}=", getattr(node, n)) for n in node._fields], ")"
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return f"{kind}(", [(f"{n}=", value) for n, value in _changed(node)], ")"
    if isinstance(node, (tuple, list)) and len(node) <= FEW:
        begin, end = ("(", ")") if isinstance(node, tuple) else ("[", "]")
        return begin, [("", child) for child in node], end
    if isinstance(node, dict) and len(node) <= FEW:
        return "{", [(f"{name!r}: ", child) for name, child in node.items()], "}"
    return None


def _changed(node: Any) -> Iterator[tuple[str, Any]]:
    """Returns the fields of a dataclass, except settings that have their default."""
    for field in dataclasses.fields(node):
        value = getattr(node, field.name, None)
        if not (isinstance(value, (*NUMBER, str)) and value == field.default):
            yield field.name, value


def _is_optimizer(node: Any) -> bool:
    return isinstance(node, tuple) and bool(node) and all(map(callable, node))


def _text(node: Any) -> str:
    leaves = [node] if _is_optimizer(node) else jax.tree.leaves(node)
    if len(leaves) != 1 or leaves[0] is not node:
        return _counts(type(node), leaves)
    if not hasattr(node, "dtype"):
        return getattr(node, "__qualname__", None) or brief(node).partition("\n")[0]
    if is_array(node) and np.shape(node) == () and not is_key(node):
        try:
            return str(node.item())
        except Exception:  # traced, donated, or on another host: its value is not here
            pass
    return f"{node.dtype}{list(node.shape)}"


def _counts(kind: type, leaves: list[Any]) -> str:
    """Returns how many numbers of each dtype a container has, such as moments or parameters."""
    if not leaves:
        return "None" if kind is type(None) else f"{kind.__name__}()"
    numbers: collections.Counter[str] = collections.Counter()
    for leaf in leaves:
        typed = hasattr(leaf, "dtype")
        numbers[str(leaf.dtype) if typed else type(leaf).__name__] += (
            int(np.prod(leaf.shape)) if typed else 1
        )
    each = ", ".join(f"{count:,} {name}" for name, count in numbers.items())
    return f"<{len(leaves)} {'leaf' if len(leaves) == 1 else 'leaves'}: {each}>"
