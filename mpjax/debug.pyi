"""The public names of `mpjax.debug`, and where they come from."""

from ._src.tools.instruments.calibrate import calibrate
from ._src.tools.instruments.histogram import gradient_histogram, recommend_loss_scale
from ._src.tools.instruments.logs import JsonLines, flush_metrics, log_metrics
from ._src.tools.instruments.tune import tune
from ._src.tools.watching.stalled import warn_if_stalled
from ._src.tools.watching.watch import WatchedStep, measure_precision

__all__ = [
    "JsonLines",
    "WatchedStep",
    "calibrate",
    "flush_metrics",
    "gradient_histogram",
    "log_metrics",
    "measure_precision",
    "recommend_loss_scale",
    "tune",
    "warn_if_stalled",
]
