"""Other libraries' test suites as ours: every function that they differentiate is planned.

As a pytest plugin, it wraps each function given to `jax.grad`, `jax.value_and_grad`, `jax.vjp`,
`jax.jvp`, `jax.linearize`, `jax.jacfwd` and `jax.jacrev` in `mpjax.autocast` with the policy in
STRANGERS_POLICY. "jit", the control, wraps it in `jax.jit` instead, because some tests look at
tracers and fail under any wrapper.

    STRANGERS_POLICY=float32 python -m pytest -p strangers their_test.py

As a program, it runs the suites of `strangers.toml`, each file under each policy in a process of
its own, and reports the tests that pass under the control alone. `float32` has to change nothing.
Under a 16-bit policy, tolerances may break; an error of another type is a finding. A policy leaves
float64 alone, so suites that turn it on (`float64 = true`) run a second time with it kept off.

    python tests/helpers/strangers.py          # all; resumes after an interruption
    python tests/helpers/strangers.py optax --policies jit float32
    python tests/helpers/strangers.py --part   # the files that installed packages contain, anew
    python tests/helpers/strangers.py equinox --judge  # gradients of tests whose tolerances break
    python tests/helpers/strangers.py diffrax --files test_adjoint --float64 off

To judge, the tests run again, with STRANGERS_JUDGED: each function is differentiated three times,
planned, with its matmuls rounded by hand, and in float32, and `measure` compares the errors. The
tests that could not be judged are named: a function that changes a state gives each way another
result, and one with a derivative rule may have no derivative without it.

The sources, at their pinned commits, and the results are in `.strangers`.
"""

import argparse
import copy
import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HELPERS = Path(__file__).parent
TESTS = HELPERS.parent
SUITES = tomllib.loads((TESTS / "strangers.toml").read_text())
HOME = TESTS.parent / ".strangers"
CONTROL = "jit"
POLICIES = (CONTROL, "float32", "mixed_bfloat16", "mixed_float16")
TRANSFORMATIONS = ("grad", "value_and_grad", "vjp", "jvp", "linearize", "jacfwd", "jacrev")
# How the errors of tests that compare numbers begin.
TOLERANCE = ("AssertionError", "assert False", "assert Array(False")


# ---- the plugin ----------------------------------------------------------------------------------


def in_jit(run, found, arrays):
    import jax

    return jax.jit(run)(arrays)


def compiled(fun, execute=in_jit):
    """Returns a function that runs in a `jax.jit`, with arguments and results of any type.

    Its part on arrays is run by ``execute``, which gets a function of a list of arrays, the list
    into which this function puts what else it returns, and the arrays.
    """
    import jax
    import numpy as np

    def is_array(x):
        return isinstance(x, jax.Array | np.ndarray | np.generic)

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        traced = [is_array(x) for x in leaves]
        found = []

        def run(arrays):
            given = iter(arrays)
            whole = [next(given) if yes else x for x, yes in zip(leaves, traced, strict=True)]
            args, kwargs = jax.tree.unflatten(tree, whole)
            results, out_tree = jax.tree.flatten(fun(*args, **kwargs))
            found[:] = [out_tree, [None if is_array(x) else (x,) for x in results]]
            return [x for x in results if is_array(x)]

        given = [x for x, yes in zip(leaves, traced, strict=True) if yes]
        arrays = iter(execute(run, found, given))
        out_tree, others = found
        return jax.tree.unflatten(out_tree, [next(arrays) if o is None else o[0] for o in others])

    return wrapped


def around(policy):
    """Returns what wraps a function under a policy or under the control."""
    if policy == CONTROL:
        return compiled
    import mpjax

    return functools.partial(mpjax.autocast, policy=policy)


def planning(transform, wrap, judge=None):
    """Returns a transformation of JAX that wraps the function that it differentiates.

    What mpjax itself differentiates is not planned again. A judge compares the transformed ways in
    which it runs the function.
    """

    @functools.wraps(transform)
    def wrapped(fun, *args, **kwargs):
        ours = sys._getframe(1).f_globals.get("__name__", "").startswith("mpjax.")
        if ours or not callable(fun):
            return transform(fun, *args, **kwargs)
        if judge is None:
            return transform(wrap(fun), *args, **kwargs)
        own = copy.copy(judge)  # each function has effects of its own
        ways = [functools.partial(transform, way, *args, **kwargs) for way in own.ways(fun, wrap)]
        return own(transform.__name__, own.each(ways))

    return wrapped


