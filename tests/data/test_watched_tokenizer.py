import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridflow.data import watched_tokenizer
from hybridflow.data.chat_prompts import PromptEncoder, encode_texts
from hybridflow.data.watched_tokenizer import require_sound, watched
from hybridflow.errors import DataError

HELLO = [{"role": "user", "content": "a b"}]
TEMPLATE = "{{ messages[0].content }}!"


def letters(template=TEMPLATE, **parts):
    """Return a tokenizer of letters, with other parts and another chat template."""
    vocabulary = {letter: number for number, letter in enumerate(["</s>", "<unk>", *"abcdefgh !"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    for name, part in parts.items():
        setattr(backend, name, part)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", name_or_path="MODEL")
    made.chat_template = template
    return made


def doubling(kind, times=40):
    return [kind(letter, 2 * letter) for letter in "ab" for _ in range(times)]


@pytest.fixture
def short_limits(monkeypatch):
    monkeypatch.setattr(watched_tokenizer, "CALL_S", 0.3)
    monkeypatch.setattr(watched_tokenizer, "CHARS_PER_S", 10**9)
    monkeypatch.setattr(watched_tokenizer, "MEMORY_BYTES", 256 << 20)
    monkeypatch.setattr("hybridflow.data.chat_prompts.RENDERING_LIMIT_S", 0.3)


@pytest.mark.parametrize("chunk", [10**6, 8])
def test_a_watched_tokenizer_gives_the_same_tokens_and_texts(monkeypatch, chunk):
    monkeypatch.setattr(watched_tokenizer, "CHUNK_CHARS", chunk)
    tokenizer, texts = letters(), ["ab c", "d", "", "zz a"] * 20
    kind = type(tokenizer)
    expected = tokenizer(texts).data, tokenizer("a").data, tokenizer(["a"], return_tensors="np")["input_ids"].tolist()
    prompt = PromptEncoder(tokenizer, True).text(HELLO, "row 0")
    with watched(tokenizer):
        assert type(tokenizer) is not kind
        assert (tokenizer(texts).data, tokenizer("a").data) == expected[:2]
        assert tokenizer(["a"], return_tensors="np")["input_ids"].tolist() == expected[2]
        assert PromptEncoder(tokenizer, True).text(HELLO, "row 0") == prompt == "a b!"
        assert tokenizer.decode(expected[1]["input_ids"]) == "a"
        with pytest.raises(TypeError):
            tokenizer(["\ud800"])
    assert type(tokenizer) is kind


SLOW = Regex("(a|aa)+$")


@pytest.mark.parametrize(
    ("tokenizer", "text", "message"),
    [
        (letters(pre_tokenizer=pre_tokenizers.Split(SLOW, "isolated")), ("a" * 28 + "!") * 200, "MODEL' took longer"),
        (letters(pre_tokenizer=pre_tokenizers.Split(SLOW, "isolated")), "a" * 99 + "!", "retry-limit|took longer"),
        (letters(normalizer=normalizers.Sequence(doubling(normalizers.Replace))), "a", "MODEL' (takes too|took long)"),
    ],
    ids=["slow", "refused", "doubling"],
)
@pytest.mark.usefixtures("short_limits")
def test_a_pattern_that_explodes_and_rules_that_multiply_are_errors(capfd, tokenizer, text, message):
    with watched(tokenizer), pytest.raises(DataError, match=message):
        encode_texts(tokenizer, ["b", text])
    assert capfd.readouterr().err == ""  # of a panic in Rust


@pytest.mark.usefixtures("short_limits")
def test_a_tokenizer_that_multiplies_what_it_decodes_is_not_sound():
    with pytest.raises(DataError, match=r"MODEL' (takes too|took long)"):
        require_sound(letters(decoder=decoders.Sequence(doubling(decoders.Replace))))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ strftime_now('%c' * 10000000) }}", "row 0: .*template took longer than 0.3 s"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "took longer than 0.3 s"),
        ("{{ 'x' * 10**10 }}", "row 0: .*(takes too much memory|took longer)"),
    ],
    ids=["in C", "loops", "memory"],
)
@pytest.mark.usefixtures("short_limits")
def test_a_template_that_hangs_in_c_is_an_error(template, message):
    tokenizer = letters(template)
    with watched(tokenizer), pytest.raises(DataError, match=message):
        PromptEncoder(tokenizer, True).text(HELLO, "row 0")
    with pytest.raises(DataError, match="MODEL"):
        require_sound(tokenizer)


def test_a_template_may_refuse_the_probe_or_be_unused():
    refusing = letters("{{ raise_exception('only tools') }}")
    require_sound(refusing)
    with watched(refusing), pytest.raises(DataError, match=r"row 0: .*rejects the messages: only tools"):
        PromptEncoder(refusing, True).text(HELLO, "row 0")
    require_sound(letters("{{ 'x' * 10**12 }}"), chat_template=False)
