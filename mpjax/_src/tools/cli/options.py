"""Options that several commands share. Their help needs no JAX, only their values do."""

import contextlib
import functools
import math
from pathlib import Path
from typing import Any

import click

from mpjax._src.tools.cli.advice import PLATFORMS
from mpjax._src.tools.cli.printing import Output

EXIT_CODES = (
    "Exit codes: 0 if all is well; 1 for a finding (a failed test, a limit that was exceeded, a "
    "program that does not fit, a fault that lint reports); 2 for a wrong command line, an error "
    "in your own code, or a result that cannot be written."
)


class _Parsed(click.ParamType):
    """An option whose text a function parses; the message of its ValueError is shown."""

    def __init__(self, name: str, parse: Any):
        self.name, self.parse = name, parse

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        # click also converts defaults, and values that were converted before.
        if not isinstance(value, str):
            return value
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Number(click.FloatRange):
    """A number within limits. NaN is refused: it compares as false with every limit."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def _numbers(text: str) -> int | tuple[int, ...] | None:
    if text == "none":
        return None
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} must be integers, such as 0 or 0,1, or none.") from None
    return numbers[0] if len(numbers) == 1 else numbers


def _rules(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def _names(text: str) -> tuple[str, ...]:
    # No names are wrong, unlike no rules: all are selected then, or none ignored.
    if not (names := _rules(text)):
        raise ValueError(f"{text!r} must be names, such as v100,h100.")
    return names


def _policy(text: str) -> Any:
    from mpjax._src.core.policy.grammar import get_policy

    return get_policy(text)


def _loss_scale(text: str) -> float | str:
    from mpjax._src.core.training.loss_scale import resolve_loss_scale

    scale: float | str = text
    with contextlib.suppress(ValueError):
        scale = float(text)
    # Refuses unknown words while the command line is read, and not after the function is loaded.
    resolve_loss_scale(scale, False)
    return scale


LOSS_SCALE = _Parsed("loss scale", _loss_scale)
NAMES = _Parsed("names", _names)
RULES = _Parsed("rules", _rules)


def option(names: str, text: str, type: Any = None, metavar: str = "", **more: Any) -> Any:
    """Returns an option. ``names`` are its own, and that of its argument if it is another one."""
    return click.option(*names.split(), type=type, metavar=metavar or None, help=text, **more)


def flag(names: str, text: str) -> Any:
    """Returns an option that is given or not."""
    return option(names, text, is_flag=True)


def device(text: str, required: bool = False) -> Any:
    """Returns the option ``--target`` of one accelerator."""
    return option("--target device", text, metavar="NAME", required=required)


def argnums(default: int | None) -> Any:
    """Returns the option ``--argnums``."""
    text = "Include the gradient of fun, a scalar loss, by these arguments; none leaves it out."
    shown = "none" if default is None else str(default)
    kind = _Parsed("numbers", _numbers)
    return option("--argnums", text, kind, "0[,1]", default=shown, show_default=True)


def policy(default: str | None, text: str = "A policy, as for mpjax.get_policy.") -> Any:
    """Returns the option ``--policy``."""
    kind = _Parsed("policy", _policy)
    return option("--policy", text, kind, "POLICY", default=default, show_default=bool(default))


FILE = click.Path(dir_okay=False, path_type=Path)

target = click.argument("target", metavar="TARGET")
has_aux = flag("--has-aux", "fun returns (loss, aux).")
as_json = flag("--json as_json", "Print JSON, and nothing else.")
platform = option(
    "--platform",
    "Also advise for this platform, which this machine need not have.",
    click.Choice(PLATFORMS),
    multiple=True,
)
html = option(
    *("--html", "Also write the report to this file, as an HTML page with a map of the program."),
    *(FILE, "FILE"),
)
plot = option("--plot", "Also draw the result to this file, a PNG.", FILE, "FILE")
show_traceback = flag(
    "--traceback show_traceback", "Show the full traceback of an error in your code."
)


def output(*more: Any) -> Any:
    """Returns the options of a command that reports: ``more``, --html, --json and --traceback.

    The command gets them as one `Output`; `Command` itself reads --traceback.
    """

    def add(command: Any) -> Any:
        @functools.wraps(command)
        def call(plot=None, html=None, as_json=False, show_traceback=False, **others):
            return command(**others, output=Output(plot, html, as_json))

        for option in (show_traceback, as_json, html, *more):
            call = option(call)
        return call

    return add
