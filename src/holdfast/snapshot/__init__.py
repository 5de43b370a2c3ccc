"""Taking the state out of the training processes into memory that outlives them."""
