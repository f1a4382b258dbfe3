"""Lightning callbacks, thin over a Session."""
