"""Restores tensors from images in memory or storage: choose a source, prove coverage, read,
verify.
"""
