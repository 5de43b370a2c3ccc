"""Copies checkpoints between roots, and repairs them, by what their manifests name."""
