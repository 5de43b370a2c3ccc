"""Converts bytes to values and back, without any I/O: images, checksums, manifests, plain
values.
"""
