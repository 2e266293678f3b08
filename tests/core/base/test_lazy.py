"""Public modules find their names in their stubs, when they are first asked for."""

import importlib
import subprocess
import sys
import types

import pytest
from support import thorough_but

import mpjax
from mpjax._src.core.base.lazy import attach

STUB = """
from . import optim as optim
from ._src.core.base.lines import short, where

__all__ = ["short", "where"]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "place.pyi").write_text(STUB)
    module = types.ModuleType("place")
    module.__getattr__, module.__dir__, module.__all__ = attach("place", tmp_path / "place.py")
    monkeypatch.setitem(sys.modules, "place", module)
    return module


def test_lazy_name_comes_from_where_the_stub_says(module):
    lines = importlib.import_module("mpjax._src.core.base.lines")
    assert "short" not in vars(module)
    assert module.short is lines.short is vars(module)["short"]
    assert module.optim is importlib.import_module("mpjax.optim")


def test_lazy_modules_are_listed_but_no_part_of_a_star_import(module):
    assert module.__all__ == ["short", "where"] and dir(module) == ["optim", "short", "where"]
    exec("from place import *", names := {})
    assert {"short", "where"} <= {*names} and "optim" not in names


@pytest.mark.thorough
def test_modules_that_need_an_extra_are_imported_when_they_are_asked_for():
    code = (
        "import sys, mpjax; assert 'keras' not in {*sys.modules, *dir(mpjax)};"
        "assert mpjax.keras.mixed_precision.__name__ == 'mixed_precision'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute '__main__'"):
        mpjax.__main__  # noqa: B018  (it would run the command line)


BEFORE = """
import importlib.util, sys, mpjax
assert "jax" not in sys.modules and importlib.util.find_spec("jax")
contexts = "mpjax._src.core.base.contexts"
{imported}
assert contexts in sys.modules, "a context that is created later changes the key of each program"
import jax
f = jax.jit(lambda x: x + 1)
f(1.0)
[getattr(m, name) for m in (mpjax, mpjax.optim, mpjax.debug) for name in m.__all__]
f(1.0)
assert f._cache_size() == 1, "compiled again"
assert not any(type(each).__name__ == "WithJax" for each in sys.meta_path)
"""


WAYS = ("import jax", "from jax import numpy", "import jax.core", "mpjax.autocast")


@pytest.mark.parametrize("imported", thorough_but(WAYS, "from jax import numpy"))
def test_contexts_are_created_with_jax_where_mpjax_is_imported_first(imported):
    code = BEFORE.format(imported=imported)
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.parametrize("name", ["shorts", "with_master_weights"])
def test_lazy_module_refuses_missing_names_that_mpjax_had(module, name):
    with pytest.raises(AttributeError, match=f"module 'place' has no attribute '{name}'"):
        getattr(module, name)
    with pytest.raises(AttributeError, match="Did you mean 'short'"):
        module.shorts  # noqa: B018
