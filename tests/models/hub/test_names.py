import pytest

from hybridflow.errors import DataConfigError
from hybridflow.models.hub import FileName, ModelName, name_of

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("path", "repository", "revision"),
    [
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", None),
        ("Qwen/Qwen2.5-0.5B@main", "Qwen/Qwen2.5-0.5B", "main"),
        (f"a/b@{SHA}", "a/b", SHA),
        ("a/b@refs/pr/1", "a/b", "refs/pr/1"),
    ],
)
def test_a_name_of_a_model_has_an_owner_and_may_have_a_revision(path, repository, revision):
    assert ModelName.of(path) == ModelName(repository, revision)
    assert str(ModelName.of(path)) == path


@pytest.mark.parametrize("path", ["gpt2", "./a/b", "/a/b", "a/b/c", "models/b", "a/b@", "../a/b", "a/b c", ""])
def test_other_texts_are_paths(path):
    assert ModelName.of(path) is None


def test_what_exists_or_lies_in_a_directory_here_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    assert ModelName.of("owner/model") is None
    assert ModelName.of("owner/misspelled") is None
    assert ModelName.of("owner/model@main") == ModelName("owner/model", "main")
    assert ModelName.of("another/model") is not None


def test_a_file_of_a_data_set_has_a_path_and_may_have_a_revision():
    assert FileName.of("hf://datasets/a/b/data/train-*.parquet") == FileName("a/b", None, "data/train-*.parquet")
    assert FileName.of("hf://datasets/a/b@v1/x.csv") == FileName("a/b", "v1", "x.csv")
    assert FileName.of("hf://datasets/a/b") == FileName("a/b", None, "")
    assert FileName.of("data/train.parquet") is None


@pytest.mark.parametrize(
    "name",
    [
        *("hf://a/b/c.csv", "hf://datasets/a", "hf://datasets/a/b/../c.csv", "hf://spaces/a/b/c"),
        *(
            f"hf://datasets/a/b/{path}"
            for path in ("/c.csv", ".", "c/", "**", "c/**", "c**.csv", "**c/d.csv", "c//d.csv")
        ),
    ],
)
def test_another_hf_name_is_an_error_that_says_what_is_valid(name):
    with pytest.raises(DataConfigError, match=r"expected hf://datasets/OWNER/NAME/PATH"):
        FileName.of(name)


def test_a_copy_in_the_cache_has_the_name_with_its_revision():
    assert name_of(f"/cache/hub/models--a--b/snapshots/{SHA}") == f"a/b@{SHA}"
    assert name_of(f"/cache/hub/datasets--a--b/snapshots/{SHA}/x/y.csv") == f"hf://datasets/a/b@{SHA}/x/y.csv"
    assert name_of("/models/a") == "/models/a"
    assert name_of(f"/cache/models--a--b/snapshots/{SHA}/config.json").endswith("config.json")
