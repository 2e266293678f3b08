"""What is public, and where it is: read by type checkers, and by `mpjax` itself when asked."""

from . import checkpoint as checkpoint
from . import debug as debug
from . import errors as errors
from . import hardware as hardware
from . import jmp as jmp
from . import linen as linen
from . import nnx as nnx
from . import optim as optim
from . import reports as reports
from ._src.core.autocast.kernels import current_policy, half_inputs
from ._src.core.autocast.regions import precision
from ._src.core.autocast.transform import autocast
from ._src.core.base.rules import register_rule
from ._src.core.base.trees import all_finite, cast, select
from ._src.core.policy.grammar import get_policy
from ._src.core.policy.policy import Policy
from ._src.core.policy.recommend import recommend_policy
from ._src.core.training.gradients import scaled_value_and_grad
from ._src.core.training.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from ._src.core.training.mixed_precision import mixed_precision
from ._src.core.training.step import TrainState, build_train_step, raise_if_diverged
from ._src.replacements.attention import dot_product_attention
from ._src.replacements.cross_entropy import linear_cross_entropy
from ._src.tools.hardware.aot import compile_for
from ._src.tools.instruments.compare import compare
from ._src.tools.instruments.explain import explain
from ._src.tools.instruments.nonfinite import find_nonfinite
from ._src.tools.lint.linter import lint
from ._src.tools.watching.watch import watch_precision

__version__: str

__all__ = [
    "DynamicLossScale",
    "NoOpLossScale",
    "Policy",
    "StaticLossScale",
    "TrainState",
    "all_finite",
    "autocast",
    "build_train_step",
    "cast",
    "compare",
    "compile_for",
    "current_policy",
    "dot_product_attention",
    "explain",
    "find_nonfinite",
    "get_policy",
    "half_inputs",
    "linear_cross_entropy",
    "lint",
    "mixed_precision",
    "precision",
    "raise_if_diverged",
    "recommend_policy",
    "register_rule",
    "scaled_value_and_grad",
    "select",
    "watch_precision",
]
