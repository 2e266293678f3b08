"""Runs a code base's training script, alone and under mpjax, in an environment of its own."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.results import FAILED, SKIPPED, Row

HERE = Path(__file__).parent
TREE = HERE.parent.parent
SCRIPTS = HERE / "scripts"
TIMEOUT = 1800
# How a script prints what is compared, unless `bases.toml` says otherwise: "loss 0.25".
LOSS = r"\bloss\b\D{0,3}([-+\d.e]+|nan|inf)"
# What compiles for an absent GPU, in the version of jaxlib: no CUDA, no driver.
COMPILERS = ("jax-cuda12-plugin=={0}", "jax-cuda12-pjrt=={0}", "nvidia-cuda-nvcc-cu12")
# How a survey's notes of the compiled steps begin; other notes name files of this machine.
COMPILED = "for h100"
# The file that mpjax writes where the script runs.
REPORT = "report.json"

Base = dict[str, Any]


class Absent(Exception):
    """What a code base needs is not on this machine."""


class Failed(Exception):
    """A script or an installation failed."""


def measured(case: str, base: Base, way: str, home: Path) -> Row:
    """Returns the figures of a script in one way, or why there are none."""
    try:
        python = environment(case, base, home)
        survey = way.startswith("survey")
        script = command(case, base, home, own=way.endswith("own"))
        if survey:
            return survey_figures(case, base, python, script, home, way.endswith("own"))
        policy = way.removeprefix("run ") if way.startswith("run ") else None
        ours = ["-m", "mpjax", "run", "--policy", policy, "--report", REPORT] if policy else []
        return run_figures(base, executed(case, base, python, [*ours, *script], home))
    except Absent as absent:
        return {SKIPPED: str(absent)}
    except Failed as failed:
        return {FAILED: str(failed)}


# ---- what a code base needs ----------------------------------------------------------------------


def environment(case: str, base: Base, home: Path) -> Path:
    """Returns the Python of a code base's environment, which is made if it is absent."""
    wanted = [f"{name}=={jax_of(base)}" for name in ("jax", "jaxlib")] + base["packages"]
    key = "\n".join([base.get("python", sys.version), *wanted, *base.get("alone", ())])
    name = hashlib.sha256(key.encode()).hexdigest()[:8]
    folder = home / "environments" / f"{base.get('shares', case)}-{name}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        done([interpreter(base), "-m", "venv", str(folder)])
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        done([*pip, "--editable", f"{TREE}[cli]", *wanted])
        if base.get("alone"):  # whose other requirements contradict these, or are of no use here
            done([*pip, "--no-deps", *base["alone"]])
        (folder / "ready").touch()
    return python


def interpreter(base: Base) -> str:
    """Returns the Python that makes an environment: a code base may need another than this."""
    if "python" not in base:
        return sys._base_executable
    found = shutil.which(f"python{base['python']}")
    try:
        done([found or "", "-c", ""])  # version managers have names of what is not there
    except (OSError, Failed):
        raise Absent(f"python{base['python']} is not on this machine") from None
    return found


def jax_of(base: Base) -> str:
    """Returns the version of JAX and jaxlib of an environment."""
    return base.get("jax", jax.__version__)


def compilers(base: Base, python: Path, home: Path) -> Path:
    """Returns the folder of the compiler for absent GPUs, which is filled if it is absent."""
    version = base.get("python", f"{sys.version_info[0]}.{sys.version_info[1]}")
    folder = home / f"compilers-{jax_of(base)}-{version}"
    if not (folder / "ready").exists():
        packages = [package.format(jax_of(base)) for package in COMPILERS]
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        done([*pip, str(folder), *packages])
        (folder / "ready").touch()
    return folder


def source(case: str, base: Base, home: Path) -> Path | None:
    """Returns the checkout of a code base that is no package."""
    if "repository" not in base:
        return None
    folder = home / "sources" / f"{base.get('source', case)}-{base['commit'][:12]}"
    if not folder.exists():
        raise Absent(f"{base['repository']} at commit {base['commit']} is not in {folder.parent}")
    return folder


def command(case: str, base: Base, home: Path, own: bool = False) -> list[str]:
    """Returns the script of a code base with its arguments."""
    args = base.get("command", [f"{{scripts}}/train_{case}.py"])
    given = base.get("own", [])
    if isinstance(given, dict):  # values without it and with it, in place of a word
        (word, values), *_ = given.items()
        args = [arg.replace(word, values[own]) for arg in args]
    elif own:
        args = [*args, *given]
    return [arg.format(**folders(case, base, home)) for arg in args]


def folders(case: str, base: Base, home: Path) -> dict[str, Any]:
    """Returns the folders that commands and paths name."""
    known = {"scripts": SCRIPTS, "shims": HERE / "shims", "sources": home / "sources"}
    return {**known, "source": source(case, base, home)}


# ---- what runs -----------------------------------------------------------------------------------


class Run(NamedTuple):
    """What a finished script printed and read, what mpjax reported of it, and how long it took."""

    out: str
    err: str
    report: dict[str, Any] | None
    seconds: float
    numbers: list[str]


