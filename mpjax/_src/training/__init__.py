"""Training: loss scales, gradients, master weights, the gated step."""
