"""The command line of the benchmarks: see the package's docstring."""

import importlib
import importlib.util
import shlex
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import click
from rich.console import Console
from rich.table import Table

from benchmarks import RESULTS, SUITES, Options

FOUND = [name for name in SUITES if importlib.util.find_spec(f"benchmarks.{name}")]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("cases", nargs=-1)
@click.option("--suite", type=click.Choice(FOUND), help="The suite to measure.")
@click.option("--part", "parts", multiple=True, help="Only this part of the suite; repeatable.")
@click.option("--smoke", is_flag=True, help="Test that it runs: small models, a temporary file.")
@click.option("--fresh", is_flag=True, help="Measure recorded rows again.")
@click.option("--out", type=click.Path(path_type=Path), help="The JSON file to write.")
@click.option("--budget", default=470.0, help="Seconds for each part, in suites with a budget.")
@click.option("--cache", type=click.Path(path_type=Path), help="For the gpu suite's programs.")
@click.option("--list", "listing", is_flag=True, help="List the suites, parts and cases.")
@click.option("--page", is_flag=True, help="Write the documentation's tables from the JSON files.")
def main(
    cases: tuple[str, ...],
    suite: str | None,
    parts: tuple[str, ...],
    smoke: bool,
    fresh: bool,
    out: Path | None,
    budget: float,
    cache: Path | None,
    listing: bool,
    page: bool,
) -> None:
    """Measure mpjax beside its rivals: CASES of a suite, by default all except long ones."""
    if not (suite or listing or page):
        raise click.UsageError(f"--suite must be given: {', '.join(FOUND)}. Or --list, or --page.")
    problems = []
    if listing:
        Console().print(overview([suite] if suite else FOUND))
    elif suite:
        module = load(suite)
        options = Options(
            cases=chosen("CASE", cases, module.CASES, getattr(module, "LONG", ())),
            parts=chosen("--part", parts, getattr(module, "PARTS", ())),
            smoke=smoke,
            fresh=fresh,
            budget=budget,
            cache=cache,
        )
        problems = measure(suite, module, options, out)
    if page:
        importlib.import_module("benchmarks.page").write()
    for line in problems:
        click.echo(line, err=True)
    sys.exit(bool(problems))


def load(suite: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{suite}")


def chosen(what: str, asked: tuple[str, ...], legal, long=()) -> tuple[str, ...]:
    """Returns the requested names in the suite's order: by default all except the long ones."""
    for name in asked:
        if name not in legal:
            raise click.BadParameter(f"{name!r} is none of {', '.join(legal)}.", param_hint=what)
    asked = asked or tuple(name for name in legal if name not in long)
    return tuple(name for name in legal if name in asked)


def measure(suite: str, module: ModuleType, options: Options, out: Path | None) -> list[str]:
    """Runs a suite and returns its problems."""
    from benchmarks.results import Results  # after the suite, which may choose JAX's platform

    folder = Path(tempfile.gettempdir()) / "mpjax_smoke" if options.smoke else RESULTS
    results = Results.open(
        out or folder / getattr(module, "FILE", f"{suite}.json"),
        fresh=options.fresh or options.smoke,
        command=shlex.join(["python", "-m", "benchmarks", "--suite", suite]),
        **({"smoke": True} if options.smoke else {}),
        **getattr(module, "SETTINGS", {}),
    )
    problems = module.run(options, results) or []
    click.echo(f"{results.path}: {sum(map(len, results.cases.values()))} rows")
    return list(problems)


def overview(suites: list[str]) -> Table:
    """Returns a table of the suites with their parts and cases."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("suite", "measures", "parts", "cases"):
        table.add_column(column, overflow="fold")
    for name in suites:
        module = load(name)
        parts = ", ".join(getattr(module, "PARTS", ())) or "-"
        table.add_row(name, SUITES[name], parts, ", ".join(module.CASES))
    return table


if __name__ == "__main__":
    main()
