"""Decide, between and inside steps, what memory asks for. Imports no torch."""
