"""What the adapters of frameworks cost."""
