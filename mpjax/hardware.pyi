"""The public names of `mpjax.hardware`, and where they come from."""

from ._src.hardware.batch_size import largest_batch
from ._src.hardware.devices import device_report
from ._src.hardware.fit import fit_memory
from ._src.policy.recommend import half_dtype

__all__ = [
    "device_report",
    "fit_memory",
    "half_dtype",
    "largest_batch",
]
