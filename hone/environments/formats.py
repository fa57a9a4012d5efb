"""Parses the text of a turn: its message and its tool calls, in the format of the model's family.

    read = reader_of(tokenizer, schemas)
    read('I add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    # Reading({"role": "assistant", "content": "I add.", "tool_calls": [...]}, calls=(Call("add", {"a": 1}),))

The format is recognised by marks in the chat template. A model's text is never trusted: a call that cannot be read, or
does not fit the tool's schema, is an error that is reported to the model.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hone.environments.base import Message, Schema
from hone.types import Step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Texts longer than this are not searched for calls.
LONGEST = 200_000
MOST_CALLS = 64


class Malformed(Exception):
    """A tool call that cannot be read; the text says why, to the model."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """A turn as read: the message, its tool calls, or why a call could not be read."""

    message: Message
    calls: tuple[Call, ...] = ()
    error: str | None = None


Split = tuple[str, list[tuple[str, Any]]]  # (text without calls, calls as (name, arguments))


@dataclass(frozen=True, slots=True)
class Format:
    """How a family writes calls. `marks`: one of them is in its chat template. `as_text`: arguments are JSON text."""

    name: str
    marks: tuple[str, ...]
    split: Callable[[str], Split]
    as_text: bool = False


def reader_of(
    tokenizer: PreTrainedTokenizerBase, tools: Sequence[Schema], raw: bool = False
) -> Callable[[str], Reading]:
    """The reader of a model's turns; without tools every turn is a plain message. `raw`: no chat template is used."""
    if not tools:
        return lambda text: Reading({"role": "assistant", "content": text})
    parameters = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    if raw:
        return lambda text: _read(text, parameters, FENCED)
    if getattr(tokenizer, "response_template", None) is not None:
        return lambda text: _read(text, parameters, _by_template(tokenizer, tools))
    tool_format = format_of(str(getattr(tokenizer, "chat_template", None) or ""))
    return lambda text: _read(text, parameters, tool_format)


def complaint(reading: Reading) -> Step:
    """The answer to a tool call that cannot be read."""
    text = f"Error: the tool call could not be read: {reading.error}"
    return Step(reading.message, ({"role": "user", "content": text},), error=reading.error)


def format_of(chat_template: str) -> Format:
    """The format whose marks the template has; the last one, fenced blocks, for base models."""
    return next((f for f in FORMATS if any(mark in chat_template for mark in f.marks)), FENCED)


def _read(text: str, parameters: Mapping[str, Any], tool_format: Format) -> Reading:
    thought, closed, message_text = text.rpartition("</think>")  # calls within the thinking are not made
    try:
        if len(message_text) > LONGEST:
            raise Malformed(f"the message has {len(message_text)} characters, at most {LONGEST} are read")
        content, raw = tool_format.split(message_text)
        if len(raw) > MOST_CALLS:
            raise Malformed(f"{len(raw)} calls in one message, at most {MOST_CALLS} are made")
        calls = tuple(Call(name, _fitting(name, arguments, parameters)) for name, arguments in raw)
    except Malformed as error:
        return Reading({"role": "assistant", "content": text}, error=str(error))
    message: dict[str, Any] = {"role": "assistant", "content": thought + closed + content if calls else text}
    if calls:
        message["tool_calls"] = [_as_message(call, number, tool_format.as_text) for number, call in enumerate(calls)]
    return Reading(message, calls)


def _as_message(call: Call, number: int, as_text: bool) -> dict[str, Any]:
    arguments = json.dumps(call.arguments) if as_text else dict(call.arguments)
    return {"type": "function", "id": f"call{number:05d}", "function": {"name": call.name, "arguments": arguments}}


