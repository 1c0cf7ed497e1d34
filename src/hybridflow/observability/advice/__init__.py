"""Advice from what a run has written: findings in its metrics and samples, and the keys to change."""
