"""Loading a tokenizer from a directory, without downloads or code of it, and the ids that pad and stop."""

import json
from collections.abc import Collection, Sequence
from datetime import datetime
from pathlib import Path
from string import ascii_letters
from typing import TYPE_CHECKING, cast

from hybridflow.data.chat_prompts import PromptEncoder
from hybridflow.data.chat_templates import chat_template_of
from hybridflow.errors import DataConfigError, DataError
from hybridflow.runtime.observe import get_logger
from hybridflow.runtime.plain_files import require_model_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridflow.config import Config

logger = get_logger(__name__)

_without_padding: set[Path] = set()
"""Directories of tokenizers of which this process has said so: a run loads its tokenizer several times."""

VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken", "*.model")
"""File names, or patterns of them, that hold a tokenizer's vocabulary; a directory with a tokenizer has one."""


CLOCK = "strftime_now"
"""The function by which a chat template reads the clock."""


def reads_clock(path: str | Path) -> bool:
    """Return whether a chat template of a directory reads the clock."""
    patterns = ("tokenizer_config.json", "*.jinja", "additional_chat_templates/*.jinja")
    files = (file for pattern in patterns for file in Path(path).glob(pattern) if file.is_file())
    return any(CLOCK in file.read_text(encoding="utf-8", errors="replace") for file in files)


def _clock(date: str) -> str:
    """Return the source of a macro that a chat template calls instead of the function: the time is 00:00 of the date.

    It replaces each code of a format by its value, such as %d by 28. transformers gives templates no functions of ours.
    """
    begin = datetime.fromisoformat(date)
    codes = [f"%{modifier}{letter}" for letter in ascii_letters for modifier in ("", *"-_0^#")]
    values = {code: value for code in codes if (value := begin.strftime(code)) != code}
    steps = json.dumps({"%%": "\1", **values, "\1": "%"})
    return (
        f"{{% macro {CLOCK}(format) %}}{{% set text = namespace(now=format) %}}"
        f"{{% for code, value in {steps}.items() %}}"
        "{% set text.now = text.now.replace(code, value) %}{% endfor %}{{ text.now }}{% endmacro %}\n"
    )


def tokenizer_of(config: "Config") -> "PreTrainedTokenizerBase":
    """Return the policy's tokenizer, with the chat template and the date of a configuration."""
    return load_tokenizer(config.model.path, config.data.date, config.model.chat_template)


