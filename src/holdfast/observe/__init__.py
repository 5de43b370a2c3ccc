"""What becomes of events: sinks that keep them, and the report made of what was kept."""
