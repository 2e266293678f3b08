"""The command line: what it prints, its exit codes, and errors of one line."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from click.testing import CliRunner
from support import thorough_but

import mpjax
from mpjax._src.tools.cli import commands as cli
from mpjax._src.tools.cli import doctor, load
from mpjax._src.tools.hardware.report import MatmulRow

ROOT = Path(__file__).parents[3]

PROGRAM = """
import jax, jax.numpy as jnp

print("a library may print what it likes")

def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["w"])
    return jnp.mean(jnp.matmul(hidden, params["w"], precision="highest"))

def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)

def loss():
    print("and so may a function")
    return loss_fn, ({"w": shape(8, 8)}, shape(2, 8))

def real():
    return loss_fn, [{"w": jnp.full((8, 8), 0.1)}, jnp.ones((2, 8))]

class Config:
    inner = None

Config.inner = Config
Config.loss = staticmethod(loss)

number = 3
def wrong(): return 3
def triple(): return loss_fn, 1, 2
def single(): return loss_fn, shape(2)
def needs(x): return x
def raises(): return [][1]
def quits(): raise SystemExit(3)
def breaks(): return (lambda x: x @ jnp.ones((3, 3))), (shape(4, 4),)
"""
LINE_OF_RAISES = PROGRAM.splitlines().index("def raises(): return [][1]") + 1
LINE_OF_BREAKS = LINE_OF_RAISES + 2


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the user's program, which is the current one."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "syntax.py").write_text("def broken(:\n")
    (tmp_path / "imports.py").write_text("\nimport not_there\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit(2)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # else compile sets it for this whole process
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("program", "syntax", "imports", "script"):
        sys.modules.pop(name, None)


def run(*arguments):
    return CliRunner().invoke(cli.cli, arguments)


def as_json(result):
    """Parses stdout, refusing NaN and Infinity, which are not JSON."""

    def refuse(name):
        raise AssertionError(name)

    return json.loads(result.stdout, parse_constant=refuse)


# ---------------------------------------------------------------- what it is pointed at


@pytest.mark.parametrize(
    "target", ["program:loss", "program.py:loss", "./program.py:loss", "program:Config.inner.loss"]
)
def test_load_takes_each_form_of_target(folder, target):
    fun, args = load.load(target)
    assert fun.__name__ == "loss_fn" and isinstance(args, tuple) and len(args) == 2


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("program", "'program' must be MODULE:FUNCTION, such as train:step"),
        (":loss", "':loss' must be MODULE:FUNCTION"),
        ("nowhere:loss", "there is no module 'nowhere' in"),
        ("program.sub:loss", "there is no module 'program.sub' in"),
        ("nowhere.py:loss", "there is no file 'nowhere.py'"),
        ("imports:f", r"importing imports failed: .*'not_there' \(.*imports.py:2\)"),
        ("imports.py:f", r"importing imports.py failed: .*'not_there' \(.*imports.py:2\)"),
        ("syntax:f", r"importing syntax failed: SyntaxError.*\(.*syntax.py:?,? ?(line )?1\)"),
        ("script:f", "importing script ended the program .*if __name__ == '__main__'"),
        ("program:lost", "program has no 'lost'. Did you mean 'loss'.*FUNCTION takes no arguments"),
        ("program:Config.lost", "program:Config has no 'lost'. Did you mean 'loss'"),
        ("program:number", "program:number is an int, not a function"),
        ("program:needs", "cannot be called without arguments: missing.*'x'"),
        ("program:wrong", r"program:wrong\(\) returned an int. .*returns \(fun, args\)"),
        ("program:triple", "returned a tuple of function, int, int"),
        ("program:single", r"an array for args.*write \(fun, \(argument,\)\)"),
        ("program:raises", rf"IndexError.*\(.*program.py:{LINE_OF_RAISES}\)"),
        ("program:quits", r"program:quits\(\) ended the program"),
        ("program:breaks", rf"explaining .* TypeError.*\(.*program.py:{LINE_OF_BREAKS}\)"),
    ],
)
def test_errors_of_a_target_are_one_line_and_exit_with_2(folder, target, message):
    result = run("explain", target)
    assert result.exit_code == 2 and not result.stdout
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("a library")]
    assert re.search(f"^Error: .*{message}", line), line


def test_traceback_option_shows_the_whole_error(folder):
    result = run("explain", "program:raises", "--traceback")
    assert result.exit_code == 2 and "Traceback" in result.stderr and "IndexError" in result.stderr
    assert "Error: program:raises() failed" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain"], "Missing argument 'TARGET'"),
        (["explain", "program:loss", "--policy", "mixed_f16"], "Did you mean 'mixed_float16'"),
        (["explain", "program:loss", "--argnums", "a"], "'a' must be integers"),
        (["explain", "program:loss", "--argnums", "2"], "no argument 2: fun has 2"),
        (["explain", "program:loss", "--fail-under", "2"], "'--fail-under': 2.0 is not in"),
        (["compare", "program:real", "--plot", "."], "'--plot': File '.' is a directory"),
        (["compile", "program:loss"], "Missing option '--target'"),
        (["compile", "program:loss", "--target", ","], "',' must be names"),
        (["doctors"], "No such command 'doctors'"),
    ],
)
def test_a_wrong_command_line_exits_with_2(folder, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and not result.stdout
    assert message in result.stderr and "Traceback" not in result.stderr


# ---------------------------------------------------------------- explain


def test_explain_prints_totals_and_reasons_in_plain_text(folder):
    result = run("explain", "program:loss", "--rows", "1")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "program:loss under mixed_bfloat16"
    assert lines[1].startswith("50.0% of matmul FLOPs run in bfloat16; ")
    assert "explicit precision" in result.stdout and "16-bit list" in result.stdout
    assert "\x1b" not in result.stdout and "…" not in result.stdout
    assert not any(line.endswith(" ") for line in lines)
    assert "a library may print" in result.stderr and "and so may" in result.stderr


def test_explain_as_json_is_the_report(folder):
    result = run("explain", "program:real", "--json", "--argnums", "0", "--policy", "mixed_float16")
    found = as_json(result)
    fun, args = load.load("program:real")
    report = mpjax.explain(fun, "mixed_float16", 0)(*args)
    assert found["target"] == "program:real" and found["policy"] == "mixed_float16"
    assert found["half_flops"] == report.half_flops and len(found["rows"]) == len(report.rows)
    assert found["stored_before"] == report.stored_before > 0


def test_explain_lists_what_the_error_comes_from(folder):
    data = as_json(run("explain", "program:real", "--errors", "--probes", "2", "--json"))
    assert data["errors"]["probes"] == 2
    assert data["errors"]["gradient"] >= 0
    assert "errors=True" in run("explain", "program:loss", "--parameters", "w").stderr


def test_explain_lists_all_rows(folder):
    report = as_json(run("explain", "program:loss", "--json"))
    listed = run("explain", "program:loss", "--all").stdout.split("Rows:\n")[1]
    assert len(listed.splitlines()) == len(report["rows"]) + 1


def test_explain_plans_attention_for_a_target(folder):
    assert as_json(run("explain", "program:loss", "--target", "h100", "--json"))["rows"]
    result = run("explain", "program:loss", "--target", "h10")
    assert result.exit_code == 2 and "Did you mean 'h100'" in result.stderr


@pytest.mark.parametrize(("share", "code"), [("0.5", 0), ("0.51", 1)])
def test_explain_fail_under_sets_the_exit_code(folder, share, code):
    result = run("explain", "program:loss", "--fail-under", share, "--json")
    assert result.exit_code == code
    assert as_json(result)["half_flops"] == 0.5
    assert (re.search(r"50\.00% .*51\.00%", result.stderr) is not None) == bool(code)


# ---------------------------------------------------------------- compile


GIB = 2**30
MATMULS = (
    MatmulRow("bf16", "bf16", "bf16", 3, 3, 7.5e8, 0.75),
    MatmulRow("bf16", "f32", "f32", 1, 1, 2.5e8, 0.25),
)


class Compiled(mpjax.reports.CompileReport):
    """What a compiler answered, made up."""

    def __init__(self, target):
        memory = {"argument_bytes": GIB, "output_bytes": GIB, "alias_bytes": 0}
        super().__init__(
            *(target, "a card", 1, jax.__version__),
            **memory,
            temp_bytes=GIB,
            code_bytes=2048,
            device_bytes=2 * GIB if target == "t4" else 16 * GIB,
            flops=2e9,
            matmul_flops=1e9,
            bytes_accessed=5e9,
            matmuls=MATMULS,
            collectives=(),
            compute_ms=math.inf,
            memory_ms=12.3456,
            host_bytes=0.0,
            host_ms=0.0,
            notes=("datasheet peaks",),
            xla_costs={},
            hlo="",
        )

    def to_html(self):
        return f"<title>{self.target}"


class Refused(RuntimeError):
    pass


class NoExtra(ImportError):
    pass


@pytest.fixture
def compilers(monkeypatch):
    """Stands in for the compilers: what each target answers."""
    seen = []

    def compile_for(target, fun, *args, progress):
        assert not progress  # the command has a spinner of its own
        seen.append((target, str(jax.make_jaxpr(fun)(*args))))
        if target == "p100":
            raise Refused("the compiler says no\nin several lines")
        if target == "v5e":
            raise NoExtra("pip install 'mpjax[tpu]'")
        if target == "x100":
            raise ValueError("Unknown target='x100'. Did you mean 'v100'?")
        return Compiled(target)

    monkeypatch.setattr(mpjax, "compile_for", compile_for)
    return seen


def test_compile_shows_targets_side_by_side(folder, compilers):
    result = run("compile", "program:loss", "--target", "v100, h100", "--html", "a.html")
    assert result.exit_code == 0, result.stderr
    assert (folder / "a-h100.html").read_text() == "<title>h100" and "a-v100.html" in result.stdout
    run("compile", "program:loss", "--target", "v100", "--html", "one.html")
    assert (folder / "one.html").exists()  # a single page has the name that was given
    rows = {line[:16].strip(): line[16:].split() for line in result.stdout.splitlines()}
    assert rows["program:loss as"] and "v100  " in result.stdout
    assert rows["fits"] == ["yes", "yes"]
    assert rows["memory"] == ["3.00", "GiB"] * 2 and rows["code"] == ["2.00", "KiB"] * 2
    assert "3 bf16, 1 f32" in result.stdout and "25.0%" in result.stdout
    assert "v100, h100: datasheet peaks" in result.stdout
    assert "bf16" not in compilers[0][1]


def test_compile_applies_the_policy(folder, compilers):
    result = run("compile", "program:loss", "--target", "v100", "--policy", "mixed_float16")
    assert result.exit_code == 0 and "program:loss under mixed_float16" in result.stdout
    assert "f16" in compilers[0][1]


@pytest.mark.parametrize(
    ("targets", "code", "words"),
    [
        ("v100,t4", 1, "does not fit, or was refused: t4"),
        ("v100,p100", 1, "does not fit, or was refused: p100"),
        ("v100,v5e", 2, "v5e: NoExtra: pip install 'mpjax[tpu]'"),
        ("x100,v100", 2, "Did you mean 'v100'"),
        ("p100,x100", 2, "x100"),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_compile_target_that_fails_does_not_lose_the_others(
    folder, compilers, targets, code, words, form
):
    result = run("compile", "program:loss", "--target", targets, *form)
    assert result.exit_code == code and words in result.stderr
    assert "Traceback" not in result.stderr
    if form:
        found = as_json(result)
        assert [each["target"] for each in found["results"]] == targets.split(",")
        statuses = {each["target"]: each["status"] for each in found["results"]}
        assert statuses.get("v100", "compiled") == "compiled"
        assert statuses.get("p100", "refused") == "refused"
        assert all(each.get("compute_ms", "inf") == "inf" for each in found["results"])
    else:
        assert all(target in result.stdout for target in targets.split(","))
        assert ("p100: Refused: the compiler says no" in result.stdout) == ("p100" in targets)
        assert ("memory" in result.stdout) == ("v100" in targets)


def test_compile_of_a_function_that_cannot_be_traced_exits_with_2(folder, compilers):
    result = run("compile", "program:breaks", "--target", "v100")
    assert result.exit_code == 2 and f"program.py:{LINE_OF_BREAKS}" in result.stderr


@pytest.mark.parametrize(("given", "updates"), [("", [("jax_platforms", "cpu")]), ("cuda", [])])
def test_compile_keeps_off_accelerators_unless_told(folder, compilers, monkeypatch, given, updates):
    found = []
    monkeypatch.setenv("JAX_PLATFORMS", given)
    monkeypatch.setattr(jax.config, "update", lambda *update: found.append(update))
    run("compile", "program:lost", "--target", "v100")
    assert found == updates


def test_compile_refuses_an_unknown_target(folder):
    result = run("compile", "program:loss", "--target", "v1000")
    assert result.exit_code == 2 and "v1000" in result.stderr and "Choose one of" in result.stderr


# ---------------------------------------------------------------- compare


def test_compare_prints_the_worst_rows_and_writes_a_picture(folder):
    result = run("compare", "program:real", "--top", "2", "--plot", "a.png")
    assert result.exit_code == 0, result.stderr
    assert "mixed_bfloat16 against float32" in result.stdout
    assert "worst first" in result.stdout and "gradient of" in result.stdout
    assert "shows all rows" in result.stdout and "Picture written to a.png" in result.stdout
    assert (folder / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("command", ["explain", "compare"])
def test_explain_and_compare_write_html_pages(folder, command):
    found = as_json(run(command, "program:real", "--html", "map.html", "--json"))
    page = (folder / "map.html").read_text()
    assert f"{len(found['rows'])} operations" in page and "program:real" in page
    assert "Page written to map.html" in run(command, "program:real", "--html", "map.html").stdout


def test_compare_scales_the_loss(folder):
    names = ("compare", "program:real", "--policy", "mixed_float16")
    assert "loss scale 65536" in run(*names).stdout
    assert "loss scale" not in run(*names, "--loss-scale", "none").stdout
    assert as_json(run(*names, "--loss-scale", "8", "--json"))["loss_scale"] == 8
    wide = as_json(run(*names, "--reference", "float64", "--json"))
    assert wide["reference"] == "float64" and 0 < max(wide["float32"].values()) < 1e-5
    refused = run(*names, "--loss-scale", "-8")
    assert refused.exit_code == 2 and "loss_scale=-8" in refused.stderr


def test_compare_wants_arrays(folder):
    result = run("compare", "program:loss")
    assert result.exit_code == 2 and "compare runs the function: return arrays" in result.stderr


def test_compare_gives_json(folder):
    result = run("compare", "program:real", "--policy", "mixed_float16", "--json")
    found = as_json(result)
    assert result.exit_code == 0 and found["rows"] and found["policy"] == "mixed_float16"
    assert any(row["backward"] for row in found["rows"])
    forward = as_json(run("compare", "program:real", "--argnums", "none", "--json"))
    assert not any(row["backward"] for row in forward["rows"])


@pytest.mark.parametrize(("tolerance", "code"), [("1e-9", 1), ("10", 0)])
def test_compare_tolerance_sets_the_exit_code(folder, tolerance, code):
    result = run("compare", "program:real", "--tolerance", tolerance, "--json")
    assert result.exit_code == code, result.stderr
    assert as_json(result)["results"]
    assert ("above 1e-09" in result.stderr) == bool(code)


# ---------------------------------------------------------------- doctor


@pytest.mark.parametrize("dtype", thorough_but(doctor.HALVES, 0), ids=str)
def test_every_doctor_check_passes_here(dtype):
    for check in doctor.CHECKS:
        found = doctor.run(check, dtype)
        assert found.status == (doctor.NOTE if check in NOTES else doctor.PASS), found
        assert found.value is not None and math.isfinite(found.value)


NOTES = (doctor.subnormals, doctor.speed)


def test_doctor_check_that_raises_has_failed():
    def broken(dtype):
        """broken."""
        raise NotImplementedError("no such thing")

    found = doctor.run(broken, doctor.HALVES[0])
    assert (found.status, found.name) == (doctor.FAIL, "broken")
    assert "NotImplementedError: no such thing" in found.found


def test_doctor_finds_a_wrong_matmul(monkeypatch):
    monkeypatch.setattr(doctor.jnp, "matmul", lambda a, b: (a @ b) * 1.01)
    assert all(doctor.matmul(dtype).status == doctor.FAIL for dtype in doctor.HALVES)


@pytest.mark.parametrize(("status", "code"), [(doctor.PASS, 0), (doctor.FAIL, 1)])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_doctor_prints_checks_and_its_exit_code_tells_failure(monkeypatch, status, code, form):
    fake = lambda dtype: doctor.Check(dtype.name, "a test", status, "nothing", math.nan)  # noqa: E731
    monkeypatch.setattr(doctor, "CHECKS", (fake,))
    result = run("doctor", *form)
    assert result.exit_code == code
    assert ("a self-test failed" in result.stderr) == bool(code)
    if form:
        found = as_json(result)
        assert found["ok"] == (not code) and found["versions"]["jax"] == jax.__version__
        assert found["policy"] == str(mpjax.recommend_policy())
        assert {check["dtype"] for check in found["checks"]} == {"float16", "bfloat16"}
    else:
        assert f"mpjax {mpjax.__version__}" in result.stdout and status in result.stdout
        assert "Recommended policy: " in result.stdout


# ---------------------------------------------------------------- the whole program


def python(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "mpjax", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.thorough
def test_doctor_runs_as_a_program(tmp_path):
    done = python("doctor", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] and len(found["checks"]) == 2 * len(doctor.CHECKS)


@pytest.mark.thorough
def test_explain_runs_as_a_program(folder):
    done = python("explain", "program:loss", "--fail-under", "0.9", cwd=folder)
    assert done.returncode == 1 and "50.0% of matmul FLOPs" in done.stdout


@pytest.mark.thorough
def test_an_error_of_the_program_is_one_line(folder):
    done = python("explain", "program:raises", cwd=folder)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Error: program:raises() failed: IndexError")


@pytest.mark.parametrize(
    "command", [(), ("doctor",), ("explain",), ("compile",), ("fit",), ("compare",)]
)
def test_help_of_each_command_has_examples_and_fits(command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert command == ("doctor",) or "Examples:" in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_version_option_prints_the_version():
    assert run("--version").stdout == f"mpjax {mpjax.__version__}\n"
