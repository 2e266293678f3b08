"""Casts that another library makes for a policy of its own: two policies over one program."""

import sys

from mpjax._src import _jax
from mpjax._src.autocast.graph import Block
from mpjax._src.dtypes import FLOAT32, HALVES

# The library, the files of it that cast for its policy, and how to have none.
OTHERS = (
    (
        "keras",
        ("keras/src/dtype_policies/dtype_policy.py", "keras/src/backend/common/variables.py"),
        "keras.config.set_dtype_policy('float32') before the model is made, and no dtype= of half "
        "in its layers",
    ),
)


def check_no_other_policy(block: Block) -> None:
    """Raises a ValueError where a library's own dtype policy casts float32 to half.

    Its layers would run in half as a whole, norms and softmax too, whatever the plan says: every
    value that they hand on is half before anything is decided.
    """
    for library, files, cure in OTHERS:
        if library not in sys.modules:
            continue
        for op in block.walk():
            if op.name != "convert_element_type" or not op.ins[0].is_f32:
                continue
            if op.outs[0].aval.dtype in HALVES and _jax.passed_through(op.eqn, files):
                raise ValueError(
                    f"{library}'s own dtype policy casts {FLOAT32.name} to "
                    f"{op.outs[0].aval.dtype.name} in {op.source or 'a layer'}, and autocast is to "
                    "decide that operation by operation: with both, what the layers hand on is "
                    f"half before anything is decided. Use one of them. For autocast: {cure}."
                )
