"""Reads images from the memory of other hosts, and decodes lost ones from parity. No torch."""
