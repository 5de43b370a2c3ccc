"""Facts of the source tree: contracts between packages, code in documents."""
