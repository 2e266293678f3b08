"""Fixtures for all tests, the tiers that they belong to, and the devices on which they run.

A test without a mark is in the quick tier, which `make test` runs before every commit. Tests marked
``thorough`` repeat a statement for further inputs, or need minutes; `make test-all` runs both. Each
test also has a kind, by its file: ``unit``, ``sound``, ``docs`` or ``processes``.
"""

import collections
import ctypes
import functools
import gc
import importlib.metadata
import os
import re
import resource
import sys
import threading
import time
from pathlib import Path

# Several CPU devices for shard_map and pmap. Compilation is fast rather than its code, because
# tests do more of it. No flag may choose other kernels than users have: with one thread for each
# device (xla_cpu_multi_thread_eigen), matmuls that failed for users passed in every test.
FLAGS = ("--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0")
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS))

# The quick tier on its fixed seed chooses those of elementwise operations alone: an earlier part of
# XLA makes them, in a quarter to a half of the time. Matmuls, convolutions and roundings are as for
# users. Runs of the thorough tier or on fresh seeds compile all as users do, and so does JAX from
# 0.11 on, which may no longer have this part.
QUICK = ("--xla_cpu_parallel_codegen_split_count=1", "--xla_cpu_use_fusion_emitters=false")
HAS_QUICK = importlib.metadata.version("jaxlib").startswith("0.10.")

TESTS = Path(__file__).parent

# Programs that an earlier run compiled are read from here, in the tests' own processes too. The
# folder is ignored by git.
RUNS_ON = f"jax-{importlib.metadata.version('jax')}-{sys.implementation.cache_tag}"
if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(TESTS.parent / ".compiled" / RUNS_ON)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import psutil
import pytest
from hypothesis import settings
from jax._src.interpreters import mlir as lowering
from support import chosen_seed, fresh_rng, seed_of_run

from mpjax._src.core.base import rules
from mpjax._src.core.base.called import CALLED, CASTS, SCALES, UNSCALED
from mpjax._src.core.planner import rounding

# Whatever ran before in a worker. Tests of a process that has called nothing ask for
# `nothing_called`.
CALLED.update((CASTS, SCALES, UNSCALED))

# Tracing and compiling make the time of a single example meaningless.
PROFILES = {"quick": 10, "thorough": 50}

# ---- tiers and kinds ----------------------------------------------------------------------------

# The kinds besides ``unit``, by the beginnings of the paths of their files.
KINDS = {
    "sound": (
        "core/autocast/test_sound_",
        "core/autocast/test_autocast_random",
        "core/base/test_rules_",
    ),
    "docs": (
        "site/",
        "test_docs",
        "test_examples",
        "test_coming_from",
        "test_concept_pictures",
    ),
    "processes": (
        "benchmarks/test_main",
        "checkpoint/test_kills",
        "test_canary",
        "test_docker",
        "test_multihost",
        "test_packaging",
    ),
}


def kind_of(path):
    name = path.relative_to(TESTS).as_posix()
    return next((kind for kind, starts in KINDS.items() if name.startswith(starts)), "unit")


def pytest_configure(config):
    quick = re.fullmatch("(.* and )?not thorough", config.option.markexpr)  # and no "or"
    os.environ["SEED"] = str(chosen_seed(bool(quick)))  # workers get it too
    if quick and seed_of_run() == 0 and HAS_QUICK:
        os.environ["XLA_FLAGS"] = " ".join((*QUICK, os.environ["XLA_FLAGS"]))
        lowering.make_ir_context = functools.partial(context_again, lowering.make_ir_context)
    name = "quick" if quick else "thorough"
    settings.register_profile(
        name, deadline=None, max_examples=PROFILES[name], derandomize=seed_of_run() == 0
    )
    settings.load_profile(name)


OWN = threading.local()


