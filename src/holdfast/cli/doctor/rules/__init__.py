"""PURE. Judges the facts that doctor's probes collected."""
