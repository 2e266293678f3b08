"""A plan pass by pass, for whoever debugs the planner: what each pass makes, as text."""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mpjax._src.core.autocast.transform import Traced, trace
from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax.held import is_inexact
from mpjax._src.core.base._jax.rounded import ROUNDED
from mpjax._src.core.base.lines import short
from mpjax._src.core.planner.program import Derivative, Program
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.policy.policy import PolicyLike
from mpjax._src.core.program.curried import takes_arguments
from mpjax._src.core.program.graph import REGION
from mpjax._src.core.program.site import equations, row_of
from mpjax._src.tools.document.model import Document, Table
from mpjax._src.tools.document.text import text_of

COLUMNS = ("operation", "result", "where", "found out")

Rows = Iterable[tuple[str, ...]]


@takes_arguments
def passes(
    fun: Callable[..., Any], policy: "PolicyLike" = "mixed_bfloat16"
) -> Callable[..., dict[str, str]]:
    """Plans a function and its derivative, without running it, and prints what each pass makes.

    Args:
        fun: The function, as for `mpjax.autocast`.
        policy: The policy, as for `mpjax.autocast`.

    Returns:
        A function that takes the arguments of ``fun``, arrays or `jax.ShapeDtypeStruct`. It returns
        text by the name of the pass: one row per operation, or per value.

    Example:
        >>> import jax.numpy as jnp
        >>> from mpjax._src.tools.instruments.passes import passes
        >>> text = passes(lambda x, w: jnp.tanh(x @ w))(jnp.ones((2, 3)), jnp.ones((3, 4)))
        >>> print(text["classify"])  # doctest: +ELLIPSIS
        operation  ...
        dot_general ...
    """
    policy = get_policy(policy)

    def printed(*args: Any, **kwargs: Any) -> dict[str, str]:
        traced = trace(fun, policy, args, kwargs)
        return {name: _text(name, entries) for name, entries in _passes(traced).items()}

    return printed


def _text(name: str, rows: Rows) -> str:
    document = Document(name, "", (), (Table(name, COLUMNS, tuple(rows), COLUMNS),))
    return text_of(document, width=sys.maxsize)


def _passes(traced: Traced) -> dict[str, Rows]:
    """Returns the regions, both parts of the derivative, what is kept and rounded, and what runs.

    The derivative is that by all floating arguments.
    """
    program = traced.with_rows.program
    # Constants come first among the arguments, and nothing is differentiated by them.
    consts = len(program.in_avals) - len(traced.avals)
    cut = program.cut(
        tuple(i >= consts and is_inexact(aval) for i, aval in enumerate(program.in_avals))
    )
    back, _ = cut.backward((True,) * len(cut.moves))
    parts = {"forward": cut.forward, "backward": back}
    told = program.exceptions.reasons
    regions = lambda eqn, row: _region(eqn, told.get(row, ""))  # noqa: E731
    return {
        "classify": _listed(traced, program.closed, regions),
        **{name: _listed(traced, part.closed) for name, part in parts.items()},
        "cut": _cut(traced, cut),
        "rounded": [row for part in parts.values() for row in _rounded(traced, part)],
        **{f"written {name}": _listed(traced, part.written) for name, part in parts.items()},
    }


def _listed(
    traced: Traced, program: Any, note: Callable[[Any, Any], str] = lambda eqn, row: ""
) -> Iterator[tuple[str, ...]]:
    """Yields the equations of a program, with the lines of their rows."""
    for eqn, site, _ in equations(_jax.open_jaxpr(program)[0]):
        results = ", ".join(str(v.aval) for v in eqn.outvars)
        again = "again " * site.again
        yield eqn.primitive.name, results, _line(traced, site.op), again + note(eqn, site.op)


def _line(traced: Traced, row: int | None) -> str:
    return "" if row is None else short(traced.outline.numbered[row][0].source)


def _region(eqn: Any, why: str) -> str:
    names = _jax.scope_names(eqn.source_info.name_stack)
    dtypes = [name.removeprefix(REGION) for name in names if name.startswith(REGION)]
    return " ".join(filter(None, [*dtypes[-1:], why and f'"{why}"']))


def _cut(traced: Traced, cut: Derivative) -> Iterator[tuple[str, ...]]:
    """Yields what the forward part hands over, in which dtype, and at which price."""
    count = len(cut.program.out_avals)
    for v, aval in zip(cut.saved, cut.forward.out_avals[count:], strict=True):
        maker = cut.makers[v]
        line = _line(traced, row_of(_jax.scope_names(maker.stack)))
        yield maker.name, str(aval), line, f"price={cut.prices(v)}"


def _rounded(traced: Traced, part: Program) -> Iterator[tuple[str, ...]]:
    """Yields the values that are rounded for all who read them."""
    for row in _listed(traced, part.closed):
        if row[0] == ROUNDED:
            yield row
