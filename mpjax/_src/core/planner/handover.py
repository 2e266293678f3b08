"""What a forward part hands to its backward part under a setting of storage, and what runs again.

The same choice is made for a program, and for the loops, branches and maps inside. The prices of a
program count what kernels move (`prices`). Inside of a loop, values are stacked: bytes count alone.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from mpjax._src.core.planner import coding, rounding
from mpjax._src.core.planner.budget import Budget, Timeline
from mpjax._src.core.planner.equations import Equation, Value
from mpjax._src.core.planner.maxima import with_operands
from mpjax._src.core.planner.partition import Parts, Pricing, handed, read_of
from mpjax._src.core.planner.prices import KEPT, Traffic


class HandedOver(NamedTuple):
    """What is handed over, and both parts then.

    Attributes:
        values: What the forward part hands over: values, or codes of them.
        carriers: What carries the tangents of values that have codes.
        early: The forward part.
        before: What the backward part computes first, which the rest reads as if handed over.
        again: What else it computes a second time.
        late: The rest of it.
        prices: What it costs to hand over a value.
    """

    values: list[Value]
    carriers: list[Value]
    early: list[Equation]
    before: list[Equation]
    again: list[Equation]
    late: list[Equation]
    prices: Pricing


def handed_over(
    both: Parts,
    ins: Sequence[Value],
    storage: str | float,
    *,
    low: Collection[Value] = (),
    asked: Collection[Value] = (),
    inside: bool = True,
    priced: Collection[Value] = (),
    stacked: Collection[Value] = (),
    turns: int = 1,
) -> HandedOver:
    """Returns what to hand over.

    Args:
        both: The two parts.
        ins: The arguments of the forward part, which the backward part has, too.
        storage: The policy's setting of storage.
        low: The arguments that arrive in 16 bits.
        asked: The results of the backward part that leave in 16 bits.
        inside: Whether it is inside of a loop, branch or map.
        priced: The arguments that have to be handed over to be read.
        stacked: The results of which all turns are returned anyway.
        turns: How often a loop turns.
    """
    early, late, _, results, _, half = both
    # What only matmuls of the backward part read is handed over in the 16 bits that they read.
    made, wanted = rounding.made(early, low, half), rounding.wanted(late, results, asked)
    price = rounding.Price(made, wanted, half)
    price = coding.priced(price, early, late) if storage == "8bit" else price
    once = lambda v: 0 if v in stacked else price(v)  # noqa: E731
    if inside:
        prices, hand = once, handed(early, late, results, once, priced, ins)
    else:
        # A number as storage starts from what `lean` keeps, and codes of 8 bits are put on that.
        prices = Traffic.of(price, KEPT.get(storage, KEPT["lean"]), early, late)
        hand = handed(early, late, results, prices, (), ins, prices.costs)
    before: list[Equation] = []
    if not isinstance(storage, str):
        paid = lambda v: turns * once(v)  # noqa: E731
        timeline = Timeline(both, ins, low, price, paid)
        crossing = read_of([*priced, *(v for e in early for v in e.outs)], late, results)
        # What a checkpoint of the user keeps is behind a barrier, and stays kept.
        pinned = [] if inside else [v for e in late if e.is_barrier for v in e.ins]
        free = {*ins} - {*priced}
        budget = Budget(early, crossing, hand.saved, free, timeline, pinned, priced, turns)
        hand, before = budget.within(storage)
    again, late = with_operands(early, late, hand, {*ins, *(v for e in before for v in e.outs)})
    before, again = ([*map(rounding.again, equations)] for equations in (before, again))
    values, carriers = hand.saved, list[Value]()
    if isinstance(price, coding.Price):
        # A stack that is returned has no code: its values would be stored twice.
        own = [v for v in values if v not in stacked]
        sent, carriers, encoding, decoding = coding.codes(own, price, early)
        values = [*(v for v in values if v in stacked), *sent]
        early, again = [*early, *encoding], [*decoding, *again]
    return HandedOver(values, carriers, early, before, again, late, prices)
