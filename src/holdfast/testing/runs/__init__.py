"""Starts the ranks of a run, with or without launchers, reads their journals, and kills them.

The demo, the chaos benchmark and the project's tests stand on it. Nothing here imports torch.
"""
