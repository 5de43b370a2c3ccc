"""Runs the command line as ``python -m holdfast.cli``, the same as ``python -m holdfast``."""

from __future__ import annotations

import sys

from holdfast.cli import main

sys.exit(main())
