"""The check of a model family: a small copy of a model computes what transformers computes, in every layout of rows."""
