"""The backends that tests of both run on."""

import pytest

from hybridflow.controller import LocalBackend


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def backend(request):
    return LocalBackend() if request.param == "local" else request.getfixturevalue("ray_backend")
