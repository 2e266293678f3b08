"""Op-level mixed precision: the plan of a program, and its rewrite."""

# This module registers the functions that evaluate primitives with derivative rules of their own.
from mpjax._src.autocast import custom_rules as custom_rules
