"""The wheel and the sdist contain all files that they need, and no others."""

import itertools
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from house import imports

import mpjax

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"mpjax-{mpjax.__version__}"
LARGEST = 3_300_000  # bytes of an sdist: half are tests; it has no business to be larger


@pytest.fixture(scope="module")
def tracked():
    """The files that git knows of, and that are there."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")))
    with zipfile.ZipFile(path) as file:
        yield file


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    (path,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("sdist")))
    with tarfile.open(path) as file:
        yield file


def test_the_wheel_is_the_package_and_its_metadata(wheel, tracked):
    about = f"{NAME}.dist-info"
    metadata = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    package = {name for name in tracked if name.startswith("mpjax/")}
    assert set(wheel.namelist()) == package | {f"{about}/{name}" for name in metadata}
    needed = {
        "mpjax/py.typed",
        "mpjax/__init__.pyi",
        "mpjax/_src/tools/document/templates/page.html.jinja",
    }
    assert needed <= package


def test_the_metadata_says_what_the_project_says(wheel):
    metadata = message_from_bytes(wheel.read(f"{NAME}.dist-info/METADATA"))
    assert metadata["Version"] == mpjax.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    script = wheel.read(f"{NAME}.dist-info/entry_points.txt").decode()
    assert "mpjax = mpjax._src.tools.cli.start:main" in script


def test_the_sdist_is_what_git_tracks_but_for_the_code_host(sdist, tracked):
    names = {name.removeprefix(f"{NAME}/") for name in sdist.getnames()}
    left_out = {name for name in tracked if name.startswith((".ci/", ".github/"))}
    assert names - {"PKG-INFO"} == tracked - left_out


def test_the_sdist_is_small(sdist):
    assert Path(sdist.name).stat().st_size < LARGEST


def test_every_dependency_is_imported():
    imported = {
        name.partition(".")[0] for path in (ROOT / "mpjax").rglob("*.py") for name in imports(path)
    }
    needed = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in PROJECT["dependencies"]}
    assert needed <= imported


def test_every_import_is_of_a_dependency_or_of_an_extra():
    """What a user has not installed is imported in a function, which says how to install it."""
    lines = itertools.chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    listed = {re.match(r"[\w-]+", line)[0].lower().replace("-", "_") for line in lines}
    renamed = {"orbax": "orbax_checkpoint"}
    with_jax = {"jaxlib", "numpy", "ml_dtypes"}
    with_orbax = {"tensorstore"}
    with_notebooks = {"IPython"}
    known = {"mpjax", *listed, *with_jax, *with_orbax, *with_notebooks, *sys.stdlib_module_names}
    for path in (ROOT / "mpjax").rglob("*.py"):
        for name in imports(path):
            root = name.partition(".")[0]
            assert renamed.get(root, root) in known, f"{path} imports {name}"


def test_every_dependency_has_a_floor():
    floored = [*PROJECT["dependencies"]]
    for extra in ("cli", "plot", "html", "checkpoint", "safetensors", "keras"):
        floored += PROJECT["optional-dependencies"][extra]
    assert all(">=" in requirement for requirement in floored)
