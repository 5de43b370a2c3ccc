"""One command for a day with a GPU."""
