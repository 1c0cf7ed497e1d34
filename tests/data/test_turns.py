"""What is learned from conversations, by chat templates of many forms: each answer up to the token that ends it."""

import logging
import re

import pytest
from tokenizers import decoders, pre_tokenizers

from fixtures.chat_tokenizers import CONTROL, TEMPLATES, byte_tokenizer, chat_tokenizer
from fixtures.row_files import write_rows
from hybridflow.data import PreferenceDataset, RLHFDataset, SFTDataset, stop_token_ids
from hybridflow.data.turns import TurnEncoder
from hybridflow.environments import EpisodeEncoder
from hybridflow.errors import DataError


def talk(user, assistant, header="", ending=""):
    """Return a chat template of the forms of a user's message, an answer, the header of an answer, and an ending."""
    return (
        f"{{% for m in messages %}}{{% if m.role == 'user' %}}{user}{{% else %}}{header}{assistant}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{header}{{% else %}}{ending}{{% endif %}}"
    )


C = "{{ m.content }}"
FORMS = {
    # the token that ends a turn, which may not be EOS, and the template
    "chatml": ("<|im_end|>", talk(f"user\n{C}<|im_end|>\n", f"{C}<|im_end|>\n", "assistant\n")),
    "gemma": ("<end>", talk("user\n{{ m.content | trim }}<end>\n", "{{ m.content | trim }}<end>\n", "model\n")),
    "phi3": ("<|end|>", talk(f"<|user|>\n{C}<|end|>\n", f"{C}<|end|>\n", "<|assistant|>\n", "<eos>")),
    "phi4": ("<|im_end|>", talk(f"user<|im_sep|>{C}<|im_end|>", f"{C}<|im_end|>", "assistant<|im_sep|>")),
    "mistral": ("<eos>", talk(f"[INST] {C} [/INST]", f"{C}<eos> ")),
    "llama2": ("<eos>", talk("<s>[INST] {{ m.content.strip() }} [/INST]", " {{ m.content.strip() }} <eos>")),
    "olmo": ("<eos>", talk(f"<|user|>\n{C}\n", f"{C}<eos>{{{{ '' if loop.last else '\n' }}}}", "<|assistant|>\n")),
    "system": ("<eos>", "You help.\n" + talk(f"U: {C}\n", f"{C}<eos>\n", "A: ")),
}
CHAT = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(("a", "one", "b", "two"))]


def tokenizer_of(form):
    end, template = FORMS[form]
    return byte_tokenizer(tuple(dict.fromkeys(("<s>", end, "<eos>"))), template)


