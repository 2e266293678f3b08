"""`mpjax run`: a script in mixed precision, with no line changed.

JAX is imported by the script, which may set the environment before; mpjax plans from then on, until
the process has ended.
"""

import atexit
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpjax._src.core.base.lazy import with_jax
from mpjax._src.tools.scripts.launch import LaunchError, file_of, launch, refusal
from mpjax._src.tools.scripts.started import heard, runs_python

WRONG = 2  # the exit status of a wrong command line

# Policies that need no process to judge them: most runs are under these.
KNOWN = ("mixed_bfloat16", "float32")
JUDGE = """
    from mpjax._src.core.policy.grammar import get_policy
    from mpjax._src.tools.scripts.gradients import allowed
    allowed(get_policy(*asked))
"""

# What a process that multiprocessing spawns runs before the script. It may not find mpjax.
IN_CHILD = """
try:
    from mpjax._src.tools.scripts.running import in_child
except ImportError:
    import sys
    print("mpjax: not found in a child process, where nothing is planned", file=sys.stderr)
else:
    in_child({policy!r})
"""


class Run:
    """A run of a script under a policy.

    Attributes:
        report: The `GradientsReport`; None before JAX is imported.
        script: The file that runs, or "".
        children: Whether multiprocessing has spawned processes.
        others: How many other processes of Python were started, which plan nothing.
    """

    def __init__(self, policy: str, script: str = "", report_file: Path | None = None) -> None:
        self.policy, self.script, self.report_file = policy, script, report_file
        self.report: Any = None
        self.children, self.others = False, 0
        self.process = os.getpid()  # -1 if nothing ran, of which anything could be told
        self._stack = contextlib.ExitStack()

    def judge(self) -> None:
        """Ends the process if its policy is refused, before the script has done anything."""
        if self.policy in KNOWN:
            return
        if "jax" in sys.modules or refusal(JUDGE, self.policy) is not None:
            self._allowed()

    def _allowed(self) -> Any:
        from mpjax._src.core.policy.grammar import get_policy
        from mpjax._src.tools.scripts.gradients import NeedsLossScale, allowed

        try:
            return allowed(get_policy(self.policy))
        except (ValueError, TypeError) as error:
            self._refuse(error, isinstance(error, NeedsLossScale))

    def begin(self) -> None:
        """Plans from now on, for the rest of the process."""
        from mpjax._src.tools.scripts.gradients import GradientsReport, planning

        self.report = GradientsReport(self._allowed())
        self._stack.enter_context(planning(self.report))

    def _refuse(self, error: Exception, needs_lines: bool) -> None:
        """Ends the process, with the diff to apply on stdout if lines of the script can change."""
        self.process = -1
        print(f"Error: {error}", file=sys.stderr)
        if needs_lines and self.script:
            from mpjax._src.tools.scripts.refused import lines_to_change

            proposal = lines_to_change(self.script, self.policy)
            if proposal.diff:
                print(
                    f"To change them, give this to git apply in {proposal.root}:", file=sys.stderr
                )
                sys.stderr.flush()
                print(proposal.diff, end="", flush=True)
            for missing in proposal.missing:
                print(f"{missing}", file=sys.stderr)
        sys.exit(WRONG)

    def abandon(self) -> None:
        """Plans no longer, and tells nothing: nothing has run."""
        self.process = -1
        self._stack.close()

    def spawning(self) -> None:
        """Lets the processes that multiprocessing spawns plan too."""
        from multiprocessing import spawn

        prepare = spawn.get_preparation_data

        def prepared(name: str) -> dict[str, Any]:
            self.children = True
            return {**prepare(name), "mpjax": _InChild(self.policy)}

        spawn.get_preparation_data = prepared
        self._stack.enter_context(heard(self._heard))

    def _heard(self, words: Sequence[str], replaced: bool) -> None:
        """Counts processes of Python that the script starts."""
        if os.getpid() == self.process:
            self.others += runs_python(words)
            if replaced:
                self.finish()  # nothing of this process is left to tell it

    def finish(self) -> None:
        """Prints what was planned, and writes the report."""
        if os.getpid() != self.process:  # a fork, whose results nobody waits for
            return
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed
            print(self.summary(), file=sys.stderr, flush=True)
        if self.report_file is not None and self.report is not None:
            try:
                self.report_file.write_text(json.dumps(self.report.to_dict(), indent=2) + "\n")
            except OSError as error:
                print(f"mpjax: the report could not be written: {error}", file=sys.stderr)

    def summary(self) -> str:
        text = "mpjax: JAX was not imported, so nothing was planned."
        if self.report is not None:
            text = self.report.summary()
        if self.others:
            text += (
                f"\nmpjax: {self.others} process{'es' * (self.others != 1)} of Python that the "
                "script started plan nothing: put `mpjax run` in place of `python` in that command"
            )
        if self.children:
            text += "\nmpjax: processes of multiprocessing plan as this one; they are not counted"
        return text


class _InChild:
    """What has a process that multiprocessing spawns plan, when it reads it."""

    def __init__(self, policy: str) -> None:
        self.policy = policy

    def __reduce__(self) -> Any:
        return exec, (IN_CHILD.format(policy=self.policy),)


def in_child(policy: str) -> None:
    """Plans in a process that multiprocessing has spawned, and tells nothing."""
    run = Run(policy)
    run.spawning()
    with_jax(run.begin)


def run_script(
    policy: str, target: str, args: Sequence[str], module: bool, report_file: Path | None = None
) -> None:
    """Runs a script under a policy; raises what it raises, and tells at the end of the process.

    Args:
        policy: The policy, as text.
        target: The script, notebook or module, as for `launch`.
        args: Its arguments.
        module: Whether it is a module.
        report_file: Where to write the report, as JSON.
    """
    run = Run(policy, file_of(target, module), report_file)
    run.judge()
    run.spawning()
    with_jax(run.begin)
    atexit.register(run.finish)  # after what the script registers, and after its threads
    try:
        launch(target, args, module)
    except LaunchError:
        run.abandon()
        raise
    except Exception as error:
        if run.report is not None:
            from mpjax._src.tools.scripts.gradients import blamed

            if said := blamed(error):
                error.add_note(said)
        raise
