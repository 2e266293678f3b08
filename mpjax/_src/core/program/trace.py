"""Functions as programs of flat arrays.

A call and its result are trees. Their arrays go through the program; their other leaves (Python
values, objects) are constants of it.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.tree_util import keystr

from mpjax._src.core.base import _jax
from mpjax._src.core.base.patterns import path_of
from mpjax._src.core.base.trees import is_array, is_array_or_shape


@dataclasses.dataclass(frozen=True, eq=False)
class Flat:
    """A tree that is taken apart into its arrays and its other leaves."""

    tree: Any  # its structure
    traced: tuple[bool, ...]  # for each leaf, whether it is one of the arrays
    arrays: tuple[Any, ...]  # the arrays, or `jax.ShapeDtypeStruct`; none in the result of a trace
    others: tuple[Any, ...]  # the other leaves
    keys: tuple[Any, ...]  # the key path of each array

    @classmethod
    def of(cls, tree: Any, is_traced: Callable[[Any], bool] = is_array_or_shape) -> "Flat":
        """Takes a tree apart; ``is_traced`` says which leaves are its arrays."""
        pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
        traced = tuple(is_traced(x) for _, x in pairs)
        inside = [pair for pair, yes in zip(pairs, traced, strict=True) if yes]
        others = [x for (_, x), yes in zip(pairs, traced, strict=True) if not yes]
        return cls(
            *(structure, traced, tuple(x for _, x in inside), tuple(others)),
            tuple(keys for keys, _ in inside),
        )

    @functools.cached_property
    def avals(self) -> tuple[Any, ...]:
        """The abstract value of each array."""
        return tuple(map(_jax.aval_of, self.arrays))

    def filled(self, arrays: Iterable[Any]) -> Any:
        """Returns the tree with other arrays."""
        leaves, others = iter(arrays), iter(self.others)
        return self.tree.unflatten([next(leaves if yes else others) for yes in self.traced])

    def spread(self, values: Iterable[Any]) -> list[Any]:
        """Returns the value of each leaf that is an array, and None for the others."""
        leaves = iter(values)
        return [next(leaves) if yes else None for yes in self.traced]

    # ---- a call: the tree (args, kwargs) ----

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """The path of each array in its argument, without the argument's position or name."""
        return tuple(path_of(keys[2:]) for keys in self.keys)

    def on(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function of the arrays of this call that a function is."""

        def flat(*arrays):
            args, kwargs = self.filled(arrays)
            return fun(*args, **kwargs)

        return flat

    def names(
        self,
        parameters: Sequence[str],
        spelled: Callable[[str, Any], str] = lambda name, keys: name + keystr(keys),
    ) -> tuple[str, ...]:
        """Returns the name of each array, spelled from its parameter and its keys in it."""
        # The root is (args, kwargs): the first key chooses one, the second the parameter in it.
        return tuple(
            spelled(str(which.key) if kind.idx else parameters[which.idx], tuple(inside))
            for kind, which, *inside in self.keys
        )


def parameters_of(fun: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    """Returns the names of the parameters that positional arguments are for."""
    try:
        names = list(inspect.signature(fun).bind_partial(*args).arguments)
    except (TypeError, ValueError):  # some callables have no signature
        names = []
    return names + [f"argument {i}" for i in range(len(names), len(args))]


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function that is traced for one call."""

    jaxpr: Any  # the program, closed over its constants
    out: Flat  # the result, without its arrays: no tracer may outlive its trace

    def rebuild(self, arrays: Iterable[Any]) -> Any:
        """Returns what the function returns, from the results of the program."""
        return self.out.filled(arrays)

    def returned(self) -> Any:
        """Returns the result of the function, with a `jax.ShapeDtypeStruct` for each array."""
        results = [v.aval for v in _jax.open_jaxpr(self.jaxpr)[0].outvars]
        return self.rebuild([jax.ShapeDtypeStruct(a.shape, a.dtype) for a in results])


def trace(flat: Callable[..., Any], avals: Sequence[Any], name: str) -> Traced:
    """Traces a function of flat arrays that returns any tree, such as `Flat.on` makes."""
    outs: list[Flat] = []

    def run(*arrays):
        out = Flat.of(flat(*arrays), is_array)
        outs.append(dataclasses.replace(out, arrays=()))
        return out.arrays

    run.__name__ = name
    return Traced(_jax.trace(run, avals, name), outs[-1])
