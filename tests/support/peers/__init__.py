"""Hosts that exchange rows and images within one process."""
