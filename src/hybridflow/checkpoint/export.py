"""Export of trained weights as a Hugging Face model directory, or of trained adapters for peft, with a card."""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hybridflow.checkpoint.certificate import Certificate
from hybridflow.checkpoint.model_card import model_card
from hybridflow.checkpoint.model_fingerprint import require_same_base
from hybridflow.checkpoint.partial_directory import partial_directory, remove_leftovers
from hybridflow.checkpoint.store import Checkpoint, open_checkpoint, stored_weights
from hybridflow.checkpoint.stored_tensors import StoredTensors
from hybridflow.errors import CheckpointConfigError, CheckpointError, ModelConfigError
from hybridflow.models.hub.names import name_of
from hybridflow.runtime.files import describe_bytes
from hybridflow.runtime.progress import note_progress

EXPORT_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
"""The precisions of an exported model, by name (`hybridflow export --dtype`)."""

MAX_FILE_BYTES = 5 * 10**9
"""Size of the largest weight file; a larger model is written as several files with an index."""

REWARD_MODEL, OFFSET = "reward_model", "score.bias"
"""The checkpoint component of a reward model, and its bias. The bias is not exported: preferences do not determine it,
training leaves only rounding in it, and a sequence classifier has no such parameter."""

CHAT_TEMPLATES = ("chat_template*", "additional_chat_templates")
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_COPIED = (
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("*.model", "*.tiktoken", "*.spm", "*.bpe", "bpe.codes", "prophetnet.tokenizer", "tekken.json", "byte_maps.json"),
    *("entity_vocab.json", "dict.txt", "emoji.json", "normalizer.json", "*processor_config.json"),
    *CHAT_TEMPLATES,
)
"""Patterns of all files that loading a tokenizer, a processor or the settings of generation reads."""


def export_model(
    source: str | Path | Checkpoint | Mapping[str, Tensor],
    model_dir: str | Path,
    out_dir: str | Path,
    *,
    dtype: str | None = None,
    adapter: bool = False,
    chat_template: str = "",
    certificate: Certificate | None = None,
) -> str:
    """Write a trained model to `out_dir` for `AutoModelForCausalLM.from_pretrained(out_dir)`; return its dtype's name.

    Weights are read, cast and written one file at a time. `out_dir` appears complete or not at all. No code of
    `model_dir` is executed.

    Args:
        source: A checkpoint or its directory, with the weights in component `actor` under "model"; or the weights by
            parameter name, tied weights once. A checkpoint of `hybridflow reward-model` has component `reward_model`
            instead, and is written for `AutoModelForSequenceClassification` with one label.
        model_dir: The directory that training started from: configuration, generation configuration and tokenizer are
            copied from it.
        out_dir: A directory that does not exist or is empty.
        dtype: A key of EXPORT_DTYPES. None: the dtype in the config.json of `model_dir`, or the dtype of the trained
            weights if config.json names none and for adapters alone.
        chat_template: The text of a chat template that the model was trained with, in place of that of `model_dir`.
        certificate: Of the run of the checkpoint; it is written beside the model.
        adapter: Write adapters (lora.rank) alone, for `peft.PeftModel.from_pretrained(model, out_dir)`, instead of
            merging them into the weights of `model_dir`.

    Raises:
        CheckpointError: `out_dir` is not empty or cannot be written, the weights do not fit the model, or the
            certificate is that of another run.
        ModelError: `model_dir` is not a model directory.
    """
    model_dir, out_dir = Path(model_dir), Path(out_dir)
    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise CheckpointConfigError(f"dtype={dtype!r} is invalid: expected {', '.join(EXPORT_DTYPES)}.")
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise CheckpointConfigError(
            f"'{out_dir}' exists and is not an empty directory; give a new directory, or remove this one first."
        )
    if not isinstance(source, Mapping | Checkpoint):
        source = open_checkpoint(source)
    checkpoint = source if isinstance(source, Checkpoint) else None
    if certificate is not None and checkpoint is not None:
        certificate.require_same_run(checkpoint)
    is_reward_model = checkpoint is not None and checkpoint.info.get("kind") == "reward-model"
    model = _Model.of(model_dir, is_reward_model=is_reward_model)
    component = REWARD_MODEL if is_reward_model else "actor"
    opened: Any = stored_weights(checkpoint, component) if checkpoint else nullcontext((source, None))
    with opened as (weights, lora):
        if is_reward_model:
            weights = {name: weights[name] for name in weights if name != OFFSET}
        if adapter and lora is None:
            raise CheckpointConfigError(
                "the checkpoint has no adapters to export: it was trained without lora.rank; leave --adapter out."
            )
        if lora is None:
            model.require_fit(weights)
        elif checkpoint is not None:
            require_same_base(checkpoint, model_dir)
        with model.weights(weights, lora) as weight_of:
            if dtype is not None:
                written = EXPORT_DTYPES[dtype]
            elif adapter:  # peft computes with float32 adapters beside a bfloat16 model, too
                written = next(iter(weights.values())).dtype
            elif (written := model.empty.config.dtype) not in EXPORT_DTYPES.values():  # config.json names none
                written = weight_of(next(iter(model.shapes))).dtype
            try:
                remove_leftovers(out_dir.parent, re.compile(re.escape(out_dir.name)))
                with partial_directory(out_dir) as partial:
                    if adapter:
                        _write_adapter(partial, weights, lora, model_dir, written)
                    else:
                        model.write(partial, weight_of, written)
                        _write_config(partial, model, written)
                    _copy_tokenizer(model_dir, partial, chat_template)
                    if is_reward_model:
                        _make_classifier(partial)
                    card = model_card(model_dir, checkpoint, lora if adapter else None)
                    (partial / "README.md").write_text(card, encoding="utf-8")
                    if certificate is not None:
                        certificate.write(partial)
            except (OSError, SafetensorError) as error:
                needed = describe_bytes(sum(map(math.prod, model.shapes.values())) * written.itemsize)
                raise CheckpointError(f"'{out_dir}' was not written ({needed} of weights): {error}") from error
    return str(written).removeprefix("torch.")


