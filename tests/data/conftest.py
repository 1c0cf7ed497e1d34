"""Tiny tokenizers and files; nothing is downloaded."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hybridflow.data import prompt_row, write_prompt_file

# <pad> 0, <eos> 1, <bos> 2, <unk> 3, then one id per character: a 4, b 5, ... z 29, newline 30, ":" 31, ...
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz\n:0123456789+-*/()=, <>"


@pytest.fixture
def char_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Return a builder of character tokenizers; `template`: post-processor, `special`: other special tokens."""

    def build(template: str | None = None, chat_template: str | None = None, **special: str) -> PreTrainedTokenizerFast:
        vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
        if template:
            backend.post_processor = processors.TemplateProcessing(
                single=template, special_tokens=[("<eos>", 1), ("<bos>", 2)]
            )
        special = special or {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **special)
        tokenizer.chat_template = chat_template
        return tokenizer

    return build


@pytest.fixture
def prompt_file(tmp_path: Path) -> Callable[..., Path]:
    """Return a writer of prompt files: row i has text i, the ground truth str(i) and, if given, `extra_infos[i]`."""

    def build(texts: list[str], name: str = "prompts.parquet", extra_infos: list[dict] | None = None) -> Path:
        rows = [
            prompt_row(data_source="copy", prompt=text, ground_truth=str(i), split="train", index=i)
            for i, text in enumerate(texts)
        ]
        if extra_infos:
            rows = [{**row, "extra_info": info} for row, info in zip(rows, extra_infos, strict=True)]
        return write_prompt_file(tmp_path / name, rows)

    return build
