"""From memory to storage: write images, then publish the manifest that makes a checkpoint."""
