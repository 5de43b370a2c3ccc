"""Applies rules to the state: maps its tensors to checkpoint leaves where the two differ."""
