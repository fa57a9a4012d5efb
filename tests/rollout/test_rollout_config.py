"""Settings of the engines: what is impossible is an error, what has no effect is said."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hone.recipe.notes import notices
from hone.recipe.recipe import Recipe
from hone.recipe.sections.rollout import RolloutConfig, VLLMConfig

TASK = {"name": "knights"}


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "https://x:1", "http://", "http://x:1/v1"])
def test_a_url_is_one_of_a_server(url: str) -> None:
    with pytest.raises(ValidationError, match=r"give http://host:port"):
        VLLMConfig(url=url)
    assert VLLMConfig(url="http://127.0.0.1:8000/").url


def test_the_settings_of_another_engine_are_said_to_have_no_effect() -> None:
    idle = Recipe(name="x", task=TASK, rollout={"vllm": {"port": 8000}})
    assert "rollout.vllm has no effect while rollout.engine is native" in notices(idle)
    assert not [n for n in notices(Recipe(name="x", task=TASK, rollout={"engine": "vllm"})) if n.startswith("rollout.")]


@pytest.mark.parametrize(
    ("settings", "port", "starts"),
    [
        ({}, None, False),
        ({"engine": "vllm", "vllm": {"port": 1}, "sglang": {"port": 2}}, 1, True),
        ({"engine": "sglang", "vllm": {"port": 1}, "sglang": {"port": 2}}, 2, True),
        ({"engine": "sglang", "sglang": {"port": 2, "url": "http://127.0.0.1:2"}}, 2, False),
        ({"engine": "vllm", "vllm": {"port": 1, "in_process": True}}, None, False),
    ],
)
def test_the_server_is_that_of_the_engine(settings: dict[str, Any], port: int | None, starts: bool) -> None:
    rollout = RolloutConfig.model_validate(settings)
    assert (rollout.server and rollout.server.port, rollout.starts_server) == (port, starts)


def test_sglangs_log_probs_of_a_cut_distribution_are_said_to_be_biased() -> None:
    cut = Recipe(name="x", task=TASK, rollout={"engine": "sglang"}, sampling={"top_p": 0.9})
    assert any(n.startswith("sampling.top_p: SGLang's log-probs") for n in notices(cut))
    assert not any("SGLang" in n for n in notices(cut.model_copy(update={"rollout": RolloutConfig()})))


def test_an_adapter_that_is_served_as_it_is_needs_one_that_vllm_has_room_for() -> None:
    served = {"engine": "vllm", "vllm": {"lora": "adapter"}}
    assert any(
        n.startswith("rollout.vllm.lora has no effect") for n in notices(Recipe(name="x", task=TASK, rollout=served))
    )
    Recipe(name="x", task=TASK, rollout=served, lora={"rank": 512})
    with pytest.raises(ValidationError, match=r"up to rank 512; lower it, or set rollout.vllm.lora: merged"):
        Recipe(name="x", task=TASK, rollout=served, lora={"rank": 513})
    Recipe(name="x", task=TASK, rollout={"engine": "vllm"}, lora={"rank": 513})


def test_rollouts_ahead_need_a_server() -> None:
    inside = {"engine": "vllm", "vllm": {"in_process": True}, "ahead": True}
    with pytest.raises(
        ValidationError, match=r"cannot sample while it trains; remove this, or rollout.vllm.in_process"
    ):
        Recipe(name="x", task=TASK, rollout=inside, algo={"correction": {"kind": "tis"}})


def test_vllm_in_the_process_is_alone_there() -> None:
    inside = {"engine": "vllm", "vllm": {"in_process": True}}
    with pytest.raises(ValidationError, match=r"take them for its own; remove this"):
        Recipe(name="x", task=TASK, rollout=inside, parallel={"replicate": 2})
    Recipe(name="x", task=TASK, rollout=inside)
