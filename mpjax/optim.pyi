"""The public names of `mpjax.optim`, and where they come from."""

from ._src.core.training.masters import (
    MasterWeightsState,
    master_params,
    with_kahan_summation,
    with_master_weights,
)
from ._src.core.training.mixed_precision import MixedPrecision, MixedPrecisionState
from ._src.core.training.optimizers import SkipNonfiniteState, skip_nonfinite
from ._src.core.training.placement import state_shardings
from ._src.optim.moments import EightBitMomentsState, with_8bit_moments
from ._src.optim.rounding import (
    StochasticRoundingState,
    stochastic_round,
    with_stochastic_rounding,
)

__all__ = [
    "EightBitMomentsState",
    "MasterWeightsState",
    "MixedPrecision",
    "MixedPrecisionState",
    "SkipNonfiniteState",
    "StochasticRoundingState",
    "master_params",
    "skip_nonfinite",
    "state_shardings",
    "stochastic_round",
    "with_8bit_moments",
    "with_kahan_summation",
    "with_master_weights",
    "with_stochastic_rounding",
]
