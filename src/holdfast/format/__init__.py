"""Bytes to values and back, without any I/O: images, block checksums, manifests, plain values."""
