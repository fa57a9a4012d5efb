"""Save a model and its config so that other programs can read them.

    save_model(model, folder)      # config.json, generation_config.json, model.safetensors
    save_settings(config, folder)  # config.json alone

transformers 5 writes rotary settings into `rope_parameters` only. Programs on transformers 4 (SGLang 0.5.9, many
inference tools) ignore that key and silently use the default base of 10 000. So config.json also gets the older keys,
which both versions read alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

CONFIG = "config.json"
#: Keys of `rope_parameters` that are at the top level of transformers 4's config.
TOP = ("rope_theta", "partial_rotary_factor")


def save_model(model: PreTrainedModel, folder: Path, **arguments: Any) -> None:
    """`model.save_pretrained`, with settings that transformers 4 reads too; `arguments` are those of that method."""
    model.save_pretrained(folder, **arguments)
    add_older_keys(folder)


def save_settings(config: PretrainedConfig, folder: Path) -> None:
    """`config.save_pretrained`, with the older keys too."""
    config.save_pretrained(folder)
    add_older_keys(folder)


def add_older_keys(folder: Path) -> None:
    """Write `older_keys` into the folder's config.json, at every level with rotary settings."""
    file = folder / CONFIG
    settings = json.loads(file.read_text())
    levels = [settings, *(value for value in settings.values() if isinstance(value, dict))]  # text_config and others
    for level in levels:
        for key, value in older_keys(level).items():
            level.setdefault(key, value)
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def older_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings as transformers 4 names them, from `rope_parameters`; empty without that key.

        {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}
        -> {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}

    Parameters per kind of layer (Gemma 3) become `rope_theta` for full attention and `rope_local_base_freq` for
    sliding attention.
    """
    rope = settings.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return {}
    older: dict[str, Any] = {}
    if isinstance(full := rope.get("full_attention"), Mapping):
        sliding = rope.get("sliding_attention")
        if isinstance(sliding, Mapping) and "rope_theta" in sliding:
            older["rope_local_base_freq"] = sliding["rope_theta"]
        rope = full
    older |= {key: rope[key] for key in TOP if key in rope}
    scaling = {key: value for key, value in rope.items() if key not in TOP}
    if scaling and scaling != {"rope_type": "default"}:
        older["rope_scaling"] = scaling
    return older
