"""Prints what `mpjax survey` finds, and ends the process that ran a script."""

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from mpjax._src.tools.cli import printing
from mpjax._src.tools.scripts.ending import end_process
from mpjax._src.tools.scripts.launch import LaunchError, refusal
from mpjax._src.tools.scripts.survey import Options, surveyed

INTERRUPTED, WRONG = 1, 2

JUDGE = """
    from mpjax._src.core.policy.grammar import get_policy
    from mpjax._src.tools.hardware.targets import find_target
    policies, targets = asked
    [*map(get_policy, policies), *map(find_target, targets)]
"""


def show_survey(
    options: Options,
    script: str,
    args: Sequence[str],
    module: bool,
    as_json: bool,
    html: Path | None,
) -> NoReturn:
    """Surveys a script, prints what was found, and ends the process."""
    # What is asked for in vain is told before the first line of the script runs.
    if html and importlib.util.find_spec("jinja2") is None:
        _wrong("pages need jinja2: pip install 'mpjax[html]'.")
    _check_names(options)
    out = sys.stdout

    def finish(survey: Any, at_once: bool = False) -> NoReturn:
        with contextlib.redirect_stdout(out):
            _finish(survey, as_json, html, at_once)

    # With --json, what the script prints is no part of the result.
    quiet = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    try:
        with quiet:
            survey = surveyed(
                options, script, args, module, functools.partial(finish, at_once=True)
            )
    except (ValueError, TypeError, LaunchError) as error:
        _wrong(str(error))
    finish(survey)


def _finish(survey: Any, as_json: bool, html: Path | None, at_once: bool) -> NoReturn:
    try:
        _print(survey, as_json, html)
        sys.stdout.flush()
    except OSError as error:
        # Python still flushes stdout when it exits.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _wrong(f"the result could not be written: {error.strerror or error}.", at_once)
    if survey.ended == "interrupted":
        click.echo("Aborted!", err=True)
        end_process(INTERRUPTED)
    end_process(WRONG if survey.ended == "failed" or not survey else 0, at_once)


def _print(survey: Any, as_json: bool, html: Path | None) -> None:
    if as_json:
        printing.json_to_stdout(survey)
    else:
        printing.show(survey.document())
        if changes := survey.changes():
            click.echo(f"\n{changes}")
    for number, step in enumerate(survey.steps, 1):
        output = printing.Output(None, html, as_json, step.to_html(step.name) if html else "")
        output.finish(f"-{number}" if len(survey.steps) > 1 else "")


def _check_names(options: Options) -> None:
    """Ends the process for a policy or a target that does not exist."""
    if not (options.policies or options.targets):
        return
    if (said := refusal(JUDGE, options.policies, options.targets)) is not None:
        _wrong(said)


def _wrong(message: str, at_once: bool = False) -> NoReturn:
    click.echo(f"Error: {message}", err=True)
    end_process(WRONG, at_once)
