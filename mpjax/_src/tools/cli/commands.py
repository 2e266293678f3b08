"""The command line, ``mpjax doctor`` and its like.

Exit codes: 0 if all is well; 1 for a finding that a script should stop at; 2 for a wrong command
line, for an error in the user's module or function, and for a result that cannot be written.

What needs JAX is imported by the command that runs: help and errors of the command line do without.
"""

import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

import mpjax
from mpjax._src.tools.cli import options, printing
from mpjax._src.tools.cli.load import TargetError, describe, load, load_maker, running

FINDING, WRONG = 1, 2

api: Any = mpjax


class UserError(click.ClickException):
    """An error in the user's code: one line on stderr."""

    exit_code = WRONG


class Command(click.Command):
    """A command that tells the user's errors in one line, or whole with ``--traceback``."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TargetError as error:
            # The cause is the user's own exception, whose traceback ends in the user's code.
            if ctx.params.get("show_traceback"):
                traceback.print_exception(error.__cause__ or error)
            raise UserError(str(error)) from None


class Group(click.Group):
    command_class = Command


@click.group(cls=Group, epilog=options.EXIT_CODES, context_settings={"max_content_width": 100})
@click.version_option(mpjax.__version__, prog_name="mpjax", message="%(prog)s %(version)s")
def cli() -> None:
    """Mixed precision for JAX: test what a machine can do, and inspect what a program does.

    TARGET is MODULE:FUNCTION or path/to/file.py:FUNCTION. FUNCTION takes no arguments and returns
    (fun, args): a function, and the tuple of arguments to call it with. Commands that do not run
    the function also accept jax.ShapeDtypeStruct as arguments. For fit, FUNCTION takes a policy.

    \b
    Examples:
      mpjax doctor
      mpjax explain train.py:loss --argnums 0
      mpjax compile train:step --target v100,h100 --policy mixed_float16
      mpjax fit train:step --target a100
      mpjax compare train:loss --argnums 0 --tolerance 0.05 --json
      mpjax lint train:step --sarif
      mpjax run train.py --epochs 3
    """


@cli.command()
@options.platform
@options.as_json
def doctor(platform: tuple[str, ...], as_json: bool) -> None:
    """Show versions and devices, and test 16-bit computation.

    Also lists XLA flags that are worth trying, and known problems of the installed jaxlib. Takes
    about two seconds for each 16-bit dtype. Exits with 1 if a test failed.
    """
    # Imported here: it loads optax and the training step, which no other command needs.
    from mpjax._src.tools.cli.doctor import examine, shown

    with printing.waiting("testing float16 and bfloat16"):
        results = examine(platform)
    printing.json_to_stdout(results) if as_json else printing.show(shown(results))
    if not results["ok"]:
        _finding("a self-test failed: 16-bit computation does not work correctly here.")


@cli.command()
@options.target
@options.policy("mixed_bfloat16")
@options.argnums(None)
@options.has_aux
@options.option("--rows", "List the first N operations.", click.IntRange(0), "N", default=0)
@options.flag("--all all_rows", "List all operations.")
@options.option(
    "--fail-under",
    "Exit with 1 if less than this share of the matmul FLOPs is in 16 bits, for example 0.9.",
    *(options.Number(0, 1), "SHARE"),
)
@options.device("Plan attention for this accelerator, such as h100. This machine need not have it.")
@options.flag("--errors", "Run it, and list what each operation adds to the gradient's error.")
@options.option("--probes", "Random vectors of that estimate.", click.IntRange(1), "N", default=8)
@options.option(
    "--parameters", "Only the gradients of these parameters, such as 'blocks/3/*'.", str, "PATTERN"
)
@options.output()
def explain(
    target: str,
    policy: Any,
    argnums: Any,
    has_aux: bool,
    rows: int,
    all_rows: bool,
    fail_under: float | None,
    device: str | None,
    errors: bool,
    probes: int,
    parameters: str | None,
    output: printing.Output,
) -> None:
    """Show what autocast would do to a function, without running it, or what its error comes from.

    \b
    Examples:
      mpjax explain train:loss                      the forward pass
      mpjax explain train:loss --argnums 0 --all    with gradients, op by op
      mpjax explain train:loss --fail-under 0.9     for a script
      mpjax explain train:loss --html map.html      a map of the program
      mpjax explain train:loss --errors             where the error comes from
    """
    fun, args = _loaded(target, argnums)
    title = f"{target} under {policy}"
    settings: dict[str, Any] = {"errors": errors, "probes": probes, "parameters": parameters}
    with running(f"explaining {target}"):
        report = mpjax.explain(fun, policy, argnums, has_aux, device, **settings)(*args)
        output.draw(report, title)
    data = {"target": target, "policy": str(policy), **report.to_dict()}
    output.tell(data, title, report.document(len(report.rows) if all_rows else rows))
    # Last, because it exits: the report and the page are written in any case.
    if fail_under is not None and report.half_flops < fail_under:
        _finding(
            f"{report.half_flops:.2%} of the matmul FLOPs run in 16 bits, below {fail_under:.2%}"
        )


@cli.command("compile")
@options.target
@options.option(
    "--target devices",
    "Accelerators, such as v100,h100 or 'h100 x 8'. This machine need not have them.",
    *(options.NAMES, "NAMES"),
    required=True,
)
@options.policy(
    None, "Autocast the function first. Without it, the function is compiled as written."
)
@options.output()
def compile_(target: str, devices: Sequence[str], policy: Any, output: printing.Output) -> None:
    """Compile a function for accelerators that you do not have.

    Shows memory, the dtypes of matmuls, a lower bound on the run time and where it goes, side by
    side. For several devices, shows what one of them uses and what it sends to the others. Exits
    with 1 if the program does not fit on a device, or if its compiler refuses it.

    \b
    Examples:
      mpjax compile train:step --target v100,h100
      mpjax compile train:step --target v5e --policy mixed_bfloat16 --json
    """
    _use_cpu()
    from mpjax._src.tools.hardware.report import document_of

    # After the platform is chosen: the user's module may start JAX when it is imported.
    fun, args = load(target)
    fun = fun if policy is None else mpjax.autocast(fun, policy)
    compiled = [_compiled(name, fun, args, output.html is not None) for name in devices]
    results = [result for result, *_ in compiled]
    if output.as_json:
        result = {"target": target, "policy": policy and str(policy), "results": results}
        printing.json_to_stdout(result)
    elif any(each["status"] != "error" for each in results):
        click.echo(f"{target} {f'under {policy}' if policy else 'as written'}")
        if reports := [report for _, report, _ in compiled if report]:
            printing.show(document_of(reports))
        for each in results:
            if "error" in each:
                click.echo(f"{each['target']}: {each['error']}")
    for name, (*_, page) in zip(devices, compiled, strict=True):
        output.page = page
        output.finish(f"-{name.replace(' ', '')}" if len(devices) > 1 else "")
    # One target that fails does not hide the reports on the others, which are shown by now.
    wrong = [each for each in results if each["status"] == "error"]
    if wrong:
        raise TargetError("\n".join(_grouped(wrong)))
    # A program that was refused has no report, and so no entry "fits".
    bad = [each["target"] for each in results if not each.get("fits", False)]
    if bad:
        _finding(f"does not fit, or was refused: {', '.join(bad)}")


@cli.command()
@options.target
@options.device(
    "An accelerator, such as a100 or 'h100 x 8'. This machine need not have it.", required=True
)
@options.policy("mixed_bfloat16", "The policy to which settings are added.")
@options.flag("--every", "Compile all settings, for the whole frontier.")
@options.option(
    "--reserve",
    "The share of the memory to leave free: by default 0.25 on GPUs, which JAX does not give to "
    "programs, and 0.05 on TPUs.",
    *(options.Number(0, 1, max_open=True), "SHARE"),
)
@options.output(options.plot)
def fit(
    target: str,
    device: str,
    policy: Any,
    every: bool,
    reserve: float | None,
    output: printing.Output,
) -> None:
    """Find the fastest setting with which a training step fits a device.

    Compiles the step with few of the settings that save memory, and prints the policy to copy.
    FUNCTION takes a policy, and returns (fun, args) with the step under that policy. If it also
    takes checkpoint=, a function to put around the loss or a layer, jax.checkpoint is compared.
    Exits with 1 if nothing fits.

    \b
    Examples:
      mpjax fit train:step --target a100
      mpjax fit train:step --target v100 --policy mixed_float16
      mpjax fit train:step --target a100 --every --plot frontier.png
    """
    _use_cpu()
    make = load_maker(target)
    with running(f"fitting {target} to {device}"):
        make_step, args = _stepping(make, policy)
        found = api.hardware.fit_memory(
            device, make_step, *args, policy=policy, every=every, reserve=reserve
        )
        output.draw(found, f"{target} on {device}")
    data = {"target": target, "policy": str(policy), "result": found.to_dict()}
    title = f"{target} under {policy} and settings that save memory"
    output.tell(data, title, found.document())
    if not found.fits:
        _finding(f"nothing fits {found.target}")


def _stepping(make: Callable[..., Any], policy: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the function from a policy to the step, and the arguments of the step."""
    from mpjax._src.tools.hardware.trials import takes_checkpoint

    # Settings that are added change the step and not its arguments, so those under the policy as
    # it is given serve all of them.
    if takes_checkpoint(make):
        args = make(policy, checkpoint=lambda fun: fun)[1]
        return lambda policy, checkpoint: make(policy, checkpoint=checkpoint)[0], args
    return lambda policy: make(policy)[0], make(policy)[1]


