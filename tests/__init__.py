"""A package, so that test modules can import what they share (`tests.activations.families`)."""
