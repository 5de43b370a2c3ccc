"""A run of many hosts over real sockets: keepers that are real, and keepers that are played."""
