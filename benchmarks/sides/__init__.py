"""One program for each side of a comparison; each runs in an environment that has that side's packages.

A program takes its options as one JSON argument, says that it is ready, then answers one request after the other
(`support.serve`).
"""
