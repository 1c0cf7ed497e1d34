"""Trainers: the training loops, their stages, and the functions that build them from a configuration."""

from hybridflow.runtime.allocator import paused_collector

with paused_collector():
    from hybridflow.trainers.build.build import build_trainer
    from hybridflow.trainers.build.build_generation import build_generator, build_validator
    from hybridflow.trainers.build.build_offline import build_dpo_trainer, build_reward_model_trainer, build_sft_trainer
    from hybridflow.trainers.build.memory_estimate import estimate_memory, need_of_pools
    from hybridflow.trainers.build.program import placement_notes, run_on_placeholders
    from hybridflow.trainers.build.step_estimate import step_estimate
    from hybridflow.trainers.offline.objectives import DPO, SFT, Objective, RewardModeling
    from hybridflow.trainers.offline.offline_trainer import OfflineTrainer
    from hybridflow.trainers.ppo import PPO
    from hybridflow.trainers.run.ppo_trainer import PPOTrainer
    from hybridflow.trainers.run.replay import LearnedSample, LearnedStep, Replay, replay_step
    from hybridflow.trainers.run.run_directory import RunDirectory
    from hybridflow.trainers.run.text_generation import TextGenerator
    from hybridflow.trainers.run.training_loop import fit
    from hybridflow.trainers.validation import Validator, majority_at_k, pass_at_k

__all__ = [
    "DPO",
    "PPO",
    "SFT",
    "LearnedSample",
    "LearnedStep",
    "Objective",
    "OfflineTrainer",
    "PPOTrainer",
    "Replay",
    "RewardModeling",
    "RunDirectory",
    "TextGenerator",
    "Validator",
    "build_dpo_trainer",
    "build_generator",
    "build_reward_model_trainer",
    "build_sft_trainer",
    "build_trainer",
    "build_validator",
    "estimate_memory",
    "fit",
    "majority_at_k",
    "need_of_pools",
    "pass_at_k",
    "placement_notes",
    "replay_step",
    "run_on_placeholders",
    "step_estimate",
]
