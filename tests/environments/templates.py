"""Chat templates of many families, with a byte-level tokenizer that knows their special tokens.

Those that TRL ships are taken from there; the others, written for these tests, do to a conversation what the families'
own templates do: what they insert, drop, trim and merge.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL = re.compile(
    r"<[|｜][\w▁ -]+[|｜]>|<(?:start|end)_of_turn>|</?s>|\[/?(?:INST|TOOL_\w+|AVAILABLE_TOOLS)\]|\[e~\[|\]~!?b\["
)


@dataclass(frozen=True)
class Family:
    """How a model family writes a conversation."""

    name: str
    stop: str  # the token that ends its turns
    file: str = ""  # of its template in TRL
    own: str = ""  # of its template in `chat_templates`
    call: str = "hermes"  # the format of its tool calls
    calls_stop: str = ""  # the token that ends turns with a call, if another
    arguments: dict[str, Any] = field(default_factory=dict)  # of the template


FAMILIES = (
    Family("Qwen2.5", "<|im_end|>", file="qwen2_5"),
    Family("Qwen3", "<|im_end|>", file="qwen3"),
    Family("Qwen3 without thinking", "<|im_end|>", file="qwen3", arguments={"enable_thinking": False}),
    Family("Qwen3 Instruct 2507", "<|im_end|>", file="qwen3_instruct_2507"),
    Family("Qwen3.5 with thinking", "<|im_end|>", file="qwen3_5_think", call="qwen_xml"),
    Family("Llama 3", "<|eot_id|>", file="llama3", call=""),
    Family("Llama 3.1", "<|eot_id|>", file="llama3_1", call="llama"),
    Family("Llama 3.2", "<|eot_id|>", file="llama3_2", call="llama"),
    Family("Mistral", "</s>", own="mistral", call="mistral"),
    Family("Gemma", "<end_of_turn>", file="gemma", call=""),
    Family("Gemma 3", "<end_of_turn>", file="gemma3", call=""),
    Family("Phi-3.5", "<|end|>", file="phi3_5", call=""),
    Family("Phi-4 mini", "<|end|>", own="phi4", call="phi"),
    Family("SmolLM3", "<|im_end|>", own="smollm3"),
    Family("GLM-4.5", "<|user|>", file="glm4moe", call="glm", calls_stop="<|observation|>"),
    Family("DeepSeek-R1 distill", "<｜end▁of▁sentence｜>", file="deepseek_r1_distill", call=""),
    Family("DeepSeek-V3", "<｜end▁of▁sentence｜>", file="deepseekv3", call="deepseek"),
    Family("gpt-oss", "<|return|>", file="gptoss", call="", calls_stop="<|call|>"),
    Family("Granite", "<|end_of_text|>", own="granite", call="granite"),
    Family("Command", "<|END_OF_TURN_TOKEN|>", file="cohere", call=""),
    Family("OLMo", "<|im_end|>", own="olmo", call="olmo"),
    Family("MiniMax", "[e~[", own="minimax", call="minimax"),
    Family("Nemotron 3 Nano", "<|im_end|>", file="nemotron_3_nano", call=""),
)


def template_of(family: Family) -> str:
    if family.own:
        return (Path(__file__).parent / "chat_templates" / f"{family.own}.jinja").read_text(encoding="utf-8").rstrip()
    import trl

    return (Path(trl.__path__[0]) / "chat_templates" / f"{family.file}.jinja").read_text(encoding="utf-8")


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the family's template and special tokens."""
    family = next(one for one in FAMILIES if one.name == name)
    template = template_of(family)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    special = {*_SPECIAL.findall(template), family.stop, family.calls_stop or family.stop}
    tokens.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in sorted(special)])
    begin = "<|begin_of_text|>"
    tokens.add_special_tokens([AddedToken(begin, special=True, normalized=False)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=family.stop, bos_token=begin)
    made.chat_template = template
    return made
