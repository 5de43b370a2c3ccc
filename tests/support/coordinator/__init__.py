"""A world in which the coordinator is driven without processes."""
