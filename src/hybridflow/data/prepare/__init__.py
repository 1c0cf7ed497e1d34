"""Preparation of data sets: `train.parquet` and `test.parquet` in one schema."""

from hybridflow.data.prepare.countdown import (
    COUNTDOWN_PROMPT,
    CountdownProblem,
    countdown_prompt,
    generate_countdown,
    prepare_countdown,
)
from hybridflow.data.prepare.gsm8k import GSM8K_INSTRUCTION, prepare_gsm8k
from hybridflow.data.prepare.multiplication import (
    MULTIPLICATION_PROMPT,
    MultiplicationProblem,
    generate_multiplication,
    prepare_multiplication,
)
from hybridflow.data.prepare.prompt_file import (
    PreparedFiles,
    prompt_row,
    write_conversation_file,
    write_preference_file,
    write_prompt_file,
    write_sft_file,
)
from hybridflow.data.prepare.table import prepare_table

__all__ = [
    "COUNTDOWN_PROMPT",
    "GSM8K_INSTRUCTION",
    "MULTIPLICATION_PROMPT",
    "CountdownProblem",
    "MultiplicationProblem",
    "PreparedFiles",
    "countdown_prompt",
    "generate_countdown",
    "generate_multiplication",
    "prepare_countdown",
    "prepare_gsm8k",
    "prepare_multiplication",
    "prepare_table",
    "prompt_row",
    "write_conversation_file",
    "write_preference_file",
    "write_prompt_file",
    "write_sft_file",
]
