"""Trainers: the loops, the stages they are made of, and the one place that builds them."""

from hybridflow.trainers.build import build_generator, build_sft_trainer, build_trainer, build_validator
from hybridflow.trainers.generation import TextGenerator
from hybridflow.trainers.ppo import PPO
from hybridflow.trainers.ppo_trainer import PPOTrainer
from hybridflow.trainers.program import placement_notes, run_on_placeholders
from hybridflow.trainers.run_directory import RunDirectory
from hybridflow.trainers.sft import SFTTrainer
from hybridflow.trainers.training_loop import fit
from hybridflow.trainers.validation import Validator, majority_at_k, pass_at_k

__all__ = [
    "PPO",
    "PPOTrainer",
    "RunDirectory",
    "SFTTrainer",
    "TextGenerator",
    "Validator",
    "build_generator",
    "build_sft_trainer",
    "build_trainer",
    "build_validator",
    "fit",
    "majority_at_k",
    "pass_at_k",
    "placement_notes",
    "run_on_placeholders",
]
