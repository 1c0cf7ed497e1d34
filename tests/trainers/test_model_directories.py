import pytest

from hybridflow.errors import ModelConfigError
from hybridflow.trainers.model_directories import require_model_directory


@pytest.mark.parametrize("key", ["model.path", "reference.model_path", "teacher.model_path"])
def test_hub_id_gets_the_download_command(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelConfigError, match=rf"^{key}='Qwen/Qwen2\.5-0\.5B' is not a directory here") as error:
        require_model_directory(key, "Qwen/Qwen2.5-0.5B")
    assert "`hf download Qwen/Qwen2.5-0.5B --local-dir models/Qwen2.5-0.5B`" in str(error.value)
    assert str(error.value).endswith(f"then set {key}=models/Qwen2.5-0.5B.")
    assert f"a relative path starts at '{tmp_path}'" in str(error.value)


@pytest.mark.parametrize("path", ["models/absent", "absent", "./a/b", "a/b/c", "models"])
def test_other_paths_are_missing_model_directories(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(ModelConfigError, match=r"is not a model directory: config\.json not found") as error:
        require_model_directory("model.path", path)
    assert f"a relative path starts at '{tmp_path}'" in str(error.value)


def test_directory_with_a_configuration_is_accepted(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    require_model_directory("model.path", str(tmp_path))


def test_a_missing_directory_of_models_is_not_a_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelConfigError, match=r"is not a model directory: config\.json not found") as error:
        require_model_directory("model.path", "models/Qwen2.5-0.5B-Instruct")
    assert "hf download" not in str(error.value)
