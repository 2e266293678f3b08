"""mpjax's step with each implementation of its gate, and without a gate."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

from mpjax._src.core.training import step, transaction

NONE, SELECT, BRANCH = "no gate", "gate a select", "gate a branch"


def ungated(finite: Any, new: Callable[..., Any], before: Any, *args: Any) -> Any:
    return new(before, *args)


GATES = {NONE: ungated, SELECT: transaction.by_select, BRANCH: transaction.by_cond}


def _gated(gate: Callable[..., Any], finite: Any, new: Any, before: Any, *args: Any, **_: Any):
    """Calls an implementation as `transaction.gated` calls it for an update of plain arithmetic."""
    return gate(finite, lambda *args: (new(*args), finite), before, *args)


def spelled(train_step: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns a step of `mpjax.build_train_step` that is traced with one of `GATES`."""

    def run(state, batch):
        with mock.patch.object(step, "gated", functools.partial(_gated, GATES[name])):
            return train_step(state, batch)

    return run
