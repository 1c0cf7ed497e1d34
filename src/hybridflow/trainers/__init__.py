"""Trainers: the loops, the stages they are made of, and the one place that builds them."""

from hybridflow.trainers.build import build_sft_trainer, build_trainer, build_validator
from hybridflow.trainers.ppo import PPOTrainer
from hybridflow.trainers.sft import SFTTrainer
from hybridflow.trainers.validation import Validator, pass_at_k

__all__ = [
    "PPOTrainer",
    "SFTTrainer",
    "Validator",
    "build_sft_trainer",
    "build_trainer",
    "build_validator",
    "pass_at_k",
]
