"""Upper bound of the logarithm of a probability ratio before it is exponentiated."""

MAX_LOG_RATIO = 20.0
"""Upper bound (its exponential is 4.9e8) against overflow, where 0 * inf would make the gradient NaN."""