def context_again(make):
    """Returns a context for lowering, which several programs of a thread share, as in JAX 0.12.

    To make one takes more time than to lower a small program. After some programs, a new one is
    made: a context keeps their constants.
    """
    OWN.left = getattr(OWN, "left", 0) - 1
    if OWN.left < 0:
        OWN.context, OWN.left = make(), 20
    return OWN.context


def pytest_addoption(parser):
    parser.addoption("--drawing", action="store_true", help="only tests that draw random numbers")


DRAWS = re.compile(r"\brng\b|hypothesis|fresh_rng|seed_of_run")


def pytest_ignore_collect(collection_path, config):
    read = config.option.drawing and collection_path.match("test_*.py")
    return True if read and not DRAWS.search(collection_path.read_text()) else None


def draws(item):
    """Returns whether a seed changes a test, by what it or its module asks for."""
    ways = {"rng", "fresh_rng", "seed_of_run"} & {*item.fixturenames, *vars(item.module)}
    return bool(ways) or hasattr(item.function, "hypothesis")


def pytest_collection_modifyitems(config, items):
    if config.option.drawing:
        items[:] = filter(draws, items)
    for item in items:
        if " at 0x" in item.nodeid:  # another one in each worker
            raise pytest.UsageError(f"The name of {item.nodeid} contains an address.")
        item.add_marker(kind_of(item.path))
    away = {*filter(is_elsewhere, items)}
    config.hook.pytest_deselected(items=[*away])
    items[:] = [item for item in items if item not in away]


def is_elsewhere(item):
    """Returns whether another target runs a test, which has what it needs: it is no skipped one."""
    return any(mark.args[1] for mark in item.iter_markers("elsewhere"))


# What JAX says to a mesh, and to pmap, for which one device, such as a GPU, is too few.
TOO_FEW = re.compile("Number of devices 1 must be|cannot select an axis to squeeze out")
# What XLA raises, and prints, of a cast to float16 on a CPU without its instructions (SSE4.2). The
# error of a module's fixture is printed once, and raised in each test.
NO_FLOAT16 = re.compile("Failed to materialize symbols|Symbols not found: .*__(trunc|extend)")


@functools.cache
def casts_to_float16():
    try:
        return jax.jit(lambda x: x.astype(jax.numpy.float16))(1.0) == 1
    except jax.errors.JaxRuntimeError:
        return False


def reason_to_skip(report):
    """Returns why this device cannot run a test that failed, whatever it tests, or ""."""
    if jax.device_count() == 1 and TOO_FEW.search(report.longreprtext):
        return "needs several devices"
    # The test itself need not see the error: a report says that a step could not run.
    if NO_FLOAT16.search(report.longreprtext + report.capstderr) and not casts_to_float16():
        return "needs a CPU with float16"
    return ""


# ---- what a run costs ---------------------------------------------------------------------------

SLOWEST = 10
peaks: dict[str, str] = {}  # of each worker
spent: collections.Counter[str] = collections.Counter()  # seconds of processor time, by file
own_peak = (0, "")

# A budget of processor time says nothing of another processor, nor of one that others load. So a
# fixed work is timed after every so many tests, relative to what it takes where budgets are from.
# That time is inferred: where the tier took 1.8 times as long, the work took 0.016 s.
PROBED, WORK, REFERENCE = 50, 200_000, 0.009  # seconds
paces: list[float] = []
finished = 0  # tests of this process


def pace():
    """Returns how many times as long as on the machine of the budgets work takes here, now."""
    begun = time.process_time()
    sum(i * i for i in range(WORK))
    return (time.process_time() - begun) / REFERENCE


def at_reference():
    """Returns the seconds that the tests would have taken on the machine of the budgets."""
    mean = sum(paces) / len(paces) if paces else 1.0
    return spent.total() / max(mean, 1.0)


def cpu_seconds():
    """Returns the processor time of this process and of its children: no other load changes it."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def peak():
    """Returns the largest resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    item.stash[STARTED] = cpu_seconds()
    result = yield
    global own_peak
    own_peak = max(own_peak, (peak(), item.nodeid), key=lambda pair: pair[0])
    if resident() > LIMIT:
        free()
    return result


