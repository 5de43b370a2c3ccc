"""Keeps the place in the training data for the whole run, so that any number of ranks can
resume.
"""
