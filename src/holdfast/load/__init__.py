"""From images, wherever they lie, back to tensors: choose, prove, read, verify."""