def load_tokenizer(path: str | Path, date: str = "auto", chat_template: str = "") -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a Hugging Face directory, with EOS as padding if it defines no padding token.

    `chat_template`: the text of one in place of its own, the value of `model.chat_template`.

    A chat template that reads the clock gets the beginning of a day: of `date`, the value of `data.date`, or of the day
    of this call. Raises DataError if the directory or its tokenizer is missing, or if the tokenizer needs custom code
    or has no EOS token.
    """
    from transformers import AutoTokenizer  # slow to import, and `hybridflow prepare` needs none

    path = Path(path)
    if not path.is_dir():
        raise DataConfigError(
            f"tokenizer='{path}' is not a directory; give a local Hugging Face directory (nothing is downloaded)."
        )
    require_tokenizer(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for a malformed tokenizer.json
        reason = " ".join(str(error).split())[:300].rstrip(".")
        if "trust_remote_code" in str(error):
            reason = "it needs code of its directory, which hybridflow does not run"
        raise DataError(
            f"tokenizer='{path}' cannot be loaded ({reason}); expected tokenizer.json and tokenizer_config.json. "
            f"Tokenizers that need custom code are not supported."
        ) from error
    eos_token_id(tokenizer, str(path))
    if chat_template:
        tokenizer.chat_template = chat_template_of(chat_template)
    if CLOCK in str(tokenizer.chat_template):
        clock = _clock(str(datetime.today().date()) if date == "auto" else date)
        given = cast(str | dict[str, str], tokenizer.chat_template)
        is_text = isinstance(given, str)
        tokenizer.chat_template = clock + given if is_text else {name: clock + given[name] for name in given}
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        if path.resolve() not in _without_padding:
            _without_padding.add(path.resolve())
            logger.info("The tokenizer of %s has no padding token; EOS (%r) pads instead.", path, tokenizer.eos_token)
    return tokenizer


def require_tokenizer(path: str | Path, key: str = "tokenizer") -> None:
    """Raise DataConfigError if a model directory, the value of `key`, has no file with a vocabulary, or a special file.

    For some such directories transformers returns an empty tokenizer, which encodes every text to no tokens.
    """
    try:
        require_model_files(path)
    except OSError as error:
        raise DataConfigError(f"{key}='{path}' cannot be read: {error}.") from error
    if not any(next(Path(path).glob(name), None) for name in VOCABULARY_FILES):
        raise DataConfigError(
            f"{key}='{path}' has no tokenizer: expected tokenizer.json (or tokenizer.model, vocab.json or vocab.txt) "
            "and tokenizer_config.json; copy these files from the model's original directory."
        )


def eos_token_id(tokenizer: "PreTrainedTokenizerBase", name: str = "") -> int:
    """Return the tokenizer's EOS id; raise DataError, with the fix, if it has none."""
    eos_id = tokenizer.eos_token_id
    if not isinstance(eos_id, int):
        raise DataError(
            f"the tokenizer{' of ' + name if name else ''} has no EOS token, so no response could end; set one of its "
            f'tokens as "eos_token" in tokenizer_config.json (for example "eos_token": "</s>"), or in Python: '
            f"tokenizer.eos_token = '</s>'; tokenizer.save_pretrained(DIRECTORY)."
        )
    return eos_id


def pad_token_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the id of the padding token, or the EOS id if the tokenizer has no padding token."""
    pad_id = tokenizer.pad_token_id
    return pad_id if isinstance(pad_id, int) else eos_token_id(tokenizer)


def response_texts(
    tokenizer: "PreTrainedTokenizerBase",
    rows: Sequence[Sequence[int]],
    stop_ids: Collection[int] = (),
    is_sampled: Sequence[Sequence[bool]] = (),
) -> list[str]:
    """Return what responses say, with the special tokens in them that are text of the model, such as `<think>`.

    Without those that begin, end, pad or mask a text (EOS, BOS, `stop_ids` and others that the tokenizer names), and
    without all special tokens where not `is_sampled`, which the template wrote.
    """
    special = {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}
    named = (getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
    hidden = special & {*stop_ids, *named}
    shown = [
        [token for token, own in zip(row, sampled, strict=True) if token not in (hidden if own else special)]
        for row, sampled in zip(rows, is_sampled or ([True] * len(row) for row in rows), strict=True)
    ]
    return tokenizer.batch_decode(shown, skip_special_tokens=False)


def stop_token_ids(
    tokenizer: "PreTrainedTokenizerBase", model_path: str | Path | None = None, chat_template: bool = False
) -> tuple[int, ...]:
    """Return all ids that end a response, ascending: those of the directory `model_path`, and the tokenizer's EOS.

    The directory names them in `generation_config.json`, or without that file in `config.json`. With `chat_template`
    also the token that the template writes after each answer. Raises DataError for a malformed file.
    """
    stop_ids = {eos_token_id(tokenizer)}
    if chat_template and (end := PromptEncoder(tokenizer, chat_template).end_of_turn()) is not None:
        stop_ids.add(end)
    names = ("generation_config.json", "config.json") if model_path is not None else ()
    files = [file for name in names if (file := Path(model_path or "") / name).is_file()]
    if files:
        stop_ids.update(_read_eos_ids(files[0]))
    return tuple(sorted(stop_ids))


def _read_eos_ids(file: Path) -> list[int]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read as JSON ({error}).") from error
    if not isinstance(settings, dict):
        raise DataError(f"{file}: expected a table, got {type(settings).__name__}; copy the file again.")
    value = settings.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
        raise DataError(f"{file}: eos_token_id must be a number or a list of numbers, got {value!r}.")
    return ids