def executed(
    case: str, base: Base, python: Path, args: list[str], home: Path, extra: tuple[Path, ...] = ()
) -> Run:
    """Runs a Python command in an empty folder."""
    paths = ["{shims}/numbers"] if base.get("numbers") else []
    own = [path.format(**folders(case, base, home)) for path in (*paths, *base.get("path", ()))]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "MPJAX_"))}
    env = {
        **kept,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([*own, str(TREE), *map(str, extra)]),
        # A program that is the same in two ways is compiled once.
        "JAX_COMPILATION_CACHE_DIR": str(home / "compiled"),
        **base.get("environment", {}),
    }
    with tempfile.TemporaryDirectory(prefix="mpjax-others-") as folder:
        read = Path(folder) / "numbers.txt"
        env["OTHERS_NUMBERS"] = str(read)
        start = time.monotonic()
        run = done([str(python), *args], env=env, cwd=folder)
        seconds = time.monotonic() - start
        path = Path(folder) / REPORT
        report = json.loads(path.read_text()) if path.exists() else None
        numbers = sorted({*read.read_text().splitlines()}) if read.exists() else []
        return Run(run.stdout, run.stderr, report, seconds, numbers)


def done(command: list[str], **settings: Any) -> subprocess.CompletedProcess:
    """Runs a command to its end.

    Raises:
        Failed: If its exit status is not 0; the message is its last line.
    """
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, **settings)
    except subprocess.TimeoutExpired:
        raise Failed(f"not finished after {TIMEOUT} seconds") from None
    if run.returncode:
        raise Failed(f"exit status {run.returncode}: {why(run.stderr)}")
    return run


def why(err: str) -> str:
    """Returns the line of a traceback that names the error; otherwise, the last line."""
    lines = [line for line in err.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (named or lines or [""])[-1][:300]


# ---- figures -------------------------------------------------------------------------------------


def run_figures(base: Base, run: Run) -> Row:
    """Returns the losses that a script printed, and what `mpjax run` reported of it."""
    losses = re.findall(base.get("loss", LOSS), run.err if base.get("log") else run.out)
    if not losses:
        raise Failed("it printed no loss")
    row: Row = {"losses": losses}
    if run.numbers:
        digest = hashlib.sha256("\n".join(run.numbers).encode()).hexdigest()[:16]
        row |= {"numbers": len(run.numbers), "digest": digest}
    return row if run.report is None else {**row, **report_figures(run.report)}


def report_figures(report: Row) -> Row:
    """Returns what the page needs of the report of `mpjax run`."""
    return {
        "half_flops": report["half_flops"],
        "differentiated": len(report["rows"]),
        "planned": sum(row["planned"] for row in report["rows"]),
        "reasons": sorted({row["reason"] for row in report["rows"] if row["reason"]}),
        "missed": len(report["missed"]),
    }


def survey_figures(
    case: str, base: Base, python: Path, script: list[str], home: Path, own: bool
) -> Row:
    """Returns the figures of a survey's steps by policy."""
    survey = ["-m", "mpjax", "survey", "--target", "h100", "--json", "--no-batch"]
    survey += ["--no-run", "--policy", "float32"] if own else ["--policy", "mixed_bfloat16"]
    survey += base.get("survey", ())
    run = executed(case, base, python, [*survey, *script], home, (compilers(base, python, home),))
    found = json.loads(run.out)
    notes = [note for note in found["not_covered"] if note.startswith(COMPILED)]
    row: Row = {"steps": [step_figures(step) for step in found["steps"]]}
    return {**row, "notes": notes} if notes else row


def step_figures(step: Row) -> Row:
    """Returns what the page needs of a step in a survey's JSON."""
    rows = {}
    for row in step["rows"]:
        known = {key: row[key] for key in ("half_flops", "gradient_error", "notes")}
        kept = {key: value for key, value in known.items() if value not in (None, [])}
        for program in row["programs"]:
            figures = "temp_bytes", "total_bytes", "bytes_accessed", "roofline_ms", "refused"
            kept[program["target"]] = {key: program[key] for key in figures if program[key]}
        rows[row["policy"]] = kept
    found = {key: step[key] for key in ("name", "parameters", "matmul_flops", "notes")}
    return {**found, "rows": rows}


def same(plain: Row, other: Row) -> bool:
    """Returns whether a script printed and read the same values, bit for bit, in two ways."""
    return all(plain[key] == other.get(key) for key in ("losses", "digest") if key in plain)


def problems(cases: dict[str, dict[str, Row]]) -> list[str]:
    """Returns a line for each script whose values differ under `float32`, and each failure."""
    found = []
    for case, rows in cases.items():
        found += [f"{case}, {way}: {row[FAILED]}" for way, row in rows.items() if FAILED in row]
        plain, again = rows.get("float32", {}), rows.get("run float32", {})
        if "losses" in plain and "losses" in again and not same(plain, again):
            found.append(f"{case}: the values differ under mpjax run --policy float32")
    return found
