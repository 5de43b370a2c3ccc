"""Asks torch for the accelerator beside the host: the only package that names a device's maker."""
