"""Checkpoints of several processes: each writes its part, and any other layout reads them, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hone.base.settings import UserError
from hone.learn import checkpoint
from hone.model import shards
from hone.model.tiny import create
from hone.recipe.sections.model import TinyConfig
from tests.shard_worker import everything, load
from tests.test_world import spawn, wait

#: Sizes that do not divide evenly over two, so that parts differ.
MODEL = TinyConfig(vocab_size=300, hidden_size=32, layers=1, heads=4, kv_heads=2, mlp_size=48)


def saved_by(size: int, folder: Path, **case: Any) -> tuple[dict[str, Any], Path]:
    create(folder / "model", MODEL, ["Zoey is a knight."] * 3, seed=0)
    case = {"model": str(folder / "model"), "after": [], **case}
    (folder / "case.json").write_text(json.dumps(case))
    wait(spawn(size, str(folder / "case.json"), str(folder), module="tests.shard_worker"), timeout=240)
    return case, folder / "checkpoints" / "step_000002"


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert any(name.endswith("exp_avg_sq") and value.any() for name, value in expected.items())
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def check_layouts(size: int, folder: Path, **case: Any) -> None:
    """In the processes' own other layouts, and in one process."""
    case, saved = saved_by(size, folder, **case)
    expected = torch.load(folder / "0.pt")
    for i in range(len(case["after"])):
        check_same(torch.load(folder / f"{i + 1}.pt"), expected)
    alone = load(case, {})
    alone.restore(saved, checkpoint.read_state(saved)["policy"])
    check_same(everything(alone), expected)
    assert {p.name[:11] for p in (saved / "optimizer").iterdir()} == {f"shard-{n:05d}" for n in range(1, size + 1)}


def test_written_by_two_shards_read_by_one_process_and_by_tensor_parallel(tmp_path: Path) -> None:
    check_layouts(2, tmp_path, before={"shard": 2}, after=[{"tensor": 2}, {"replicate": 2}], dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, "all"])
def test_four_processes_in_every_layout(tmp_path: Path, lora: str | None) -> None:
    layouts = [{"shard": 4}, {"replicate": 2, "shard": 2}, {"replicate": 2, "tensor": 2}]
    check_layouts(4, tmp_path, before={"shard": 2, "tensor": 2}, after=layouts, lora=lora)


def test_one_process_writes_what_it_reads(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.tensor([7.0]), "c": torch.randn(4).bfloat16()}
    copies = shards.stage(tensors)
    shards.write(tmp_path / "x", copies)
    tensors["a"].zero_()
    restored = shards.whole(tmp_path / "x")
    assert restored["a"].abs().sum() > 0, "staged tensors are copies"
    for name, value in copies.items():
        assert restored[name].dtype == value.dtype
        assert torch.equal(restored[name], value)
    assert not [p for p in (tmp_path / "x").iterdir() if p.suffix != ".safetensors"], "no pickle"
    with pytest.raises(ValueError, match=r"a is \(3, 5\), but \(3, 4\) is needed"):
        shards.read(tmp_path / "x", {"a": torch.zeros(3, 4)})
    with pytest.raises(ValueError, match="d is missing, but"):
        shards.read(tmp_path / "x", {"d": torch.zeros(1)})


def test_large_tensors_go_to_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "FILE_BYTES", 100)
    tensors = {name: torch.randn(20) for name in "abc"}  # 80 bytes each
    shards.write(tmp_path, tensors)
    assert len(list(tmp_path.iterdir())) == 3
    for name, value in shards.whole(tmp_path).items():
        np.testing.assert_array_equal(value, tensors[name])


def test_a_checkpoint_of_an_earlier_format_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"step": 3, "policy": {}}')
    with pytest.raises(UserError, match=r"another version of hone \(format 1, this one reads 2\).*model=.*/model"):
        checkpoint.read_state(tmp_path)
