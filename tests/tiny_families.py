"""Tiny random checkpoints of architectures that transformers has: for `tests/test_families.py`.

make("gemma3", folder)      # 4 layers, 64 wide; a sliding window, where one is on, has 8 tokens
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

FULL = ["full_attention"] * 4

#: Sizes by the names that configs give them; each config takes those that it knows.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim_model", "dim", "attention_hidden_size", "lru_width"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "dim_ff", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("num_experts_per_token", "index_n_heads", "linear_num_key_heads", "bos_token_id"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "v_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("linear_head_dim", "mamba_d_state", "ssm_state_size", "mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("state_size", "index_topk", "index_head_dim", "attention_chunk_size"), 16),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size", "q_lora_rank"), 32),
    **dict.fromkeys(("kv_lora_rank", "mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "sliding_window", "attention_window_size"), 8),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "first_k_dense_replace", "moe_layer_start_index"), 1),
    "pad_token_id": 1,
    "eos_token_id": 0,
    "zero_expert_num": 0,
    "mamba_d_ssm": 128,
    "rescale_every": 0,
}

#: Name of the variant -> model type of transformers, and what differs from SIZES.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen2 (window)": ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}),
    "qwen2 (yarn)": (
        "qwen2",
        {
            "use_sliding_window": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "qwen2-moe": ("qwen2_moe", {"use_sliding_window": False}),
    "qwen2-moe (window)": ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 4}),
    "qwen3": ("qwen3", {}),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-next": ("qwen3_next", {}),
    "qwen3.5": ("qwen3_5_text", {}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {}),
    "llama": ("llama", {}),
    "llama (dropout)": ("llama", {"attention_dropout": 0.3}),
    "llama4": ("llama4_text", {"intermediate_size_mlp": 128}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral (window)": ("mistral", {"sliding_window": 8}),
    "ministral": ("ministral", {}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "mixtral (router noise)": ("mixtral", {"sliding_window": None, "router_jitter_noise": 0.3}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma2 (attention cap)": ("gemma2", {"layer_types": FULL, "final_logit_softcapping": None}),
    "gemma3": ("gemma3_text", {}),
    "gemma3n": (
        "gemma3n_text",
        {
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] + ["full_attention"] * 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 512,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0],
        },
    ),
    "gemma4": ("gemma4_text", {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512}),
    "vaultgemma": ("vaultgemma", {}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3 (window)": ("phi3", {"sliding_window": 8}),
    "phi3 (longrope)": (
        "phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
            },
        },
    ),
    "phi3 (dropout)": ("phi3", {"sliding_window": None, "resid_pdrop": 0.3, "embd_pdrop": 0.3}),
    "phimoe": ("phimoe", {"sliding_window": None}),
    "smollm3": ("smollm3", {"use_sliding_window": False}),
    "olmo": ("olmo", {"clip_qkv": 1.0}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "olmoe": ("olmoe", {"clip_qkv": 2.0}),
    "granite": ("granite", {"logits_scaling": 4.0}),
    "granitemoe": ("granitemoe", {"logits_scaling": 1.0, "attention_multiplier": 0.03}),
    "granite4-h": (
        "granitemoehybrid",
        {"logits_scaling": 1.0, "layer_types": ["mamba", "attention", "mamba", "attention"]},
    ),
    "bamba": ("bamba", {"attn_layer_indices": [1, 3]}),
    "falcon": ("falcon", {"multi_query": True}),
    "falcon-h1": ("falcon_h1", {}),
    "falcon-mamba": ("falcon_mamba", {}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
    "lfm2-moe": (
        "lfm2_moe",
        {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    ),
    "deepseek-v2": (
        "deepseek_v2",
        {"num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {"num_key_value_heads": 4, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16},
    ),
    "deepseek-v3.2": ("deepseek_v32", {"num_key_value_heads": 4}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4-moe": ("glm4_moe", {"use_qk_norm": True}),
    "glm4-moe-lite": ("glm4_moe_lite", {"num_key_value_heads": 4}),
    "gpt-oss": ("gpt_oss", {}),
    "minimax-m2": ("minimax_m2", {"sliding_window": None}),
    "nemotron": ("nemotron", {}),
    "nemotron-h": ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp", "attention"]}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {}),
    "stablelm": ("stablelm", {}),
    "gpt2": ("gpt2", {}),
    "gpt-neox": ("gpt_neox", {"attention_dropout": 0.2, "hidden_dropout": 0.2}),
    "gpt-neo": ("gpt_neo", {"attention_types": [[["global", "local"], 2]], "window_size": 8}),
    "gpt-j": ("gptj", {"rotary_dim": 8}),
    "codegen": ("codegen", {"rotary_dim": 8}),
    "gpt-bigcode": ("gpt_bigcode", {"multi_query": True}),
    "bloom": ("bloom", {}),
    "mpt": ("mpt", {}),
    "opt": ("opt", {"word_embed_proj_dim": 64, "dropout": 0.1}),
    "biogpt": ("biogpt", {}),
    "xglm": ("xglm", {}),
    "exaone4": ("exaone4", {"sliding_window": 8, "sliding_window_pattern": 4}),
    "seed-oss": ("seed_oss", {"residual_dropout": 0.1, "attention_dropout": 0.1}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "hunyuan-moe": ("hunyuan_v1_moe", {}),
    "ernie4.5": ("ernie4_5", {}),
    "ernie4.5-moe": ("ernie4_5_moe", {}),
    "kimi-linear": (
        "kimi_linear",
        {
            "num_key_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        },
    ),
    "starcoder2": ("starcoder2", {"sliding_window": None, "residual_dropout": 0.3, "embedding_dropout": 0.3}),
    "persimmon": ("persimmon", {}),
    "jamba": ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}),
    "mamba": ("mamba", {}),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 16}),
    "olmo-hybrid": ("olmo_hybrid", {}),
    "zamba2": ("zamba2", {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}),
    "minimax": ("minimax", {"sliding_window": None}),
    "rwkv": ("rwkv", {}),
    "diffllama": ("diffllama", {}),
    "minicpm3": ("minicpm3", {"num_key_value_heads": 4}),
    "nanochat": ("nanochat", {}),
    "modernbert-decoder": ("modernbert-decoder", {}),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "helium": ("helium", {}),
    "doge": ("doge", {}),
    "dots1": ("dots1", {"n_shared_experts": 1, "sliding_window": None}),
    "jetmoe": ("jetmoe", {}),
    "openai-gpt": ("openai-gpt", {}),
    "afmoe": ("afmoe", {}),
    "axk1": ("axk1", {"num_key_value_heads": 4}),
    "cohere2-moe": ("cohere2_moe", {}),
    "cwm": ("cwm", {}),
    "exaone-moe": ("exaone_moe", {}),
    "flex-olmo": ("flex_olmo", {}),
    "granite-swa": ("granite_swa", {}),
    "granitemoe-swa": ("granitemoe_swa", {}),
    "granitemoe-shared": ("granitemoeshared", {}),
    "hy-v3": ("hy_v3", {}),
    "hyperclovax": ("hyperclovax", {}),
    "internlm3": ("internlm3", {}),
    "jais2": ("jais2", {}),
    "laguna": ("laguna", {}),
    "mellum": ("mellum", {}),
    "mimo-v2-flash": ("mimo_v2_flash", {}),
    "ministral3": ("ministral3", {}),
    "solar-open": ("solar_open", {}),
    "youtu": ("youtu", {"num_key_value_heads": 4}),
    "gpt-neox-japanese": ("gpt_neox_japanese", {}),
}


def make(name: str, folder: Path) -> None:
    """Write the checkpoint, without a tokenizer. Weights are large enough for every part to be seen in the logits."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind, differs = FAMILIES[name]
    cls = CONFIG_MAPPING[kind]
    known = {f.name for f in dataclasses.fields(cls)}
    config = cls(**{key: value for key, value in SIZES.items() if key in known} | differs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for full_name, p in model.named_parameters():
                _fill(full_name, p)
                if kind == "gemma4_text" and "q_norm" in full_name:
                    p.mul_(0.3)  # it does not scale scores: larger ones make a softmax that doubles every rounding
    model.save_pretrained(folder)


def _fill(name: str, p: torch.Tensor) -> None:
    last = name.rpartition(".")[2]
    if last == "A_log":
        p.uniform_(-3.0, -1.0)  # slow decay, so that states reach far; a fast one also costs digits
        return
    if last in ("dt_bias", "time_decay", "time_first"):
        return  # others make states explode
    if p.ndim < 2:
        p.add_(torch.randn_like(p) * (1.0 if "sink" in name else 0.2))
    elif any(part in name for part in ("embed", "wte", "wpe", "lm_head")):
        p.normal_(0.0, 0.3)
    else:
        p.normal_(0.0, 1.1 / math.sqrt(max(16, min(p.shape[-1], p.shape[-2], 128))))
