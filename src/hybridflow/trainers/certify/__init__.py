"""Checks that a recipe gives equal results where hybridflow claims it, on short runs, and writes a certificate."""
