"""Runs the quick tier on fresh seeds under each instruction set: no test may fail in any run.

XLA fuses and vectorizes a program in another way on another processor, so a test that compares two
programs bit for bit, or with too small a tolerance, fails on some machines and for some inputs.
The first seed runs every test, the others those that draw: elsewhere a seed changes nothing. What
each run printed lies in a folder of the commit; a run that is there is not repeated. Under SSE4.2,
where XLA has no float16, the tests that need it are skipped.
"""

import argparse
import collections
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / ".flaky"
# Each contains the one before. "default" is what XLA chooses for this processor.
SETS = {"SSE4_2": "sse4_2", "AVX2": "avx2", "AVX512": "avx512f", "default": ""}
FAILED = re.compile(r"^(?:FAILED|ERROR) ([^\[\n]+?(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)


def available():
    """Returns the instruction sets that this processor has."""
    processor = Path("/proc/cpuinfo")
    flags = processor.read_text().split() if processor.exists() else []
    return [name for name, flag in SETS.items() if not flag or flag in flags]


def run(instructions, seed, workers, paths, folder):
    """Returns the tests that fail under an instruction set for a seed."""
    printed = folder / f"{instructions}-{seed}.txt"
    if not printed.exists():
        flag = "" if instructions == "default" else f"--xla_cpu_max_isa={instructions}"
        env = {**os.environ, "SEED": str(seed), "XLA_FLAGS": flag}
        command = [sys.executable, "-m", "pytest", "-n", workers, "--dist", "worksteal", *paths]
        command += ["--drawing"] * (seed > 1)
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            sys.exit(f"{done.stdout}{done.stderr}\npytest ended with {done.returncode}")
        printed.write_text(done.stdout)
    return FAILED.findall(printed.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", help="only these tests")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--workers", default="2")
    parser.add_argument("--sets", nargs="*", choices=SETS, default=available())
    args = parser.parse_args()
    rev = ["git", "rev-parse", "--short", "HEAD"]
    folder = FOLDER / subprocess.run(rev, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    folder.mkdir(parents=True, exist_ok=True)
    failures = collections.defaultdict(list)
    for seed in range(1, args.seeds + 1):
        for name in args.sets:
            failed = run(name, seed, args.workers, args.paths, folder)
            print(f"{name:8} SEED={seed}: {len(failed)} failed", flush=True)
            for test in failed:
                failures[test].append(f"{name} {seed}")
    for test, runs in sorted(failures.items()):
        print(f"{test}\n    {', '.join(runs)}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