@cli.command()
@options.target
@options.policy("mixed_bfloat16")
@options.argnums(0)
@options.has_aux
@options.option(
    *("--top", "Number of rows to list, worst first.", click.IntRange(1), "N"),
    default=20,
    show_default=True,
)
@options.option(
    "--tolerance",
    "Exit with 1 if the error of the value or of a gradient is above this, or is NaN.",
    *(options.Number(0, min_open=True), "ERROR"),
)
@options.option(
    "--loss-scale",
    "The loss scale: a number, none, or auto (1, unless something computes in float16).",
    *(options.LOSS_SCALE, "SCALE"),
    default="auto",
    show_default=True,
)
@click.option(
    "--reference",
    type=click.Choice(["float32", "float64"]),
    default="float32",
    show_default=True,
    help="The dtype that errors are relative to. float64 shows those of float32 too.",
)
@options.output(options.plot)
def compare(
    target: str,
    policy: Any,
    argnums: Any,
    has_aux: bool,
    top: int,
    tolerance: float | None,
    loss_scale: float | str,
    reference: str,
    output: printing.Output,
) -> None:
    """Compare a function in 16-bit precision with float32, or with float64.

    Shows the error that each operation adds, and the error that it inherits. If the function
    returns a scalar loss, its gradient is compared too.

    This runs the function: the args that FUNCTION returns must be arrays.

    \b
    Examples:
      mpjax compare train:loss --policy mixed_float16
      mpjax compare train:loss --tolerance 0.05 --plot errors.png
    """
    fun, args = _loaded(target, argnums)
    _check_arrays(target, args)
    title = f"{target}: {policy} against {reference}"
    with running(f"comparing {target}"):
        comparison = mpjax.compare(
            fun, policy, argnums, has_aux, loss_scale=loss_scale, reference=reference
        )(*args)
        # A plot of no rows raises, although a program that rounds nothing is fine.
        output.draw(comparison, title, plots=bool(comparison.rows))
    data = {"target": target, "policy": str(policy), **comparison.to_dict()}
    all_of_them = f"--top {len(comparison.rows)} shows all rows."
    more = all_of_them if len(comparison.rows) > top else ""
    output.tell(data, title, comparison.document(top), more)
    if tolerance is not None:
        _judge(comparison.worst_results(), tolerance, target)


