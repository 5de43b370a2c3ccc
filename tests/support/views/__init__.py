"""Programs that show what Holdfast wrote: Chromium, and Perfetto in it."""
