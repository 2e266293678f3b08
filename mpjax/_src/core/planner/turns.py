"""What a loop need not do or read in each turn: matmuls, and constants that are spread.

A recurrent layer multiplies each slice of its input by the same weights, and adds up the gradient
of its weights turn by turn: each turn reads the weights, and reads and writes the float32 sum. One
matmul of the stack of all turns does the same, and rounds once:

- A matmul of a slice and a constant runs ahead of the loop.
- One whose result is only stacked runs behind it, on what is stacked in its place.
- So does one whose results are only added up: its sum over turns is a longer sum of products.

A loop that stacks less than that in a turn runs turn by turn to hold little, as one over the chunks
of a loss: it stays.

A constant that was spread over more axes before the loop is spread in the turns, where that fuses
into what reads it. JAX moves the masks of attention out of a loop over layers, of full size.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

import jax

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import building
from mpjax._src.core.base.higher_order import SCAN
from mpjax._src.core.base.rules import ADDITIONS, DEAR, DOT, RESHAPES, SPREAD, SUMS_OF_TWO
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.dependence import between, dependents, in_order, readers_of
from mpjax._src.core.planner.equations import Equation, Value, appended, closed, parts, rename
from mpjax._src.core.planner.partition import runs_again

# What it costs to stack an entry of 16 bits, in entries that are read: it is written, read, kept.
STACKED = 2.5
# What it costs to add to an entry of a float32 sum: it is read and written.
ADDED = 4
MANY = 2  # what there are several turns of runs once
LINEAR = {*SUMS_OF_TWO, *RESHAPES, "neg", "transpose", "slice", "split"}


def hoisted(equations: Sequence[Equation]) -> list[Equation]:
    """Returns equations whose loops leave out the matmuls that no turn waits for."""
    found: list[Equation] = []
    maker = {out: e for e in equations for out in e.outs}
    for e in equations:
        found += _Turns(e, maker).hoisted() if e.row.kind == SCAN else [e]
    return found


class _Turns:
    """A loop whose body is open."""

    def __init__(self, e: Equation, around: Mapping[Value, Equation]) -> None:
        self.loop, self.around, (program,) = e, around, rounding.programs(e)
        self.length, self.results = e.row.turns(e)[0], [*e.outs]  # outside, of `outs`
        ins, self.equations, self.outs = parts(building.as_closed(program), region=e.region)
        self.maker = {out: e for e in self.equations for out in e.outs}
        # The arguments of its body, each with what the loop gets for it.
        self.consts, self.carries, self.slices = map(dict, rounding.groups_of(e, ins))
        self.held = _size([*self.slices, *self.outs[len(self.carries) :]])  # of a turn

    def hoisted(self) -> list[Equation]:
        """Returns the loop with what runs ahead of it and behind it."""
        spread = self._spread()
        # With a symbolic number of turns the gain is unknown; a single turn gains nothing.
        if not isinstance(self.length, int) or self.length < MANY:
            return [self._closed()] if spread else [self.loop]
        ahead = self._ahead()
        behind = in_order([*self._shifted_stacks(), *self._sums(), *self._stacks()])
        return [*ahead, self._closed(), *behind] if spread or ahead or behind else [self.loop]

    # ---- inside

    def _spread(self) -> bool:
        """Spreads constants in the turns that were spread before the loop; returns whether any."""
        consts: dict[Value, Value] = {}
        spread: list[Equation] = []
        for v, outer in self.consts.items():
            large = _size([outer]) >= rounding.SMALL
            equations, small = self._smaller(outer) if large else ([], [outer])
            inner = {x: Value(x.aval) for x in small} if equations else {outer: v}
            consts |= {own: x for x, own in inner.items()}
            for e in dict.fromkeys(equations):
                inner[e.outs[0]] = v if e.outs[0] is outer else Value(e.outs[0].aval)
                spread.append(e.on((inner.get(x, x) for x in e.ins), outs=[inner[e.outs[0]]]))
        self.consts, self.equations[:0] = consts, spread
        return bool(spread)

    def _smaller(self, v: Value) -> tuple[list[Equation], list[Value]]:
        """Returns equations that spread smaller values to one, as operands of one cheap operation.

        If there are none, the value itself.
        """
        e = self.around.get(v)
        if e is None or not runs_again(e) or e.rule.cost == DEAR or len(e.outs) > 1:
            return [], [v]
        operands = [x for x in e.ins if not x.literal]
        makers = [self.around.get(x) for x in operands]
        spreads = e.name == SPREAD or all(m is not None and m.name == SPREAD for m in makers)
        each = [self._smaller(x) for x in operands] if spreads else []
        small = [*dict.fromkeys(x for _, values in each for x in values)]
        if not spreads or 2 * _size(small) > _size([v]):
            return [], [v]
        return [*itertools.chain(*(equations for equations, _ in each)), e], small

    # ---- ahead of the loop

    def _ahead(self) -> list[Equation]:
        moving = dependents(self.equations, self.carries)
        sliced = dependents(self.equations, self.slices) - moving
        dots = [
            d
            for d in self.equations
            if _is_plain(d) and moving.isdisjoint(d.ins) and self._is_worth(d, sliced, d.outs)
        ]
        made = [d.outs[0] for d in dots]
        before = between(self.equations, made, {*self.consts, *self.slices})
        # Operands are computed ahead and in the turns that read them, so they have to be cheap.
        alone = all(e in dots or runs_again(e) for e in before)
        if not dots or not alone or _size(made) > self.held:
            return []
        ahead: list[Equation] = []
        stacks = self._for_all_turns(self.slices, made, ahead)
        self.equations = [e for e in self.equations if e not in dots]
        for v, stack in zip(made, stacks, strict=True):
            self.slices[v] = stack
            # The loop stacked it as a result: now it is that result.
            if v in self.outs[len(self.carries) :]:
                i = self.outs.index(v, len(self.carries))
                rename(ahead, stack, self.results[i])
                self.slices[v] = self.results.pop(i)
                del self.outs[i]
        return ahead

    def _is_worth(self, d: Equation, sliced: Collection[Value], stack: Sequence[Value]) -> bool:
        """Returns whether a matmul reads more in a constant than stacking in its place costs."""
        constant = [v for v in d.ins if v not in sliced]
        return len(constant) == 1 and _size(constant) > STACKED * _size(stack)

    def _for_all_turns(
        self, stacks: dict[Value, Value], made: Sequence[Value], into: list[Equation]
    ) -> list[Value]:
        """Appends what makes values of all turns at once, from constants and from stacks."""
        ins = self.consts | stacks
        program = closed(
            [*ins], between(self.equations, made, ins), made, rounding.info_of(self.loop)
        )
        axes = [0 if v in stacks else None for v in ins]
        run = jax.vmap(lambda *args: _jax.eval_closed(program, *args), axes, axis_size=self.length)
        return appended(run, [*ins.values()], into, self.loop)

    # ---- behind it

    def _shifted_stacks(self) -> list[Equation]:
        """Takes out stacks of carries as turns get them, if they are stacked as turns return them.

        The one is the other, shifted by a turn.
        """
        carried = [*self.carries]
        backwards = self.loop.row.turns(self.loop)[1]
        into: list[Equation] = []
        for i in range(len(carried), len(self.outs))[::-1]:
            j = carried.index(self.outs[i]) if self.outs[i] in carried else None
            stack = self._stack(self.outs[j]) if j is not None else None
            if j is None or stack is None or stack is self.results[i]:
                continue

            def run(first, rest):
                rest = rest[1:] if backwards else rest[:-1]
                both = [rest, first[None]] if backwards else [first[None], rest]
                return [jax.numpy.concatenate(both)]

            given = [self.carries[carried[j]], stack]
            appended(run, given, into, self.loop, [self.results[i]])
            del self.outs[i], self.results[i]
        return into

    def _sums(self) -> list[Equation]:
        """Takes out the matmuls whose results are only added up."""
        turning = self._turning()
        chains, taken = self._chains(), []

        def is_worth(d):
            # What is stacked anyway costs nothing.
            new = {v for v in map(self._source, d.ins) if self._stack(v) is None}
            worth = ADDED * _size(d.outs) > STACKED * _size(new) and _size(new) <= self.held
            return worth and turning.issuperset(d.ins)

        while chains:
            sums = [add for chain in chains.values() for add in chain]
            # A sum also of what stays in the loop stays, and with it what was taken for it alone.
            taken = self._sinkable(sums, (), is_worth, lambda e: e.name in LINEAR)
            made = {out for e in (*taken, *sums) for out in e.outs}
            carried = [*self.carries]
            alone = {
                i: chain
                for i, chain in chains.items()
                if all(v in made or v is carried[i] for add in chain for v in add.ins)
            }
            if alone == chains:
                break
            chains = alone
        behind: list[Equation] = []
        for e in taken if chains else ():
            behind.append(self._of_all_turns(e, behind) if _is_plain(e) else e)
        for i, chain in chains.items():
            # The sum begins with what the carry began with.
            instead = {carried[i]: self.carries[carried[i]]}
            for add in chain:
                behind.append(add.on(instead.get(v, v) for v in add.ins))
            behind[-1].outs = [self.results[i]]
        if chains:
            self._leave_out([*taken, *sums], [*chains])
        return behind

    def _chains(self) -> dict[int, list[Equation]]:
        """Returns the places of carries to which something is only added, and the sums."""
        readers = readers_of(self.equations)
        found: dict[int, list[Equation]] = {}
        for i, (v, out) in enumerate(zip(self.carries, self.outs, strict=False)):
            chain: list[Equation] = []
            while len(readers[v]) == 1 and readers[v][0].name in ADDITIONS:
                # A turn returns the partial sum, so it is needed in the turn.
                if v in self.outs:
                    break
                chain += readers[v]
                (v,) = chain[-1].outs
            if chain and v is out and not readers[v] and self.outs.count(v) == 1:
                found[i] = chain
        return found

    def _of_all_turns(self, d: Equation, into: list[Equation]) -> Equation:
        """Returns the sum over turns of a matmul, as one."""
        ins = [self._stacked(v, into) for v in d.ins]
        summed, batch = d.params["dimension_numbers"]
        # The axis of turns is contracted as well: one accumulator adds them up, and rounds once.
        summed = tuple((0, *(i + 1 for i in axes)) for axes in summed)
        batch = tuple(tuple(i + 1 for i in axes) for axes in batch)
        return d.on(ins, params={**d.params, "dimension_numbers": (summed, batch)})

    def _stacks(self) -> list[Equation]:
        """Takes out the matmuls whose results are only stacked."""
        turning = self._turning()

        def is_worth(d):
            new = {v for v in map(self._source, d.ins) if v in turning and self._stack(v) is None}
            return self._is_worth(d, turning, [*new]) and _size(new) <= self.held

        stacked = {v for v in self.outs[len(self.carries) :] if self.outs.count(v) == 1}
        taken = self._sinkable((), stacked, is_worth, runs_again)
        dots = [e for e in taken if _is_plain(e)]
        behind = dependents(taken, [e.outs[0] for e in dots])
        places = [i for i, v in enumerate(self.outs) if v in behind]
        if not places:
            return []
        waits = turning - behind
        read = dict.fromkeys(self._source(v) for e in dots for v in e.ins if v in waits)
        read |= dict.fromkeys(self.slices)
        made, into = [self.outs[i] for i in places], list[Equation]()
        outs = self._for_all_turns({v: self._new_stack(v) for v in read}, made, into)
        for i, v in zip(places, outs, strict=True):
            rename(into, v, self.results[i])
        self._leave_out([e for e in taken if not behind.isdisjoint(e.outs)], places)
        return into

    def _sinkable(
        self,
        sums: Collection[Equation],
        stacked: Collection[Value],
        is_worth: Callable[[Equation], bool],
        follows: Callable[[Equation], bool],
    ) -> list[Equation]:
        """Returns the matmuls, and what is made of them alone, that can run behind the loop.

        It begins with all that may be among them, and drops what a turn needs until nothing
        changes.

        Args:
            sums: The sums over turns. They may read what is taken.
            stacked: The values that are only stacked. They may be taken.
            is_worth: Whether a matmul is worth what is stacked for it.
            follows: Whether an equation may be taken with the matmuls that it reads.
        """
        # What is cheap and reads no carry can be computed again behind the loop.
        waiting = dependents(self.equations, self.carries)
        waiting |= {v for e in self.equations if not runs_again(e) for v in e.outs}
        waiting = dependents(self.equations, waiting)
        turning = self._turning()
        readers = readers_of(self.equations)
        dots = {e for e in self.equations if _is_plain(e) and is_worth(e)}
        taken = dots | {e for e in self.equations if follows(e) and not turning.isdisjoint(e.outs)}
        taken -= {*sums}
        outs = {*self.outs} - {*stacked}
        while True:
            made = {out for e in taken for out in e.outs}
            left = {
                e
                for e in taken
                if (e in dots or all(v in made or (stacked and v not in waiting) for v in e.ins))
                and outs.isdisjoint(e.outs)
                and all(r in taken or r in sums for v in e.outs for r in readers[v])
            }
            if left == taken:
                return [e for e in self.equations if e in taken]
            taken = left

    def _turning(self) -> set[Value]:
        """Returns the values that are others in each turn, or wait behind a barrier for one."""
        found = {*self.carries, *self.slices}
        for e in self.equations:
            found.update(e.outs if not found.isdisjoint(e.ins) else ())
        return found

    def _source(self, v: Value) -> Value:
        """Returns the stacked value of which a value is a view; itself if there is none."""
        x = v
        while self._stack(x) is None:
            e = self.maker.get(x)
            if e is None or not rounding.is_view(e) or len(e.ins) != 1:
                return v
            (x,) = e.ins
        return x

    def _stack(self, v: Value) -> Value | None:
        """Returns the stack of a value outside of the loop, if there is one."""
        if v in self.slices or v not in self.outs[len(self.carries) :]:
            return self.slices.get(v)
        return self.results[self.outs.index(v, len(self.carries))]

    def _new_stack(self, v: Value) -> Value:
        """Returns the stack of a value outside of the loop."""
        stack = self._stack(v)
        if stack is None:
            stack = Value(building.stacked_aval(self.length, v.aval))
            self.outs.append(v)
            self.results.append(stack)
        return stack

    def _stacked(self, v: Value, into: list[Equation]) -> Value:
        """Returns the stack of a value, as a view of one."""
        source = self._source(v)
        stack = self._new_stack(source)
        if source is v:
            return stack
        (out,) = self._for_all_turns({source: stack}, [v], into)
        return out

    def _leave_out(self, equations: Collection[Equation], places: Collection[int]) -> None:
        """Leaves out equations, and the results at places, with their carries."""
        gone = {*equations}
        self.equations = [e for e in self.equations if e not in gone]
        carried = [*self.carries]
        for i in sorted(places, reverse=True):
            del self.outs[i], self.results[i]
            if i < len(carried):
                del self.carries[carried[i]]

    def _closed(self) -> Equation:
        """Returns the loop on what its body still reads."""
        read = {*self.outs, *(v for e in self.equations for v in e.ins)}
        consts, slices = (
            [pair for pair in group.items() if pair[0] in read]
            for group in (self.consts, self.slices)
        )
        groups = consts, self.carries.items(), slices
        ins, params = rounding.scanned(self.loop, groups, self.equations, self.outs)
        return self.loop.on(ins, outs=self.results, params=params)


def _is_plain(e: Equation) -> bool:
    """Returns whether an equation is a matmul of two values whose type has no sharding."""
    return e.name == DOT and e.params.get("out_sharding") is None


def _size(values: Collection[Value]) -> int:
    return sum(v.size for v in values)
