"""Adapters for Lightning, Accelerate and Transformers."""
