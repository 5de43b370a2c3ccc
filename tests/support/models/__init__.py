"""Models, optimizers and layouts whose state is saved and compared."""
