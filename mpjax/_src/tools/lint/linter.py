"""`lint`: runs the rules on a program, and makes the report without what comments silence."""

import ast
import collections
import functools
import linecache
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from mpjax._src.core.base import _jax
from mpjax._src.core.base.errors import check_flag, first_line
from mpjax._src.core.base.lines import short
from mpjax._src.core.base.patterns import matches
from mpjax._src.core.base.progress import advance, progress_bar
from mpjax._src.core.program.curried import takes_arguments
from mpjax._src.core.program.graph import Op
from mpjax._src.core.program.interpret import OPERATION, Plain, interpret, operations_in
from mpjax._src.core.program.site import shown
from mpjax._src.tools.hardware.aot import CPU, compiled_texts
from mpjax._src.tools.hardware.targets import find_target
from mpjax._src.tools.lint.program import Program, make_program, noted
from mpjax._src.tools.lint.report import Finding, LintReport
from mpjax._src.tools.lint.rule import HLO, JAXPR, VALUES, Compiled, Hit, NotRun, Rule
from mpjax._src.tools.lint.table import chosen

ABSTRACT = "no step was run, because some arguments are jax.ShapeDtypeStruct: pass arrays"
NOT_RUN = "no step was run, because of run=False"
NO_TARGET = "nothing was compiled: pass target='cpu' or an accelerator such as 'h100'"


@takes_arguments
def lint(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    *,
    select: str | Iterable[str] = (),
    ignore: str | Iterable[str] = (),
    run: bool = True,
    target: str | None = None,
    progress: bool = True,
) -> Callable[..., LintReport]:
    """Looks for silent precision faults in a program.

    The rules are listed in ``docs/lint_rules.md``. Most of them check the traced program, and need
    only shapes. Some check the values of one real step, and some the compiled program. A rule that
    could not run is listed in the report.

    A comment ``# mpjax: ignore[rule]`` silences a rule on its line, ``# mpjax: ignore`` all rules.

    Args:
        fun: A training step, a loss, or any function that `jax.jit` can trace, jitted or not, under
            `autocast` or not.
        argnums: The arguments to differentiate, if ``fun`` is a loss and its backward pass is to be
            checked too; None checks ``fun`` as it is.
        has_aux: Whether ``fun`` returns ``(loss, aux)``. Used only with ``argnums``.
        select: The names of the rules to run, or globs such as ``half-*``. All rules if empty.
        ignore: The names of rules not to run, or globs.
        run: Whether to run one step, one operation at a time, for the rules that check values.
            Nothing is run if an argument is a `jax.ShapeDtypeStruct`.
        target: The target to compile the program for, for the rules that check HLO: "cpu", or an
            accelerator as for `compile_for`, which need not be present. None compiles nothing.
        progress: Whether to show a progress bar if stderr is a terminal. It counts the operations
            of the step that is run.

    Returns:
        A function of the arguments of ``fun`` that returns a `LintReport`; with these arguments
        after ``fun``, the report. The arguments may be pytrees of arrays or `jax.ShapeDtypeStruct`,
        and Flax NNX modules, which are not changed.

    Raises:
        TypeError: If ``fun`` is not a function, or does not return a loss although ``argnums`` is
            given.
        ValueError: If ``select`` or ``ignore`` matches no rule, or ``target`` is unknown.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> def mean(x):
        ...     return jax.lax.reduce(x, x.dtype.type(0), jax.lax.add, (0,)) / len(x)
        >>> report = mpjax.lint(mean)(jax.ShapeDtypeStruct((4096,), jnp.bfloat16))
        >>> [finding.rule for finding in report.findings]
        ['half-sum']
    """
    rules = chosen(select, ignore)
    check_flag("run", run)
    check_flag("progress", progress)
    # Raises for an unknown target now, before the function is traced and run.
    if target not in (None, CPU):
        find_target(target)

    def look(*args: Any, **kwargs: Any) -> LintReport:
        program = make_program(fun, args, kwargs, argnums, has_aux)
        total = operations_in(program.traced.jaxpr) if run and not program.is_abstract else None
        with progress_bar(progress, "lint", OPERATION, total):
            return checked(program)

    def checked(program: Program) -> LintReport:
        not_run: dict[str, str] = {}
        hits: list[tuple[Rule, Hit]] = []
        values = [rule for rule in rules if rule.needs == VALUES]
        compiled = [rule for rule in rules if rule.needs == HLO]
        for rule in (rule for rule in rules if rule.needs == JAXPR):
            found = rule.check(program)  # a result of the program has to depend on it
            hits += [(rule, hit) for hit in found if hit.op is None or _matters(program, hit.op)]
        if values:
            reason = ABSTRACT if run and program.is_abstract else "" if run else NOT_RUN
            reason = reason or _run(program, values, hits)
            not_run |= {rule.name: reason for rule in values if reason}
        if target is None:
            not_run |= {rule.name: NO_TARGET for rule in compiled}
        elif compiled:
            advance(OPERATION, f"compiling for {target}", by=0)
            not_run |= _compile(program, target, compiled, hits)
        findings, suppressed = _findings(program, hits)
        ran = tuple(rule.name for rule in rules if rule.name not in not_run)
        return LintReport(program.name, findings, ran, not_run, suppressed, rules)

    return look


