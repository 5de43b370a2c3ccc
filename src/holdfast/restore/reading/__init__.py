"""Reads ranges of images from storage and memory, checked block by block. No torch."""