def said(tokenizer, row):
    """Return the counted text of a row, with "·" for the tokens that do not count."""
    return "".join(tokenizer.decode([t]) if own else "·" for t, own in zip(row.response, row.counts, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_learned_up_to_their_end_in_the_text_of_the_template(form):
    tokenizer, end = tokenizer_of(form), FORMS[form][0]
    encoder = TurnEncoder(tokenizer)
    (row,) = encoder(CHAT, [], "row 0")
    assert tokenizer.apply_chat_template(CHAT, tokenize=False).startswith(
        tokenizer.decode([*row.prompt, *row.response])
    )
    first, *between, last = said(tokenizer, row).split("·")
    assert [each.strip() for each in (first, *between, last) if each] == [
        f"{word}{' ' * (form == 'llama2')}{end}" for word in ("one", "two")
    ]
    begun = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(row.prompt) == begun
    assert EpisodeEncoder(tokenizer, [tokenizer.eos_token_id])(CHAT, [], "row 0") == [row]
    prompt, (answer, other) = encoder.responses(CHAT[:3], ["two", f"two{end}\n"], "row 0")
    assert answer == other
    assert [*prompt, *answer] == [*row.prompt, *row.response]


@pytest.mark.parametrize("written", ["", "\n### End\n"])
def test_answers_that_a_template_does_not_end_have_eos_and_rows_of_their_own(caplog, written):
    tokenizer = byte_tokenizer(("<s>", "<eos>"), talk(f"U: {C}\n", f"{C}{written}", "A: "))
    with caplog.at_level(logging.WARNING):
        first, second = TurnEncoder(tokenizer)(CHAT, [], "row 0")
    assert [said(tokenizer, row) for row in (first, second)] == [f"one{written}<eos>", f"two{written}<eos>"]
    assert tokenizer.decode(second.prompt) == f"U: a\nA: one{written}U: b\nA: "
    assert "writes no stop token after" in caplog.text


def test_a_template_that_changes_earlier_turns_makes_a_row_for_each_answer():
    tokenizer = byte_tokenizer(("<s>", "<eos>"), talk(f"U: {C}\n", "{{ m.content if loop.last else '-' }}<eos>", "A: "))
    first, second = TurnEncoder(tokenizer)(CHAT, [], "row 0")
    assert [said(tokenizer, row) for row in (first, second)] == ["one<eos>", "two<eos>"]
    assert tokenizer.decode(second.prompt) == "U: a\nA: -<eos>U: b\nA: "


def test_reasoning_that_a_prompt_opens_and_a_template_drops_is_learned():
    template = talk(f"U: {C}\n", "{{ m.content.split('</think>')[-1] }}<eos>", "A: ")
    tokenizer = byte_tokenizer(("<s>", "<eos>"), template.replace("A: {% else %}{%", "A: <think>\n{% else %}{%"))
    content = "<think>\nr\n</think>\nyes"
    (row,) = TurnEncoder(tokenizer)([CHAT[0], {"role": "assistant", "content": content}], [], "row 0")
    assert tokenizer.decode([*row.prompt, *row.response]) == "U: a\nA: <think>\nr\n</think>\nyes<eos>"
    assert TurnEncoder(tokenizer).responses(CHAT[:1], [content], "row 0") == (row.prompt, [row.response])
    with pytest.raises(DataError, match=r"row 0: .* the prompt of message 1 in another way once it is answered"):
        TurnEncoder(tokenizer)(CHAT, [], "row 0")


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("form", ["mistral", "olmo", "llama2", "system"])
def test_rows_are_the_tokens_of_the_text_where_a_tokenizer_begins_with_a_space(scheme, form):
    tokenizer = tokenizer_of(form)
    backend = tokenizer.backend_tokenizer
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    whole = tokenizer(tokenizer.apply_chat_template(CHAT, tokenize=False), add_special_tokens=False)["input_ids"]
    for encoder in (TurnEncoder(tokenizer), EpisodeEncoder(tokenizer)):
        (row,) = encoder(CHAT, [], "row 0")
        ids = [*row.prompt, *row.response]
        assert ids == whole[: len(ids)]
        prompt, (answer,) = encoder.responses(CHAT[:3], ["two"], "row 0")
        assert [*prompt, *answer] == ids


def forms_of_data(folder, tokenizer, text):
    """Return a reader of an answer's tokens for each form in which data has it; `text` begins with one letter."""
    pair = write_rows(folder / "p.jsonl", [{"prompt": "a", "chosen": text, "rejected": "b"}])
    response = write_rows(folder / "r.jsonl", [{"prompt": "a", "response": text}])
    answer = {"role": "assistant", "content": text}
    schema = {"type": "function", "function": {"name": "u", "parameters": {"type": "object", "properties": {}}}}
    encoder = EpisodeEncoder(tokenizer)
    return {
        "response": lambda: SFTDataset(response, tokenizer, 99, 99)._at([0])[0].response,
        "messages": lambda: encoder([CHAT[0], answer], [], f"{folder}: line 1")[0].response,
        "tools": lambda: encoder([CHAT[0], answer], [schema], f"{folder}: line 1")[0].response,
        "pair": lambda: PreferenceDataset(pair, tokenizer, 99, 99)._at([0])[0][0][1],
        "scored": lambda: PreferenceDataset(pair, tokenizer, 99, 99, layout="reward_model")._at([0])[0][0][0][-3:-1],
    }


@pytest.mark.parametrize("stop", ["<|im_end|>", "<eos>"])
def test_any_stop_token_ends_an_answer_and_text_after_it_is_an_error(tmp_path, stop):
    template = "{# <tool_call> </tool_call> #}{{ 'u' if tools }}" + FORMS["chatml"][1]
    tokenizer = byte_tokenizer(("<s>", "<|im_end|>", "<eos>"), template)
    for form, read in forms_of_data(tmp_path, tokenizer, f"y{stop}\n").items():
        assert (form, tokenizer.decode(read())) == (form, "y<|im_end|>")
    problem = re.escape(f"the stop token {stop!r} before 'z', where generation would end; remove it")
    for read in forms_of_data(tmp_path, tokenizer, f"y{stop}z").values():
        with pytest.raises(DataError, match=f"^{tmp_path}.*: line 1: .*{problem}"):
            read()


def test_without_a_template_a_response_has_one_of_the_stop_tokens(char_tokenizer):
    encoder = TurnEncoder(char_tokenizer(), [1, 2])
    assert encoder.responses(CHAT[:1], ["b", "b<bos>", "b<eos>"], "row 0")[1] == [[5, 1], [5, 2], [5, 1]]


def test_the_token_that_a_template_writes_after_an_answer_ends_responses():
    for form, (end, _) in FORMS.items():
        tokenizer = tokenizer_of(form)
        expected = tokenizer.convert_tokens_to_ids([*dict.fromkeys([end, "<eos>"])])
        assert stop_token_ids(tokenizer, chat_template=True) == tuple(sorted(expected))
        assert stop_token_ids(tokenizer) == (tokenizer.eos_token_id,)


def weighted(*weights):
    return [
        {**message, **({} if weight is None else {"weight": weight})}
        for message, weight in zip(CHAT, weights, strict=True)
    ]


def test_an_answer_of_weight_0_is_context():
    tokenizer = tokenizer_of("chatml")
    encoder = TurnEncoder(tokenizer)
    (row,) = encoder(weighted(None, 0, None, 1.0), [], "row 0")
    assert said(tokenizer, row) == "two<|im_end|>"
    (whole,) = encoder(CHAT, [], "row 0")
    assert [*row.prompt, *row.response] == [*whole.prompt, *whole.response]
    (row,) = encoder(weighted(0, 1, 0, False), [], "row 0")
    assert said(tokenizer, row) == "one<|im_end|>"


READERS = {"messages": SFTDataset, "response": SFTDataset, "chosen": PreferenceDataset, "answer": RLHFDataset}


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"weight": 2}, "message 1, of the role assistant, has weight=2; expected 0 or 1"),
        ({"weight": "0"}, "message 1, of the role assistant, has weight='0'; expected 0 or 1"),
        ({"role": "user", "weight": 1}, "message 1, of the role user, has weight=1; expected 0 or 1"),
        ({"train": False}, "message 1 has the key 'train', which the chat template does not read"),
    ],
)
def test_a_weight_or_key_without_a_meaning_is_an_error(tmp_path, message, problem):
    tokenizer = tokenizer_of("chatml")
    prompt = [CHAT[0], {**CHAT[1], **message}, CHAT[2]]
    rows = {
        "messages": {"messages": [*prompt, CHAT[3]]},
        "response": {"prompt": prompt, "response": "c"},
        "chosen": {"prompt": prompt, "chosen": "c", "rejected": "d"},
        "answer": {"prompt": prompt, "answer": "c"},
    }
    for name, row in rows.items():
        limits = (99,) if name == "answer" else (99, 99)
        file = write_rows(tmp_path / f"{name}.jsonl", [row])
        with pytest.raises(DataError, match=f"^{file}: line 1: {problem}"):
            READERS[name](file, tokenizer, *limits)
    tokenizer.chat_template = tokenizer.chat_template.replace(f"{C}<|im_end|>", f"{C}{{{{ m.train }}}}<|im_end|>")
    (row,) = TurnEncoder(tokenizer)([CHAT[0], {**CHAT[1], "train": "x"}], [], "row 0")
    assert said(tokenizer, row) == "onex<|im_end|>"


