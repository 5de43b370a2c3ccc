"""Protects snapshots against the loss of hosts: groups, parity, and the probability of survival."""
