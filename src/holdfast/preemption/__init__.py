"""SIGTERM: a last step is agreed on, saved on all ranks, and in storage within the grace given.

Whoever takes a machine back says so by SIGTERM, some time before SIGKILL. ``signals`` hears it,
``grace`` agrees on the last step and has memory stand for it where it cannot be had, ``leaving``
waits for storage and ends. See docs/design/0011-preemption.md.
"""
