"""Mutation tests: checks that a test fails when a line of the library is changed.

cosmic-ray makes the mutants and runs the tests, here in several copies of the working tree at once.
The parts of the library run one after the other, each with its own tests (`mutants.toml`). Mutants
that change no behavior are listed in `mutants.json` with the reason, and not run. Exits with 1 if a
mutant survives that is not listed.
"""

import argparse
import ast
import collections
import fnmatch
import hashlib
import json
import math
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from cosmic_ray.config import load_config, serialize_config
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult
from sample import changed, environment, mutated, write

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "tests" / "mutants.toml"
LIST = ROOT / "tests" / "mutants.json"
FOLDER = ROOT / ".mutants"
BIN = Path(sys.executable).parent

# The reasons why a mutant was skipped, besides cosmic-ray's filters ("Filtered ...").
NOT_CHOSEN, LISTED, ELSEWHERE = "not chosen", "listed", "another worker's"


def git(*args):
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else ""


def read_parts():
    """Returns the configuration of each part of the library, by name."""
    config = load_config(CONFIG)
    parts = config.pop("parts")
    for part in parts.values():
        command = [*shlex.split(config["test-command"]), *part["tests"]]
        part.update({**config, "test-command": shlex.join(command)})
    return parts


def start(folder, config, base):
    """Makes a session of all mutants, or with a base of those on lines that differ from it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # The commit where the branch left its base: later commits of the base do not count.
    branch = git("merge-base", base, "HEAD").strip() or base
    filters = {**config["filters"], "git-filter": {"branch": branch}}
    toml, session = folder / "config.toml", folder / "session.sqlite"
    toml.write_text(serialize_config({**config, "filters": filters}))
    commands = [["cosmic-ray", "init", toml, session], ["cr-filter-operators", session, toml]]
    if base:
        commands.append(["cr-filter-git", session, "--config", toml])
    for name, *args in commands:
        subprocess.run([BIN / name, *args], cwd=ROOT, check=True)


def files_of(config):
    """Returns the files of a part, including those that are not mutated."""
    paths = [ROOT / path for path in config["module-path"]]
    return sorted({f for p in paths for f in (p.rglob("*.py") if p.is_dir() else [p])})


def digest(config):
    """Returns a digest of a part's files and settings. A session is valid for one digest."""
    parts = [serialize_config(config).encode(), *(f.read_bytes() for f in files_of(config))]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def change(mutation):
    """Returns the lines that a mutation changes: old, new, and the number of equal ones before."""
    source = (ROOT / mutation.module_path).read_text()
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    return changed(source, mutate_code(source, operator, mutation.occurrence) or source)


def is_listed(rows, module, line, mutant):
    """Returns whether a row lists a mutant. A row of module "*" lists a change of any line."""
    for row in rows:
        if row["module"] == module and (row["line"], row["mutant"]) == (line, mutant):
            return True
        if row["module"] == "*":
            pieces = line.split(row["line"])
            for i in range(1, len(pieces)):
                sides = row["line"].join(pieces[:i]), row["line"].join(pieces[i:])
                if row["mutant"].join(sides) == mutant:
                    return True
    return False


def outdated(rows):
    """Yields the rows whose lines no longer exist."""
    for row in rows:
        path = ROOT / row["module"]
        lines = {x.strip() for x in path.read_text().splitlines()} if path.exists() else set()
        if row["module"] != "*" and not lines.issuperset(row["line"].splitlines()):
            yield f"{row['module']}: {row['line']}"


def skip(db, jobs, why):
    db.set_multiple_results(jobs, WorkResult(worker_outcome=WorkerOutcome.SKIPPED, output=why))


def choose(session, modules, sample, seed):
    """Skips listed mutants, and those that the patterns of modules or the sample leave out."""
    rows = json.loads(LIST.read_text())
    parts = [part for row in rows for part in row["line"].splitlines()]
    with use_db(session) as db:
        rest, known, others = [], [], []
        for item in db.pending_work_items:
            (mutation,) = item.mutations
            name = str(mutation.module_path)
            line = (ROOT / name).read_text().splitlines()[mutation.start_pos[0] - 1].strip()
            if not any(fnmatch.fnmatch(name, pattern) for pattern in modules):
                others.append(item.job_id)
            elif any(p in line for p in parts) and is_listed(rows, name, *change(mutation)[:2]):
                known.append(item.job_id)
            else:
                rest.append((str(mutation), item.job_id))
        if sample is not None:
            # In an order in which one mutant more or less moves no other.
            rest.sort(key=lambda pair: hashlib.sha256(f"{seed} {pair[0]}".encode()).digest())
            others += [job for _, job in rest[sample:]]
        skip(db, others, NOT_CHOSEN)
        skip(db, known, LISTED)


