"""`mpjax run`: a script in mixed precision, with no line changed.

JAX is imported by the script, which may set the environment before; mpjax plans from then on, until
the process has ended.
"""

import atexit
import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpjax._src.core.base.lazy import with_jax
from mpjax._src.tools.scripts.launch import LaunchError, file_of, launch, refusal

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
        self._heard_of: list[str] = []
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
        sys.addaudithook(self._heard)  # there is no way to remove one

    def _heard(self, event: str, args: Any) -> None:
        """Counts processes of Python that the script starts."""
        if event not in STARTING or os.getpid() != self.process:
            return
        with contextlib.suppress(Exception):  # it would end what the script does
            words = words_of(*STARTING[event](args))
            again = event == "os.posix_spawn" and words == self._heard_of  # by subprocess itself
            self._heard_of = words
            self.others += runs_python(words) and not again
        if event == "os.exec":
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


# What Python tells an audit hook when a process is started: the program and its arguments.
STARTING: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "subprocess.Popen": lambda args: args[:2],
    "os.posix_spawn": lambda args: args[:2],
    "os.exec": lambda args: args[:2],
    "os.spawn": lambda args: args[1:3],
    "os.system": lambda args: (None, args[0]),
}
PYTHON = re.compile(r"(^|[/\\])(python|pypy)[0-9.]*(\.exe)?$", re.IGNORECASE)
# What starts Python of its own accord, but for its own processes.
OWN_PROCESSES = ("multiprocessing", "mpjax")


def words_of(program: Any, args: Any) -> list[str]:
    """Returns the words of a command: a list, a text, or a list that hands a shell a text."""
    if isinstance(args, (str, bytes, os.PathLike)):
        return shlex.split(os.fsdecode(args))
    words = [os.fsdecode(each) for each in args]
    words[:1] = [os.fsdecode(program)] if program is not None else words[:1]
    shell = words[1:2] == ["-c"] and not PYTHON.search(words[0])
    return shlex.split(words[2]) if shell else words


def runs_python(words: Sequence[str]) -> bool:
    """Returns whether a command runs code of Python, and not as multiprocessing or mpjax would."""
    at = next((i for i, word in enumerate(words) if PYTHON.search(word)), len(words))
    rest = words[at + 1 :]
    return bool(rest) and not any(own in " ".join(rest[:3]) for own in OWN_PROCESSES)


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
