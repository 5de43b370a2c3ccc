"""Cooperation of the keepers of several hosts: roles, followers, and their messages."""
