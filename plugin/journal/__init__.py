"""The append-only decision log of a run: events, writer, reader, text report."""
