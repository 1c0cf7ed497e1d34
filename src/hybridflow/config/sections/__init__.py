"""The configuration: one frozen section per part of a run, one home per key. `config` holds the whole.

Every key has a meaning (`hybridflow config --reference` prints them) and a default that works. Values that need each
other are checked together in `checks`. No torch here.
"""
