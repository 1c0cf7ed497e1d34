"""Bad configurations, one line each: the arguments, the first lines of the error, and exit status 2."""

import re
import time

import pytest

from hybridflow.cli.main import main
from hybridflow.config import leaf_keys

pytestmark = pytest.mark.slow

LONGEST_LINE = 1000
"""Characters of an error line, whatever the input was."""

OVERRIDES = [
    # name, argument, what the error says
    ("no equals sign", "trainer.total_steps", r"recipe trainer\.total_steps does not exist; recipes in"),
    ("no key", "=3", r"'=3' is not an override"),
    ("an empty part", "trainer..total_steps=3", r"is not an override"),
    ("a leading dot", ".total_steps=3", r"is not an override"),
    ("unknown key", "trainer.total_stepz=3", r"trainer\.total_stepz: no such key; did you mean trainer\.total_steps\?"),
    ("unknown section", "trainr.total_steps=3", r"did you mean trainer(\.total_steps)?\?"),
    ("a key below a value", "trainer.seed.x=3", r"trainer\.seed={'x': 3} is invalid: expected a valid integer"),
    ("a value for a section", "trainer=3", r"trainer=3 is invalid: expected a section; set one of its keys, such as"),
    ("a key of 5,000 parts", ".".join(["a"] * 5000) + "=1", r"no such key; it has 9999 characters"),
    ("a key of 10 MB", "a" * 10_000_000 + "=1", r"no such key; it has 10000000 characters"),
    ("a long key in a section", f"trainer.{'a' * 5000}=1", r"no such key; it has 5008 characters"),
    ("an integer of 5,000 digits", "trainer.total_steps=" + "9" * 5000, r"is invalid: expected a valid integer"),
    ("a negative integer of 5,000 digits", "trainer.seed=-" + "9" * 5000, r"is invalid: expected a valid integer"),
    ("a value of 10 MB", "trainer.total_steps=" + "a" * 10_000_000, r"is invalid: expected a valid integer"),
    ("a deep array", "data.train_files=" + "[" * 5000 + "]" * 5000, r"is invalid: expected an array"),
    ("a NUL in a path", "model.path=a\0b", r"is invalid: a text cannot have a NUL character"),
    ("a NUL in an array", 'data.train_files=["a\\u0000b"]', r"is invalid: a text cannot have a NUL character"),
    ("bytes that are not UTF-8", "model.path=\udcff", r"is invalid: character 0 is not Unicode"),
    (
        "an empty run directory",
        "trainer.run_dir=",
        r"trainer\.run_dir='' is invalid: expected a text that is not empty",
    ),
    ("too many threads", "controller.threads=100000", r"expected a value less than or equal to 1024"),
    ("too many workers", "controller.num_workers=100000000", r"expected a value less than or equal to 65536"),
    ("a temperature that overflows", "rollout.temperature=1e-300", r"logits divided by it overflow; use 0 \(greedy\)"),
    ("the same for validation", "validation.temperature=1e-5", r"logits divided by it overflow"),
    ("a slow factor below 1.5", "recovery.slow_factor=1.4", r"slow_factor=1\.4 is invalid: equal ranks differ by less"),
    ("a negative slow factor", "recovery.slow_factor=-3", r"expected a value greater than or equal to 0"),
    ("NaN for the slow factor", "recovery.slow_factor=nan", r"slow_factor=nan is invalid: expected a finite number"),
    ("infinity", "actor.optimizer.lr=inf", r"actor\.optimizer\.lr=inf is invalid: expected a finite number"),
    ("a number beyond float64", "actor.optimizer.lr=1e400", r"lr=inf is invalid: expected a finite number"),
    ("NaN", "actor.optimizer.lr=nan", r"lr=nan is invalid: expected a finite number"),
    ("NaN in an array", "algorithm.rollout_weight_bounds=[nan, 1.0]", r"is invalid: expected a finite number"),
    ("a float for an integer", "trainer.total_steps=3.0", r"=3\.0 is invalid: expected a valid integer"),
    ("a boolean for an integer", "trainer.total_steps=true", r"=True is invalid: expected a valid integer"),
    ("a text for a boolean", "trainer.deterministic=yes", r"='yes' is invalid: expected a valid boolean"),
    ("a number for a boolean", "trainer.deterministic=1", r"=1 is invalid: expected a valid boolean"),
    ("a number for a list", "data.train_files=3", r"=3 is invalid: expected an array"),
    ("a list of numbers for files", "data.train_files=[3]", r"is invalid: expected a valid string"),
    ("a list for a table", "memory.offload=[1]", r"is invalid: expected a table"),
    ("an unknown role", "memory.offload={student = 'all'}", r"is invalid: expected"),
    ("an unknown name", "algorithm.advantage=grp", r"='grp' is invalid: expected one of 'gae', 'grpo'"),
    (
        "a function without a file",
        "algorithm.advantage=:score",
        r"advantage=':score' is invalid: expected one of 'gae'",
    ),
    ("a probability above 1", "rollout.top_p=1.1", r"=1\.1 is invalid: expected a value less than or equal to 1"),
    ("a probability of 0", "rollout.top_p=0", r"is invalid: expected a value greater than 0"),
    ("a negative rate", "actor.optimizer.lr=-1e-5", r"is invalid: expected a value greater than"),
    ("a key of another framework", "rollout.n=4", r"rollout\.n: no such key; the key here is rollout\.group_size"),
]