@dataclass(frozen=True)
class _Model:
    """A model directory without its weights.

    `shapes` has each parameter once; `tied` has the other names of tied parameters; `buffers` are the persistent ones.
    `architectures`: the classes that read what is written.
    """

    directory: Path
    empty: Any
    shapes: dict[str, tuple[int, ...]]
    buffers: dict[str, Tensor]
    tied: set[str]
    architectures: list[str]
    is_part: bool
    """Whether it is the language model of a directory that has more, such as an encoder of images."""

    @classmethod
    def of(cls, directory: Path, *, is_reward_model: bool = False) -> "_Model":
        # Imported here because saving a checkpoint does not need it, and the import takes seconds.
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
        from transformers.initialization import no_init_weights

        from hybridflow.models.loading import cannot_be_loaded, parameters_on_meta
        from hybridflow.models.model_files import LOADING_ERRORS, require_sound_config
        from hybridflow.models.parameters import persistent_buffers
        from hybridflow.models.support import other_parts

        if not (directory / "config.json").exists():
            raise ModelConfigError(
                f"'{directory}' is not a model directory: config.json not found; give the directory that training "
                "started from."
            )
        require_sound_config(directory)
        auto_class: Any = AutoModelForSequenceClassification if is_reward_model else AutoModelForCausalLM
        try:
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
            if is_reward_model:
                config.num_labels = 1
            with no_init_weights(), parameters_on_meta():
                model = auto_class.from_config(config, trust_remote_code=False)
        except LOADING_ERRORS as error:
            raise cannot_be_loaded(directory, auto_class, error) from error
        model.tie_weights()
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        buffers = persistent_buffers(model)
        tied = model.state_dict().keys() - shapes.keys() - buffers.keys()
        is_part = not is_reward_model and bool(other_parts(config))
        whole = config.architectures if is_part else None  # a reader of the whole directory finds all of it
        return cls(directory, model, shapes, buffers, tied, whole or [type(model).__name__], is_part)

    def require_fit(self, weights: Mapping[str, Tensor]) -> None:
        """Raise CheckpointError unless the weights have the model's names and shapes."""
        names = set(weights)
        missing = sorted(self.shapes.keys() - names)
        unknown = sorted(names - self.shapes.keys() - self.tied - self.buffers.keys())
        shape_of = weights.shape if isinstance(weights, StoredTensors) else lambda name: tuple(weights[name].shape)
        found = {name: shape_of(name) for name in sorted(self.shapes.keys() & names)}
        wrong = [f"{n} {shape} instead of {self.shapes[n]}" for n, shape in found.items() if shape != self.shapes[n]]
        if missing or unknown or wrong:
            parts = {"missing": missing, "unknown": unknown, "of another shape": wrong}
            listed = "; ".join(f"{len(part)} {what} ({', '.join(part[:3])})" for what, part in parts.items() if part)
            raise CheckpointConfigError(
                f"the weights do not fit the {type(self.empty).__name__} of the model directory: {listed}. "
                "Give the directory that training started from (--model)."
            )

    @contextmanager
    def weights(self, trained: Mapping[str, Tensor], lora: Any) -> Iterator[Callable[[str], Tensor]]:
        """Yield a function from name to tensor: a trained weight, or one of the directory merged with its adapters.

        Persistent buffers, which do not learn, are those of the directory.
        """
        from hybridflow.models.lora import merged_weight
        from hybridflow.models.stored_model import ModelTensors, StoredModel

        with StoredModel(self.directory) as files:
            base = ModelTensors(self.empty, files)

            def weight_of(name: str) -> Tensor:
                if lora is None and name not in self.buffers:
                    return trained[name]
                if name not in base:
                    raise CheckpointError(f"'{self.directory}' lacks {name}, which is not trained; copy it again.")
                weight = base.read(name)
                return merged_weight(name, weight, trained, lora["alpha"] / lora["rank"]) if lora else weight

            yield weight_of

    def write(self, out_dir: Path, weight_of: Callable[[str], Tensor], dtype: torch.dtype) -> None:
        """Write the weights in files of at most MAX_FILE_BYTES, of which one is in memory at a time.

        Names are those of the directory's files. Buffers keep their dtype. Weights of other parts of the directory's
        model, such as an encoder of images, are copied.
        """
        from hybridflow.models.stored_model import ModelTensors, PublishedForm, StoredModel

        form = PublishedForm(self.empty, [*self.shapes, *self.buffers])
        prefix = f"{self.empty.base_model_prefix}."
        with StoredModel(self.directory) as stored:  # files of a body alone, such as those of GPT-2, lack the prefix
            is_body = not any(name.startswith(prefix) for name in stored.names)
            others = ModelTensors(self.empty, stored).ignored if self.is_part else []
            sizes = {name: math.prod(stored.shape(name)) * dtype.itemsize for name in others}
        prefix = prefix if is_body and all(name.startswith(prefix) for name in self.shapes) else ""
        sizes |= {name: math.prod(shape) * dtype.itemsize for name, shape in self.shapes.items()}
        sizes |= {name: buffer.nbytes for name, buffer in self.buffers.items()}
        files: list[list[tuple[str, ...]]] = [[]]
        filled = 0
        for group in (*form.groups, *((name,) for name in others)):
            size = sum(sizes[name] for name in group)
            if files[-1] and filled + size > MAX_FILE_BYTES:
                files.append([])
                filled = 0
            files[-1].append(group)
            filled += size
        index: dict[str, str] = {}
        total = 0
        for number, in_file in enumerate(files, 1):
            file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            tensors: dict[str, Tensor] = {}
            with StoredModel(self.directory) as stored:
                for group in in_file:
                    if group[0] in others:
                        own = {name: _cast(name, stored.read(name), dtype) for name in group}
                    else:
                        own = {n: weight_of(n) if n in self.buffers else _cast(n, weight_of(n), dtype) for n in group}
                        own = {name.removeprefix(prefix): each.contiguous() for name, each in form.of(own).items()}
                    tensors |= own
            save_file(tensors, out_dir / file, metadata={"format": "pt"})
            note_progress()
            index |= dict.fromkeys(tensors, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
        if len(files) > 1:
            document = {"metadata": {"total_size": total}, "weight_map": index}
            (out_dir / "model.safetensors.index.json").write_text(json.dumps(document, indent=2), encoding="utf-8")


def _cast(name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight in a dtype; raise CheckpointConfigError if a finite value of it becomes infinite."""
    cast = weight.to(dtype)
    if dtype == torch.float16 and bool((cast.isinf() & weight.isfinite()).any()):
        raise CheckpointConfigError(
            f"{name} has values up to {weight.abs().max():.3g}, but float16 ends at 65504; use --dtype bfloat16 or "
            "float32."
        )
    return cast


def _write_adapter(
    out_dir: Path, weights: Mapping[str, Tensor], lora: Any, model_dir: Path, dtype: torch.dtype
) -> None:
    """Write adapters in the format of peft's `save_pretrained`."""
    names = {name: f"base_model.model.{name.replace('.default', '')}" for name in weights}
    tensors = {names[name]: _cast(name, weight, dtype) for name, weight in weights.items()}
    save_file(tensors, out_dir / "adapter_model.safetensors", metadata={"format": "pt"})
    repository, _, revision = (name := name_of(model_dir)).partition("@")
    is_on_hub = name != str(model_dir)
    document = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "target_modules": lora["targets"],
        "lora_dropout": 0.0,
        "bias": "none",
        "base_model_name_or_path": repository if is_on_hub else str(model_dir.resolve()),
        **({"revision": revision} if is_on_hub else {}),
    }
    _write_json(out_dir / "adapter_config.json", document)


def _copy_tokenizer(model_dir: Path, out_dir: Path, chat_template: str) -> None:
    for pattern in _COPIED[: -len(CHAT_TEMPLATES)] if chat_template else _COPIED:
        for path in model_dir.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, out_dir / path.name)
            elif path.is_dir():
                shutil.copytree(path, out_dir / path.name)
    if chat_template:
        (out_dir / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
        if (file := out_dir / "tokenizer_config.json").is_file():
            settings = json.loads(file.read_text(encoding="utf-8"))
            _write_json(file, {name: value for name, value in settings.items() if name != "chat_template"})


def _write_config(out_dir: Path, model: _Model, dtype: torch.dtype) -> None:
    """Write config.json as it was, in the words of the version of transformers that wrote it, for these weights."""
    config = json.loads((model.directory / "config.json").read_text(encoding="utf-8"))
    config.pop("auto_map", None)  # code of the directory, which is neither executed nor copied
    config.pop("quantization_config", None)  # weights are written as they were trained
    names = [name for name in ("dtype", "torch_dtype") if name in config] or ["dtype"]
    config |= {"architectures": model.architectures, **dict.fromkeys(names, str(dtype).removeprefix("torch."))}
    _write_json(out_dir / "config.json", config)


def _make_classifier(directory: Path) -> None:
    """Let the exported directory be that of a classifier with one label, whose padding is not part of conversations.

    A classifier scores the last token that is not padding. If EOS pads, it would skip the EOS of a conversation.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    files = [file for name in ("generation_config.json", "config.json") if (file := directory / name).is_file()]
    ends = [tokenizer.eos_token_id, *(json.loads(f.read_text(encoding="utf-8")).get("eos_token_id") for f in files[:1])]
    stops = {token for end in ends for token in (end if isinstance(end, list) else [end])}
    named = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id)
    candidates = [*named, *(token for token, added in sorted(tokenizer.added_tokens_decoder.items()) if added.special)]
    padding = next((token for token in candidates if isinstance(token, int) and token not in stops), None)
    names = () if padding in (None, tokenizer.pad_token_id) else TOKENIZER_SETTINGS
    classifier = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "pad_token_id": padding}
    for name, changes in (
        ("config.json", classifier),
        *((name, {"pad_token": tokenizer.convert_ids_to_tokens(padding)}) for name in names),
    ):
        if (file := directory / name).is_file():
            document = json.loads(file.read_text(encoding="utf-8"))
            document.pop("num_labels", None)
            _write_json(file, document | changes)


def _write_json(file: Path, document: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
