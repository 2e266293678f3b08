"""The public names of `mpjax.reports`, and where they come from."""

from ._src.base.devices import DeviceFacts
from ._src.hardware.batch_size import BatchTry, LargestBatch
from ._src.hardware.collectives import CollectiveRow
from ._src.hardware.devices import DeviceReport
from ._src.hardware.fit import MemoryFit
from ._src.hardware.memory import MemoryRow
from ._src.hardware.report import CompileReport, MatmulRow
from ._src.hardware.trials import FitTry
from ._src.instruments.agreement import Agreement, Parting
from ._src.instruments.compare import Comparison
from ._src.instruments.explain import CastReport
from ._src.instruments.histogram import GradientHistogram, LossScaleAdvice
from ._src.instruments.nonfinite import NonfiniteReport
from ._src.instruments.tune import Tuning
from ._src.lint.report import Finding, LintReport
from ._src.training.stalled import Stalled
from ._src.training.watch import Overflow, Underflow
from ._src.watching.report import PrecisionReport, PrecisionRow, WatchedTensor
from ._src.watching.risk import Risk

__all__ = [
    "Agreement",
    "BatchTry",
    "CastReport",
    "CollectiveRow",
    "Comparison",
    "CompileReport",
    "DeviceFacts",
    "DeviceReport",
    "Finding",
    "FitTry",
    "GradientHistogram",
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
    "Risk",
    "Stalled",
    "Tuning",
    "Underflow",
    "WatchedTensor",
]
