"""Where an equation is: in which scopes, loops and calls, in which pass, and in which row."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mpjax._src.core.base import _jax
from mpjax._src.core.base.higher_order import CUSTOM, higher_order, turns_of
from mpjax._src.core.base.patterns import matches
from mpjax._src.core.program.derived import Key, key_of
from mpjax._src.core.program.graph import AGAIN, KERNEL, Block, Op

# The names of scopes that say which op of a plan, or which equation of a function, an equation
# comes from, before the number.
ROW = "mpjax.row="
NUMBER = "mpjax.equation="


@dataclasses.dataclass(frozen=True)
class Site:
    """The position of an equation in a program."""

    scopes: tuple[str, ...] = ()  # the names of the scopes around it
    transforms: tuple[str, ...] = ()  # the transformations that produced it: "jvp", "transpose"
    # The loops around it with their iterations, the outermost first, where it runs.
    loops: tuple[tuple[str, int], ...] = ()
    # The equations whose programs it is inside of, the outermost first.
    callers: tuple[Any, ...] = ()
    # The equations of the whole program that depend on a cotangent (`derived_in`), if known.
    derived: frozenset[Key] | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def backward(self) -> bool:
        """Whether the backward pass runs it. It may only compute there again (`is_derived`)."""
        return "transpose" in self.transforms

    @property
    def again(self) -> bool:
        """Whether the backward pass recomputes there what the forward pass computed."""
        return AGAIN in (*self.scopes, *self.transforms)

    @property
    def op(self) -> int | None:
        """The number of the plan's op at this place, if ops are numbered."""
        return row_of(self.scopes)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number of the function's equation at this place, after those of the equations around
        it, if equations are numbered."""
        names = dict.fromkeys(name for name in self.scopes if name.startswith(NUMBER))
        return tuple(int(name.removeprefix(NUMBER)) for name in names)

    def is_derived(self, eqn: Any) -> bool:
        """Returns whether an equation here depends on a cotangent. What a backward pass computes
        again does not, and belongs to the forward pass in reports."""
        if self.derived is None:
            return self.backward and not self.again
        return key_of(eqn, self.callers) in self.derived

    def at(self, eqn: Any, repeats: bool = True) -> "Site":
        """Returns the place of an equation in the program at this place.

        An equation in a transposed jit repeats the scopes around it. Without ``repeats``, they
        count once.
        """
        stack = eqn.source_info.name_stack
        scopes, transforms = _jax.scope_names(stack), _jax.transforms(stack)
        once = not repeats and scopes[: len(self.scopes)] == self.scopes
        return dataclasses.replace(
            self,
            scopes=scopes if once else self.scopes + scopes,
            transforms=self.transforms + transforms,
        )

    def inside(self, eqn: Any) -> "Site":
        """Returns the place of the inner programs of an equation at this place."""
        return dataclasses.replace(self, callers=(*self.callers, eqn))

    def turn(self, loop: str, iteration: int) -> "Site":
        """Returns the place of an iteration of a loop at this place."""
        return dataclasses.replace(self, loops=(*self.loops, (loop, iteration)))

    def lines(self, eqn: Any) -> tuple[str, str]:
        """Returns "file:line" of an equation here, or of the nearest caller that has
        one: the user's line, and that of the library that it calls there, or ""."""
        return _jax.source_lines(eqn, *reversed(self.callers))


ROOT = Site()  # of a whole program


def equations(jaxpr: Any, site: Site = ROOT, times: int = 1) -> Iterator[tuple[Any, Site, int]]:
    """Yields every equation of an open jaxpr and of the programs inside, where it is, and how
    often it runs, as far as that is known."""
    for eqn in jaxpr.eqns:
        here = site.at(eqn)
        yield eqn, here, times
        for inner in _jax.inner_jaxprs(eqn):
            yield from equations(inner, here.inside(eqn), times * turns_of(eqn))


def row_of(scopes: Sequence[str]) -> int | None:
    """Returns the number of the plan's op in the innermost of some scopes, if ops are numbered."""
    numbers = [name for name in scopes if name.startswith(ROW)]
    return int(numbers[-1].removeprefix(ROW)) if numbers else None


def with_rows(program: Any, block: Block, rows: Mapping[Op, int]) -> Any:
    """Returns a program whose equations are in scopes with the numbers of their ops.

    JAX leaves scopes on the equations of derivatives, so each says which row it belongs to. A
    function that is called twice has two rows for each of its equations: calls share none.

    Args:
        program: A jaxpr, open or closed.
        block: Its graph.
        rows: The numbers.
    """
    return _numbered(program, [*reversed(block.ops)], rows)


def _numbered(program: Any, ops: list[Op], rows: Mapping[Op, int]) -> Any:
    inner, _ = _jax.open_jaxpr(program)
    new = inner.replace(eqns=[_equation(eqn, ops, rows) for eqn in inner.eqns])
    return new if inner is program else program.replace(jaxpr=new)


def _equation(eqn: Any, ops: list[Op], rows: Mapping[Op, int]) -> Any:
    """Returns an equation with the number of its op; a call has that of the first op in it."""
    called, info = _jax.inlined(eqn), eqn.source_info
    # The ops are in reverse order, so that the next one is the last of the list.
    row = rows.get(ops[-1]) if ops else None
    if row is not None:
        info = info.replace(name_stack=info.name_stack.extend(f"{ROW}{row}"))
    if called is not None:
        changed = {k: _numbered(p, ops, rows) for k, p in eqn.params.items() if p is called}
        return eqn.replace(params={**eqn.params, **changed}, source_info=info)
    op = ops.pop()
    inner = op.inside
    pairs = zip(inner.wire(eqn), op.subs, strict=True)
    programs = [with_rows(old.program, new.program, rows) for old, new in pairs]
    # Programs that autocast has planned stay as they are: no parameter is listed for them.
    params = {**eqn.params, **inner.holding(programs)} if inner.params else eqn.params
    return eqn.replace(params=params, source_info=info)


def shown(scopes: Sequence[str]) -> list[str]:
    """Returns the names of scopes without those that mpjax itself adds, and JAX's own."""
    return [name for name in scopes if not name.startswith("mpjax.") and name != AGAIN]


def overriding(
    overrides: Iterable[tuple[str, Any]], scopes: Sequence[str], name: str, paths: Iterable[str]
) -> list[tuple[str, Any]]:
    """Returns the overrides that match an operation of a primitive, in scopes, on parameters."""
    scopes = [scope for scope in scopes if not scope.startswith((ROW, NUMBER))]
    user_scopes = (scope for scope in scopes if not scope.startswith(KERNEL))
    places = ["/".join(scopes), "/".join((*scopes, name)), "/".join(user_scopes)]
    # What is inside a program reads its operands by their paths, but for rules that come later.
    if name in CUSTOM or not higher_order(name).params:
        places += paths
    return [o for o in overrides if any(matches(o[0], place) for place in places)]
