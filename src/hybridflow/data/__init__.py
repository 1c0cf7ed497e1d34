"""Data: preparation of data sets, prompt, SFT and preference datasets, and a loader whose position can be saved."""

from hybridflow.data.dataset import RLHFDataset
from hybridflow.data.loader import BatchLoader
from hybridflow.data.preference_dataset import PreferenceDataset
from hybridflow.data.prepare.countdown import (
    COUNTDOWN_PROMPT,
    CountdownProblem,
    countdown_prompt,
    generate_countdown,
    prepare_countdown,
)
from hybridflow.data.prepare.datasets import GSM8K_INSTRUCTION, MATH_INSTRUCTION, prepare_files
from hybridflow.data.prepare.multiplication import (
    MULTIPLICATION_PROMPT,
    MultiplicationProblem,
    generate_multiplication,
    prepare_multiplication,
)
from hybridflow.data.prepare.prompt_file import (
    PreparedFiles,
    SourceFile,
    prompt_row,
    write_conversation_file,
    write_preference_file,
    write_prompt_file,
    write_sft_file,
)
from hybridflow.data.row_forms import RowForm
from hybridflow.data.sampler import EpochSampler
from hybridflow.data.sft_dataset import SFTDataset
from hybridflow.data.tokenizer import load_tokenizer, stop_token_ids

__all__ = [
    "COUNTDOWN_PROMPT",
    "GSM8K_INSTRUCTION",
    "MATH_INSTRUCTION",
    "MULTIPLICATION_PROMPT",
    "BatchLoader",
    "CountdownProblem",
    "EpochSampler",
    "MultiplicationProblem",
    "PreferenceDataset",
    "PreparedFiles",
    "RLHFDataset",
    "RowForm",
    "SFTDataset",
    "SourceFile",
    "countdown_prompt",
    "generate_countdown",
    "generate_multiplication",
    "load_tokenizer",
    "prepare_countdown",
    "prepare_files",
    "prepare_multiplication",
    "prompt_row",
    "stop_token_ids",
    "write_conversation_file",
    "write_preference_file",
    "write_prompt_file",
    "write_sft_file",
]
