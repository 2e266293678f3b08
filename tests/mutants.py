"""Mutation tests: is there a test that fails when a line of the planner says something else?

    python tests/mutants.py [--base REF] [--sample N] [--modules GLOB] [--json FILE] [--resume]

cosmic-ray makes the mutants and runs the tests (`mutants.toml`), here in several copies of the
working tree at once. A mutant that changes nothing is listed in `mutants.json` with the reason,
and not run. Exits with 1 if a mutant that is not listed survives.
"""

import argparse
import collections
import fnmatch
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

from cosmic_ray.config import load_config, serialize_config
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "tests" / "mutants.toml"
KNOWN = ROOT / "tests" / "mutants.json"
FOLDER = ROOT / ".mutants"
SESSION = FOLDER / "session.sqlite"
BIN = Path(sys.executable).parent

NOT_CHOSEN, EQUIVALENT, ELSEWHERE = "not chosen", "equivalent", "run by another worker"


def command(*args, cwd=ROOT):
    subprocess.run([str(a) for a in args], cwd=cwd, check=True)


def merge_base(base):
    """Returns the commit that a branch left ``base`` at; ``base`` itself if git knows none."""
    found = subprocess.run(
        ["git", "merge-base", base, "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return found.stdout.strip() or base


def start(base):
    """Makes a session of all mutants; with a base, of those on the lines that differ from it."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    config = load_config(CONFIG)
    if base:
        config["filters"]["git-filter"]["branch"] = merge_base(base)
    (FOLDER / "config.toml").write_text(serialize_config(config))
    command(BIN / "cosmic-ray", "init", FOLDER / "config.toml", SESSION)
    command(BIN / "cr-filter-operators", SESSION, FOLDER / "config.toml")
    if base:
        command(BIN / "cr-filter-git", SESSION, "--config", FOLDER / "config.toml")


def change(mutation):
    """Returns the lines that a mutation changes, as they are and as they become."""
    source = (ROOT / mutation.module_path).read_text()
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    mutant = mutate_code(source, operator, mutation.occurrence) or source
    before, after = source.splitlines(), mutant.splitlines()
    if len(before) != len(after):
        return before[mutation.start_pos[0] - 1].strip(), ""
    pairs = [(a.strip(), b.strip()) for a, b in zip(before, after, strict=True) if a != b]
    return tuple("\n".join(lines) for lines in zip(*pairs, strict=True)) or ("", "")


def known():
    """Returns the listed mutants by (module, line, mutant), and those whose line is gone."""
    rows = json.loads(KNOWN.read_text()) if KNOWN.exists() else []
    gone = []
    for row in rows:
        module = ROOT / row["module"]
        lines = (
            [line.strip() for line in module.read_text().splitlines()] if module.exists() else []
        )
        if not set(row["line"].splitlines()) <= set(lines):
            gone.append(row)
    return {(row["module"], row["line"], row["mutant"]): row for row in rows}, gone


def skip(db, job, why):
    db.set_result(job, WorkResult(worker_outcome=WorkerOutcome.SKIPPED, output=why))


def choose(modules, sample, seed):
    """Skips what is listed, and what a pattern or a sample leaves out."""
    listed, gone = known()
    lines = {(module, line.splitlines()[0]) for module, line, _ in listed}
    with use_db(SESSION) as db:
        items = sorted(db.pending_work_items, key=lambda item: str(item.mutations))
        kept = []
        for item in items:
            (mutation,) = item.mutations
            name = str(mutation.module_path)
            source = (ROOT / name).read_text().splitlines()
            row = source[mutation.start_pos[0] - 1].strip()
            if not any(fnmatch.fnmatch(name, f"*{pattern}") for pattern in modules):
                skip(db, item.job_id, NOT_CHOSEN)
            elif (name, row) in lines and (name, *change(mutation)) in listed:
                skip(db, item.job_id, EQUIVALENT)
            else:
                kept.append(item)
        if sample is not None and sample < len(kept):
            chosen = set(random.Random(seed).sample(range(len(kept)), sample))
            for index, item in enumerate(kept):
                if index not in chosen:
                    skip(db, item.job_id, NOT_CHOSEN)
    return gone


def copy_tree(folder):
    """Copies the working tree, what is not committed included."""
    shutil.rmtree(folder, ignore_errors=True)
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        *(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def execute(workers):
    """Runs what is pending, in copies of the working tree; keeps what was found if interrupted."""
    # CI: the tests that draw numbers draw the same for every mutant.
    paths = os.pathsep.join([str(BIN), os.environ["PATH"]])
    environ = {**os.environ, "CI": "1", "JAX_PLATFORMS": "cpu", "PATH": paths}
    # Most mutants leave most programs as they are: compiled once for all.
    environ |= {
        "JAX_COMPILATION_CACHE_DIR": str(FOLDER / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    with use_db(SESSION) as db:
        pending = [item.job_id for item in db.pending_work_items]
    running = []
    for worker in range(min(workers, len(pending))):
        folder = FOLDER / f"worker{worker}"
        copy_tree(folder)
        compiled = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"]
        subprocess.run(compiled, cwd=folder, env=environ, stdout=subprocess.DEVNULL, check=True)
        session = FOLDER / f"worker{worker}.sqlite"
        shutil.copy2(SESSION, session)
        with use_db(session) as db:
            others = [job for i, job in enumerate(pending) if i % workers != worker]
            result = WorkResult(worker_outcome=WorkerOutcome.SKIPPED, output=ELSEWHERE)
            db.set_multiple_results(others, result)
        args = [BIN / "cosmic-ray", "exec", FOLDER / "config.toml", session]
        running.append((subprocess.Popen(args, cwd=folder, env=environ), session))
    try:
        for process, _ in running:
            process.wait()
    finally:
        for process, session in running:
            process.terminate()
            process.wait()
            with use_db(session) as found, use_db(SESSION) as db:
                for job, result in found.results:
                    if job in pending and result.output != ELSEWHERE:
                        db.set_result(job, result)


def report(gone, out):
    """Prints the survivors and the counts; returns whether all is well."""
    counts = collections.defaultdict(collections.Counter)
    survivors = []
    with use_db(SESSION) as db:
        results = dict(db.results)
        for item in db.work_items:
            (mutation,) = item.mutations
            result = results.get(item.job_id)
            count = counts[str(mutation.module_path)]
            if result is not None and (result.output or "").startswith("Filtered"):
                continue
            count["mutants"] += 1
            if result is not None and result.output == EQUIVALENT:
                count["listed"] += 1
            if result is None or result.worker_outcome == WorkerOutcome.SKIPPED:
                continue
            count["run"] += 1
            if result.test_outcome == TestOutcome.SURVIVED:
                count["survived"] += 1
                survivors.append((mutation, result))
            else:
                count["killed"] += 1
    for mutation, result in sorted(survivors, key=lambda pair: str(pair[0])):
        line, mutant = change(mutation)
        row = {"module": str(mutation.module_path), "line": line, "mutant": mutant}
        row |= {"operator": mutation.operator_name.removeprefix("core/"), "reason": ""}
        print(result.diff, json.dumps(row), sep="\n", end="\n\n")
    for row in gone:
        print(f"listed, but no longer a line of {row['module']}: {row['line']}")
    total = sum(counts.values(), collections.Counter())
    files = {name: dict(sorted(count.items())) for name, count in sorted(counts.items())}
    print(json.dumps(dict(total)))
    if out:
        Path(out).write_text(json.dumps({**total, "files": files}, indent=1) + "\n")
    return not survivors and not gone


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--base", default="", help="only lines that differ from this commit")
    parser.add_argument("--modules", nargs="*", default=["*"], help="globs of module paths")
    parser.add_argument("--sample", type=int, help="only so many, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", help="where to write the counts")
    parser.add_argument("--resume", action="store_true", help="goes on with the last session")
    args = parser.parse_args()
    gone = known()[1]
    if not args.resume:
        start(args.base)
        choose(args.modules, args.sample, args.seed)
    execute(args.workers)
    sys.exit(0 if report(gone, args.json) else 1)


if __name__ == "__main__":
    main()
