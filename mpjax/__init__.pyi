"""What is public, and where it lies: read by type checkers, and by `mpjax` itself when asked."""

from . import checkpoint as checkpoint
from . import linen as linen
from . import nnx as nnx
from ._src.autocast.attention import dot_product_attention
from ._src.autocast.kernels import current_policy, half_inputs
from ._src.autocast.regions import full_precision, precision
from ._src.autocast.transform import autocast
from ._src.base.devices import DeviceFacts
from ._src.base.errors import CompileError, DivergenceError, OutOfMemoryError, PrecisionWarning
from ._src.base.rules import register_rule
from ._src.base.trees import all_finite, cast, select
from ._src.checkpoint.export import export_params, load_safetensors, save_safetensors
from ._src.hardware.aot import compile_for
from ._src.hardware.batch_size import BatchTry, LargestBatch, largest_batch
from ._src.hardware.collectives import CollectiveRow
from ._src.hardware.devices import DeviceReport, device_report
from ._src.hardware.memory import MemoryRow
from ._src.hardware.report import CompileReport, MatmulRow
from ._src.instruments.agreement import Agreement, Parting
from ._src.instruments.compare import Comparison, compare
from ._src.instruments.explain import CastReport, explain
from ._src.instruments.histogram import (
    GradientHistogram,
    LossScaleAdvice,
    gradient_histogram,
    recommend_loss_scale,
)
from ._src.instruments.logs import JsonLines, flush_metrics, log_metrics
from ._src.instruments.nonfinite import NonfiniteReport, find_nonfinite
from ._src.instruments.plots import (
    plot_agreement,
    plot_compare,
    plot_gradient_histogram,
    plot_precision,
)
from ._src.instruments.tune import Tuning, tune
from ._src.lint.linter import lint
from ._src.lint.report import Finding, LintReport
from ._src.policy.policy import Policy, get_policy
from ._src.policy.recommend import half_dtype, recommend_policy
from ._src.training.gradients import scaled_value_and_grad
from ._src.training.loss_scale import (
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
    get_loss_scale,
)
from ._src.training.masters import (
    MasterWeightsState,
    master_params,
    with_kahan_summation,
    with_master_weights,
)
from ._src.training.mixed_precision import (
    MixedPrecision,
    MixedPrecisionState,
    mixed_precision,
)
from ._src.training.moments import EightBitMomentsState, with_8bit_moments
from ._src.training.optimizers import SkipNonfiniteState, skip_nonfinite
from ._src.training.placement import state_shardings
from ._src.training.rounding import (
    StochasticRoundingState,
    stochastic_round,
    with_stochastic_rounding,
)
from ._src.training.stalled import Stalled, warn_if_stalled
from ._src.training.step import TrainState, TrainStep, build_train_step, raise_if_diverged
from ._src.training.watch import Overflow, Underflow
from ._src.watching.report import PrecisionReport, PrecisionRow, WatchedTensor
from ._src.watching.risk import Risk
from ._src.watching.watch import WatchedStep, measure_precision, watch_precision

__version__: str

__all__ = [
    "Agreement",
    "BatchTry",
    "CastReport",
    "CollectiveRow",
    "Comparison",
    "CompileError",
    "CompileReport",
    "DeviceFacts",
    "DeviceReport",
    "DivergenceError",
    "DynamicLossScale",
    "EightBitMomentsState",
    "Finding",
    "GradientHistogram",
    "JsonLines",
    "LargestBatch",
    "LintReport",
    "LossScaleAdvice",
    "MasterWeightsState",
    "MatmulRow",
    "MemoryRow",
    "MixedPrecision",
    "MixedPrecisionState",
    "NoOpLossScale",
    "NonfiniteReport",
    "OutOfMemoryError",
    "Overflow",
    "Parting",
    "Policy",
    "PrecisionReport",
    "PrecisionRow",
    "PrecisionWarning",
    "Risk",
    "SkipNonfiniteState",
    "Stalled",
    "StaticLossScale",
    "StochasticRoundingState",
    "TrainState",
    "TrainStep",
    "Tuning",
    "Underflow",
    "WatchedStep",
    "WatchedTensor",
    "all_finite",
    "autocast",
    "build_train_step",
    "cast",
    "compare",
    "compile_for",
    "current_policy",
    "device_report",
    "dot_product_attention",
    "explain",
    "export_params",
    "find_nonfinite",
    "flush_metrics",
    "full_precision",
    "get_loss_scale",
    "get_policy",
    "gradient_histogram",
    "half_dtype",
    "half_inputs",
    "largest_batch",
    "lint",
    "load_safetensors",
    "log_metrics",
    "master_params",
    "measure_precision",
    "mixed_precision",
    "plot_agreement",
    "plot_compare",
    "plot_gradient_histogram",
    "plot_precision",
    "precision",
    "raise_if_diverged",
    "recommend_loss_scale",
    "recommend_policy",
    "register_rule",
    "save_safetensors",
    "scaled_value_and_grad",
    "select",
    "skip_nonfinite",
    "state_shardings",
    "stochastic_round",
    "tune",
    "warn_if_stalled",
    "watch_precision",
    "with_8bit_moments",
    "with_kahan_summation",
    "with_master_weights",
    "with_stochastic_rounding",
]
