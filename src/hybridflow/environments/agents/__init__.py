"""Agents: programs that know nothing of hybridflow and call a model behind a base URL."""
