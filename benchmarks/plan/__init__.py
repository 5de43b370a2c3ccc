"""The benchmark of planning at thousands of ranks."""
