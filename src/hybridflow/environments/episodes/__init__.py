"""Episodes: turns between a model and an environment, their tools, and conversations as tokens."""
