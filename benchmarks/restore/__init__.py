"""The benchmark of restores, beside other ways to load and the limits of the machine."""
