"""Connects Holdfast to the loops that other libraries have; each module imports its own library."""