RECIPES = [
    # name, bytes of the recipe, what the error says
    ("not TOML", b"trainer: 3", r"recipe\.toml, line 1: .*trainer: 3"),
    ("an open table", b"[trainer\nseed = 1", r"recipe\.toml, line 1"),
    ("an open text", b'[model]\npath = "a', r"recipe\.toml"),
    ("UTF-16", "[trainer]\nseed = 1".encode("utf-16"), r"byte 0 is not UTF-8; save the recipe as UTF-8"),
    ("random bytes", bytes(range(128, 256)), r"byte 0 is not UTF-8"),
    ("NUL bytes", b"[model]\npath = 'a\0b'", r"recipe\.toml, line 2"),
    ("a NUL by escape", b'[model]\npath = "a\\u0000b"', r"a text cannot have a NUL character"),
    ("an integer of 5,000 digits", b"[trainer]\nseed = " + b"9" * 5000, r"recipe\.toml: a number has too many digits"),
    ("a key of 5,000 parts", b".".join([b"a"] * 5000) + b" = 1", r"values are nested too deeply"),
    ("a key of 5,000 characters", b"a" * 5000 + b" = 1", r"no such key; it has 5000 characters"),
    ("a deep table", b"x = " + b"{a = " * 3000 + b"1" + b"}" * 3000, r"values are nested too deeply"),
    ("a deep array", b"x = " + b"[" * 3000 + b"]" * 3000, r"values are nested too deeply"),
    ("a key twice", b"[trainer]\nseed = 1\nseed = 2", r"recipe\.toml: this key already has a value: each key once"),
    ("a table twice", b"[trainer]\nseed = 1\n[trainer]\nseed = 2", r"recipe\.toml, line 3"),
    ("a date for a text", b"[model]\npath = 2024-01-01", r"model\.path=datetime\.date\(2024, 1, 1\) is invalid"),
    ("an array of tables", b"[[trainer]]\nseed = 1", r"trainer=.* is invalid: expected a section"),
    ("a section as a value", b"trainer = 3", r"trainer=3 is invalid: expected a section"),
    ("an old section", b"[sft]\nbatch_size = 3", r"sft: no such section; renamed to \[offline\]"),
]


def error_of(arguments, capsys):
    """Run the command; return its error lines. It must end with status 2, soon, and print no traceback."""
    start = time.process_time()
    assert main(arguments) == 2
    assert time.process_time() - start < 20  # of processor time; comparing a key of 10 MB took minutes
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "Traceback" not in error
    assert max(map(len, error.splitlines())) <= LONGEST_LINE
    return error


@pytest.mark.parametrize(("override", "message"), [case[1:] for case in OVERRIDES], ids=[case[0] for case in OVERRIDES])
def test_a_bad_override_is_one_error(override, message, capsys):
    assert_matches(error_of(["config", override], capsys), message)


@pytest.mark.parametrize(("recipe", "message"), [case[1:] for case in RECIPES], ids=[case[0] for case in RECIPES])
def test_a_bad_recipe_is_one_error(recipe, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_bytes(recipe)
    assert_matches(error_of(["config", "recipe.toml"], capsys), message)


def test_a_byte_order_mark_is_no_error(tmp_path, capsys):
    (tmp_path / "recipe.toml").write_bytes(b"\xef\xbb\xbf[trainer]\nseed = 7")
    assert main(["config", str(tmp_path / "recipe.toml")]) == 0
    assert "seed = 7" in capsys.readouterr().out


@pytest.mark.parametrize("path", ["r" * 5000 + ".toml", "a\0b.toml", "", ".", "absent.toml", "/dev/null/x.toml"])
def test_a_recipe_that_cannot_be_opened_is_one_error(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    error_of(["config", path], capsys)


WRONG = {bool: "3", int: '"x"', float: '"x"', str: "[1]", tuple: "3", dict: "3", type(None): "[1]"}
"""A value of another type, by the type of a key's default."""


@pytest.mark.parametrize("key", leaf_keys())
def test_every_key_rejects_a_value_of_another_type_by_its_name(key, tmp_path, capsys):
    section, _, leaf = key.rpartition(".")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"[{section}]\n{leaf} = {WRONG[type(leaf_keys()[key])]}")
    assert f"\n  {key}=" in error_of(["config", str(recipe)], capsys)


def assert_matches(error, message):
    assert re.search(message, error), error[:2000]
