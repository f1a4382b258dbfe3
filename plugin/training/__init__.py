"""The recipe runner: data, models, loss, run."""
