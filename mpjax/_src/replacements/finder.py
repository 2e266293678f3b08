"""Finds what a policy replaces in a program, and notes what it leaves alone."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mpjax._src.core.policy.policy import Policy
from mpjax._src.core.program.graph import Block, Op
from mpjax._src.core.program.respellings import Found, respellings
from mpjax._src.replacements.attentions import attentions
from mpjax._src.replacements.cross_entropies import cross_entropies
from mpjax._src.replacements.flow import Flow


class Finder:
    """Finds what is replaced in the blocks of a program.

    Attributes:
        attention: For the matmul of each attention, its kernel, or why it has none.
        losses: For what makes the logits of each loss, its blocks, or why it has none.
        instead: For each op that is replaced, what runs in its place.
    """

    def __init__(self, rulings: Callable[[Block], Mapping[Op, Any]], policy: Policy) -> None:
        self._rulings, self._policy = rulings, policy  # what the policy asks of a block's ops
        self.attention: dict[Op, str] = {}
        self.losses: dict[Op, str] = {}
        self.instead: dict[Op, str] = {}

    def __call__(self, block: Block, fixed: bool = False) -> dict[Op, Found]:
        """Returns what is replaced in a block, by the op whose results it returns.

        One that is ``fixed`` stays as it is.
        """
        if fixed:
            # Searched all the same, so that a report can say why nothing in it is replaced.
            inside = self.apart()
            inside(block)
            why = "its function has rules of its own"
            self.attention |= dict.fromkeys(inside.attention, f"xla: {why}")
            self.losses |= dict.fromkeys(inside.losses, f"unchanged: {why}")
            return {}
        taken: dict[Op, Found] = {}
        for found in self._found(Flow(block, self._rulings(block)), taken):
            taken.update(dict.fromkeys(found.ops, found))
        return respellings(block) | {found.result: found for found in taken.values()}

    def apart(self) -> "Finder":
        """Returns one for another program, with notes of its own."""
        return Finder(self._rulings, self._policy)

    def _found(self, flow: Flow, taken: Mapping[Op, Found]) -> Iterator[Found]:
        for at, note, found in cross_entropies(flow) if self._policy.chunked_loss else ():
            self.losses[at] = note
            yield from self._free(found, taken, f"run {note}, which keeps no logits")
        for at, note, found in attentions(flow, taken) if self._policy.fused_attention else ():
            self.attention[at] = note
            kernel, *_ = note.split(",")
            text = f"run by the fused attention of {kernel}, which keeps no weights"
            yield from self._free(found, taken, text)

    def _free(self, found: Found | None, taken: Mapping[Op, Found], text: str) -> Iterator[Found]:
        # The caller adds to ``taken`` what is yielded, so later finds do not share its ops.
        if found is not None and found.ops.isdisjoint(taken):
            self.instead |= dict.fromkeys(found.ops, text)
            yield found
