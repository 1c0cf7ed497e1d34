"""The largest logarithm of a probability ratio that is exponentiated."""

MAX_LOG_RATIO = 20.0
"""Bound from above (exp of it is 4.9e8): beyond, exp overflows, and 0 * inf makes a NaN of the gradient."""
