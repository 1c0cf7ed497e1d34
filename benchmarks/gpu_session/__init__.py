"""A quarter of an hour on one GPU: parts in the order of their importance, each in processes of its own."""
