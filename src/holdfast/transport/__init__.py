"""Transfers byte ranges between keepers over signed HTTP, and control messages over sealed
channels.

``server`` answers HTTP/1.1 range requests out of open files, ``client`` pulls such ranges straight
into memory. Both know only paths, generations and bytes; the callers decide which bytes are offered
and pulled. The signatures, and what they guarantee, are described in
docs/design/0007-between-keepers.md.
"""
