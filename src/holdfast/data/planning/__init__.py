"""PURE. The order of samples, and how it is split over ranks."""