STARTED = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    reason = report.failed and reason_to_skip(report)
    if reason:
        report.outcome, report.longrepr = "skipped", (*item.location[:2], f"Skipped: {reason}")
    if report.when == "teardown":
        report.user_properties.append(("cpu", cpu_seconds() - item.stash[STARTED]))
        global finished
        if finished % PROBED == 0:
            report.user_properties.append(("pace", pace()))
        finished += 1
    return report


def resident():
    """Returns the resident memory of this process, in MB."""
    return psutil.Process().memory_info().rss // 1000**2


def described_peak():
    megabytes, name = own_peak
    return f"{megabytes} MB in {name}"


def pytest_runtest_logreport(report):
    if report.when == "teardown":
        name = report.nodeid.partition("::")[0]
        properties = dict(report.user_properties)
        spent[name] += properties.get("cpu", 0)
        paces.extend([properties["pace"]] if "pace" in properties else [])


def over_budget():
    """Returns whether the tests took more seconds of processor time than BUDGET, if it is set."""
    return at_reference() > float(os.environ.get("BUDGET", "inf"))


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak"] = described_peak()
    elif over_budget():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    if hasattr(node, "workeroutput"):
        peaks[node.gateway.id] = node.workeroutput["peak"]


def pytest_terminal_summary(terminalreporter):
    memory = ", ".join((peaks or {"": described_peak()}).values())
    terminalreporter.section("cost")
    terminalreporter.write_line(f"seed of all random inputs: SEED={seed_of_run()}")
    terminalreporter.write_line(f"peak memory of each worker: {memory}")
    terminalreporter.write_line(
        f"processor time of all tests: {spent.total():.0f} s; {at_reference():.0f} s at the pace "
        "of the machine that budgets are from. Most of it:"
    )
    for name, seconds in spent.most_common(SLOWEST):
        terminalreporter.write_line(f"{seconds:7.1f} s  {name}")
    if over_budget():
        text = f"That is over the budget of {os.environ['BUDGET']} s, so the run fails."
        terminalreporter.write_line(f"{text} CONTRIBUTING.md says what a test may cost.", red=True)


# ---- memory -------------------------------------------------------------------------------------

# A worker that has come to take so much (MB) is freed of its programs after a test. They would be
# most of its memory; freeing them takes a third of a second, and some are compiled again.
LIMIT = 1150
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None

# Tracing makes many objects and few cycles: with Python's own thresholds, a sixth of its time goes
# into looking for them.
gc.set_threshold(50_000, 20, 50)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # modules and tests live to the end: no collection looks at them again


def free():
    jax.clear_caches()
    gc.collect()
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)  # glibc returns nothing to the system of its own accord


# ---- fixtures -----------------------------------------------------------------------------------


# Tests of what is rounded, whose programs are small.
SHOWN_SMALL = ("core/autocast/", "core/planner/", "replacements/", "tools/instruments/test_planned")


@pytest.fixture(autouse=True, scope="module")
def rules_of_traffic_for_small_arrays(request):
    """The rules that spare traffic apply to arrays of any size."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.relative_to(TESTS).as_posix().startswith(SHOWN_SMALL):
            patch.setattr(rounding, "SMALL", 1)
        yield


@pytest.fixture
def strict_promotion():
    """Strict dtype promotion: none of our operations may mix dtypes by accident."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def nothing_called():
    """A process that has called nothing of mpjax yet, as far as warnings know."""
    before = {*CALLED}
    CALLED.clear()
    yield
    CALLED.update(before)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def rng():
    """A generator for the seed of the run, which the head of pytest's output shows."""
    return fresh_rng()


@pytest.fixture
def table():
    """The table of rules, which is restored after a test that adds to it."""
    before = dict(rules.RULES)
    yield rules.RULES
    rules.RULES.clear()
    rules.RULES.update(before)
