"""Moves images from memory to storage, then publishes the manifest that makes a checkpoint."""
