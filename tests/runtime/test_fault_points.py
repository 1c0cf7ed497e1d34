import pytest

from hybridflow.errors import ConfigError
from hybridflow.runtime.fault_points import FAULTS_VARIABLE, current_worker, fault_point


def test_a_fault_point_calls_the_function_that_the_environment_names(tmp_path, monkeypatch):
    monkeypatch.delenv(FAULTS_VARIABLE, raising=False)
    fault_point("forward")
    (tmp_path / "hook.py").write_text("def hook(*arguments): raise RuntimeError(arguments)\n")
    monkeypatch.setenv(FAULTS_VARIABLE, f"{tmp_path}/hook.py:hook")
    with pytest.raises(RuntimeError, match=r"\('step', 'driver', 3\)"):
        fault_point("step", 3)
    token = current_worker.set("critic/1")
    with pytest.raises(RuntimeError, match=r"\('forward', 'critic/1', None\)"):
        fault_point("forward")
    current_worker.reset(token)


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("absent.py:hook", "there is no file"),
        ("hook", "write 'path.py:function'"),
        ("empty.py:hook", "has no function"),
    ],
)
def test_a_place_that_names_no_function_is_an_error(tmp_path, monkeypatch, place, problem):
    (tmp_path / "empty.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(FAULTS_VARIABLE, place)
    with pytest.raises(ConfigError, match=f"HYBRIDFLOW_FAULTS '{place}'.*{problem}"):
        fault_point("forward")
