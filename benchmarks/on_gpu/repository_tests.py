"""Runs the repository's own tests on the device, several files at a time."""

import concurrent.futures
import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).parents[2]
CASE, ALL = "tests", "all"  # the row with the number of files
SMOKE = ("tests/core/base/test_dtypes.py",)
AT_ONCE = 8
COUNTS = ("tests", "failures", "errors", "skipped")


def run(options: Any, results: Any, left: Callable[[], float], variables: dict[str, str]) -> None:
    """Runs the files that have no row yet until the budget is spent."""
    if importlib.util.find_spec("pytest") is None:
        results.put(CASE, ALL, {"skipped": "pytest is not installed"})
        return
    every = SMOKE if options.smoke else found()
    results.put(CASE, ALL, {"files": len(every)})
    files = [file for file in every if results.get(CASE, file) is None]
    # Tests set their own flags, so they must not use a cache of programs compiled with others.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment["JAX_PLATFORMS"] = "cpu" if options.smoke else "cuda"
    workers = min(AT_ONCE, os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(run_file, file, environment, left): file for file in files}
        for future in tqdm(
            concurrent.futures.as_completed(running), total=len(files), unit="file", disable=None
        ):
            if (row := future.result()) is not None:
                results.put(CASE, running[future], row)


def found() -> list[str]:
    """Returns the test files, the longest first, so that no long file starts last."""
    paths = sorted(ROOT.glob("tests/**/test_*.py"), key=lambda path: -path.stat().st_size)
    return [str(path.relative_to(ROOT)) for path in paths]


def run_file(
    file: str, environment: dict[str, str], left: Callable[[], float]
) -> dict[str, Any] | None:
    """Returns the counts and failures of a file; None if the budget ends first."""
    if left() <= 0:
        return None
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
        try:
            done = subprocess.run(
                [*command, f"--junitxml={report}"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=left(),
            )
        except subprocess.TimeoutExpired:
            return None
        if not report.exists():
            last = (done.stderr or done.stdout).strip().splitlines()[-3:]
            return {"failed": f"pytest ended with {done.returncode}: {' '.join(last)}"[:500]}
        return counted(report.read_text())


def counted(report: str) -> dict[str, Any]:
    """Returns the counts of a JUnit report and the first line of each failure."""
    root = ElementTree.fromstring(report)
    suites = list(root.iter("testsuite"))
    counts = {key: sum(int(s.get(key, 0)) for s in suites) for key in COUNTS}
    failures = {}
    for case in root.iter("testcase"):
        for bad in (*case.findall("failure"), *case.findall("error")):
            failures[str(case.get("name"))] = (bad.get("message") or "").split("\n")[0][:200]
    return {
        "passed": counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"],
        "failures": counts["failures"] + counts["errors"],
        "left_out": counts["skipped"],
        "seconds": round(sum(float(s.get("time", 0)) for s in suites), 1),
        "names": failures,
    }
