"""Chat templates: the text must be what transformers' apply_chat_template gives; faults are 400."""

import json
from pathlib import Path

import pytest

from tokenspeed.errors import ConfigError, RequestError
from tokenspeed.tokenizer import chat
from tokenspeed.tokenizer.chat import ChatTemplate, load_chat_template
from tokenspeed.tokenizer.encoder import Encoder

# In the manner of templates that look backwards, count, break out of loops, dump JSON and trim white space
WINDING = """
{%- set state = namespace(last=0, many=false) %}
{%- for m in messages[::-1] %}
    {%- set i = (messages | length) - 1 - loop.index0 %}
    {%- if m.role == "user" and m['content'] is string and not m.content.startswith('<tool>') %}
        {%- set state.last = i %}
        {% break %}
    {%- endif %}
{%- endfor %}
{%- if tools %}no tools here{% endif %}
{% for m in messages %}
    {% if m.role == "system" and loop.first %}
{{ bos_token }}[{{ m.content | trim }}]
        {% continue %}
    {% endif %}
    {%- set text = m.content.split('</think>')[-1].lstrip('\\n') if '</think>' in m.content else m.content %}
  <{{ m.role }}{{ " *" if loop.index0 == state.last else "" }}> {{ text }}{{ eos_token }}
    {% if m.name is defined %}{{ m | tojson }}{{ {"b": 1, "a": "é<&>"} | tojson(indent=2, sort_keys=True) }}
    {% endif %}
    {% generation %}{{ strftime_now("%Y") }}{% endgeneration %}
{% endfor %}
{%- if add_generation_prompt %}<assistant>
{% endif %}
{{- unknown_thing }}"""
CHATS = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "  Be brief. "}, {"role": "user", "content": "1 < 2 & 'x'\n"}],
    [
        {"role": "user", "content": "naïve \U0001f600"},
        {"role": "assistant", "content": "<think>\nhm</think>\n\nYes."},
        {"role": "user", "content": "{{ 7 * 7 }}", "name": "bob"},
    ],
    [{"role": "user", "content": "<tool>x"}, {"role": "assistant", "content": ""}],
]


@pytest.fixture(scope="module")
def theirs(demo_dir: Path):
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(demo_dir)


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("winding", [False, True])
def test_same_text_and_ids_as_transformers(demo_dir, theirs, messages, winding):
    encoder = Encoder.load(demo_dir)
    template = encoder.chat
    source = None
    if winding:
        source = WINDING
        special = {k: v for k, v in theirs.special_tokens_map.items() if isinstance(v, str)}
        template = ChatTemplate(WINDING, special)
    text = template.render(json.dumps(messages).encode())
    options = dict(add_generation_prompt=True, chat_template=source)
    assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
    expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert encoder.encode([text], add_special_tokens=False)[0] == expected


@pytest.mark.parametrize(
    "text", ["", "Hello", "  1234 naïve\n\n1. \U0001f600", "<|im_start|>user\nhi<|im_end|>", "a" * 3000]
)
def test_plain_prompts_as_transformers(demo_dir, theirs, text):
    encoder = Encoder.load(demo_dir)
    assert encoder.encode([text, text], True) == [theirs(text)["input_ids"]] * 2


@pytest.mark.parametrize(
    "messages",
    [
        b"nonsense",
        b"\xff\xfe",
        b"[]",
        b'{"role": "user"}',
        b'["x"]',
        b'[{"content": "x"}]',
        b'[{"role": 1, "content": "x"}]',
        b'[{"role": "user", "content": 7}]',
        b'[{"role": "user", "content": {"a": 1}}]',
        b'[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]',
        b"[" * 100_000,
    ],
)
def test_bad_messages_are_400(demo_dir, messages):
    with pytest.raises(RequestError) as caught:
        Encoder.load(demo_dir).chat.render(messages)
    assert caught.value.param == "messages" and caught.value.status == 400


def test_text_parts_and_missing_content():
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", {})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}, {"role": "user"}]
    assert template.render(json.dumps(messages).encode()) == "[a\nb][][]"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}", "no element 5"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10000000) %}x{% endfor %}", "range"),
    ],
)
def test_template_faults(source, says):
    with pytest.raises(RequestError, match=f"(?i){says}") as caught:
        ChatTemplate(source, {}).render(b'[{"role": "user", "content": "x"}]')
    assert caught.value.param == "messages"


def test_output_is_bounded(monkeypatch):
    loops = "{% for i in range(999) %}{% for j in range(999) %}xxxxxxxxxx{% endfor %}{% endfor %}"
    monkeypatch.setattr(chat, "MAX_RENDERED_CHARS", 100_000)
    with pytest.raises(RequestError, match="too long"):
        ChatTemplate(loops, {}).render(b'[{"role": "user"}]')
    monkeypatch.setattr(chat, "MAX_RENDER_SECONDS", -1.0)
    with pytest.raises(RequestError, match="too long"):
        ChatTemplate("x", {}).render(b'[{"role": "user"}]')


def test_where_templates_come_from(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    one = b'[{"role": "user"}]'
    assert load_chat_template(tmp_path, {}, {}) is None
    assert load_chat_template(tmp_path, {"chat_template": [named[0]]}, {}) is None
    assert load_chat_template(tmp_path, {"chat_template": "S"}, {}).render(one) == "S"
    assert load_chat_template(tmp_path, {"chat_template": named}, {}).render(one) == "D"
    (tmp_path / "chat_template.jinja").write_text("J{{ bos_token }}")
    assert load_chat_template(tmp_path, {"chat_template": "S"}, {"bos_token": "<s>"}).render(one) == "J<s>"
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="does not compile"):
        load_chat_template(tmp_path, {}, {})
