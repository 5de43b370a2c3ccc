"""Computes which rank holds which box of which leaf: arithmetic that every rank evaluates alike.

Nothing here reads, waits or knows a tensor: values in, values out.
"""
