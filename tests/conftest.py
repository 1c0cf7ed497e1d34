"""Checked shapes, and what another implementation of GRPO computed.

`--shapes=on` (the default) checks every jaxtyping signature of `hybridflow.algorithms` on each call. Nothing of it
exists in production, where the signatures are only read. `inspect.unwrap(function)` is the function as production
calls it; tests of its own checks use that.
"""

import json
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Qwen2ForCausalLM

FIXTURES = Path(__file__).parent / "fixtures"
CHECKED_PACKAGE = "hybridflow.algorithms"
CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
"""An int is a valid float, as static type checkers have it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shapes",
        choices=("on", "off"),
        default="on",
        help=f"check the tensor shapes in signatures of {CHECKED_PACKAGE} (default: on)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--shapes") == "off":
        return
    if any(name == CHECKED_PACKAGE or name.startswith(f"{CHECKED_PACKAGE}.") for name in sys.modules):
        raise pytest.UsageError(f"--shapes=on came too late: {CHECKED_PACKAGE} is already imported.")
    from jaxtyping import install_import_hook

    install_import_hook(CHECKED_PACKAGE, CHECKER)


@dataclass(frozen=True)
class RecordedGRPO:
    """A batch, weights, losses and gradients: tests/fixtures/make_trl_grpo_fixture.py made and describes them."""

    record: dict[str, Any]
    tensors: "dict[str, Tensor]"

    def build_model(self) -> "Qwen2ForCausalLM":
        """The model with the recorded weights, in the recorded dtype."""
        from transformers import Qwen2Config, Qwen2ForCausalLM

        model = Qwen2ForCausalLM(Qwen2Config(**self.record["model"]))
        weights = {
            name.removeprefix("model."): tensor for name, tensor in self.tensors.items() if name.startswith("model.")
        }
        if model.config.tie_word_embeddings:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        model.load_state_dict(weights)
        if self.record["dtype"] == "float64":
            runpy.run_path(str(FIXTURES / "float64_qwen2.py"))["use_float64_throughout"](model)
        return model

    def grads(self, setting: str) -> "dict[str, Tensor]":
        """The recorded gradient of each weight."""
        prefix = f"grad.{setting}."
        return {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}


def _recorded_grpo(stem: str) -> RecordedGRPO:
    from safetensors.torch import load_file

    return RecordedGRPO(
        record=json.loads((FIXTURES / f"{stem}.json").read_text()),
        tensors=load_file(FIXTURES / f"{stem}.safetensors"),
    )


@pytest.fixture(scope="session")
def recorded_grpo() -> RecordedGRPO:
    """In float64: to be equalled to ten digits."""
    return _recorded_grpo("trl_grpo")


@pytest.fixture(scope="session")
def recorded_grpo_float32() -> RecordedGRPO:
    """In float32, by a newer version: to be equalled to rounding."""
    return _recorded_grpo("trl_grpo_float32")
