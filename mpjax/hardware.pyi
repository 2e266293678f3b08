"""The public names of `mpjax.hardware`, and where they come from."""

from ._src.core.policy.recommend import half_dtype
from ._src.tools.hardware.batch_size import largest_batch
from ._src.tools.hardware.devices import device_report
from ._src.tools.hardware.fit import fit_memory

__all__ = [
    "device_report",
    "fit_memory",
    "half_dtype",
    "largest_batch",
]
