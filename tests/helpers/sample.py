"""Checks that the tests kill a fixed sample of mutants, drawn from all packages.

`sample.json` says at which commit and with which seed it was drawn, and for each mutant which test
of the whole suite failed ("killed_by", null if none did). A mutant is found by its lines, so code
may move. Each tier of the tests must kill its share of the mutants that were killed then.

Each mutant first meets the test that killed it, then the tests of its part of the library
(`mutants.toml`), then the whole tier. Exits with 1 if a tier kills less than its share.
"""

import argparse
import collections
import compileall
import concurrent.futures
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "tests" / "sample.json"
PARTS = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["cosmic-ray"]["parts"]
FOLDER = ROOT / ".mutants" / "sample"

# Of each tier, which tests it runs and the share of the mutants killed so far that it must kill.
TIERS = {"quick": ("not thorough", 0.95), "thorough": ("thorough or not thorough", 1.0)}
# No test may take so many seconds: a mutant may loop for ever.
LONGEST = 600
STARTS = ("FAILED", "ERROR ")  # of a line about a test that failed
PYTEST = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider"]


def equal(old, new):
    """Returns how many lines are equal before the first that differs."""
    return sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False))
    )


def changed(before, after):
    """Returns the lines that differ between two sources, old and new, without indentation.

    The third value is the number of equal lines that come before.
    """
    old, new = before.splitlines(), after.splitlines()
    start = equal(old, new)
    same = equal(old[start:][::-1], new[start:][::-1])
    while start < len(old) - same and not old[start].strip():
        start += 1  # the blank lines before a decorator go with it
    lines, mutant = old[start : len(old) - same], new[start : len(new) - same]
    nth = places(old, [line.strip() for line in lines]).index(start)
    return "\n".join(map(str.strip, lines)), "\n".join(map(str.strip, mutant)), nth


def places(lines, wanted):
    """Returns where the wanted lines begin among the lines, whatever their indentation."""
    found = range(len(lines) - len(wanted) + 1)
    return [i for i in found if [x.strip() for x in lines[i : i + len(wanted)]] == wanted]


def mutated(source, row):
    """Returns the source with a row's mutant, or None if its lines are no longer there."""
    lines, before, after = source.splitlines(), row["line"].splitlines(), row["mutant"].splitlines()
    found = places(lines, before)
    if row["nth"] >= len(found):
        return None
    start = found[row["nth"]]
    margins = [line[: len(line) - len(line.lstrip())] for line in lines[start:][: len(after)]]
    lines[start : start + len(before)] = [a + b for a, b in zip(margins, after, strict=True)]
    return "\n".join(lines) + "\n"


def environment(folder):
    """Returns the environment of the tests of mutants: reproducible and fast."""
    return {
        **os.environ,
        "SEED": "0",  # every mutant gets the same random inputs
        "JAX_PLATFORMS": "cpu",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        # Most mutants leave most programs unchanged, so programs are compiled once for all.
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def pytest(tree, *args):
    """Runs pytest in a tree, and returns its status and what it printed."""
    # The first is for the tests' own processes. A file may change twice in a second: no bytecode.
    environ = environment(FOLDER) | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([*PYTEST, *args], cwd=tree, env=environ, capture_output=True, text=True)
    return done.returncode, done.stdout


def collect(tree):
    """Returns the ids of all tests and files, and checks that the parts' tests are among them."""
    status, printed = pytest(tree, "--collect-only", "-m", TIERS["thorough"][0])
    ids = [line for line in printed.splitlines() if "::" in line]
    tests = [test for part in PARTS.values() for test in part["tests"] if test.startswith("tests/")]
    gone = [test for test in tests if not any(i.startswith(test) for i in ids)]
    if status or gone:
        sys.exit(f"{printed}\nThese tests cannot be collected: {gone or 'see above'}")
    return {*ids, *(i.split("::")[0] for i in ids)}


def killer(tree, tier, tests, ids):
    """Returns the first of the tests that fails in a tree, or None if all pass."""
    limits = [f"faulthandler_timeout={LONGEST}", "faulthandler_exit_on_timeout=true"]
    options = [arg for limit in limits for arg in ("-o", limit)]
    status, printed = pytest(tree, "-x", "-rfE", "-m", TIERS[tier][0], *options, *tests)
    if status in (0, 5):  # 5: all of them are of another tier
        return None
    failed = [line.split(" ", 1)[1] for line in printed.splitlines() if line[:6] in STARTS]
    named = [i for i in ids if any(f == i or f.startswith(i + " - ") for f in failed)]
    return max(named, key=len, default=f"pytest ends with {status}")


def judge(tree, row, tier, ids):
    """Returns what kills a mutant, None if nothing does, and "gone" if its lines are gone."""
    path = tree / row["module"]
    source = path.read_text() if path.exists() else ""
    mutant = mutated(source, row)
    if mutant is None:
        return "gone"
    before = path.stat()
    path.write_text(mutant)
    try:
        first = [[row["killed_by"]]] if row["killed_by"] in ids else []
        for tests in (*first, PARTS[row["part"]]["tests"], []):
            if found := killer(tree, tier, tests, ids):
                return found
    finally:
        path.write_text(source)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # its bytecode is valid again
    return None


def copy(commit, tree):
    """Makes a copy of a commit, in which the tests of mutants run."""
    shutil.rmtree(tree, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, tree], check=True)
    subprocess.run(["git", "checkout", "--quiet", "--detach", commit], cwd=tree, check=True)
    compileall.compile_dir(tree / "mpjax", quiet=1)  # the tests of mutants write no bytecode
    return tree


