"""Finds what a policy replaces in a program, and notes what it leaves alone."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mpjax._src.core.policy.policy import Policy
from mpjax._src.core.program.graph import Block, Op
from mpjax._src.core.program.respellings import respellings
from mpjax._src.replacements.attentions import attention, others
from mpjax._src.replacements.cross_entropies import cross_entropies
from mpjax._src.replacements.flow import Flow, Found
from mpjax._src.replacements.softmaxes import softmaxes


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
        if self._policy.chunked_loss:
            for maker, note, found in cross_entropies(flow):
                self.losses[maker] = note
                # The caller adds to ``taken`` what is yielded, so later finds do not share its ops.
                if found is not None and found.ops.isdisjoint(taken):
                    text = f"run {note}, which keeps no logits"
                    self.instead |= dict.fromkeys(found.ops, text)
                    yield found
        if self._policy.fused_attention:
            for softmax in softmaxes(flow):
                made = attention(softmax, flow) if softmax.ops.isdisjoint(taken) else None
                if made is None:
                    continue
                self.attention[made.matmul] = made.note
                if made.found is not None and made.found.ops.isdisjoint(taken):
                    kernel, *_ = made.note.split(",")
                    text = f"run by the fused attention of {kernel}, which keeps no weights"
                    self.instead |= dict.fromkeys(made.found.ops, text)
                    yield made.found
            self.attention.update({made.matmul: made.note for made in others(flow, self.attention)})
