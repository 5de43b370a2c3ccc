"""The trainer's side of a save: copies the state into the arena, and fences updates."""
