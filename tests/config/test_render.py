import pytest

from hybridflow.config import (
    Config,
    DataConfig,
    RewardConfig,
    leaf_keys,
    load_config,
    reference_markdown,
    reference_text,
    to_toml,
)


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        load_config(None, ["actor.clip_ratio_dual=none", "actor.optimizer.lr=3e-7", "rollout.top_p=0.95"]),
        Config(data=DataConfig(train_files=('a "b".parquet', "c\\d\n\x7f\U0001f600é.parquet"))),
        Config(reward=RewardConfig(function="my file.py:score", error_score=-1e300)),
    ],
)
def test_a_config_written_as_toml_loads_back_equal(config, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert load_config(path) == config


def test_the_reference_is_a_recipe_of_all_defaults_with_descriptions(tmp_path):
    text = reference_text()
    (tmp_path / "reference.toml").write_text(text)
    assert load_config(tmp_path / "reference.toml") == Config()
    assert (
        "# Sample among the fewest most likely tokens whose total probability reaches top_p; 1: all tokens.\n"
        "# number > 0 and <= 1\ntop_p = 1.0\n" in text
    )


def test_the_markdown_reference_has_one_row_for_every_key():
    rows = [line for line in reference_markdown().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    assert [name.strip("`") for name, *_ in cells] == list(leaf_keys())
    assert all(len(row) == 4 and all(row) for row in cells)
    assert "Policy loss, or your own function ([algorithms](algorithms.md))." in [row[3] for row in cells]
    assert ["`actor.clip_ratio_dual`", 'number > 1 or "none"', "`3.0`"] in [row[:3] for row in cells]
    assert ["`model.dtype`", '"float32" or "bfloat16" or "float64" or "auto"', '`"auto"`'] in [row[:3] for row in cells]
