"""Training: loss scales, gradients, master weights, the training step."""
