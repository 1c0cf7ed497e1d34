"""Import path kept for programs; the module is `hybridflow.models.tiny_model`."""

from hybridflow.models.tiny_model import write_model

__all__ = ["write_model"]
