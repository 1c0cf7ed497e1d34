"""Fixtures of the controller's tests."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hybridflow.controller.ray import RayBackend


@pytest.fixture(scope="session")
def ray_backend(ray_backend: "RayBackend") -> "RayBackend":
    """Return the backend of the session, whose cluster has started: no test starts it as one of its own processes."""
    from hybridflow.controller.ray import RayResourcePool

    ray_backend.check_fit([RayResourcePool([1])])
    return ray_backend
