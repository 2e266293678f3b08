"""How tools that report on a function are called: its arguments come along, or in a second call.

``tool(fun, setting)(*args)`` and ``tool(fun, setting, *args)`` make the same report. An argument is
told from a setting by its arrays: settings that are passed by position hold none. What could be
either raises an error that shows both calls.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, ParamSpec, Protocol, TypeVar, overload

import jax
import jmp
import numpy as np

from mpjax._src.core.base._jax import internals
from mpjax._src.core.base.contexts import unchecked
from mpjax._src.core.base.errors import brief, check_callable, check_flag, did_you_mean, misplaced
from mpjax._src.core.base.trees import is_array_or_shape
from mpjax._src.core.program.modules import flat_has_modules
from mpjax._src.core.program.trace import parameters_of

# The settings that may stand before the arguments; others are named there.
LEADING = ("policy", "tolerance")

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Tool(Protocol[P, R_co]):
    """A tool, for type checkers: of settings alone it returns a function, else a report."""

    __name__: str

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Callable[..., R_co]: ...
    @overload
    def __call__(self, fun: Callable[..., Any], /, *args: Any, **settings: Any) -> R_co: ...


def takes_arguments(tool: Callable[P, Callable[..., R_co]], of_two: bool = False) -> Tool[P, R_co]:
    """Makes a tool, called ``tool(fun, setting)(*args)``, take these arguments along too.

    With ``of_two``, the place of the policy may have a second function.
    """
    parameters = inspect.signature(tool).parameters
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    places = [each.name for each in parameters.values() if each.kind is kind][1:]

    @functools.wraps(tool)
    def asked(*given: Any, **named: Any) -> Any:
        values = [*given] or [named.pop("fun", None)]
        fun = values.pop(0)
        check_callable(fun, f"{tool.__name__}: fun")
        call = _Call(tool.__name__, fun, tuple(values), named)
        if any(map(_holds_arrays, values)):
            call = _split(call, places, of_two)
        _check(call, places, parameters)
        report = Pending(call, tool(fun, *call.settings, **named))  # type: ignore[call-arg]
        return report(*call.args) if call.args else report

    return asked  # type: ignore[return-value]


class _Call(NamedTuple):
    """A call of a tool."""

    tool: str
    fun: Callable[..., Any]
    settings: tuple[Any, ...]  # that are passed by position
    named: Mapping[str, Any]
    args: tuple[Any, ...] = ()  # of the function

    @property
    def name(self) -> str:
        """The name of the function."""
        return _shown(self.fun)

    def text(self, *more: str) -> str:
        """Returns the two calls that make the report, in the user's names as far as known."""
        named = (f"{key}={_shown(value)}" for key, value in self.named.items())
        first = ", ".join([self.name, *map(_shown, self.settings), *named])
        inside = parameters_of(self.fun, self.args) if self.args else _required(self.fun)
        names = ("..." if " " in name else name for name in inside)  # some have no name
        return f"{self.tool}({first})({', '.join([*names, *more])})"


