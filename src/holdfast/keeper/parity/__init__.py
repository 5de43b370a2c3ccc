"""The keeper's side of parity: makes it, stores it, rebuilds lost images from it."""
