"""PURE. Cuts parameters into subgroups, and schedules their updates by a cost model."""
