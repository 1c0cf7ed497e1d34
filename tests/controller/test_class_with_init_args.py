import pytest

from hybridflow.controller import ClassWithInitArgs
from hybridflow.errors import DispatchError


class Model:
    def __init__(self, config, size=1, *, name=""):
        self.config, self.size, self.name = config, size, name


def test_the_config_is_found_by_keyword_and_by_position():
    assert ClassWithInitArgs(Model, config="c").config == "c"
    assert ClassWithInitArgs(Model, "c", 2).config == "c"


def test_wrong_constructor_arguments_raise_before_the_constructor_runs():
    with pytest.raises(DispatchError, match=r"Model\.__init__\(self, config.*missing a required argument: 'config'"):
        ClassWithInitArgs(Model)
    with pytest.raises(DispatchError, match="unexpected keyword argument 'siez'"):
        ClassWithInitArgs(Model, "c", siez=2)


def test_an_instance_instead_of_a_class_is_an_error():
    with pytest.raises(DispatchError, match="needs a worker class"):
        ClassWithInitArgs(Model("c"))  # pyright: ignore[reportArgumentType]