def _check_arrays(target: str, args: Any) -> None:
    import jax

    with running(f"reading the args of {target}"):
        leaves = jax.tree.leaves(args)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise TargetError(
            f"{target}() returned a jax.ShapeDtypeStruct among its args, but compare runs the "
            "function: return arrays."
        )


def _judge(results: Sequence[tuple[str, float]], tolerance: float, target: str) -> None:
    """Makes a finding of a worst result that is above the tolerance, or NaN."""
    if not results:
        raise TargetError(
            f"{target} has nothing to compare with --tolerance: the function returns no "
            "floating-point array."
        )
    name, error = results[0]
    # NaN is not below any tolerance.
    if not error <= tolerance:
        _finding(f"the error of the {name} is {error:.3g}, above {tolerance:g}")


@cli.command()
@click.argument("target", metavar="[TARGET]", required=False)
@options.argnums(None)
@options.has_aux
@options.option(
    "--select",
    "Run only these rules: names or globs, such as half-sum,half-*.",
    *(options.RULES, "RULES"),
    default=(),
)
@options.option("--ignore", "Skip these rules.", options.RULES, "RULES", default=())
@options.flag("--no-run", "Do not run the function. Rules that need its values are skipped.")
@options.device(
    "Compile for 'cpu', or for an accelerator such as h100, which this machine need not have. "
    "Rules that read HLO need it.",
)
@options.as_json
@options.flag("--sarif", "Print SARIF, for code scanning, and nothing else.")
@options.flag("--rules list_rules", "List the rules and what each one needs.")
@options.show_traceback
def lint(
    target: str | None,
    argnums: Any,
    has_aux: bool,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    no_run: bool,
    device: str | None,
    as_json: bool,
    sarif: bool,
    list_rules: bool,
    show_traceback: bool,
) -> None:
    """Find silent precision faults in a training step or a loss.

    The comment "# mpjax: ignore[RULE]" silences a rule at its line. Exits with 1 if something was
    found, and with 2 if the compiler of --target is not installed.

    \b
    Examples:
      mpjax lint train:step
      mpjax lint train:loss --argnums 0 --ignore half-collective
      mpjax lint train:step --target h100 --sarif > lint.sarif
      mpjax lint --rules
    """
    from mpjax._src.tools.hardware.aot import CPU
    from mpjax._src.tools.hardware.compiler import require
    from mpjax._src.tools.hardware.targets import find_target
    from mpjax._src.tools.lint.rule import HLO
    from mpjax._src.tools.lint.table import as_data, chosen, listed

    if as_json and sarif:
        raise click.UsageError("--json and --sarif exclude each other: choose one.")
    if list_rules:
        rules = _valid(lambda: chosen(select, ignore))
        printing.json_to_stdout(as_data(rules)) if as_json else printing.show(listed(rules))
        return
    if target is None:
        raise click.UsageError("Missing argument 'TARGET'.")
    fun, args = _loaded(target, argnums)
    look = _valid(
        lambda: api.lint(
            fun, argnums, has_aux, select=select, ignore=ignore, run=not no_run, target=device
        )
    )
    # `lint` only notes rules that it could not run. A script that asks for them must not pass.
    if device not in (None, CPU) and any(r.needs == HLO for r in chosen(select, ignore)):
        with running(f"compiling for {device}"):
            require(find_target(device))
    with running(f"linting {target}"):
        report = look(*args)
    if as_json or sarif:
        printing.json_to_stdout(report.to_sarif() if sarif else report.to_dict())
    else:
        printing.show(report.document())
    if report:
        click.get_current_context().exit(FINDING)


