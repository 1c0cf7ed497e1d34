"""Preparation of data sets: `train.parquet` and `test.parquet` in one schema."""

from hybridflow.data.prepare.countdown import (
    COUNTDOWN_PROMPT,
    CountdownProblem,
    countdown_prompt,
    generate_countdown,
    prepare_countdown,
)
from hybridflow.data.prepare.dapo import prepare_dapo
from hybridflow.data.prepare.gsm8k import GSM8K_INSTRUCTION, prepare_gsm8k
from hybridflow.data.prepare.math import MATH_INSTRUCTION, prepare_math
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
from hybridflow.data.prepare.table import prepare_table
from hybridflow.data.prepare.ultrafeedback import prepare_ultrafeedback

__all__ = [
    "COUNTDOWN_PROMPT",
    "GSM8K_INSTRUCTION",
    "MATH_INSTRUCTION",
    "MULTIPLICATION_PROMPT",
    "CountdownProblem",
    "MultiplicationProblem",
    "PreparedFiles",
    "SourceFile",
    "countdown_prompt",
    "generate_countdown",
    "generate_multiplication",
    "prepare_countdown",
    "prepare_dapo",
    "prepare_gsm8k",
    "prepare_math",
    "prepare_multiplication",
    "prepare_table",
    "prepare_ultrafeedback",
    "prompt_row",
    "write_conversation_file",
    "write_preference_file",
    "write_prompt_file",
    "write_sft_file",
]
