"""The public names of `mpjax.debug`, and where they come from."""

from ._src.instruments.histogram import gradient_histogram, recommend_loss_scale
from ._src.instruments.logs import JsonLines, flush_metrics, log_metrics
from ._src.instruments.tune import tune
from ._src.training.stalled import warn_if_stalled
from ._src.watching.watch import WatchedStep, measure_precision

__all__ = [
    "JsonLines",
    "WatchedStep",
    "flush_metrics",
    "gradient_histogram",
    "log_metrics",
    "measure_precision",
    "recommend_loss_scale",
    "tune",
    "warn_if_stalled",
]
