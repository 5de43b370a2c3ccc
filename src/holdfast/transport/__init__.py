"""Bytes between keepers: ranges of files in shared memory, asked for and answered with signatures.

``server`` answers HTTP/1.1 range requests out of open files, ``client`` pulls such ranges straight
into memory. Both know only paths, generations and bytes: what is served, and why it is pulled, is
decided above. How requests are signed, and what that is worth, is in
docs/design/0007-between-keepers.md.
"""
