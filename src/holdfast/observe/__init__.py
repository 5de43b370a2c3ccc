"""Keeps the events of a run in files, shows them to people, and makes reports from them."""