class Pending:
    """What a tool returns that was given settings alone. It says so where a report is expected."""

    def __init__(self, call: _Call, report: Callable[..., Any]) -> None:
        functools.update_wrapper(self, call.fun, updated=())
        self._report = report
        self._text = (
            f"no report yet: call it with the arguments of {call.name}, as in "
            f"{call._replace(args=()).text()}"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with unchecked():
            try:
                return self._report(*args, **kwargs)
            except Exception as error:
                internals.explain(error)
                raise

    def __repr__(self) -> str:
        return f"<{self._text}>"

    def __bool__(self) -> bool:
        raise TypeError(f"This is {self._text}.")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python and JAX ask for many
            raise AttributeError(name)
        raise AttributeError(f"There is no {name!r}, because this is {self._text}.")


def _split(call: _Call, places: Sequence[str], of_two: bool) -> _Call:
    """Returns a call with its arguments apart from the settings before them."""
    values = call.settings
    first, count = values[0], sum(place in LEADING for place in places)
    if count and _holds_arrays(first):
        if of_two and callable(first):
            return call if len(values) == 1 else _refuse(call, 0, places)
        before = ", ".join([call.name, *places[:count]])
        wanted = call._replace(settings=()).text().replace(f"({call.name}", f"({before}", 1)
        raise TypeError(
            f"{call.tool}: policy={brief(first)} must be a policy. Arguments of {call.name} come "
            f"after it, or in a second call: {wanted}.{misplaced(first)}"
        )
    if len(values) > count and _may_be_setting(values[count]) and count < len(places):
        _refuse(call, count, places)
    return call._replace(settings=values[:count], args=values[count:])


def _refuse(call: _Call, count: int, places: Sequence[str]) -> NoReturn:
    """Raises for a value that may be a setting or the first argument."""
    value, place, before = call.settings[count], places[count], call.settings[:count]
    after = call.settings[count:]
    setting = call._replace(settings=before, named={place: value, **call.named}, args=after[1:])
    hint = ""
    if isinstance(value, str | jmp.Policy) and "policy" not in places:
        hint = f" It takes no policy: pass mpjax.autocast({call.name}, policy) as the function."
    raise TypeError(
        f"{call.tool}: {brief(value)} may be {place} or the first argument of {call.name}. Write "
        f"{setting.text()} or {call._replace(settings=before, args=after).text()}.{hint}"
    )


def _check(call: _Call, places: Sequence[str], parameters: Iterable[str]) -> None:
    """Raises for a setting that does not exist, and for arguments in the place of a setting."""
    rest = {key: value for key, value in call.named.items() if key in parameters}
    if unknown := [key for key in call.named if key not in rest]:
        more = (f"{key}={_shown(call.named[key])}" for key in unknown)
        raise TypeError(
            f"{call.tool} has no setting {unknown[0]!r}.{did_you_mean(unknown[0], parameters)} An "
            f"argument of {call.name} that is passed by name belongs in a second call: "
            f"{call._replace(named=rest).text(*more)}."
        )
    given = dict(zip(places, call.settings, strict=False)) | rest
    if _holds_arrays(given.get("argnums")):
        del rest["argnums"]
        raise ValueError(
            f"{call.tool}: argnums={brief(given['argnums'])} must be positions of arguments, or "
            f"None. The arguments of {call.name} follow: {call._replace(named=rest).text()}."
        )
    check_flag("has_aux", given.get("has_aux", False))


def _holds_arrays(value: Any) -> bool:
    """Returns whether a value is an argument: settings hold no arrays."""
    try:
        leaves, structure = jax.tree_util.tree_flatten(value)
    except Exception:  # nested too deeply, or keys without an order: no program takes it
        return False
    arrays = (is_array_or_shape(x) and not isinstance(x, np.integer) for x in leaves)
    return any(arrays) or flat_has_modules(leaves, structure)


def _may_be_setting(value: Any) -> bool:
    several = isinstance(value, Sequence | set | frozenset) and not isinstance(value, str)
    one = value is None or isinstance(value, int | np.integer | str | jmp.Policy)
    return (bool(value) and all(map(_may_be_setting, value))) if several else one


def _shown(value: Any) -> str:
    """Returns a value as a user writes it, or its kind in capitals."""
    if isinstance(value, jmp.Policy):
        return repr(str(value))
    if callable(value):
        name = getattr(value, "__name__", type(value).__name__)
        return name if name.isidentifier() else "fun"
    plain = value is None or isinstance(value, int | float | str | tuple | list)
    return brief(value) if plain and not _holds_arrays(value) else "..."


def _required(fun: Callable[..., Any]) -> list[str]:
    """Returns the parameters of a function that a call needs, as it would pass them."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # some callables have no signature
        return ["*args"]
    needed = [p for p in parameters if p.default is p.empty]
    return [
        f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else str(p.replace(annotation=p.empty))
        for p in needed
        if p.kind is not p.VAR_KEYWORD
    ]
