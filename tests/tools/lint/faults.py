"""Public faults, each as a program with the same defect and one without: the form of their tables.

The programs are our own, a few lines each; what was wrong is told by the issue that a row names.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
HERE = "# <- here"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One row.

    Attributes:
        name: What it is called: "jax#27496".
        where: The page that tells of it, after "https://github.com/".
        wrong: What was wrong, in a sentence.
        rule: The rule that must name it, at the line that ends with ``# <- here``.
        faulty: The program with the defect.
        mended: The one without.
        args: Gives the arguments of the faulty one.
        mended_args: Gives those of the mended one, where they are others.
        target: What both are compiled for, where the rule asks for HLO.
        instead: Why the program is another of its class, where the fault cannot be had any more.
        argnums: What lint differentiates, in both programs.
    """

    name: str
    where: str
    wrong: str
    rule: str
    faulty: Callable[..., Any]
    mended: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]
    mended_args: Callable[[], tuple[Any, ...]] | None = None
    target: str | None = None
    instead: str = ""
    argnums: int | None = None

    @property
    def line(self) -> str:
        """The "file:line" that the rule must name."""
        fun = inspect.unwrap(self.faulty)
        lines, _ = inspect.getsourcelines(inspect.getmodule(fun))
        (number,) = (
            i for i, line in enumerate(lines, 1) if line.rstrip().endswith(f"{HERE}: {self.name}")
        )
        return f"{inspect.getsourcefile(fun)}:{number}"


def normal(*shape, dtype=F32, scale=1.0, seed=0):
    """Returns the same random numbers at each call."""
    rng = np.random.default_rng((seed, *shape))
    return jnp.asarray(scale * rng.standard_normal(shape), dtype)


def labels(count, classes):
    return jnp.arange(count) % classes


def as_half(tree):
    return jax.tree.map(lambda x: x.astype(BF16), tree)
