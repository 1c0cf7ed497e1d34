import pytest

from hybridflow.errors import ModelConfigError
from hybridflow.trainers.model_directories import require_model_directory


@pytest.mark.parametrize("path", ["models/Qwen2.5-0.5B", "absent", "a/b", "./a/b", "a/b/c", "models"])
def test_other_paths_are_missing_model_directories(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(ModelConfigError, match=r"is not a model directory: config\.json not found") as error:
        require_model_directory("model.path", path)
    assert f"a relative path starts at '{tmp_path}'" in str(error.value)


def test_directory_with_a_configuration_is_accepted(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    require_model_directory("model.path", str(tmp_path))
