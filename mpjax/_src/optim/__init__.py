"""Optimizer state in fewer bytes: 8-bit moments, split masters, stochastic rounding."""
