"""Adapters for Lightning and Transformers."""
