"""Runs all rows of the tables in examples, rewrites the tables, and writes all curves as JSON.

    python examples/expected.py resnet18 gpt2
    python examples/expected.py --count

Each row runs with the first seed. float32 runs with three seeds, whose range is the last row. The
option counts in how many of the measured runs mixed precision ends as well as float32.
"""

import argparse
import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import common

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "examples"
SEEDS = 3
MORE_IS_BETTER = {"accuracy %", "recall %", "reward", "length"}
TABLE = re.compile(r"^    policy .*?\n(?=\n|\"\"\")", re.MULTILINE | re.DOTALL)


def run(name: str, row: str, size: str = "small", seed: int = 0, out: Any = None) -> Any:
    """Runs one row of an example's table: a policy, and further options after it."""
    argv = [*f"--size {size} --seed {seed} --policy".split(), *shlex.split(row)]
    argv += ["--out", str(out)] if out else []
    return importlib.import_module(name).main(argv)


def rows(name: str) -> dict[str, dict[str, float]]:
    """Returns the table at the top of an example, without its spread."""
    table = common.expected(importlib.import_module(name).__doc__)
    return {row: figures for row, figures in table.items() if row != common.SPREAD}


def table(runs: dict[str, list[Any]]) -> str:
    """Returns a table as it is written at the top of an example."""
    figures = {row: [run["figures"] for run in of_seeds] for row, of_seeds in runs.items()}
    rows = {row: of_seeds[0] for row, of_seeds in figures.items()}
    first = next(iter(figures.values()))
    seeds = {name: [run[name] for run in first] for name in first[0]}
    rows[common.SPREAD] = {name: max(values) - min(values) for name, values in seeds.items()}
    lines = [["policy", *seeds]]
    lines += [[row, *(f"{value:.4g}" for value in cells.values())] for row, cells in rows.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    return "\n".join(f"    {line}" for line in padded)


def summary(name: str) -> str:
    """Returns the figures shown in docs/examples.md: the first figure of every row."""
    cells = common.expected(importlib.import_module(name).__doc__)
    figure = next(iter(cells[common.SPREAD]))
    listed = ", ".join(f"{row} {values[figure]:g}" for row, values in cells.items())
    return f"{figure.strip('~')}: {listed}"


def worse(name: str) -> dict[str, bool]:
    """Returns, by row in mixed precision, whether the first figure is worse than float32's.

    It is if it lies beyond float32's first seed by more than the spread of float32. Runs that fail
    on purpose, without a loss scale, are left out.
    """
    runs = json.loads((RESULTS / f"{name}.json").read_text())
    (base, of_seeds), *others = runs.items()
    assert base == "float32"
    figure = next(iter(of_seeds[0]["figures"]))
    sign = -1 if figure in MORE_IS_BETTER else 1
    seeds = [sign * run["figures"][figure] for run in of_seeds]
    most = seeds[0] + max(seeds) - min(seeds)
    return {
        row: sign * run["figures"][figure] > most
        for row, (run, *_) in others
        if "loss-scale none" not in row
    }


def count() -> str:
    """Returns how many of the measured runs end as well as float32, and which do not."""
    found = {
        (path.stem, row): is_worse
        for path in sorted(RESULTS.glob("*.json"))
        for row, is_worse in worse(path.stem).items()
    }
    missed = "".join(f"\n  {name}, {row}" for (name, row), is_worse in found.items() if is_worse)
    good = len(found) - sum(found.values())
    return f"{good} of {len(found)} mixed-precision runs end as well as float32. Not:{missed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="names of examples with a table")
    parser.add_argument("--count", action="store_true", help="count runs as good as float32")
    options = parser.parse_args()
    if options.count:
        print(count())
    for name in options.names:
        names = list(rows(name))
        runs = {
            row: [run(name, row, seed=seed) for seed in range(SEEDS if row == names[0] else 1)]
            for row in names
        }
        module = Path(importlib.import_module(name).__file__ or "")
        before, after = TABLE.split(module.read_text(), maxsplit=1)
        module.write_text(before + table(runs) + "\n" + after)
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(runs) + "\n")


if __name__ == "__main__":
    main()