def _matters(program: Program, op: Op) -> bool:
    """Returns whether a result depends on an operation, or on its derivative.

    jax.grad returns no loss, so what only the loss depends on is not live. Its derivative is, and
    has the same line.
    """
    return op in program.live or op.lines in _differentiated(program)


@noted
def _differentiated(program: Program) -> set[tuple[str, str]]:
    """Returns the lines, those of libraries too, whose derivatives a result depends on."""
    return {op.lines for op in program.live if program.is_backward(op)}


def _run(program: Program, rules: Sequence[Rule], hits: list[tuple[Rule, Hit]]) -> str:
    """Runs one step with the rules that check values; returns why that failed, or ""."""
    watcher = _Watcher(program, rules, hits)
    # A new list, because `interpret` empties the one that it is given.
    arrays = [jnp.asarray(x) for x in program.call.arrays]
    try:
        interpret(program.traced.jaxpr, arrays, watcher)
        hits += [(rule, hit) for rule in rules for hit in rule.after(program)]
    except Exception as error:  # an error of the user's code, or out of memory
        return f"running one step failed: {_described(error)}"
    return ""


class _Watcher(Plain):
    """The watcher that passes each operation to the rules, until a rule has a hit there."""

    def __init__(self, program: Program, rules: Sequence[Rule], hits: list[tuple[Rule, Hit]]):
        self.program, self.rules, self.found = program, rules, hits
        self.ops: dict[Any, Op] = {id(op.eqn): op for op in program.ops}
        # The equations of a shard_map are traced again, with the same origin.
        self.ops |= {_origin(op.eqn): op for op in program.ops}
        self.done: set[tuple[int, str]] = set()

    def operation(self, eqn, ins, place):
        outs = Plain.operation(eqn, ins, place)
        op = self.ops.get(id(eqn)) or self.ops.get(_origin(eqn))
        for rule in self.rules if op else ():
            # Further iterations of a loop would repeat the finding.
            if (id(eqn), rule.name) not in self.done:
                hits = [(rule, hit) for hit in rule.check(self.program, op, ins, outs)]
                self.found += hits
                self.done |= {(id(eqn), rule.name)} if hits else set()
        return outs


def _origin(eqn: Any) -> tuple[Any, str]:
    return _jax.line_key(eqn), eqn.primitive.name


