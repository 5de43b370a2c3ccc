"""Writes checkpoints in the formats of others, and checkpoints of others in our own."""
