"""Runs the command as `python -m rematic.cli`."""

from __future__ import annotations

import sys

from rematic.cli.command_line import main

if __name__ == "__main__":
    sys.exit(main())
