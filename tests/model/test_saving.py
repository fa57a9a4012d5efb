"""Settings on disk, as programs on transformers 4 and 5 read them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    StableLmConfig,
)

from hone.base import checksums
from hone.learn.policy import Policy, Trainable
from hone.model.saving import older_keys, save_model, save_settings
from hone.model.tiny import create
from hone.recipe.sections.model import LoraConfig, ModelConfig, TinyConfig
from hone.recipe.sections.optim import OptimConfig

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 1024
CONFIGS: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    "qwen2": (Qwen2Config(rope_parameters={"rope_type": "default", "rope_theta": 1e6}), {"rope_theta": 1e6}),
    "llama3": (
        LlamaConfig(rope_parameters={**LLAMA3, "rope_theta": 5e5}),
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    ),
    "stablelm": (StableLmConfig(), {"rope_theta": 1e4, "partial_rotary_factor": 0.25}),
    "gemma3": (Gemma3TextConfig(), {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
    "gpt2": (GPT2Config(), {}),
}
OLDER = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")


@pytest.mark.parametrize("name", CONFIGS)
def test_rotary_settings_are_written_for_transformers_4_and_5_alike(tmp_path: Path, name: str) -> None:
    config, older = CONFIGS[name]
    save_settings(config, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {key: written[key] for key in OLDER if key in written} == older
    again = AutoConfig.from_pretrained(tmp_path)
    assert getattr(again, "rope_parameters", None) == getattr(config, "rope_parameters", None)
    save_settings(again, tmp_path)  # read and written again: the same file
    assert json.loads((tmp_path / "config.json").read_text()) == written


def test_a_model_with_a_text_part_has_them_there(tmp_path: Path) -> None:
    config = Gemma3Config()
    save_settings(config, tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert (text["rope_theta"], text["rope_local_base_freq"]) == (1e6, 1e4)
    assert AutoConfig.from_pretrained(tmp_path).text_config.rope_parameters == config.text_config.rope_parameters


def test_settings_without_rotary_positions_get_no_keys() -> None:
    assert older_keys({"vocab_size": 3}) == {}
    assert older_keys({"rope_parameters": None}) == {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with another base of its positions than the default."""
    path = tmp_path_factory.mktemp("model")
    tiny = TinyConfig(vocab_size=400, hidden_size=32, layers=1, heads=2, kv_heads=1, mlp_size=32)
    create(path, tiny, ["Zoey is a knight. Let me think: 1 + 2 = 3."] * 20, seed=0)
    config = AutoConfig.from_pretrained(path)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 3e5}
    save_model(Qwen2ForCausalLM(config), path)
    checksums.write(path)
    return path


def test_every_folder_that_a_policy_writes_names_the_base_of_its_positions(folder: Path, tmp_path: Path) -> None:
    policy = Policy.load(ModelConfig(path=str(folder)), OptimConfig(), 10, Trainable(LoraConfig(rank=2)))
    for name in ("export", "export_base", "export_adapter"):
        getattr(policy, name)(tmp_path / name)
        assert json.loads((tmp_path / name / "config.json").read_text())["rope_theta"] == 3e5
    plain = Policy.load(ModelConfig(path=str(folder)), OptimConfig(), 10)
    for one in (policy, plain):  # what stands beside the weights of a checkpoint
        assert json.loads(one.save().files["config.json"])["rope_theta"] == 3e5


def test_nothing_else_writes_the_settings_of_a_model() -> None:
    """A folder written by `model.save_pretrained` itself would lack them."""
    root = Path(__file__).resolve().parents[2] / "hone"
    for file in root.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        lines = [
            ast.unparse(c) for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "save_pretrained"
        ]
        if file.name == "saving.py":
            continue
        if file.name == "lora.py":
            lines.remove("config.save_pretrained(folder)")  # peft's
        assert all("tokenizer" in line or "generation_config" in line for line in lines), (file, lines)


@pytest.mark.slow
@pytest.mark.skipif("HONE_TRANSFORMERS4" not in os.environ, reason="set HONE_TRANSFORMERS4 to a folder that has it")
def test_transformers_4_reads_the_same_positions(tmp_path: Path) -> None:
    """HONE_TRANSFORMERS4: where `pip install --target FOLDER 'transformers<5'` put it."""
    for name, (config, _) in CONFIGS.items():
        save_settings(config, tmp_path / name)
    code = (
        "import json, sys, transformers; from transformers import AutoConfig\n"
        "assert transformers.__version__ < '5'\n"
        "for name in sys.argv[2:]:\n"
        "    c = AutoConfig.from_pretrained(f'{sys.argv[1]}/{name}')\n"
        f"    print(json.dumps({{key: getattr(c, key) for key in {OLDER} if getattr(c, key, None) is not None}}))"
    )
    env = {**os.environ, "PYTHONPATH": os.environ["HONE_TRANSFORMERS4"]}
    command = [sys.executable, "-c", code, str(tmp_path), *CONFIGS]
    out = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert [json.loads(line) for line in out.splitlines()] == [older for _, older in CONFIGS.values()]
