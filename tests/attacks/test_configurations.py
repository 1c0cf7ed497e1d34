"""Bad configurations, one line each: what is wrong, and the error of the function that loads them."""

import re
import time

import pytest

from hybridflow.cli.main import main
from hybridflow.config import leaf_keys, load_config
from hybridflow.errors import ConfigError

LONGEST_LINE = 1000
"""Characters of an error line, whatever the input was."""

OVERRIDES = [
    # name, argument, what the error says
    ("unknown section", "trainr.total_steps=3", r"did you mean trainer(\.total_steps)?\?"),
    ("a key of 5,000 parts", ".".join(["a"] * 5000) + "=1", r"no such key; it has 9999 characters"),
    ("a key of 10 MB", "a" * 10_000_000 + "=1", r"no such key; it has 10000000 characters"),
    ("an integer of 5,000 digits", "trainer.total_steps=" + "9" * 5000, r"is invalid: expected a valid integer"),
    ("a deep array", "data.train_files=" + "[" * 5000 + "]" * 5000, r"is invalid: expected an array"),
    ("a NUL in a path", "model.path=a\0b", r"is invalid: a text cannot have a NUL character"),
    ("a NUL in an array", 'data.train_files=["a\\u0000b"]', r"is invalid: a text cannot have a NUL character"),
    ("bytes that are not UTF-8", "model.path=\udcff", r"is invalid: character 0 is not Unicode"),
    ("an empty run directory", "trainer.run_dir=", r"trainer\.run_dir='' is invalid: expected a text that is not"),
    ("too many threads", "controller.threads=100000", r"expected a value less than or equal to 1024"),
    ("a temperature that overflows", "rollout.temperature=1e-300", r"logits divided by it overflow; use 0"),
    ("a number beyond float64", "actor.optimizer.lr=1e400", r"lr=inf is invalid: expected a finite number"),
    ("NaN in an array", "algorithm.rollout_weight_bounds=[nan, 1.0]", r"is invalid: expected a finite number"),
    ("a float for an integer", "trainer.total_steps=3.0", r"=3\.0 is invalid: expected a valid integer"),
    ("a function without a file", "algorithm.advantage=:score", r"advantage=':score' is invalid: expected one of"),
]

RECIPES = [
    # name, bytes of the recipe, what the error says
    ("UTF-16", "[trainer]\nseed = 1".encode("utf-16"), r"byte 0 is not UTF-8; save the recipe as UTF-8"),
    ("an integer of 5,000 digits", b"[trainer]\nseed = " + b"9" * 5000, r"recipe\.toml: a number has too many"),
    ("a key of 5,000 parts", b".".join([b"a"] * 5000) + b" = 1", r"values are nested too deeply"),
    ("a date for a text", b"[model]\npath = 2024-01-01", r"model\.path=datetime\.date\(2024, 1, 1\) is invalid"),
]


def error_of(recipe, *overrides):
    """Load a configuration; return its error, which must come soon and have short lines."""
    start = time.process_time()
    with pytest.raises(ConfigError) as error:
        load_config(recipe, overrides)
    assert time.process_time() - start < 20  # of processor time; comparing a key of 10 MB took minutes
    assert max(map(len, str(error.value).splitlines())) <= LONGEST_LINE
    return str(error.value)


@pytest.mark.parametrize(("override", "message"), [case[1:] for case in OVERRIDES], ids=[case[0] for case in OVERRIDES])
def test_a_bad_override_is_one_error(override, message):
    assert re.search(message, error_of(None, override))


@pytest.mark.parametrize(("recipe", "message"), [case[1:] for case in RECIPES], ids=[case[0] for case in RECIPES])
def test_a_bad_recipe_is_one_error(recipe, message, tmp_path):
    (tmp_path / "recipe.toml").write_bytes(recipe)
    assert re.search(message, error_of(tmp_path / "recipe.toml"))


@pytest.mark.parametrize("argument", ["trainer.total_stepz=3", "model.path=a\0b", "r" * 5000 + ".toml", "absent.toml"])
def test_the_command_shows_one_error(argument, capsys):
    assert main(["config", argument]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "Traceback" not in error
    assert max(map(len, error.splitlines())) <= LONGEST_LINE


def test_a_byte_order_mark_is_no_error(tmp_path):
    (tmp_path / "recipe.toml").write_bytes(b"\xef\xbb\xbf[trainer]\nseed = 7")
    assert load_config(tmp_path / "recipe.toml").trainer.seed == 7


@pytest.mark.parametrize("path", ["r" * 5000 + ".toml", "", ".", "absent.toml", "/dev/null/x.toml"])
def test_a_recipe_that_cannot_be_opened_is_one_error(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error_of(path)


WRONG = {bool: "3", int: '"x"', float: '"x"', str: "[1]", tuple: "3", dict: "3", type(None): "[1]"}
"""A value of another type, by the type of a key's default."""


def test_every_key_rejects_a_value_of_another_type_by_its_name(tmp_path):
    lines = [f"{key} = {WRONG[type(default)]}" for key, default in leaf_keys().items()]
    (tmp_path / "recipe.toml").write_text("\n".join(lines))
    error = error_of(tmp_path / "recipe.toml")
    shown = [line.strip().partition("=")[0] for line in error.splitlines()[1:]]
    assert sorted(set(shown)) == sorted(leaf_keys())
