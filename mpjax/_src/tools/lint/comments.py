"""Comments that silence the linter at a line: ``# mpjax: ignore`` and ``# mpjax: ignore[rule]``."""

import ast
import functools
import linecache
import re

from mpjax._src.core.base.patterns import matches

COMMENT = re.compile(r"#\s*mpjax:\s*ignore\b(?:\s*\[([^\]]*)\])?")


def is_silenced(source: str, rule: str) -> bool:
    """Returns whether a comment on a line, "file:line", or on its statement, silences a rule."""
    file, _, number = source.rpartition(":")
    if not file:
        return False
    # JAX names one line of a statement, and the comment may be on another one.
    first, last = _statement(file, int(number))
    for line in linecache.getlines(file)[first - 1 : last]:
        for names in COMMENT.findall(line):
            wanted = [name.strip() for name in names.split(",") if name.strip()]
            if not wanted or any(matches(name, rule) for name in wanted):
                return True
    return False


def _statement(file: str, number: int) -> tuple[int, int]:
    """Returns the first and last line of the innermost statement around a line."""
    text = "".join(linecache.getlines(file))
    spans = [(a, b) for a, b in _statements(text) if a <= number <= b]
    return min(spans, key=lambda span: span[1] - span[0], default=(number, number))


@functools.lru_cache(64)
def _statements(text: str) -> tuple[tuple[int, int], ...]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # not Python
        return ()
    # Only statements without a body: a comment in a function must not silence all of it.
    statements = (n for n in ast.walk(tree) if isinstance(n, ast.stmt))
    simple = (n for n in statements if not (hasattr(n, "body") or isinstance(n, ast.Match)))
    return tuple((node.lineno, node.end_lineno or node.lineno) for node in simple)
