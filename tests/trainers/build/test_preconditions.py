"""What is settled or refused before a run starts: the replay of routes, columns that functions of the user read."""

import pytest

from fixtures.families import write_family
from hybridflow.config import load_config
from hybridflow.errors import ConfigError, ModelConfigError
from hybridflow.trainers.build.preconditions import require_columns, settle_routes


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return write_family(tmp_path_factory.mktemp("moe"), "qwen3_moe")


def settled(path, *changes):
    return settle_routes(load_config(None, [f"model.path={path}", *changes])).actor.router_replay


def test_auto_replays_routes_where_model_and_engine_can(mixture, tiny_model, tmp_path, caplog):
    assert settled(mixture) is settled(mixture, "actor.router_replay=true") is True
    assert settled(mixture, "actor.router_replay=true", "rollout.backend=vllm") is True
    assert settled(mixture, "actor.router_replay=false") is settled(tiny_model("llama")) is False
    with caplog.at_level("INFO"):
        assert settled(mixture, "rollout.backend=vllm") is False
        assert settled(write_family(tmp_path, "phimoe")) is False
    assert [record.message.split(": ", 1)[0] for record in caplog.records] == [
        "actor.router_replay='auto' is false"
    ] * 2


@pytest.mark.parametrize("backend", ["embedded", "vllm"])
def test_true_is_refused_where_routes_cannot_be_replayed(tiny_model, backend):
    with pytest.raises(ModelConfigError, match=r"true is invalid.* is not a mixture of experts.*use 'auto' or false"):
        settled(tiny_model("llama"), "actor.router_replay=true", f"rollout.backend={backend}")


def test_a_column_that_nothing_makes_is_an_error_with_the_key_that_makes_it(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def loss(*, log_probs, ref_log_probs): ...\ndef advantages(*, scores, values): ...\n")
    loss, advantage = f"actor.policy_loss={file}:loss", f"algorithm.advantage={file}:advantages"
    with pytest.raises(ConfigError, match=r"mine.py:loss' reads ref_log_probs, which nothing .*kl_in_loss=true runs"):
        require_columns(load_config(None, [loss]))
    with pytest.raises(ConfigError, match=r"mine.py:advantages' or .* reads values, .*; critic.always=true"):
        require_columns(load_config(None, [advantage]))
    require_columns(load_config(None, [loss, advantage, "algorithm.kl_in_loss=true", "critic.always=true"]))