class Judge:
    """Writes the errors of planned derivatives beside those of matmuls rounded by hand."""

    def __init__(self, half, place):
        self.half, self.place = half, place
        self.changes = set()  # the effects of a function by which each way finds another state

    def ways(self, fun, wrap):
        """Returns a function as planned, as rounded by hand, and as it is.

        It is traced by the first way alone, because it may change a state, such as a random key.
        """
        import jax.extend
        import measure

        kept = []

        def first(run, found, arrays):
            kept[:] = jax.make_jaxpr(run)(arrays), found
            names = {type(effect).__name__ for effect in kept[0].effects}
            self.changes = names - {"DebugEffect", "OrderedDebugEffect"}  # these only tell
            return later(wrap, run, found, arrays)

        def later(way, run, found, arrays):
            found[:] = kept[1]
            return way(jax.extend.core.jaxpr_as_fun(kept[0]))(*arrays)

        ways = functools.partial(measure.rounded_matmuls, half=self.half), jax.jit
        return [compiled(fun, first), *(compiled(fun, functools.partial(later, w)) for w in ways)]

    def __call__(self, name, made):
        """Returns the first of what a transformation made of each way, once it is compared."""
        if len(made) == 1:
            return made[0]
        if name == "jvp":
            return self.compared(made)
        if name in ("vjp", "linearize"):
            results, backs, *aux = zip(*made, strict=True)
            return self.compared(results), self.called(backs), *(x[0] for x in aux)
        return self.called(made)

    def called(self, ways):
        def run(*args, **kwargs):
            return self.compared(self.each([functools.partial(w, *args, **kwargs) for w in ways]))

        return run

    def each(self, runs):
        """Returns the result of each way, or of the first alone if another one raises.

        Rounding by hand runs a function with a derivative rule as it is, without its rule.
        """
        first, *others = runs
        results = [first()]
        try:
            results += [run() for run in others]
        except Exception as error:
            self.silent(f"rounded by hand, a function raises {type(error).__name__}")
        return results

    def compared(self, results):
        import jax

        if self.changes:
            self.silent(f"a function has effects ({', '.join(sorted(self.changes))})")
        elif len(results) > 1:
            tell = functools.partial(self.tell, current_test())
            jax.debug.callback(tell, *map(arrays_of, results))
        return results[0]

    def silent(self, reason):
        """Notes that a function of this test is not judged."""
        with open(self.place, "a") as out:
            print(json.dumps([current_test(), None, reason]), file=out)

    def tell(self, test, *ways):
        import measure
        import numpy as np

        auto, hand, truth = ({k: np.asarray(x) for k, x in way.items()} for way in ways)
        rows = measure._rows("gradient", self.half, truth, hand, auto)
        with open(self.place, "a") as out:
            for row in rows:
                share = row.autocast / row.bound if not row.nonfinite else float("inf")
                print(json.dumps([test, share, str(row)]), file=out)


def current_test():
    return os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]


def arrays_of(tree):
    """Returns the inexact arrays of a tree by their paths."""
    import jax
    import jax.numpy as jnp

    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    found = {jax.tree_util.keystr(path): x for path, x in pairs if isinstance(x, jax.Array)}
    return {path: x for path, x in found.items() if jnp.issubdtype(x.dtype, jnp.inexact)}


def without_float64():
    """Keeps float64 off, whatever tests ask for."""
    import jax

    update = jax.config.update
    jax.config.update = lambda name, value: name == "jax_enable_x64" or update(name, value)


def install(policy, judged=None):
    """Wraps the public transformations, before a library imports them by name."""
    import jax

    wrap = around(policy)
    judge = Judge(policy.removeprefix("mixed_"), judged) if judged else None
    for name in TRANSFORMATIONS:
        setattr(jax, name, planning(getattr(jax, name), wrap, judge))


if "STRANGERS_POLICY" in os.environ and __name__ != "__main__":
    install(os.environ["STRANGERS_POLICY"], os.environ.get("STRANGERS_JUDGED"))
    if os.environ.get("STRANGERS_FLOAT64") == "off":
        without_float64()


# ---- the program ---------------------------------------------------------------------------------


def source(name, suite):
    """Returns the folder of a suite's pinned sources, which are fetched if they are absent."""
    if "sdist" in suite:
        folder = HOME / suite["sdist"].replace("==", "-")
        fetch = unpack
    else:
        folder = HOME / f"{name}-{suite['commit'][:12]}"
        fetch = check_out
    if not folder.exists():
        partly = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(partly, ignore_errors=True)
        partly.mkdir(parents=True)
        fetch(suite, partly).rename(folder)
        shutil.rmtree(partly, ignore_errors=True)
    return folder


