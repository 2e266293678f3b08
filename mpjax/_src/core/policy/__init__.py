"""Policies: their grammar, and which one suits a device."""

from mpjax._src.core.policy.policy import Policy as Policy  # old pickles name it here
