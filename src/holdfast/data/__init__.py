"""The place in the data, in terms of the whole run: for any number of ranks the same."""
