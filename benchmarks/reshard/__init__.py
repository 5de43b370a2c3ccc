"""The benchmark of restores into another layout."""
