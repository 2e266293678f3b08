"""The public names of `mpjax.reports`, and where they come from."""

from ._src.core.base.devices import DeviceFacts
from ._src.tools.hardware.batch_size import BatchTry, LargestBatch
from ._src.tools.hardware.collectives import CollectiveRow
from ._src.tools.hardware.devices import DeviceReport
from ._src.tools.hardware.fit import MemoryFit
from ._src.tools.hardware.memory import MemoryRow
from ._src.tools.hardware.report import CompileReport, MatmulRow
from ._src.tools.hardware.times import KernelRow
from ._src.tools.hardware.trials import FitTry
from ._src.tools.instruments.agreement import Agreement, Parting
from ._src.tools.instruments.alignment import AlignedRow
from ._src.tools.instruments.calibrate import CalibratedPart, Calibration
from ._src.tools.instruments.compare import Comparison
from ._src.tools.instruments.error_report import ErrorReport, ErrorRow
from ._src.tools.instruments.explain import CastReport, Row
from ._src.tools.instruments.histogram import GradientHistogram, HistogramRow, LossScaleAdvice
from ._src.tools.instruments.nonfinite import NonfiniteReport
from ._src.tools.instruments.planned import Kept
from ._src.tools.instruments.ranges import Range
from ._src.tools.instruments.shadows import CompareRow
from ._src.tools.instruments.tune import TuneStep, Tuning
from ._src.tools.lint.report import Finding, LintReport
from ._src.tools.lint.rule import Rule
from ._src.tools.scripts.seen import GradientRow, GradientsReport
from ._src.tools.scripts.surveyed import (
    Survey,
    SurveyedLoss,
    SurveyedProgram,
    SurveyedStep,
    SurveyRow,
)
from ._src.tools.watching.figures import Figures
from ._src.tools.watching.overflows import Overflow, Underflow
from ._src.tools.watching.report import PrecisionReport, PrecisionRow, WatchedTensor
from ._src.tools.watching.risk import Risk
from ._src.tools.watching.stalled import Stalled

__all__ = [
    "Agreement",
    "AlignedRow",
    "BatchTry",
    "CalibratedPart",
    "Calibration",
    "CastReport",
    "CollectiveRow",
    "CompareRow",
    "Comparison",
    "CompileReport",
    "DeviceFacts",
    "DeviceReport",
    "ErrorReport",
    "ErrorRow",
    "Figures",
    "Finding",
    "FitTry",
    "GradientHistogram",
    "GradientRow",
    "GradientsReport",
    "HistogramRow",
    "Kept",
    "KernelRow",
    "LargestBatch",
    "LintReport",
    "LossScaleAdvice",
    "MatmulRow",
    "MemoryFit",
    "MemoryRow",
    "NonfiniteReport",
    "Overflow",
    "Parting",
    "PrecisionReport",
    "PrecisionRow",
    "Range",
    "Risk",
    "Row",
    "Rule",
    "Stalled",
    "Survey",
    "SurveyRow",
    "SurveyedLoss",
    "SurveyedProgram",
    "SurveyedStep",
    "TuneStep",
    "Tuning",
    "Underflow",
    "WatchedTensor",
]