def check_out(suite, folder):
    """Checks out a suite's repository at its commit in a folder, and returns the folder."""
    for command in (
        ["init", "-q"],
        ["fetch", "-q", "--depth=1", suite["repository"], suite["commit"]],
        ["checkout", "-q", suite["commit"]],
    ):
        subprocess.run(["git", "-C", str(folder), *command], check=True)
    return folder


def unpack(suite, folder):
    """Unpacks a suite's source distribution in a folder, and returns its own folder there."""
    name = suite["sdist"].partition("==")[0]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        f"--no-binary={name}",
    ]
    subprocess.run([*command, "--dest", str(folder), suite["sdist"]], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    archive.unlink()
    (inner,) = folder.iterdir()
    return inner


def packages(suite):
    """Installs what a suite needs beyond the development packages, in a folder of its own."""
    folder = HOME / "packages"
    for package in suite.get("requires", ()):
        done = folder / f"{package}.installed"
        if not done.exists():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*command, "--target", str(folder), package], check=True)
            done.touch()
    return folder


def run(folder, file, policy, suite, report, judged=None, only=None):
    """Runs one file of a suite in a process of its own: returns the outcome of each test.

    ``only`` is pytest's expression of the tests to run, among those of the suite.
    """
    beside = [source(name, SUITES[name]) for name in suite.get("beside", ())]
    root = folder / suite.get("root", "")
    paths = [str(x) for x in (root, folder, *beside, HELPERS, TESTS.parent, packages(suite))]
    env = {**os.environ, "STRANGERS_POLICY": policy, "PYTHONPATH": os.pathsep.join(paths)}
    env |= {"STRANGERS_FLOAT64": "off"} if suite.get("float64") is False else {}
    env |= {"STRANGERS_JUDGED": str(judged)} if judged else {}
    skipped = [f"--deselect={file}::{test}" for test in suite.get("skip", {}).get(file, ())]
    only = [f"({some})" for some in (suite.get("only", {}).get(file), only) if some]
    skipped += ["-k", " and ".join(only)] if only else []
    options = ["-c", os.devnull, f"--rootdir={folder}", "-p", "strangers", "-q", "--tb=short"]
    options += ["-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *skipped, file],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=suite.get("timeout", 1800),
    )
    if not report.exists() or done.returncode > 1:  # no tests, or an error outside of them
        return {"(the run)": f"crash: {(done.stdout + done.stderr)[-500:]}"}
    return outcomes(report)


def outcomes(report):
    """Returns "passed", "skipped" or the error of each test in a JUnit report."""
    found = {}
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = next((x for x in case if x.tag in ("failure", "error")), None)
        if bad is not None:
            found[name] = " ".join((bad.get("message") or "").split())[:300] or bad.tag
        else:
            found[name] = "skipped" if case.find("skipped") is not None else "passed"
    return found


def judgments(folder, file, policy, suite, place, tests):
    """Returns the worst error of each test's gradients, as a share of its bound, and its words.

    Also returns why a test was not judged, or not as a whole.
    """
    place.unlink(missing_ok=True)
    only = " or ".join(sorted({test.rpartition("::")[2].partition("[")[0] for test in tests}))
    run(folder, file, policy, suite, place.with_suffix(".xml"), place, only)
    worst, silent = {}, {}
    for line in place.read_text().splitlines() if place.exists() else ():
        test, share, words = json.loads(line)
        if share is None:
            silent[test] = words
        else:
            worst[test] = max(worst.get(test, (0.0, "")), (share, words))
    seen = {test.rpartition("::")[2] for test in (*worst, *silent)}
    nothing = {test for test in tests if test.rpartition("::")[2] not in seen}
    return worst, silent | dict.fromkeys(nothing, "no derivative of an array")


def differences(control, other):
    """Returns the tests that pass under the control and not otherwise, with their errors.

    Of tests that compare numbers and fail under the control too, it returns errors of another type.
    """
    apart = {n: other.get(n, "absent") for n, o in control.items() if other.get(n) != "passed"}
    return {
        name: error
        for name, error in apart.items()
        if control[name] == "passed"
        or (control[name].startswith(TOLERANCE) and not error.startswith(TOLERANCE))
    }


