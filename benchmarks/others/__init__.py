"""Suite "others": other people's training code under `mpjax run` and `mpjax survey`, unchanged.

    python -m benchmarks --suite others [CASE ...] [--cache FOLDER] [--part ROW] [--fresh]

`bases.toml` lists the code bases. Each gets a virtual environment of its own in FOLDER (by default
~/.cache/mpjax-others), with pinned versions from the package registry; what needs another Python
is skipped if that is not on the path. Rows that failed stay until `--fresh`. A code base that is no
package is read from FOLDER/sources/NAME-COMMIT, and its rows are skipped if this folder is absent.
A script in `scripts` trains it as its users do; it has no line of mpjax. The rows of a case:

- "float32": the script alone.
- "run float32": under `mpjax run --policy float32`. Its losses have to be the same, bit for bit.
- "run mixed_bfloat16": under `mpjax run --policy mixed_bfloat16`.
- "own": the script alone, with the code base's own 16-bit setting, if it has one.
- "survey" and "survey own": `mpjax survey --target h100` of the script without and with it.

A code base that does not run here has the reason in place of all that, as `why`.

Packages are fetched only here: the page is written from the stored rows.
"""

import tomllib
from pathlib import Path

from benchmarks import Options
from benchmarks.results import Results

HERE = Path(__file__).parent
COMMITS = tomllib.loads((HERE / "commits.toml").read_text())
LISTED = tomllib.loads((HERE / "bases.toml").read_text()) | {
    case: {**{k: v for k, v in COMMITS.items() if k != "base"}, **base}
    for case, base in COMMITS["base"].items()
}
ABSENT = {case: base for case, base in LISTED.items() if "why" in base}
BASES = {case: base for case, base in LISTED.items() if case not in ABSENT}
CASES = tuple(BASES)
WAYS = ("float32", "run float32", "run mixed_bfloat16", "own", "survey", "survey own")
PARTS = WAYS
HOME = Path.home() / ".cache" / "mpjax-others"


def run(options: Options, results: Results) -> list[str]:
    """Measures the rows that are missing; returns which runs differ from the script alone."""
    from benchmarks.others.runs import measured, problems

    for case in options.cases:
        for way in WAYS:
            base = BASES[case]
            if way.endswith("own") and "own" not in base:
                continue
            if (not options.parts or way in options.parts) and not results.get(case, way):
                results.put(case, way, measured(case, base, way, options.cache or HOME))
    return problems(results.cases)
