"""Real processes: ranks, keepers, hosts and networks, and what is left of them."""