def test_a_word_of_a_template_is_no_key_that_it_reads():
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = "{% if thinking %}{% endif %}A thinking process. " + tokenizer.chat_template
    with pytest.raises(DataError, match="row 0: message 1 has the key 'thinking', which the chat template does not"):
        TurnEncoder(tokenizer)([CHAT[0], {**CHAT[1], "thinking": "x"}], [], "row 0")


@pytest.mark.parametrize("role", ["system", "human"])
def test_a_message_that_the_template_does_not_write_is_an_error(tmp_path, role):
    template = FORMS["phi4"][1].replace("{% else %}", "{% elif m.role == 'assistant' %}", 1)
    tokenizer = byte_tokenizer(("<s>", "<|im_end|>"), template)
    messages = [{"role": role, "content": "x"}, *CHAT]
    rows = {
        "messages": {"messages": messages},
        "response": {"prompt": messages[:2], "response": "c"},
        "chosen": {"prompt": messages[:2], "chosen": "c", "rejected": "d"},
        "answer": {"prompt": messages[:2], "answer": "c"},
    }
    for name, row in rows.items():
        file = write_rows(tmp_path / f"{name}.jsonl", [row])
        with pytest.raises(DataError, match=f"^{file}: line 1: message 0 has the role '{role}', which the chat temp"):
            READERS[name](file, tokenizer, *((99,) if name == "answer" else (99, 99)))


