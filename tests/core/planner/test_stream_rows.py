"""Rule F row by row: without any row of its tables, the streams of some program are others."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from test_streams import ARGS, D, block, found, norm

from mpjax._src.core.planner import kinds, levels, rounding, streams


def of_two(h):
    """Returns the rows of a value in pairs."""
    return h.reshape(len(h), -1, 2, D)


# An operation of each kind.
KINDS = {
    kinds.MATMUL: lambda h: h,  # what makes and reads all of them
    kinds.SAME: lambda h: checkpoint_name(h, "h"),
    kinds.LAYOUT: lambda h: h.reshape(-1, 2, D // 2).reshape(h.shape),
    kinds.MOVED: lambda h: h[:, ::-1],
    kinds.ADDED: lambda h: h + 1,
    kinds.MULTIPLIED: lambda h: h * h,
    kinds.SELECTED: jax.nn.relu,
    kinds.SUMMED: lambda h: of_two(h).sum(2),
    kinds.SUMS: lambda h: jnp.cumsum(h, 1),
    kinds.EXTREME: lambda h: of_two(h).max(2),
    kinds.ORDERED: jnp.sort,
    kinds.COMPARED: lambda h: jnp.where(h > 0, h, h / 2),
    kinds.SIMPLE: jnp.abs,
    kinds.SPECIAL: jnp.tanh,
}


def made_by(change):
    """Returns a model whose stream begins as what an operation makes of a matmul's result."""
    return lambda ws, x, b: jnp.mean(norm(block(change(x @ ws[3]), *ws[:2])) @ ws[2])


def read_by(change):
    """Returns a model whose stream is read by an operation before a matmul, and by a norm."""

    def fun(ws, x, b):
        h = block(x @ ws[3], *ws[:2])
        return jnp.mean(change(h) @ ws[2]) + jnp.mean(norm(h) @ ws[1])

    return fun


@pytest.mark.parametrize("kind", streams.STEPS)
def test_every_step_is_needed(kind, monkeypatch):
    check_needed(read_by(KINDS[kind]), streams.STEPS, kind, monkeypatch)


@pytest.mark.parametrize("kind", levels.FINDERS)
def test_every_finder_is_needed(kind, monkeypatch):
    check_needed(made_by(KINDS[kind]), levels.FINDERS, kind, monkeypatch)


def check_needed(fun, table, kind, monkeypatch):
    monkeypatch.setattr(rounding, "SMALL", 1)
    before = found(fun, *ARGS)
    monkeypatch.delitem(table, kind)
    assert found(fun, *ARGS) != before
