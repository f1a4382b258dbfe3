"""Measure: memory snapshots, probes, out-of-memory classification, the heap cap."""
