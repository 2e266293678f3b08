"""mpjax: functional mixed precision for JAX. See docs/architecture.md for the map."""

from mpjax.aot import compile_for
from mpjax.aot_report import CompileReport, MatmulRow
from mpjax.autocast import autocast
from mpjax.batch_size import BatchTry, LargestBatch, largest_batch
from mpjax.compare import Comparison, compare, plot_compare
from mpjax.devices import DeviceFacts, DeviceReport, device_report, recommend_policy
from mpjax.dtypes import half_dtype
from mpjax.errors import CompileError, DivergenceError, OutOfMemoryError
from mpjax.explain import CastReport, explain
from mpjax.gradients import scaled_value_and_grad
from mpjax.histogram import (
    GradientHistogram,
    LossScaleAdvice,
    gradient_histogram,
    plot_gradient_histogram,
    recommend_loss_scale,
)
from mpjax.logs import JsonLines, flush_metrics, log_metrics
from mpjax.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from mpjax.nonfinite import NonfiniteReport, find_nonfinite
from mpjax.optimizers import (
    MasterWeightsState,
    SkipNonfiniteState,
    master_params,
    skip_nonfinite,
    with_master_weights,
)
from mpjax.policy import Policy, get_policy
from mpjax.precision import full_precision, precision
from mpjax.train_step import TrainState, TrainStep, build_train_step, raise_if_diverged
from mpjax.trees import all_finite, cast, select
from mpjax.tune import Tuning, tune
from mpjax.watch import Overflow, Underflow

__version__ = "0.1.0"

__all__ = [
    "BatchTry",
    "CastReport",
    "Comparison",
    "CompileError",
    "CompileReport",
    "DeviceFacts",
    "DeviceReport",
    "DivergenceError",
    "DynamicLossScale",
    "GradientHistogram",
    "JsonLines",
    "LargestBatch",
    "LossScaleAdvice",
    "MasterWeightsState",
    "MatmulRow",
    "NoOpLossScale",
    "NonfiniteReport",
    "OutOfMemoryError",
    "Overflow",
    "Policy",
    "SkipNonfiniteState",
    "StaticLossScale",
    "TrainState",
    "TrainStep",
    "Tuning",
    "Underflow",
    "all_finite",
    "autocast",
    "build_train_step",
    "cast",
    "compare",
    "compile_for",
    "device_report",
    "explain",
    "find_nonfinite",
    "flush_metrics",
    "full_precision",
    "get_policy",
    "gradient_histogram",
    "half_dtype",
    "largest_batch",
    "log_metrics",
    "master_params",
    "plot_compare",
    "plot_gradient_histogram",
    "precision",
    "raise_if_diverged",
    "recommend_loss_scale",
    "recommend_policy",
    "scaled_value_and_grad",
    "select",
    "skip_nonfinite",
    "tune",
    "with_master_weights",
]
