"""Op-level mixed precision: the plan of a program, and its rewrite."""

# What evaluates primitives with programs inside registers itself.
from mpjax._src.autocast import control_flow as control_flow
from mpjax._src.autocast import custom_rules as custom_rules
