"""Roots, images and documents, written whole and damaged."""
