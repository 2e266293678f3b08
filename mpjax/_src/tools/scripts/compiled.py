"""Training steps compiled for targets, or for this machine, and the largest batch that fits."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from mpjax._src.core.base import _jax
from mpjax._src.core.base.errors import OutOfMemoryError, first_line, in_one_line
from mpjax._src.core.base.progress import advance
from mpjax._src.tools.hardware.aot import Job, compile_program, lower
from mpjax._src.tools.hardware.compiler import require
from mpjax._src.tools.hardware.hlo import parse
from mpjax._src.tools.hardware.hlo_costs import costs
from mpjax._src.tools.hardware.largest import Found, largest
from mpjax._src.tools.hardware.report import CompileReport, report_of
from mpjax._src.tools.hardware.targets import Target, find_target, room_of
from mpjax._src.tools.scripts.batches import Batch
from mpjax._src.tools.scripts.hooks import Hook
from mpjax._src.tools.scripts.steps import Call
from mpjax._src.tools.scripts.surveyed import MOST_BATCH, SurveyedProgram

TRY = "compiled"
NO_PEAKS = "no roofline on {}, whose peaks are not known: name a target, such as --target h100"
ALONE = (
    "for {} a step is compiled without its calls back into Python (checks such as eqx.error_if, "
    "jax.debug.print, pure_callback, io_callback), which need a running device: the figures are "
    "those of the rest"
)


class Compiling:
    """Compiles for the targets of a survey whose compilers are installed, else for this machine."""

    def __init__(self, targets: tuple[str, ...], timeout: float) -> None:
        self.timeout, self.compilations = timeout, 0
        self.notes: list[str] = []
        self._targets: dict[str, Target] = {}
        for name in targets:
            target = find_target(name)
            try:
                require(target)
                self._targets[target.name] = target
            except ImportError as error:
                self.notes.append(f"{error} The table shows this machine instead.")

    @functools.cached_property
    def targets(self) -> tuple[str, ...]:
        """The names of what is compiled for."""
        return (*self._targets,) or (here(),)

    def chips(self) -> Iterator[tuple[str, str]]:
        """Yields each name with that of its chip, "" for this machine."""
        for name in self.targets:
            yield name, self._targets[name].chip if name in self._targets else ""

    def is_target(self, name: str) -> bool:
        return name in self._targets

    def compiled(self, target: str, call: Call, hook: Hook | None) -> SurveyedProgram:
        """Compiles a step under a hook; what refuses it is told."""
        try:
            report = self._report(target, call, hook, call.flat.arrays)
        except OutOfMemoryError as error:
            return SurveyedProgram(target, fits=False, refused=first_line(error))
        except Exception as error:  # whatever a compiler, or the step for this target, raises
            return SurveyedProgram(target, refused=in_one_line(error))
        if isinstance(report, SurveyedProgram):
            if report.roofline_ms is None and NO_PEAKS.format(target) not in self.notes:
                self.notes.append(NO_PEAKS.format(target))
            return report
        return _surveyed(target, report)

    def largest(
        self, target: str, call: Call, hook: Hook | None, batch: Batch, known: SurveyedProgram
    ) -> int:
        """Returns the largest batch of a step that fits a target; 0 if none does."""
        _, available = room_of(self._targets[target], None)
        unit = batch.multiple_of
        units, limit = batch.size // unit, max(1, MOST_BATCH // unit)
        assert known.total_bytes is not None
        sizes: dict[float, float] = {units: known.total_bytes}
        if units >= limit and known.total_bytes <= available:
            return batch.size

        def measure(units: int) -> float:
            advance(TRY, f"a batch of {units * unit} on {target}")
            try:
                report = self._report(target, call, hook, batch.arrays(call, units * unit))
            except OutOfMemoryError:
                return math.inf
            assert isinstance(report, CompileReport)
            return report.total_bytes

        # What grows no faster than the batch fits at the limit: one compilation shows it.
        if known.total_bytes * limit <= available * units:
            sizes[limit] = measure(limit)
        found: Found = largest(measure, available, limit, sizes)
        return found.most * unit

    def _report(
        self, target: str, call: Call, hook: Hook | None, arrays: Sequence[Any]
    ) -> CompileReport | SurveyedProgram:
        self.compilations += 1
        step, found = call.flattened(hook), self._targets.get(target)
        if found is None:
            return _compiled_here(target, step, arrays)
        program = lower(found, step, arrays, alone=True)
        if program.left_out and (told := ALONE.format(target)) not in self.notes:
            self.notes.append(told)
        return compile_program(Job(found, self.timeout, {}), program)


# ---- this machine --------------------------------------------------------------------------------


def here() -> str:
    """Returns the name of this machine's device."""
    device = jax.local_devices()[0]
    return f"this {device.device_kind if device.platform != 'cpu' else 'CPU'}"


def _compiled_here(name: str, jitted: Any, args: Sequence[Any]) -> SurveyedProgram:
    lowered = jitted.trace(*args).lower()
    compiled = lowered.compile()
    text = compiled.as_text() or ""
    parts = _jax.memory_of(compiled.runtime_executable())
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        try:
            target = find_target(device.device_kind)
        except ValueError:  # a device whose peaks are not known
            target = None
        if target is not None:
            asked = lowered.compiler_ir("hlo").as_hlo_module().to_string()
            answer = {"memory": parts, "hlo": text, "asked": asked, "xla_costs": {}}
            return _surveyed(name, report_of(target, answer))
    total = parts["arguments"] + parts["outputs"] - parts["aliased"] + parts["temporary"]
    moved = costs(parse(text).text).bytes
    return SurveyedProgram(name, total, parts["temporary"], moved)


def _surveyed(name: str, report: CompileReport) -> SurveyedProgram:
    return SurveyedProgram(
        name,
        report.total_bytes,
        report.temp_bytes,
        report.bytes_accessed,
        report.roofline_ms,
        report.bound,
        report.fits,
    )
