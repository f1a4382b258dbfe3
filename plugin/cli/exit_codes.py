"""What the command tells the shell."""

from __future__ import annotations

DONE = 0
FAILED = 1
"""The run failed for a reason that lies in the machine or in the program."""
USER_ERROR = 2
"""What the user gave cannot be used as it is."""
INTERRUPTED = 130
"""Stopped by Ctrl-C, with a valid journal and checkpoint."""
SIGNAL_BASE = 128
"""A process that a signal ended counts as this plus the signal's number, as in a shell."""
