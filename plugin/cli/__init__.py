"""The `rematic` command."""

from rematic.cli.command_line import main as main
