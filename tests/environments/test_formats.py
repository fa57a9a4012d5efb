"""Tool calls as each family writes them, and what models write instead."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.environments.formats import FENCED, FORMATS, Call, format_of, reader_of
from tests.environments.templates import FAMILIES, template_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
                "required": ["a"],
            },
        },
    }
]
BY_NAME = {f.name: f for f in FORMATS}


class Tokenizer:
    """What a reader needs of a tokenizer."""

    def __init__(self, template: str) -> None:
        self.chat_template = template


def read(name: str, text: str):
    return reader_of(Tokenizer(BY_NAME[name].marks[0]), TOOLS)(text)


WRITTEN = [
    ("hermes", 'Let me add.\n<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>', "Let me add."),
    ("hermes", "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>", ""),
    ("hermes", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n</tool_call>", ""),
    ("llama", '{"name": "add", "parameters": {"a": 3}}', ""),
    ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": "3"}}', ""),
    ("mistral", 'Wait.[TOOL_CALLS][{"name": "add", "arguments": {"a": 3}, "id": "VvvODy9mT"}]', "Wait."),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 3}', ""),
    ("gpt-oss", '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary '
     'to=functions.add <|constrain|>json<|message|>{"a": 3}<|call|>', ""),
    ("pythonic", "Sure. <|tool_call_start|>[add(a=3)]<|tool_call_end|>", "Sure."),
    ("function_calls", "<function_calls>add(a=3)</function_calls>", ""),
    ("phi", '<|tool_call|>[{"name": "add", "arguments": {"a": 3}}]<|/tool_call|>', ""),
    ("granite", '<|tool_call|>[{"name": "add", "arguments": {"a": 3}}]', ""),
    ("command", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "add", '
     '"parameters": {"a": 3}}]<|END_ACTION|>', ""),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
     '{"a": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', ""),
    ("minimax", '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">3</parameter>\n</invoke>\n'
     "</minimax:tool_call>", ""),
    ("fenced", 'I add.\n```tool\n{"name": "add", "arguments": {"a": 3}}\n```', "I add."),
    ("fenced", "```tool\nadd(a=3)\n```", ""),
    ("fenced", "```tool\nadd(3)\n```", ""),
]  # fmt: skip


@pytest.mark.parametrize("name, text, content", WRITTEN)
def test_every_family_s_calls(name, text, content):
    reading = read(name, text)
    assert reading.error is None
    assert reading.calls == (Call("add", {"a": 3}),)
    assert reading.message["content"] == content
    (call,) = reading.message["tool_calls"]
    arguments = call["function"]["arguments"]
    assert (json.loads(arguments) if name == "deepseek" else arguments) == {"a": 3}
    assert call["function"]["name"] == "add"
    assert len(call["id"]) == 9


@pytest.mark.parametrize("name", BY_NAME)
def test_a_message_without_a_call_is_kept_as_it_is(name):
    text = "  The answer is 3 + 4 = 7. [1] {not json} \n"
    reading = read(name, text)
    assert reading.message == {"role": "assistant", "content": text}
    assert not reading.calls
    assert not reading.error


@pytest.mark.parametrize(
    "name, text, why",
    [
        ("hermes", "<tool_call>\n{add 3}\n</tool_call>", "not JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 3}}', "without </tool_call>"),
        ("hermes", '<tool_call>{"name": "mul", "arguments": {}}</tool_call>', "no tool 'mul'; there are add"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}</tool_call>', "needs the argument 'a'"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "z": 2}}</tool_call>', "no argument 'z'"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "x"}}</tool_call>', "not of type integer"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": true}}</tool_call>', "not of type integer"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1.5}}</tool_call>', "not of type integer"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is not a number"),
        ("hermes", "<tool_call>[1]</tool_call>", "a call is an object"),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>', "needs a name"),
        ("hermes", "<tool_call>" + "[" * 5000 + "</tool_call>", "not JSON"),
        ("fenced", "```tool\nadd(a=__import__('os').system('id'))\n```", "not a list of calls"),
        ("pythonic", "<|tool_call_start|>[lambda: 3]<|tool_call_end|>", "not a list of calls"),
        ("mistral", '[TOOL_CALLS][{"name": "add"', "not JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' * 65, "at most 64"),
    ],
)
def test_malformed_calls_name_what_is_wrong(name, text, why):
    reading = read(name, text)
    assert why in str(reading.error)
    assert not reading.calls
    assert reading.message == {"role": "assistant", "content": text}


def test_a_call_that_is_only_thought_of_is_not_made():
    call = '<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'
    assert not read("hermes", f"<think>I could say {call}.</think>No.").calls
    reading = read("hermes", f"<think>I add.</think>{call}")
    assert reading.calls
    assert reading.message["content"] == "<think>I add.</think>"


def test_llama_code_after_the_tag_is_a_call_of_python():
    tools = [{"function": {"name": "python", "parameters": {"properties": {"code": {"type": "string"}}}}}]
    reading = reader_of(Tokenizer('"parameters": '), tools)("<|python_tag|>print(1 + 1)")
    assert reading.calls == (Call("python", {"code": "print(1 + 1)"}),)


def test_the_format_is_known_by_the_template():
    pytest.importorskip("trl")
    expected = {"hermes": "hermes", "qwen_xml": "hermes", "glm": "hermes", "olmo": "function_calls"}
    for family in FAMILIES:
        if family.call:
            assert format_of(template_of(family)).name == expected.get(family.call, family.call), family.name
    assert format_of("") is FENCED


@given(st.sampled_from(sorted(BY_NAME)), st.text(max_size=60), st.data())
def test_no_text_makes_a_reader_raise(name, text, data):
    pieces = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "```tool", "```", '{"name": "add"', "}", "(", ")", "add"]
    parts = data.draw(st.lists(st.sampled_from([*pieces, *BY_NAME[name].marks, text]), max_size=8))
    reading = read(name, "".join(parts))
    assert reading.message["role"] == "assistant"
