"""Op-level mixed precision: the plan of a program, and its rewrite."""

# These modules register the functions that evaluate primitives with programs inside.
from mpjax._src.autocast import control_flow as control_flow
from mpjax._src.autocast import custom_rules as custom_rules
