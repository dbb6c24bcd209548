"""The worker: owns weights, K and V tensors and sampling state, and runs the steps that a scheduler plans."""
