"""How many GPUs one scheduler and one KV manager drive: `python -m benchmarks.scale`."""
