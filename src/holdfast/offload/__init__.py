"""Optimizer state in host memory, updated on the host and on the device, wherever it is faster."""
