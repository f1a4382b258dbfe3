"""Measures what a step costs: traces with fake tensors, and polynomials through them."""
