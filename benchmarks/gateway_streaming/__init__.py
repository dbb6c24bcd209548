"""How fast one gateway process streams: `python -m benchmarks.gateway_streaming`."""
