"""Classes of programs under the measure. Each file of a class is a registry of tiny programs.

A member is a function without arguments that returns a `Case`. Members whose errors are known to be
too large are marked where they are registered, by part. xfail is strict, so a change of the planner
that mends a member is noticed at once, and so is a change that breaks one.

The quick tier measures a quarter of the members, each in one 16-bit dtype: in the one that its
class is about, if any; else in bfloat16 and float16 by turns. Golden programs show what else a
change of the planner does.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import measure
import pytest

HALVES = {"bf16": "bfloat16", "f16": "float16"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to measure: the arguments of `measure.errors`."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    argnums: Any = 0
    update: Callable[..., Any] | None = None
    loss_scale: float | None = None
    by_hand: Callable[[str], Callable[..., Any]] | None = None


@dataclasses.dataclass(frozen=True)
class Member:
    make: Callable[[], Case]
    parts: tuple[str, ...]
    fails: frozenset[tuple[str, str]]
    reason: str
    thorough: bool


class Members(dict):
    """A registry of the members of one class, by name."""

    def __init__(self, reason: str, quick: str = ""):
        """Makes an empty registry.

        Args:
            reason: One sentence: what is wrong with the members that fail.
            quick: The 16-bit dtype of the quick tier, "bf16" or "f16"; or "", for both by turns.
        """
        self.reason, self.quick = reason, quick

    def __call__(self, fails="", parts="result gradient", reason="", thorough=False):
        """Registers a member.

        Args:
            fails: The errors that are above their bounds today, such as "bf16 update, f16
                result"; or "all".
            parts: The parts to measure.
            reason: Why the member fails, if not for the reason of the class.
            thorough: Whether the quick tier leaves the member out, whatever its place.
        """

        def register(make):
            every = frozenset((half, part) for half in HALVES for part in parts.split())
            wrong = frozenset(tuple(x.split()) for x in fails.split(",") if x.strip())
            wrong = every if fails == "all" else wrong
            if make.__name__ in self or not wrong <= every:
                raise ValueError(f"{make.__name__}: registered twice, or fails in {wrong - every}")
            why = reason or self.reason
            self[make.__name__] = Member(make, tuple(parts.split()), wrong, why, thorough)
            return make

        return register

    def test(self):
        """Returns the decorator for the test of all members: ``test(member, half, part)``."""
        params = []
        for place, (name, member) in enumerate(self.items()):
            left_out = member.thorough or place % 8 != 1
            quick = "" if left_out else self.quick or [*HALVES][place % 2]
            for half in HALVES:
                for part in member.parts:
                    marks = [] if half == quick else [pytest.mark.thorough]
                    if (half, part) in member.fails:
                        marks += [pytest.mark.xfail(reason=member.reason, strict=True)]
                    values = (member, half, part)
                    params.append(pytest.param(*values, marks=marks, id=f"{name}-{half}-{part}"))
        return pytest.mark.parametrize("member, half, part", params)


@functools.lru_cache(maxsize=4)
def rows(member: Member, half: str) -> list[measure.Error]:
    """Returns the errors of a member, measured once for all of its parts."""
    case, dtype = member.make(), HALVES[half]
    return measure.errors(
        case.fun,
        case.args,
        dtype,
        case.argnums,
        loss_scale=case.loss_scale,
        by_hand=case.by_hand and case.by_hand(dtype),
        update=case.update,
    )


def judge(member: Member, half: str, part: str) -> None:
    measure.judge(rows(member, half), part)


def moved(args: tuple[Any, ...], results: Any) -> Any:
    """Returns the update of a program whose result is the next state of its first argument."""
    return jax.tree.map(lambda new, old: new - old, results, args[0])