@pytest.mark.parametrize("key", ["weight", "train"])
def test_a_key_of_an_answer_that_is_read_as_a_text_is_an_error(tmp_path, key):
    said = [{"role": "assistant", "content": text, key: int(text == "c")} for text in "cd"]
    rows = {
        "rejected": (PreferenceDataset, {"prompt": "a", "chosen": said[:1], "rejected": said[1:]}),
        "completion": (SFTDataset, {"prompt": CHAT[:1], "completion": said[1:]}),
    }
    for column, (reader, row) in rows.items():
        if key == "train":
            row["chosen"] = CHAT[1:2]
        file = write_rows(tmp_path / f"{column}.jsonl", [row])
        with pytest.raises(DataError, match=f"^{file}: line 1: the answer in '{column}' has {key}=0, but is used as"):
            reader(file, tokenizer_of("chatml"), 99, 99)


def test_messages_without_an_answer_to_learn_are_errors():
    for weights in ((None, 0, None, 0), (None, None, None, None)):
        messages = weighted(*weights)[: 4 if 0 in weights else 1]
        with pytest.raises(DataError, match=r"row 0: the conversation has the roles user.*; expected a message of the"):
            TurnEncoder(tokenizer_of("chatml"))(messages, [], "row 0")


BEGUN = [*CHAT[:1], {"role": "assistant", "content": "Let me think "}]


