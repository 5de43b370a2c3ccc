"""Boxes and layouts: which rank holds, and which stores, which elements. Pure arithmetic."""
