"""What a training step runs: policies, autocast, loss scales, the step, adapters of frameworks."""
