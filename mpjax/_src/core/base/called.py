"""What this process has called of mpjax since it was imported.

Neither gradients nor states tell whether a function ran in 16 bits: gradients are float32 either
way, may come from another jit, and lose any mark in a ``tree.map``. That something of mpjax has
cast, or scaled a loss, is a fact about the process, on which a warning of a missing line rests.
"""

CASTS, SCALES = "casts", "scales"
UNSCALED = "unscaled"  # it was warned of a float16 gradient that nothing scales
CALLED: set[str] = set()
