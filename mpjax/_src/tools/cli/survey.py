"""Prints what `mpjax survey` finds, and ends the process that ran a script."""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from mpjax._src.tools.cli import printing
from mpjax._src.tools.scripts.ending import end_process
from mpjax._src.tools.scripts.launch import LaunchError
from mpjax._src.tools.scripts.survey import Options, surveyed

INTERRUPTED, WRONG = 1, 2


def show_survey(
    options: Options,
    script: str,
    args: Sequence[str],
    module: bool,
    as_json: bool,
    html: Path | None,
) -> NoReturn:
    """Surveys a script, prints what was found, and ends the process."""
    # With --json, what the script prints is no part of the result.
    quiet = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    try:
        with quiet:
            survey = surveyed(options, script, args, module)
    except (ValueError, TypeError, LaunchError) as error:
        click.echo(f"Error: {error}", err=True)
        end_process(WRONG)
    if as_json:
        printing.json_to_stdout(survey)
    else:
        printing.show(survey.document())
        for step in survey.steps:
            click.echo()
            printing.show(step.document())
        click.echo(f"\n{survey.changes()}" if survey.changes() else "", nl=bool(survey.changes()))
    for number, step in enumerate(survey.steps, 1):
        output = printing.Output(None, html, as_json, step.to_html(step.name) if html else "")
        output.finish(f"-{number}" if len(survey.steps) > 1 else "")
    if survey.ended == "interrupted":
        click.echo("Aborted!", err=True)
        end_process(INTERRUPTED)
    end_process(WRONG if survey.ended == "failed" or not survey else 0)