@pytest.mark.parametrize("form", [*FORMS, *CONTROL])
def test_an_answer_that_a_prompt_has_begun_goes_on(tmp_path, form):
    tokenizer = chat_tokenizer(form) if form in CONTROL else tokenizer_of(form)
    expected = tokenizer.apply_chat_template(BEGUN, tokenize=False, continue_final_message=True)
    file = write_rows(tmp_path / "a.jsonl", [{"prompt": BEGUN, "answer": "4"}])
    assert tokenizer.decode(RLHFDataset(file, tokenizer, 300).prompt_ids(0)) == expected
    prompt, (response,) = TurnEncoder(tokenizer).responses(BEGUN, ["twice"], "row 0")
    merged = [BEGUN[0], {"role": "assistant", "content": "Let me think twice"}]
    (row,) = TurnEncoder(tokenizer)(merged, [], "row 0")
    assert tokenizer.decode(prompt) == expected
    assert [*prompt, *response] == [*row.prompt, *row.response]
    pairs = write_rows(tmp_path / "b.jsonl", [{"prompt": BEGUN, "chosen": "twice", "rejected": "x"}])
    scored = PreferenceDataset(pairs, tokenizer, 300, 99, layout="reward_model")._at([0])[0][0][0]
    assert tokenizer.decode(scored) == tokenizer.apply_chat_template(merged, tokenize=False)


@pytest.mark.parametrize("header", ["", "<think>\\n"])
@pytest.mark.parametrize("begun", ["<think>\n", "<think>\nr"])
def test_reasoning_that_a_prompt_has_begun_goes_on(tmp_path, header, begun):
    tokenizer, start = chat_tokenizer("qwen3"), "'<|im_start|>assistant\\n"
    template = (TEMPLATES / "qwen3_published.jinja").read_text(encoding="utf-8")
    tokenizer.chat_template = template.replace(f"{start}' }}}}", f"{start}{header}' }}}}")
    assert tokenizer.chat_template.count("'<|im_start|>assistant\\n<think>") == bool(header)
    messages = [CHAT[0], {"role": "assistant", "content": begun}]
    file = write_rows(tmp_path / "a.jsonl", [{"prompt": messages, "answer": "4"}])
    prompt = RLHFDataset(file, tokenizer, 300).prompt_ids(0)
    assert tokenizer.decode(prompt).endswith(f"<|im_end|>\n<|im_start|>assistant\n{begun}")
    texts = ["s\n</think>\n\nyes", "cut"]
    begin, answers = TurnEncoder(tokenizer).responses(messages, texts, "row 0")
    assert begin == prompt
    assert list(map(tokenizer.decode, answers)) == [f"{text}<|im_end|>" for text in texts]


def test_a_prompt_whose_begun_answer_has_ended_is_an_error(tmp_path):
    ended = [CHAT[0], {**CHAT[1], "content": "one<end>\n"}]
    file = write_rows(tmp_path / "a.jsonl", [{"prompt": ended, "answer": "4"}])
    with pytest.raises(DataError, match="line 1: the last message has the stop token '<end>', which ends the answer"):
        RLHFDataset(file, tokenizer_of("gemma"), 300)


def test_a_template_that_cannot_continue_an_answer_is_an_error_with_the_row(tmp_path):
    tokenizer = byte_tokenizer(("<s>", "<eos>"), talk(f"U: {C}\n", "{{ m.content | upper }}<eos>", "A: "))
    file = write_rows(tmp_path / "a.jsonl", [{"prompt": BEGUN, "answer": "4"}])
    with pytest.raises(DataError, match=f"^{file}: line 1: .*is the assistant's, which the template cannot continue"):
        RLHFDataset(file, tokenizer, 300)
    called = [CHAT[0], {**CHAT[1], "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}]
    file = write_rows(tmp_path / "b.jsonl", [{"prompt": called, "answer": "4"}])
    with pytest.raises(DataError, match="line 1: the last message has tool_calls, which a model cannot continue"):
        RLHFDataset(file, tokenizer_of("chatml"), 300)


def test_a_blank_beginning_of_an_answer_is_the_header_of_one(tmp_path):
    for form in ("chatml", "gemma"):
        tokenizer = tokenizer_of(form)
        file = write_rows(tmp_path / "a.jsonl", [{"prompt": [*CHAT[:1], {**CHAT[1], "content": ""}], "answer": "4"}])
        expected = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(RLHFDataset(file, tokenizer, 300).prompt_ids(0)) == expected
