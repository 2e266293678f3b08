"""Detects casts that another library's dtype policy makes in a function under autocast."""

import sys

from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import FLOAT32, HALVES
from mpjax._src.core.program.graph import Block

# The library, its files that cast for its dtype policy, and the way to avoid these casts.
OTHERS = (
    (
        "keras",
        ("keras/src/dtype_policies/dtype_policy.py", "keras/src/backend/common/variables.py"),
        "call keras.config.set_dtype_policy('float32') before you create the model, and pass no "
        "16-bit dtype= to its layers",
    ),
)


def check_no_other_policy(block: Block) -> None:
    """Raises a ValueError if a library's own dtype policy casts float32 to 16 bits.

    All operations of its layers would run in 16 bits, norms and softmax too, whatever the plan
    says.
    """
    for library, files, cure in OTHERS:
        # Nobody who has not imported the library uses its layers.
        if library not in sys.modules:
            continue
        for op in block.walk():
            if op.name != "convert_element_type" or not op.ins[0].is_f32:
                continue
            if op.outs[0].aval.dtype in HALVES and _jax.passed_through(op.eqn, files):
                raise ValueError(
                    f"{library}'s own dtype policy casts {FLOAT32.name} to "
                    f"{op.outs[0].aval.dtype.name} in {op.source or 'a layer'}, but under autocast "
                    "mpjax chooses the dtype of each operation. With both, the layers run norms "
                    f"and softmax in 16 bits. Use one of them. To use autocast: {cure}."
                )
