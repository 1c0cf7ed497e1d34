"""Models: loading from a directory, heads, attention plans, the forward pass, and parallelism per model family."""
