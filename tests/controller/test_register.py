import pytest

from hybridflow.controller import Dispatch, Execute, register
from hybridflow.controller.register import registered_methods
from hybridflow.errors import DispatchError


def plain(self):
    return 1


def test_register_does_not_wrap_the_method():
    assert register()(plain) is plain
    assert plain(None) == 1


def test_registered_methods_include_inherited_ones():
    class Base:
        @register()
        def inherited(self): ...

        def helper(self): ...

        @property
        def size(self):
            raise RuntimeError("never read")

    class Derived(Base):
        @register(dispatch_mode="ONE_TO_ALL")
        def own(self): ...

    assert list(registered_methods(Derived)) == ["inherited", "own"]
    assert registered_methods(Derived)["own"].dispatch_mode is Dispatch.ONE_TO_ALL


def test_register_without_parentheses_is_an_error():
    with pytest.raises(DispatchError, match=r"plain: write @register\(\) with parentheses"):
        register(plain)  # pyright: ignore[reportArgumentType]


def test_only_plain_methods_can_be_registered():
    async def later(self): ...

    def several(self):
        yield 1

    for method in (later, several):
        with pytest.raises(DispatchError, match="workers are synchronous"):
            register()(method)
    with pytest.raises(DispatchError, match="expected a plain method, got staticmethod"):
        register()(staticmethod(plain))


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ({"dispatch_mode": "DP_COMPUT"}, r"dispatch_mode='DP_COMPUT' is invalid: use one of Dispatch\.RANK_ZERO"),
        ({"dispatch_mode": 3}, "dispatch_mode=3"),
        ({"execute_mode": "all"}, r"execute_mode='all' is invalid: use Execute\.ALL"),
        ({"reads": "input_ids"}, r"reads='input_ids' is invalid: expected a tuple of column names"),
        ({"writes": (1, 2)}, r"writes=\(1, 2\)"),
        ({"rows": "two"}, "rows='two'"),
        ({"rows": 0}, "rows=0"),
        ({"rows": True}, "rows=True"),
        (
            {"dispatch_mode": Dispatch.DP_COMPUTE_PROTO, "execute_mode": Execute.RANK_ZERO},
            r"DP_COMPUTE_PROTO, which splits a batch.*Dispatch\.RANK_ZERO",
        ),
        ({"dispatch_mode": "ONE_TO_ALL", "keep_groups": "group_ids"}, "ONE_TO_ALL, which does not split batches"),
        ({"dispatch_mode": "ONE_TO_ALL", "parts": "measured"}, "ONE_TO_ALL, which makes its parts itself"),
        ({"dispatch_mode": "DP_COMPUTE_PROTO", "parts": "fair"}, "expected 'equal', 'measured', 'shares'"),
    ],
)
def test_an_invalid_declaration_raises_at_registration(declaration, message):
    with pytest.raises(DispatchError, match=message):
        register(**declaration)
