"""Turns training objects into named leaves and plain values, and back. The only package that knows
torch's modules, optimizers and DTensors.
"""
