"""The `rematic` command."""
