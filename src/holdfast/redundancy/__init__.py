"""A snapshot outlives the loss of hosts: groups, their parity, and how sure that is."""