def _fitting(name: str, arguments: Any, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments with the types of the schema. Raises Malformed if they do not fit it."""
    if name not in parameters:
        raise Malformed(f"there is no tool {str(name)[:60]!r}; there are {', '.join(parameters)}")
    properties = parameters[name].get("properties", {})
    if isinstance(arguments, list) and len(arguments) <= len(properties):  # by position
        arguments = dict(zip(properties, arguments))
    if not isinstance(arguments, dict):
        raise Malformed(f"the arguments of {name} are not an object")
    if unknown := [key for key in arguments if key not in properties]:
        raise Malformed(f"{name} has no argument {str(unknown[0])[:60]!r}; it has {', '.join(properties) or 'none'}")
    if missing := [key for key in parameters[name].get("required", ()) if key not in arguments]:
        raise Malformed(f"{name} needs the argument {missing[0]!r}")
    return {key: _typed(name, key, value, properties[key]) for key, value in arguments.items()}


def _typed(name: str, key: str, value: Any, schema: Mapping[str, Any]) -> Any:
    kind = schema.get("type")
    if not isinstance(kind, str):  # several, or none
        return value
    if isinstance(value, str) and kind in ("integer", "number", "boolean", "array", "object"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Malformed(f"{key} of {name} is not of type {kind}") from None
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    types: dict[Any, tuple[type, ...]] = {
        "integer": (int,),
        "number": (int, float),
        "boolean": (bool,),
        "string": (str,),
        "array": (list,),
        "object": (dict,),
    }
    if kind not in types or (value is None and schema.get("nullable", False)):
        return value
    if not isinstance(value, types[kind]) or (isinstance(value, bool) and kind != "boolean"):
        raise Malformed(f"{key} of {name} is not of type {kind}")
    return value


# --- formats ----------------------------------------------------------------------------------------------------------


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the call is not JSON: {str(error)[:100]}") from None


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def _object(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, arguments) of a JSON call, or of a list of them."""
    for call in value if isinstance(value, list) else [value]:
        if not isinstance(call, dict):
            raise Malformed("a call is an object with name and arguments")
        name = next((call[key] for key in ("name", "tool_name", "tool") if key in call), None)
        arguments: Any = next((call[key] for key in ("arguments", "parameters", "args") if key in call), {})
        if not isinstance(name, str):
            raise Malformed("a call needs a name")
        yield name, _json(arguments) if isinstance(arguments, str) else arguments


def _between(text: str, start: str, end: str) -> tuple[str, list[str]]:
    """The text without the blocks from `start` to `end`, and the insides of these. Raises Malformed if one is open."""
    blocks = re.findall(f"{re.escape(start)}(.*?){re.escape(end)}", text, re.DOTALL)
    rest = re.sub(f"{re.escape(start)}.*?{re.escape(end)}", "", text, flags=re.DOTALL)
    if start in rest:
        raise Malformed(f"{start} without {end}")
    return rest.strip() if blocks else text, blocks


def _tagged(text: str) -> Split:
    """<tool_call> around JSON (Hermes, Qwen), around XML (Qwen3-Coder, Nemotron), or GLM's keys and values."""
    rest, blocks = _between(text, "<tool_call>", "</tool_call>")
    return rest, [call for block in blocks for call in _inside(block.strip())]


def _inside(block: str) -> Iterator[tuple[str, Any]]:
    if block.startswith("<function="):
        name, _, body = block.removeprefix("<function=").partition(">")
        yield name.strip(), _pairs(r"<parameter=([^>]+)>(.*?)</parameter>", body)
    elif "<arg_key>" in block or re.fullmatch(r"\w+", block):
        pairs = _pairs(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", block)
        yield block.partition("<arg_key>")[0].strip(), pairs
    else:
        yield from _object(_json(block))


def _pairs(pattern: str, text: str) -> dict[str, str]:
    return {key.strip(): value.strip("\n") for key, value in re.findall(pattern, text, re.DOTALL)}


def _minimax(text: str) -> Split:
    rest, blocks = _between(text, "<minimax:tool_call>", "</minimax:tool_call>")
    invoke = r'<invoke name="([^"]+)">(.*?)</invoke>'
    calls = [call for block in blocks for call in re.findall(invoke, block, re.DOTALL)]
    return rest, [(name, _pairs(r'<parameter name="([^"]+)">(.*?)</parameter>', body)) for name, body in calls]


def _mistral(text: str) -> Split:
    """[TOOL_CALLS] before a JSON list, or before name[ARGS]{...} for each call."""
    rest, *parts = text.split("[TOOL_CALLS]")
    calls: list[tuple[str, Any]] = []
    for part in parts:
        name, mark, body = part.partition("[ARGS]")
        calls += [(name.strip(), _json(body))] if mark else _object(_json(part))
    return rest.strip() if parts else text, calls


def _llama(text: str) -> Split:
    """The whole message is one JSON object, perhaps after <|python_tag|>; code after the tag is a call of `python`."""
    before, tag, body = text.partition("<|python_tag|>")
    body = (body if tag else text).strip()
    if tag and not body.startswith("{"):
        return before.strip(), [("python", {"code": body})]
    if body.startswith("{") and ('"parameters"' in body or '"arguments"' in body or tag):
        return before.strip() if tag else "", list(_object(_json(body)))
    return text, []


def _channels(text: str) -> Split:
    """gpt-oss: a message in the commentary channel, addressed to a function; else the final channel."""
    call = re.compile(r"to=functions\.([\w.-]+)(?:(?!<\|message\|>).)*<\|message\|>(.*?)(?=<\||$)", re.DOTALL)
    calls = [(name, _json(body)) for name, body in call.findall(text)]
    final = re.search(r"<\|channel\|>final(?:(?!<\|message\|>).)*<\|message\|>(.*?)(?=<\||$)", text, re.DOTALL)
    return ("" if calls else final[1] if final else text), calls


def _deepseek(text: str) -> Split:
    rest, blocks = _between(text, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = re.compile(
        r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(.*?)(?:\n|<｜tool▁sep｜>)(.*?)<｜tool▁call▁end｜>", re.DOTALL
    )
    body = re.compile(r"^```json\s*|\s*```$")
    return rest, [(n.strip(), _json(body.sub("", b.strip()))) for block in blocks for n, b in call.findall(block)]


def _listed(start: str, end: str) -> Callable[[str], Split]:
    """A JSON list after a mark: Granite, Phi-4, Command."""

    def split(text: str) -> Split:
        before, mark, body = text.partition(start)
        return (before.strip(), list(_object(_json(body.partition(end)[0] if end else body)))) if mark else (text, [])

    return split


def _pythonic(start: str, end: str) -> Callable[[str], Split]:
    """Python calls, as in [add(a=1), add(a=2)], between marks: OLMo, LFM2."""

    def split(text: str) -> Split:
        rest, blocks = _between(text, start, end)
        return rest, [call for block in blocks for call in _python_calls(block)]

    return split


def _python_calls(text: str) -> list[tuple[str, Any]]:
    try:
        tree = ast.parse(text.strip())
        nodes = [
            node
            for statement in tree.body
            for node in (statement.value.elts if isinstance(statement.value, ast.List) else [statement.value])  # type: ignore[attr-defined]
        ]
        return [(_dotted(node), _python_arguments(node)) for node in nodes]
    except (SyntaxError, ValueError, AttributeError, TypeError, RecursionError, MemoryError) as error:
        raise Malformed(f"not a list of calls such as [name(argument=1)]: {str(error)[:80]}") from None


def _dotted(node: Any) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)


def _python_arguments(node: Any) -> Any:
    """The arguments of a call whose values are literals; nothing is evaluated."""
    if node.args and not node.keywords:
        return [ast.literal_eval(value) for value in node.args]
    if node.args:
        raise ValueError("arguments by name only, or by position only")
    return {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}


def _fenced(text: str) -> Split:
    """```tool blocks with JSON or name(argument=1): for base and tiny models."""
    rest, blocks = _between(text, "```tool", "```")
    calls: list[tuple[str, Any]] = []
    for block in (block.strip() for block in blocks):
        calls += _object(_json(block)) if block.startswith(("{", "[{")) else _python_calls(block)
    return rest, calls


def _by_template(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Schema]) -> Format:
    """transformers' own parser, for tokenizers with a `response_template`."""

    def split(text: str) -> Split:
        try:
            parsed: Any = tokenizer.parse_response(text, prefix="", tools=[dict(tool) for tool in tools])
        except Exception as error:  # the parser may raise anything on text that it was not written for
            raise Malformed(f"the message cannot be read: {str(error)[:100]}") from None
        calls = parsed.get("tool_calls") or []
        return str(parsed.get("content") or ""), list(_object([call.get("function", call) for call in calls]))

    return Format("response_template", (), split)


FENCED = Format("fenced", ("```tool",), _fenced)
FORMATS = (
    Format("minimax", ("<minimax:tool_call>",), _minimax),
    Format("deepseek", ("<｜tool▁calls▁begin｜>",), _deepseek, as_text=True),
    Format("mistral", ("[TOOL_CALLS]",), _mistral),
    Format("gpt-oss", ("<|channel|>",), _channels),
    Format("pythonic", ("<|tool_call_start|>",), _pythonic("<|tool_call_start|>", "<|tool_call_end|>")),
    Format("function_calls", ("<function_calls>",), _pythonic("<function_calls>", "</function_calls>")),
    Format("phi", ("<|/tool_call|>",), _listed("<|tool_call|>", "<|/tool_call|>")),
    Format("granite", ("<|tool_call|>",), _listed("<|tool_call|>", "")),
    Format("command", ("<|START_ACTION|>",), _listed("<|START_ACTION|>", "<|END_ACTION|>")),
    Format("hermes", ("<tool_call>",), _tagged),
    Format("llama", ("<|python_tag|>", '"parameters": '), _llama),
    FENCED,
)
