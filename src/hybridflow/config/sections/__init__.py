"""Sections of the configuration, one frozen class for each part of a run; `config.Config` holds all of them.

Each key has a description (`hybridflow config --reference` prints them) and a working default. `checks` finds
contradictions between keys. Imports no torch.
"""