def _compile(
    program: Program, target: str, rules: Sequence[Rule], hits: list[tuple[Rule, Hit]]
) -> dict[str, str]:
    """Compiles the program for the rules that check HLO; returns the rules not run, and why."""
    flat = functools.partial(_jax.eval_closed, program.traced.jaxpr)
    try:
        compiled = Compiled(target, *compiled_texts(target, flat, program.call.arrays))
    # A missing compiler or a refused program must not cost the findings of the other rules.
    except (RuntimeError, TimeoutError, MemoryError, ImportError) as error:
        reason = f"compiling for {target} failed: {_described(error)}"
        return {rule.name: reason for rule in rules}
    not_run: dict[str, str] = {}
    for rule in rules:
        for hit in rule.check(program, compiled):
            if isinstance(hit, NotRun):
                not_run[rule.name] = hit.reason
            else:
                hits.append((rule, hit))
    return not_run


def _findings(
    program: Program, hits: Sequence[tuple[Rule, Hit]]
) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Returns the findings, one for each line and rule, and those that comments silence."""
    groups: dict[tuple[str, str, str], list[tuple[Rule, Hit]]] = collections.defaultdict(list)
    for rule, hit in hits:
        source, more = hit.source or (hit.op.source if hit.op else ""), ""
        if not (source and _jax.is_users_file(source)):
            found = (hit.op and program.calls.get(_jax.line_key(hit.op.eqn))) or program.place
            # A step that a library made: only the line that calls it is the user's.
            more = f" It is at {short(source)}." if found and source else ""
            source = found or source
        # A line runs many operations, for example in each call of a layer: one finding has them
        # all.
        groups[source, more, rule.name].append((rule, hit))
    findings = []
    for (source, more, name), group in groups.items():
        rule, hit = group[0]
        scope = "/".join(shown(hit.op.scopes)) if hit.op else hit.scope
        # Hits in a compiled program have no operation.
        count = len({id(hit.op) for _, hit in group if hit.op}) or 1
        said = hit.message + more, rule.why, rule.instead
        findings.append(Finding(name, source, scope, *said, count))
    findings.sort(key=_line)
    silent = {each for each in findings if is_silenced(each.source, each.rule)}
    return (
        tuple(each for each in findings if each not in silent),
        tuple(each for each in findings if each in silent),
    )


def _line(finding: Finding) -> tuple[str, int, str]:
    file, _, line = finding.source.rpartition(":")
    return file, int(line or 0), finding.rule


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


# ---- comments that silence -----------------------------------------------------------------------

# ``# mpjax: ignore`` and ``# mpjax: ignore[rule]``.
COMMENT = re.compile(r"#\s*mpjax:\s*ignore\b(?:\s*\[([^\]]*)\])?")


def is_silenced(source: str, rule: str) -> bool:
    """Returns whether a comment on a line, "file:line", or on its statement, silences a rule."""
    file, _, number = source.rpartition(":")
    if not file:
        return False
    # JAX names one line of a statement, and the comment may be on another one.
    first, last = _statement(file, int(number))
    for line in linecache.getlines(file)[first - 1 : last]:
        for names in COMMENT.findall(line):
            wanted = [name.strip() for name in names.split(",") if name.strip()]
            if not wanted or any(matches(name, rule) for name in wanted):
                return True
    return False


def _statement(file: str, number: int) -> tuple[int, int]:
    """Returns the first and last line of the innermost statement around a line."""
    text = "".join(linecache.getlines(file))
    spans = [(a, b) for a, b in _statements(text) if a <= number <= b]
    return min(spans, key=lambda span: span[1] - span[0], default=(number, number))


@functools.lru_cache(64)
def _statements(text: str) -> tuple[tuple[int, int], ...]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # not Python
        return ()
    # Only statements without a body: a comment in a function must not silence all of it.
    statements = (n for n in ast.walk(tree) if isinstance(n, ast.stmt))
    simple = (n for n in statements if not (hasattr(n, "body") or isinstance(n, ast.Match)))
    return tuple((node.lineno, node.end_lineno or node.lineno) for node in simple)
