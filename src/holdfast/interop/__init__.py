"""Reads the checkpoints of others as sources like any other; executes nothing that is in them."""
