"""The benchmark of losses of simulated hosts."""
