"""Moves image data and parity shards between the hosts of a group."""
