"""`autocast_gradients`: what a block of code differentiates, planned without changing a line."""

import collections
import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from mpjax._src.core.autocast.boundary import casts_arguments
from mpjax._src.core.autocast.transform import Autocast, call, trace
from mpjax._src.core.autocast.unplanned import ChecksInside, check_no_checks
from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import held
from mpjax._src.core.base.dtypes import FLOAT16, HALVES
from mpjax._src.core.base.errors import brief, in_one_line
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.policy.policy import Policy, PolicyLike, halves_of
from mpjax._src.core.program.trace import Flat
from mpjax._src.tools.scripts.hooks import Hook, Site, hooked
from mpjax._src.tools.scripts.launch import launch, restored
from mpjax._src.tools.scripts.missed import apart, code_of
from mpjax._src.tools.scripts.moving import runs_now
from mpjax._src.tools.scripts.seen import GradientsReport, Seen

# What a function raises that reads values of arrays, which have none while it is planned.
CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
FORWARD = "forward mode alone is left as it is"
CHECKED = "checkify checks what it computes"
TWICE = "(its first call was made twice)"
OWN = "the script has mpjax compute it, under a policy of its own"
AGAIN = (
    "mpjax raised this error while it planned the function, and called it again without a plan: "
    '{}. The script may run without mpjax, or with policy="float32".'
)


def autocast_gradients(
    policy: PolicyLike = "mixed_bfloat16", tell: bool = True
) -> AbstractContextManager[GradientsReport]:
    """Plans what the code inside differentiates, without changing one of its lines.

    Each function that the code inside gives to `jax.grad`, `jax.value_and_grad`, `jax.vjp`,
    `jax.linearize`, `jax.jacrev`, `jax.jacobian` or `jax.hessian` is differentiated under
    `autocast`, also where a library does it: Flax, Equinox, Haiku, optax. Parameters, optimizer,
    gradients and results keep their dtypes. ``mpjax run --policy mixed_bfloat16 train.py`` does the
    same for a whole script.

    Only the outermost function is planned: what is differentiated inside of it is a part of it.
    Functions of which only `jax.jvp` or `jax.jacfwd` take tangents run as they are, and so do those
    that read values of their arrays while they run (whose first call is done again), those that
    `checkify` checks, and those that the code differentiates with
    what it holds from before: a default of an argument, a closure, a derivative that was made
    outside. The report names them. What `jax.jit` has traced outside is traced again inside, and
    the other way round. The block counts for all threads of the process.

    Args:
        policy: A policy, or anything that `get_policy` accepts, without loss scale: float16 needs
            one, which lives in the training loop.
        tell: Whether to print a summary to stderr at the end.

    Returns:
        A context manager, which is a decorator of functions too. It yields a
        `mpjax.reports.GradientsReport`.

    Raises:
        ValueError: If the policy is invalid, computes in float16, or stores parameters or returns
            results in 16 bits.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax.scripts
        >>> def loss(w, x):
        ...     return jnp.mean(jnp.tanh(x @ w) ** 2)
        >>> w, x = jnp.ones((8, 8)), jnp.ones((4, 8))
        >>> with mpjax.scripts.autocast_gradients("mixed_bfloat16", tell=False) as report:
        ...     gradients = jax.jit(jax.grad(loss))(w, x)
        >>> gradients.dtype, report.half_flops
        (dtype('float32'), 1.0)
    """
    return _planning(allowed(get_policy(policy)), tell)


def run(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    policy: PolicyLike = "mixed_bfloat16",
    module: bool = False,
    tell: bool = True,
) -> GradientsReport:
    """Runs a script in mixed precision, with no line changed, in this process.

    It is what ``mpjax run`` does, where JAX may have been imported before: the script runs as
    ``__main__`` under `autocast_gradients`.

    Args:
        script: The path of a script or a notebook, or the name of a module.
        args: Its arguments.
        policy: The policy, as for `autocast_gradients`.
        module: Whether ``script`` is the name of a module, as for ``python -m``.
        tell: Whether to print a summary to stderr at the end.

    Returns:
        The report.

    Raises:
        ValueError: If the policy is one that `autocast_gradients` refuses.
        LookupError: If there is nothing of this name to run.
        Exception: Whatever the script raises; `SystemExit`, if it exits with another code than 0.

    Example:
        >>> import mpjax.scripts
        >>> mpjax.scripts.run("train.py", ["--epochs", "3"])  # doctest: +SKIP
    """
    planning = autocast_gradients(policy, tell)
    with restored(), planning as report:
        try:
            launch(os.fspath(script), [*map(str, args)], module)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
    return report


@contextlib.contextmanager
def _planning(policy: Policy, tell: bool) -> Iterator[GradientsReport]:
    report = GradientsReport(policy)
    with planning(report):
        try:
            yield report
        except Exception as error:
            if said := blamed(error):
                error.add_note(said)
            raise
        finally:
            if tell:
                print(report.summary(), file=sys.stderr, flush=True)


@contextlib.contextmanager
def planning(report: GradientsReport) -> Iterator[Hook]:
    """Plans what the code inside differentiates, and notes it in a report."""
    around = functools.partial(_around, report)
    forward = functools.partial(_left, report, FORWARD)
    own = functools.partial(_left, report, OWN)
    checked = functools.partial(_left, report, CHECKED)
    # What was traced under a policy is planned in the same way by the next block of it.
    with hooked(around, ("gradients", report.policy), forward, own, checked) as hook:
        report._hook = hook
        try:
            yield hook
        finally:
            report._ended = True


