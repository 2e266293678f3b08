"""The public names of `mpjax.reports`, and where they come from."""

from ._src.base.devices import DeviceFacts
from ._src.hardware.batch_size import BatchTry, LargestBatch
from ._src.hardware.collectives import CollectiveRow
from ._src.hardware.devices import DeviceReport
from ._src.hardware.fit import MemoryFit
from ._src.hardware.memory import MemoryRow
from ._src.hardware.report import CompileReport, MatmulRow
from ._src.hardware.times import KernelRow
from ._src.hardware.trials import FitTry
from ._src.instruments.agreement import Agreement, Parting
from ._src.instruments.compare import Comparison
from ._src.instruments.explain import CastReport, Row
from ._src.instruments.histogram import GradientHistogram, HistogramRow, LossScaleAdvice
from ._src.instruments.kept import Kept
from ._src.instruments.nonfinite import NonfiniteReport
from ._src.instruments.ranges import Range
from ._src.instruments.shadows import CompareRow
from ._src.instruments.tune import TuneStep, Tuning
from ._src.lint.report import Finding, LintReport
from ._src.lint.rule import Rule
from ._src.training.stalled import Stalled
from ._src.training.watch import Overflow, Underflow
from ._src.watching.figures import Figures
from ._src.watching.report import PrecisionReport, PrecisionRow, WatchedTensor
from ._src.watching.risk import Risk

__all__ = [
    "Agreement",
    "BatchTry",
    "CastReport",
    "CollectiveRow",
    "CompareRow",
    "Comparison",
    "CompileReport",
    "DeviceFacts",
    "DeviceReport",
    "Figures",
    "Finding",
    "FitTry",
    "GradientHistogram",
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
    "TuneStep",
    "Tuning",
    "Underflow",
    "WatchedTensor",
]
