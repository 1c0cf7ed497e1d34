"""One program for each side of a comparison, run in the environment of that side's packages.

A program takes its options as one JSON argument, reports that it is ready, then answers requests one by one
(`support.serve`).
"""
