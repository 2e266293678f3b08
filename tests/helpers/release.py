"""Tries the wheel in dist/ as a user gets it, before a release: `make release-check`, and CI.

It is installed in an empty environment, first without extras, where the README's program has to run
and the command has to say what it lacks, then with `mpjax[cli]`, where `mpjax doctor` has to pass.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
LACKING = "pip install 'mpjax[cli]'"
# Every public name that needs no extra, from its public module.
NAMES = """
import importlib, pkgutil
import mpjax
for module in ("mpjax", *(f"mpjax.{m.name}" for m in pkgutil.iter_modules(mpjax.__path__))):
    if module.rpartition(".")[2] not in ("keras", "_src", "__main__"):
        module = importlib.import_module(module)
        for name in getattr(module, "__all__", ()):
            getattr(module, name)
print(mpjax.__version__)
"""


def version() -> str:
    """Returns the version that the source names."""
    text = (ROOT / "mpjax" / "__init__.py").read_text()
    return re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)[0]


def program() -> str:
    """Returns the first program of the README."""
    text = (ROOT / "README.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]


def undone(named: str) -> list[str]:
    """Returns what is left to do in the source before a version is tagged."""
    left = []
    changelog = (ROOT / "CHANGELOG.md").read_text()
    entry, when = re.findall(r"^## \[(.*)\] - (.*)$", changelog, re.MULTILINE)[0]
    if entry != named:
        left.append(f"CHANGELOG.md begins with {entry}, not with {named}")
    dated = re.fullmatch(r"\d{4}-\d\d-\d\d", when)
    if not dated:
        left.append(f"CHANGELOG.md says {when!r} where the date of {entry} belongs")
    citation = (ROOT / "CITATION.cff").read_text()
    if f"\nversion: {named}\n" not in citation:
        left.append(f"CITATION.cff does not name version {named}")
    if not dated or f"\ndate-released: {when}\n" not in citation:
        left.append(f"CITATION.cff lacks date-released: {when if dated else 'YYYY-MM-DD'}")
    return left


class Tried:
    """An environment, and the steps that were taken in it, with their times."""

    def __init__(self, folder: Path):
        self.folder, self.bin = folder, folder / "empty" / "bin"
        # What lies outside of the environment would hide what it lacks.
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        venv.create(folder / "empty", with_pip=True)

    def run(self, step: str, *command: str, status: int = 0) -> str:
        """Runs a command of the environment, and returns what it prints, or ends the program."""
        begun = time.monotonic()
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(f"{time.monotonic() - begun:7.1f} s  {step}", flush=True)
        if done.returncode != status:
            sys.exit(f"{step}: exit status {done.returncode} instead of {status}.\n{done.stdout}")
        return done.stdout

    def install(self, what: str) -> None:
        """Installs a requirement."""
        self.run(f"pip install {what}", "python", "-m", "pip", "install", "--quiet", what)


def check(wheel: Path, named: str, folder: Path) -> None:
    """Tries a wheel in an environment without extras, and then in one with the command."""
    tried = Tried(folder)
    tried.install(str(wheel))
    lines = tried.run("every public name is imported", "python", "-I", "-c", NAMES).splitlines()
    if lines[-1] != named:
        sys.exit(f"the wheel has version {lines[-1]}, the source {named}.")
    (folder / "program.py").write_text(program())
    tried.run("the README's program runs", "python", "-I", "program.py")
    tried.run("the program of jmp's users imports", "python", "-I", "-c", "import mpjax.jmp as jmp")
    said = tried.run("mpjax --version, without the extra", "mpjax", "--version", status=2)
    if LACKING not in said or "Traceback" in said:
        sys.exit(f"the command does not say what it lacks:\n{said}")
    tried.install(f"{wheel}[cli]")
    said = tried.run("mpjax --version", "mpjax", "--version")
    if said.strip() != f"mpjax {named}":
        sys.exit(f"mpjax --version prints {said!r}.")
    print(tried.run("mpjax doctor", "mpjax", "doctor"))


def main() -> None:
    """Tries the wheel, and says what is left before the tag; with --tag, refuses what is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tag", default="", help="the tag that is released, such as v1.0.0rc1")
    tag = parser.parse_args().tag
    named = version()
    left = undone(named)
    if tag and tag != f"v{named}":
        left.append(f"the tag {tag} is not v{named}, of the version in mpjax/__init__.py")
    if tag and left:
        sys.exit("\n".join(left))
    floors = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    print(f"mpjax {named}, Python {sys.version.split()[0]} (needs {floors})")
    wheels = [*(ROOT / "dist").glob(f"mpjax-{named}-*.whl")]
    if len(wheels) != 1:
        sys.exit(f"dist/ has {len(wheels)} wheels of mpjax {named}: run make build first.")
    with tempfile.TemporaryDirectory() as folder:
        check(wheels[0], named, Path(folder))
    for each in left:
        print(f"to do before the tag: {each}")
    print(f"The wheel works. The tag of this version is v{named}.")


if __name__ == "__main__":
    main()