def outcomes_of(file, policies, places, folder, suite, workers):
    """Returns the outcomes of a file's tests under each policy: those stored, or of a new run."""

    def outcome(policy):
        place = places / f"{file.replace('/', '.')}-{policy}.json"
        if not place.exists():
            report = place.with_suffix(".xml")
            report.unlink(missing_ok=True)
            place.write_text(json.dumps(run(folder, file, policy, suite, report), indent=1))
        return json.loads(place.read_text())

    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(policies, pool.map(outcome, policies), strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suites", nargs="*", metavar="suite", help="all if none is named")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--part", action="store_true", help="only files of installed packages")
    parser.add_argument("--judge", action="store_true", help="compare gradients with casts by hand")
    parser.add_argument(
        "--files", default="", metavar="TEXT", help="only files with TEXT in the name"
    )
    parser.add_argument(
        "--float64", choices=["on", "off"], help="only this way, of suites with both"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    options = parser.parse_args()
    if unknown := {*options.suites} - {*SUITES}:
        parser.error(f"Unknown suites {sorted(unknown)}. Choose from {sorted(SUITES)}.")
    policies = [*dict.fromkeys((CONTROL, *options.policies))]
    changed = 0
    for name, suite in runs(options.suites or SUITES, options.float64):
        if options.part:
            folder, files = Path(sysconfig.get_path("purelib")), suite.get("installed", ())
            places = HOME / "part" / name
            shutil.rmtree(places, ignore_errors=True)
        else:
            folder, files = source(name, suite), suite["files"]
            places = HOME / "results" / f"{folder.name}{suite['way']}"
        places.mkdir(parents=True, exist_ok=True)
        for file in (file for file in files if options.files in file):
            found = outcomes_of(file, policies, places, folder, suite, options.workers)
            known = suite.get("control", ()) if suite["float64"] else None
            changed += tell(f"{name}{suite['way']}", file, found, known)
            for policy in policies[1:] if options.judge else ():
                broken = tolerances(found, policy)
                place = places / f"{file.replace('/', '.')}-{policy}.judged"
                if broken:
                    tell_judged(policy, *judgments(folder, file, policy, suite, place, broken))
    sys.exit(changed > 0)


def runs(names, float64=None):
    """Yields each suite, twice if its tests turn float64 on: with it, and with it kept off."""
    for name in names:
        suite = SUITES[name]
        for on in (True, False) if suite.get("float64") else (True,):
            if float64 is None or not suite.get("float64") or on == (float64 == "on"):
                yield name, {**suite, "float64": on, "way": "" if on else "-float64-off"}


def tell_judged(policy, worst, silent):
    """Prints the worst error of each test, and which tests were not judged."""
    for test, (share, words) in sorted(worst.items(), key=lambda row: -row[1][0]):
        print(f"  {policy}: {share:.2f} of the bound: {test}: {words}", flush=True)
    for test, reason in sorted(silent.items()):
        print(f"  {policy}: not judged: {test}: {reason}", flush=True)


def tolerances(found, policy):
    """Returns the tests of which a 16-bit policy breaks a tolerance."""
    apart = differences(found[CONTROL], found[policy])
    return {n for n, o in apart.items() if o.startswith(TOLERANCE) and policy != "float32"}


def tell(name, file, found, known=()):
    """Prints what differs from the control; returns how many findings there are.

    The ``known`` tests, which fail under any wrapper, are left out. If it is None, tests fail
    because float64 is off, and only their number is told.
    """
    control, findings = found[CONTROL], 0
    passed = sum(outcome == "passed" for outcome in control.values())
    if not passed:
        sys.exit(f"{name} {file}: no test passes under {CONTROL}: {[*control.values()][:1]}")
    print(f"{name} {file}: {passed} of {len(control)} pass under {CONTROL}", flush=True)
    failed = sorted(n for n, o in control.items() if o not in ("passed", "skipped"))
    if known is None:
        known = ()
        print(f"  {CONTROL}: {len(failed)} fail without float64")
    else:
        failed = [n for n in failed if n.rpartition("::")[2] not in known]
        print(*(f"  {CONTROL}: {test}: {control[test][:120]}\n" for test in failed), sep="", end="")
    for policy in found:
        apart = differences(control, found[policy])
        apart = {n: error for n, error in apart.items() if n.rpartition("::")[2] not in known}
        numbers = tolerances(found, policy) & {*apart}
        findings += len(apart) - len(numbers)
        print(f"  {policy}: {len(numbers)} tolerances, {len(apart) - len(numbers)} findings")
        for test in sorted({*apart} - numbers):
            print(f"    {test}: {apart[test][:200]}")
    return findings


if __name__ == "__main__":
    main()
