"""The systems that save: Holdfast and its rivals, each at its best settings."""
