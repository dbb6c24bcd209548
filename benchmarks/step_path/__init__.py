"""What the process boundaries on the step path cost: `python -m benchmarks.step_path`."""