@cli.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@options.option(
    "--policy",
    "A policy, as for mpjax.get_policy, that needs no loss scale.",
    metavar="POLICY",
    default="mixed_bfloat16",
    show_default=True,
    envvar="MPJAX_POLICY",
    show_envvar=True,
)
@options.option(
    "--report", "Also write what was planned to this file, as JSON.", options.FILE, "FILE"
)
@options.flag("-m module", "SCRIPT is the name of a module, as for python -m.")
@click.argument("script", metavar="SCRIPT")
@click.argument("args", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def run(policy: str, report: Path | None, module: bool, script: str, args: tuple[str, ...]) -> None:
    """Run a script in mixed precision, with no line changed.

    What it differentiates is planned by autocast. Parameters, optimizer and results keep their
    dtypes. Everything after SCRIPT is an argument of it, and it ends with its own exit code. A
    summary is printed to stderr at the end.

    \b
    Examples:
      mpjax run train.py --epochs 3
      mpjax run --policy mixed_bfloat16,storage=lean -m package.train
      MPJAX_POLICY=mixed_bfloat16 srun python -m mpjax run train.py
    """
    from mpjax._src.tools.scripts.running import run_script

    raise _Later(functools.partial(run_script, policy, script, args, module, report))


@cli.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@options.option(
    "--target targets",
    "Compile the steps for these accelerators, such as v100,h100. This machine need not have them.",
    *(options.NAMES, "NAMES"),
    default=(),
)
@options.option(
    "--policy policies",
    "A policy for a row of the tables, instead of the default ones. May be given several times.",
    metavar="POLICY",
    multiple=True,
)
@options.option(
    "--steps",
    "End the script before any of its training steps is called once more than this.",
    *(click.IntRange(1), "N"),
    default=1,
    show_default=True,
)
@options.flag("--whole", "Let the script run to its end.")
@options.flag("--no-run", "Run no step for its values: no errors of gradients.")
@options.flag("--no-batch", "Do not look for the largest batch that fits a target.")
@options.flag("--time timed", "Time the steps on this machine. Done anyway on an accelerator.")
@options.flag("-m module", "SCRIPT is the name of a module, as for python -m.")
@options.as_json
@options.html
@click.argument("script", metavar="SCRIPT")
@click.argument("args", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def survey(
    targets: tuple[str, ...],
    policies: tuple[str, ...],
    steps: int,
    whole: bool,
    no_run: bool,
    no_batch: bool,
    timed: bool,
    module: bool,
    as_json: bool,
    html: Path | None,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Show what mixed precision would make of a script's training steps.

    Runs the script as it is, with no line changed, and ends it after one step. Each training step
    is traced again under each policy: a table has its memory, bytes and roofline, the error of its
    gradient on the script's own batch, and the largest batch that fits. What the linter finds in
    the step follows, and the lines to change, as a diff. Everything after SCRIPT is an argument
    of it. Ctrl-C shows what is known so far. Exits with 2 if no training step was found.

    \b
    Examples:
      mpjax survey train.py --epochs 3
      mpjax survey --target h100,v5e --html page.html train.py
      mpjax survey --policy mixed_bfloat16,storage=lean --json -m package.train
    """
    from mpjax._src.tools.cli.survey import show_survey
    from mpjax._src.tools.scripts.survey import Options

    asked = Options(
        policies, targets, None if whole else steps, not no_run, not no_batch, timed or None
    )
    raise _Later(functools.partial(show_survey, asked, script, args, module, as_json, html))


class _Later(BaseException):
    """What runs once click has read the command line: click handles errors and interrupts."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line, and exits."""
    try:
        _main(argv)
    except _Later as later:
        run = later.run
    from mpjax._src.tools.scripts.launch import LaunchError

    try:
        run()
    except LaunchError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(WRONG)


def _main(argv: Sequence[str] | None) -> None:
    if sys.stderr is None:  # closed by the caller
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        _unwritable("stdout is closed")
    try:
        cli(argv, prog_name="mpjax")
    except OSError as error:  # `running` reports errors of the user's own code
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python still flushes stdout when it exits
        _unwritable(error.strerror or str(error))


# ---- inside --------------------------------------------------------------------------------------


def _use_cpu() -> None:
    """Keeps JAX off accelerators for commands that run nothing: off their memory and their plugins.

    A plugin for hardware that is not there prints a long complaint.
    """
    import jax

    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def _compiled(
    name: str, fun: Callable[..., Any], args: tuple[Any, ...], draw: bool
) -> tuple[dict[str, Any], Any, str]:
    """Returns what is told of a target as plain data, its report, and the page of that, or ""."""
    try:
        with running(f"compiling for {name}"), printing.waiting(f"compiling for {name}"):
            report = api.compile_for(name, fun, *args, progress=False)
            page = report.to_html() if draw else ""
            return {"status": "compiled", **report.to_dict()}, report, page
    except TargetError as error:
        cause = error.__cause__
        # A program that the compiler refuses is a finding; an unknown target or a broken function
        # is an error.
        refused = isinstance(cause, RuntimeError | MemoryError | TimeoutError)
        refused = refused and not isinstance(cause, RecursionError | NotImplementedError)
        text = describe(cause) if cause else str(error)
        status = "refused" if refused else "error"
        return {"target": name, "status": status, "error": text}, None, ""


def _grouped(wrong: Sequence[dict[str, Any]]) -> list[str]:
    """Returns errors as lines. Errors that differ only in the target's name share a line."""
    same: dict[str, list[dict[str, Any]]] = {}
    for each in wrong:
        same.setdefault(each["error"].replace(repr(each["target"]), "NAME"), []).append(each)
    return [
        f"{', '.join(each['target'] for each in group)}: {group[0]['error']}"
        for group in same.values()
    ]


def _loaded(target: str, argnums: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the function and the arguments of a target, which must have those of --argnums."""
    fun, args = load(target)
    for number in argnums if isinstance(argnums, tuple) else (argnums,):
        if number is not None and not -len(args) <= number < len(args):
            raise click.BadParameter(
                f"there is no argument {number}: fun has {len(args)}, counted from 0.",
                param_hint="'--argnums'",
            )
    return fun, args


def _valid(ask: Callable[[], Any]) -> Any:
    """Returns the result of a function; its ValueError becomes a usage error."""
    try:
        return ask()
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _unwritable(why: str) -> NoReturn:
    click.echo(f"Error: the result could not be written: {why}.", err=True)
    sys.exit(WRONG)


def _finding(message: str) -> None:
    click.echo(message, err=True)
    click.get_current_context().exit(FINDING)