def copy_tree(folder):
    """Copies the working tree, including files that are not committed."""
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def execute(folder, tests, workers):
    """Runs pending mutants in copies of the working tree; keeps the results if interrupted."""
    session, environ = folder / "session.sqlite", environment(folder.parent)
    with use_db(session) as db:
        pending = [item.job_id for item in db.pending_work_items]
    running = []
    for number in range(min(workers, len(pending))):
        tree, part = folder / f"worker{number}", folder / f"worker{number}.sqlite"
        shutil.rmtree(tree, ignore_errors=True)
        copy_tree(tree)
        # The tests of mutants write no bytecode. This command writes it for all unchanged files.
        collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", *tests]
        subprocess.run(collect, cwd=tree, env=environ, stdout=subprocess.DEVNULL, check=True)
        shutil.copy2(session, part)
        with use_db(part) as db:
            skip(db, [job for i, job in enumerate(pending) if i % workers != number], ELSEWHERE)
        args = [BIN / "cosmic-ray", "exec", folder / "config.toml", part]
        running.append((subprocess.Popen(args, cwd=tree, env=environ), part))
    try:
        for process, _ in running:
            process.wait()
    finally:
        for process, part in running:
            process.terminate()
            process.wait()
            with use_db(part) as found, use_db(session) as db:
                for job, result in found.results:
                    if job in pending and result.output != ELSEWHERE:
                        db.set_result(job, result)


def results(sessions):
    """Yields (mutation, result) for the mutants of sessions; the result is None if it did not run.

    Mutants that cosmic-ray's filters removed are left out.
    """
    for session in sessions:
        with use_db(session) as db:
            found = dict(db.results)
            for item in db.work_items:
                (mutation,) = item.mutations
                result = found.get(item.job_id)
                if result is None or not (result.output or "").startswith("Filtered"):
                    yield mutation, result


def count(sessions):
    """Returns the numbers of mutants: all, run, killed and survived, in total and by file."""
    files: dict = collections.defaultdict(collections.Counter)
    for mutation, result in results(sessions):
        kinds = ["mutants"]
        if result is not None and result.worker_outcome != WorkerOutcome.SKIPPED:
            survived = result.test_outcome == TestOutcome.SURVIVED
            kinds += ["run", "survived" if survived else "killed"]
        elif result is not None and result.output == LISTED:
            kinds.append("listed")
        files[str(mutation.module_path)].update(kinds)
    total = sum(files.values(), collections.Counter())
    return {**total, "files": {name: dict(files[name]) for name in sorted(files)}}


def print_survivors(sessions):
    """Prints each survivor: its diff, and a row for the list with an empty reason."""
    survivors = 0
    for mutation, result in results(sessions):
        if result is not None and result.test_outcome == TestOutcome.SURVIVED:
            survivors += 1
            line, mutant, _ = change(mutation)
            row = {"module": str(mutation.module_path), "line": line, "mutant": mutant}
            row |= {"operator": mutation.operator_name.removeprefix("core/"), "reason": ""}
            print(result.diff, json.dumps(row), sep="\n", end="\n\n")
    return survivors


def is_program(source):
    """Returns whether a source can be parsed: of `**options`, `*options` is a mutant."""
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def draw(parts, number, seed):
    """Draws the sample of `sample.py`: from each part in proportion to its lines."""
    lines = {
        name: sum(
            len(path.read_text().splitlines())
            for path in files_of(part)
            if str(path.relative_to(ROOT)) not in part.get("excluded-modules", ())
        )
        for name, part in parts.items()
    }
    rows = []
    for name, config in parts.items():
        session = FOLDER / "drawn" / name / "session.sqlite"
        start(session.parent, config, "")
        choose(session, ["*"], math.ceil(number * lines[name] / sum(lines.values())), seed)
        with use_db(session) as db:
            mutations = [mutation for item in db.pending_work_items for mutation in item.mutations]
        for mutation in sorted(mutations, key=str):
            line, mutant, nth = change(mutation)
            row = {"part": name, "module": str(mutation.module_path), "at": mutation.start_pos}
            row |= {"operator": mutation.operator_name.removeprefix("core/")}
            row |= {"occurrence": mutation.occurrence, "line": line, "mutant": mutant, "nth": nth}
            if is_program(mutated((ROOT / row["module"]).read_text(), row)):
                rows.append(row | {"killed_by": None})
    write({"commit": git("rev-parse", "HEAD").strip(), "seed": seed, "mutants": rows})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="", help="only lines that differ from this commit")
    parser.add_argument("--modules", nargs="*", default=["*"], help="only these; patterns of paths")
    parser.add_argument("--sample", type=int, help="only so many of each part, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--draw", type=int, help="draw so many for sample.json, and run none")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where to write the counts")
    parser.add_argument("--resume", action="store_true", help="go on where the last run ended")
    args = parser.parse_args()
    if args.draw:
        return draw(read_parts(), args.draw, args.seed)
    sessions = []
    for name, config in read_parts().items():
        names = [str(path.relative_to(ROOT)) for path in files_of(config)]
        if not any(fnmatch.filter(names, pattern) for pattern in args.modules):
            continue
        folder = FOLDER / ("changed" if args.base else "all") / name
        session, stamp = folder / "session.sqlite", folder / "sources"
        if not (args.resume and stamp.exists() and stamp.read_text() == digest(config)):
            start(folder, config, args.base)
            choose(session, args.modules, args.sample, args.seed)
            stamp.write_text(digest(config))
        execute(folder, config["tests"], args.workers)
        sessions.append(session)
    survivors, counts = print_survivors(sessions), count(sessions)
    old = list(outdated(json.loads(LIST.read_text())))
    for row in old:
        print(f"listed, but no longer there: {row}")
    print({name: number for name, number in counts.items() if name != "files"})
    if args.json:
        args.json.write_text(json.dumps(counts, indent=1) + "\n")
    sys.exit(bool(survivors or old))


if __name__ == "__main__":
    main()
