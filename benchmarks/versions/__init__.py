"""Compares two versions of Holdfast."""
