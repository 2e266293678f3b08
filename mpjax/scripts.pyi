"""The public names of `mpjax.scripts`, and where they come from."""

from ._src.tools.scripts.gradients import autocast_gradients, run
from ._src.tools.scripts.survey import survey

__all__ = ["autocast_gradients", "run", "survey"]
