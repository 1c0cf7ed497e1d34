import pytest

from fixtures.chat_tokenizers import CONTROL, TEMPLATES, chat_tokenizer
from hybridflow.cli.main import main
from hybridflow.data.chat_templates import chat_template_of
from hybridflow.environments import Tool, check_template
from hybridflow.environments.episodes.template_check import lookup

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BROKEN = [
    # the check that fails, the change of a template
    ("prompt", lambda template: template.partition("{%- if add_generation_prompt %}")[0]),
    ("prompt", lambda template: "{{ raise_exception('no') }}<tool_call></tool_call>"),
    ("stop token", lambda template: template.replace("<|im_end|>", "<|endoftext|>")),
    ("a begun answer", lambda template: template.replace("message.content +", "message.content | upper +")),
    ("round trip", lambda template: template.replace('\\n<tool_call>\\n{"name": "', '\\n<tool_call>\\n{name: "')),
    ("tools", lambda template: PLAIN),
    ("tools", lambda template: template.replace("tool | tojson", "'?'")),
]


def states(tokenizer, stop_ids=None, tools=()):
    return {each.check: each.state for each in check_template(tokenizer, stop_ids or [tokenizer.eos_token_id], tools)}


IN_ROWS = dict.fromkeys(("a user answers", "a user answers reasoning", "a tool answers", "two tools answer"), "rows")
LIMITED = {"two tools answer": "limited"}
PROMPTS_CHANGE = dict.fromkeys(
    ("a user answers", "a user answers reasoning", "a tool answers", "a tool answers reasoning", "two tools answer"),
    "failed",
)
PUBLISHED = {
    # the chat template as it is published: the family of its tokens, and what is not ok
    "deepseek_v3_1": ("deepseek_v3", {"tools": "limited"}),
    "deepseek_r1": ("deepseek_v3", {"tools": "limited", "round trip": "failed", **PROMPTS_CHANGE}),
    "qwen3_published": ("qwen3", IN_ROWS),
}


@pytest.mark.parametrize(
    ("family", "others"), [("qwen2_5", {}), ("deepseek_v3", {}), ("llama3", LIMITED), ("qwen3", IN_ROWS)]
)
def test_the_templates_of_families_serve_episodes(family, others):
    found = states(chat_tokenizer(family))
    assert {check: state for check, state in found.items() if state != "ok"} == others


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_are_checked_by_a_whole_table(name):
    family, others = PUBLISHED[name]
    tokenizer = chat_tokenizer(family)
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    found = states(tokenizer)
    assert len(found) == 10
    assert {check: state for check, state in found.items() if state != "ok"} == others


def test_tools_that_a_template_does_not_write_fail_if_they_are_asked_for():
    tokenizer = chat_tokenizer("qwen2_5")
    for template in (PLAIN, tokenizer.chat_template.replace("tool | tojson", "'?'")):
        tokenizer.chat_template = template
        assert states(tokenizer, tools=[Tool.of(lookup)])["tools"] == "failed"


@pytest.mark.parametrize(("name", "family"), [("chatml-tools", "qwen2_5"), ("llama3-tools", "llama3")])
def test_the_templates_of_the_package_serve_episodes_with_tools(name, family):
    tokenizer = chat_tokenizer(family)
    tokenizer.chat_template = chat_template_of(name)
    found = states(tokenizer, tools=[Tool.of(lookup)])
    assert {check: state for check, state in found.items() if state != "ok"} == (LIMITED if family == "llama3" else {})


def test_a_template_that_ends_turns_by_the_next_role_needs_these_as_stop_tokens():
    tokenizer = chat_tokenizer("glm4_5")
    stop_ids = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    assert set(states(tokenizer, stop_ids).values()) == {"ok"}
    assert states(tokenizer, tokenizer.convert_tokens_to_ids(["[gMASK]"]))["stop token"] == "failed"


@pytest.mark.parametrize(("check", "change"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_template_fails_in_its_check(check, change):
    tokenizer = chat_tokenizer("qwen2_5")
    whole, tokenizer.chat_template = tokenizer.chat_template, change(tokenizer.chat_template)
    assert tokenizer.chat_template != whole
    found = states(tokenizer)
    assert found[check] == ("limited" if check in ("a begun answer", "tools") else "failed")
    assert check != "tools" or found["a user answers"] == "ok"


@pytest.fixture
def model(tmp_path):
    chat_tokenizer("qwen2_5").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    return tmp_path / "model"


def test_the_command_prints_a_line_for_each_check(model, tmp_path, capsys):
    (tmp_path / "tools.py").write_text("class Calculator:\n    def add(self, a: int) -> str:\n        return str(a)\n")
    assert main(["check-template", str(model), "--tools", f"{tmp_path}/tools.py:Calculator"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [*states(chat_tokenizer("qwen2_5"))]
    assert lines[0].split() == ["tools", "ok", "calls", "in", "the", "format", "hermes"]


def test_the_command_fails_for_a_template_that_cannot_be_trained(model, capsys):
    tokenizer = chat_tokenizer("qwen2_5")
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", CONTROL["qwen2_5"][0])
    tokenizer.save_pretrained(model)
    assert main(["check-template", str(model)]) == 1
    assert "set eos_token_id in generation_config.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "message"),
    [("def __init__(self, size): ...", "cannot be made without arguments: TypeError"), ("", "has no public methods")],
)
def test_a_class_without_tools_is_an_error_that_names_it(model, tmp_path, capsys, body, message):
    (tmp_path / "tools.py").write_text(f"class Calculator:\n    {body or 'pass'}\n")
    assert main(["check-template", str(model), "--tools", f"{tmp_path}/tools.py:Calculator"]) == 2
    assert message in capsys.readouterr().err
