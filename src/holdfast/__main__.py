"""Runs the command line as ``python -m holdfast``, where the script is not on the path."""

from __future__ import annotations

import sys

from holdfast.cli import main

sys.exit(main())
