"""The keeper: one process per host that owns the arena and outlives the trainers. No torch."""