def run(rows, tier, workers, path):
    """Returns what kills each of the rows. Results are stored after each, and read if they fit."""
    rev = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(rev, cwd=ROOT, capture_output=True, text=True, check=True)
    commit = done.stdout.strip()
    stored = json.loads(path.read_text()) if path.exists() else {}
    found = stored["killed_by"] if stored.get("commit") == commit else {}
    trees = [copy(commit, FOLDER / f"tree{i}") for i in range(workers)]
    ids = collect(trees[0])
    idle: queue.SimpleQueue = queue.SimpleQueue()
    for tree in trees:
        idle.put(tree)

    def work(row):
        tree = idle.get()
        try:
            return judge(tree, row, tier, ids)
        finally:
            idle.put(tree)

    pool = concurrent.futures.ThreadPoolExecutor(workers)
    try:
        jobs = {pool.submit(work, row): name(row) for row in rows if name(row) not in found}
        for job in concurrent.futures.as_completed(jobs):
            found[jobs[job]] = job.result()
            print(len(found), jobs[job], found[jobs[job]], sep="  ", flush=True)
            path.write_text(json.dumps({"commit": commit, "killed_by": found}, indent=1))
    finally:
        pool.shutdown(cancel_futures=True)
    return found


def name(row):
    return f"{row['module']}:{row['at'][0]}:{row['at'][1]} {row['operator']} {row['occurrence']}"


def write(sample):
    """Stores the sample: a line for each mutant."""
    rows = ",\n".join(json.dumps(row) for row in sample["mutants"])
    head = json.dumps({**sample, "mutants": []}).removesuffix("]}")
    SAMPLE.write_text(f"{head}\n{rows}\n]}}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tier", choices=TIERS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), help="only these")
    parser.add_argument(
        "--record", action="store_true", help="run what nothing kills yet, and store what does"
    )
    args = parser.parse_args()
    sample = json.loads(SAMPLE.read_text())
    rows = [row for row in sample["mutants"] if row["part"] in args.parts]
    rows = [row for row in rows if bool(row["killed_by"]) != args.record]
    found = run(rows, args.tier, args.workers, FOLDER / f"{args.tier}.json")
    parts = collections.defaultdict(collections.Counter)
    for row in rows:
        result = found[name(row)]
        parts[row["part"]].update([result if result in (None, "gone") else "killed"])
        if result in (None, "gone"):
            print(name(row), result or "survives", row["line"], row["mutant"], sep="\n", end="\n\n")
        elif args.record:
            row["killed_by"] = result
    for part, counts in parts.items():
        print(f"{part:12} {counts['killed']:3} of {counts['killed'] + counts[None]}")
    total = sum(parts.values(), collections.Counter())
    print(f"{total['killed']} of {total['killed'] + total[None]} killed, {total['gone']} gone")
    if args.record:
        write(sample)
    # A mutant whose lines are gone counts as one that survives.
    sys.exit(total["killed"] < TIERS[args.tier][1] * total.total())


if __name__ == "__main__":
    main()
