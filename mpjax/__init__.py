"""mpjax: functional mixed precision for JAX. See docs/architecture.md for the map."""

import importlib
from typing import Any

from mpjax import checkpoint as checkpoint
from mpjax._src.autocast.attention import dot_product_attention
from mpjax._src.autocast.explain import CastReport, explain
from mpjax._src.autocast.kernels import current_policy, half_inputs
from mpjax._src.autocast.regions import full_precision, precision
from mpjax._src.autocast.transform import autocast
from mpjax._src.checkpoint.export import export_params, load_safetensors, save_safetensors
from mpjax._src.errors import CompileError, DivergenceError, OutOfMemoryError
from mpjax._src.hardware.aot import compile_for
from mpjax._src.hardware.batch_size import BatchTry, LargestBatch, largest_batch
from mpjax._src.hardware.collectives import CollectiveRow
from mpjax._src.hardware.devices import (
    DeviceFacts,
    DeviceReport,
    device_report,
    half_dtype,
    recommend_policy,
)
from mpjax._src.hardware.report import CompileReport, MatmulRow
from mpjax._src.instruments.compare import Comparison, compare
from mpjax._src.instruments.histogram import (
    GradientHistogram,
    LossScaleAdvice,
    gradient_histogram,
    recommend_loss_scale,
)
from mpjax._src.instruments.logs import JsonLines, flush_metrics, log_metrics
from mpjax._src.instruments.nonfinite import NonfiniteReport, find_nonfinite
from mpjax._src.instruments.plots import plot_compare, plot_gradient_histogram
from mpjax._src.instruments.tune import Tuning, tune
from mpjax._src.policy import Policy, get_policy
from mpjax._src.rules import register_rule
from mpjax._src.training.gradients import scaled_value_and_grad
from mpjax._src.training.loss_scale import (
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
    get_loss_scale,
)
from mpjax._src.training.mixed_precision import (
    MixedPrecision,
    MixedPrecisionState,
    mixed_precision,
)
from mpjax._src.training.optimizers import (
    MasterWeightsState,
    SkipNonfiniteState,
    master_params,
    skip_nonfinite,
    with_master_weights,
)
from mpjax._src.training.placement import state_shardings
from mpjax._src.training.step import TrainState, TrainStep, build_train_step, raise_if_diverged
from mpjax._src.training.watch import Overflow, Underflow
from mpjax._src.trees import all_finite, cast, select

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("linen", "nnx"):  # not before they are asked for: they import Flax
        return importlib.import_module(f"mpjax.{name}")
    raise AttributeError(f"module 'mpjax' has no attribute {name!r}")


__all__ = [
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
    "GradientHistogram",
    "JsonLines",
    "LargestBatch",
    "LossScaleAdvice",
    "MasterWeightsState",
    "MatmulRow",
    "MixedPrecision",
    "MixedPrecisionState",
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
    "load_safetensors",
    "log_metrics",
    "master_params",
    "mixed_precision",
    "plot_compare",
    "plot_gradient_histogram",
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
    "tune",
    "with_master_weights",
]