def blamed(error: BaseException) -> str:
    """Returns a note if mpjax itself raised an error, and no function that it planned; else ""."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    # A script may call mpjax too, and wrongly.
    planning = any(file in (__file__, held.__file__) for file in files)
    if not planning or not _raised_in(error).startswith(_jax.OURS):
        return ""
    return (
        "mpjax raised this error while it planned a gradient, so the script may run without mpjax, "
        'or with policy="float32".'
    )


# ---- policies ------------------------------------------------------------------------------------


class NeedsLossScale(ValueError):
    """A policy whose gradients need a loss scale."""


def allowed(policy: Policy) -> Policy:
    """Returns a policy that changes nothing but how gradients are computed; refuses others."""
    if FLOAT16 in (*halves_of(policy), policy.param_dtype):
        raise NeedsLossScale(
            f"policy={brief(str(policy))} computes in float16, whose gradients need a loss scale. "
            "That lives in the training loop, whose lines have to change (docs/frameworks.md; "
            '`mpjax run` with this policy prints a diff of them). Or choose "mixed_bfloat16", '
            "which needs none."
        )
    kept = {"stores parameters": policy.param_dtype, "returns results": policy.output_dtype}
    for what, dtype in kept.items():
        if dtype in HALVES:
            raise ValueError(
                f"policy={brief(str(policy))} {what} in {dtype.name}, but parameters, optimizer "
                "and results of a script that does not change keep their dtypes. Choose a policy "
                'that stores and returns float32, such as "mixed_bfloat16", or change the script '
                "(docs/frameworks.md)."
            )
    return policy


# ---- what is differentiated ----------------------------------------------------------------------


def _around(report: GradientsReport, fun: Callable[..., Any], site: Site) -> Callable[..., Any]:
    if not halves_of(report.policy):
        report._of(site, f"the policy is {report.policy}").calls += 1
        return fun
    if isinstance(fun, Autocast):
        report._of(site, OWN).calls += 1
        return fun

    def run(*args: Any, **kwargs: Any) -> Any:
        which = site._replace(argnums=None), code_of(fun)
        left = report._as_it_is.setdefault(which, {})
        if left and (reason := left.get(runs_now())):
            report._of(site, reason).calls += 1
            return fun(*args, **kwargs)
        finished: list[None] = []
        seen = report._of(site)
        try:
            # Flax NNX differentiates an object that hands out the states that it holds, each once.
            once = apart(fun, collections.deque)
            out = _Planned(once, report.policy, seen, finished)(*args, **kwargs)
            seen.calls += 1
            return out
        except Exception as error:
            refused = isinstance(error, ChecksInside)
            if not refused and (finished or not _may_be_of_planning(error)):
                raise
            failed = error
        # Outside of jit JAX differentiates at values, which plans do without. What the function
        # does besides, it now does twice, so this is the last time.
        reason = _reason(failed)
        try:
            out = fun(*args, **kwargs)
        except Exception as error:
            if _is_users(error):  # as it would be raised without a plan
                left[runs_now()] = reason
                report._of(site, reason).calls += 1
            elif type(error) is not type(failed):
                failed.add_note(AGAIN.format(in_one_line(error)))
                raise failed from None
            raise
        left[runs_now()] = reason
        report._of(site, reason).calls += 1
        return out

    return run


def _reason(error: Exception) -> str:
    if isinstance(error, ChecksInside):
        return f"{CHECKED} {TWICE}"
    if isinstance(error, CONCRETE):
        return f"it reads values of its arrays {TWICE}"
    return f"it cannot be traced {TWICE}: {in_one_line(error)}"


def _may_be_of_planning(error: Exception) -> bool:
    """Returns whether a function may run that has failed while it was planned.

    An error that its own code raises is its own, unless it tells of a trace.
    """
    traced = "trace" in f"{type(error).__name__} {error}".lower()
    return isinstance(error, CONCRETE) or traced or _raised_in(error).startswith(_jax.OURS)


def _is_users(error: Exception) -> bool:
    """Returns whether the user's own code has raised an error, and no library."""
    return _jax.is_users_file(_raised_in(error) or __file__)


def _raised_in(error: BaseException) -> str:
    """Returns the file of the innermost frame of an error that is none of JAX."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((file for file in reversed(files) if not file.startswith(_jax.JAX)), "")


def _left(report: GradientsReport, reason: str, site: Site) -> None:
    report._of(site, reason).calls += 1


class _Planned(Autocast):
    """A function under autocast, whose programs are noted."""

    def __init__(
        self, fun: Callable[..., Any], policy: Policy, seen: Seen, finished: list[None]
    ) -> None:
        # That it has returned, and not what: JAX looks for tracers that outlive their trace.
        super().__init__(fun, policy, returning=lambda _: finished.append(None))
        self._seen = seen

    def _run(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not casts_arguments(self.policy):
            args, kwargs = jax.tree.map(_kept, (args, kwargs))
            fun = _on_values(fun)
        traced = trace(fun, self.policy, args, kwargs)
        if not traced.as_written:
            check_no_checks(traced.jaxpr, debug=True)
            traced = self._seen.moving.apart(traced)
        out = traced.rebuild(call(traced, Flat.of((args, kwargs)).arrays))
        self._seen.planned(traced)
        return jax.tree.map(_value, out)


class _AsItIs:
    """A NumPy value that stays one: a leaf of trees, and no array.

    JAX passes arguments on as they are that are not differentiated, so NumPy computes with them, in
    its own dtypes, and a function may branch on them. What JAX computes of them is an argument of
    the program if it is an array, and else if it has changed (`moving`).
    """

    def __init__(self, value: Any) -> None:
        self.value = value


def _value(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, _AsItIs) else leaf


def _on_values(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of arguments as `_kept` returns them, whose result is of such too."""

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(_value, (args, kwargs))
        return jax.tree.map(_kept, fun(*args, **kwargs))

    return run


def _kept(leaf: Any) -> Any:
    return _AsItIs(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf
