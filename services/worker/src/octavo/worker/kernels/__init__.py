"""Triton kernels. Each file has one kernel and the function that launches it; nothing here keeps state."""
