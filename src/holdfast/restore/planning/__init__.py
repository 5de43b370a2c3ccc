"""PURE. Chooses the generation, the source of each image, and the order of reads."""
