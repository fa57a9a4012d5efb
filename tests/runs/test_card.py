"""The model card: what the hub reads in it, and that names and texts of users stay text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hone.base import sealed
from hone.recipe.explain import explain
from hone.recipe.load import load
from hone.recipe.recipe import Recipe
from hone.runs import card

RECIPE = """
name: small
model: {path: Qwen/Qwen2.5-0.5B}
lora: {rank: 8}
task: {name: countdown, train: 20, validation: 5, test: 70, numbers: [3]}
prompt: {style: raw, system: "", template: "{user} ```` <b>\\n"}
reward: {parts: {outcome: 1.0}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    loaded = load(path)
    assert isinstance(loaded, Recipe)
    return loaded


def ran(folder: Path) -> Path:
    """What a run leaves behind."""
    (folder / "model").mkdir(parents=True)
    hardware = {"gpu": None, "cpus": 2, "machine": "x86_64"}
    manifest = {
        "code_version": "0.1+abc", "versions": {"torch": "2.13"}, "hardware": hardware,
        "files": {"mine.py:f": "5e" * 32},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    interval = {"value": 0.25, "low": 0.2, "high": 0.31, "n": 70}
    row = {
        "split": "test", "samples": 4, "response_tokens": 31.6, "sampling": {"temperature": 0.6, "stop": []},
        "by_level": {"3": interval, "4|x": interval},
    }  # fmt: skip
    evals = [
        {"label": "before", "step": 0, "accuracy": interval, **row},
        {"label": "validation", "step": 5, "accuracy": {**interval, "value": 0.99}, **row, "split": "validation"},
        {"label": "after", "step": 9, "accuracy": {**interval, "value": 0.75}, **row},
    ]
    events = [
        {"step": 4, "kind": "reset", "number": 1, "why": "stagnates", "message": "hard reset 1"},
        {"step": 4, "kind": "reset", "number": 1, "why": "stagnates", "message": "hard reset 1"},  # a run that was cut
        {"step": 6, "kind": "collapse", "message": "length fell: <script>x</script> | `a`"},
    ]
    for name, rows in (("evals", evals), ("events", events)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_hub_reads_the_result_of_the_last_weights(recipe: Recipe, tmp_path: Path) -> None:
    folder = ran(tmp_path / "runs/small")
    card.write(folder / "model", [card.Trained(recipe, explain(recipe), folder)])
    read = ModelCard.load(folder / "model/README.md")
    assert read.data.base_model == "Qwen/Qwen2.5-0.5B"
    (result,) = read.data.eval_results
    assert (result.metric_value, result.dataset_split, read.data.model_name) == (0.75, "test", "small")
    assert "| before this stage | 0.250 | 0.200 to 0.310 | 70 test | 4 | 32 | – | temperature 0.6 |" in read.text
    assert "| after this stage | 0.750 |" in read.text
    assert "0.990" not in read.text  # validation is not what is reported
    assert read.text.count("| 1 | 4 | stagnates |") == 1
    assert "R_i = 1 * outcome" in read.text
    assert "mine.py:f" in read.text
    assert "5e" * 32 in read.text


def test_a_reward_of_your_own_stands_in_the_card(recipe: Recipe, tmp_path: Path) -> None:
    """Beside the accuracy; alone if the task does not grade, and then it is the result that the hub reads."""
    folder = ran(tmp_path / "runs/small")
    rows = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
    rewards = [row | {"reward": {"value": 1.5, "low": -0.25, "high": 2.0, "n": 70}} for row in rows]
    (folder / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rewards))
    card.write(folder / "model", [card.Trained(recipe, explain(recipe), folder)])
    text = (folder / "model/README.md").read_text()
    assert "| | accuracy | 95 % | reward | 95 % | problems |" in text
    assert "| after this stage | 0.750 | 0.200 to 0.310 | 1.500 | -0.250 to 2.000 | 70 test |" in text
    for row in rewards:
        del row["accuracy"]
    (folder / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rewards))
    card.write(folder / "model", [card.Trained(recipe, explain(recipe), folder)])
    read = ModelCard.load(folder / "model/README.md")
    (result,) = read.data.eval_results
    assert (result.metric_type, result.metric_value) == ("reward", 1.5)
    assert "| after this stage | 1.500 | -0.250 to 2.000 | 70 test |" in read.text


def test_names_and_texts_stay_text(recipe: Recipe, tmp_path: Path) -> None:
    folder = ran(tmp_path / "runs/small")
    text = card.card([card.Trained(recipe, explain(recipe), folder)])
    assert "step 6: length fell: &lt;script>x&lt;/script> \\| \\`a\\`".replace(">", "\\>") in text
    assert "\n`````\n{user} ```` <b>\n`````\n" in text  # a fence that the prompt cannot close
    assert "4\\|x: 0.250" in text


def test_evaluations_of_this_model_come_first(recipe: Recipe, tmp_path: Path) -> None:
    folder = ran(tmp_path / "runs/small")
    for name, model, value in (("a", folder / "model", 0.5), ("b", tmp_path / "other", 0.9)):
        place = folder / "evaluations" / name
        place.mkdir(parents=True)
        (place / "settings.json").write_text(json.dumps({"model": str(model)}))
        accuracy = {"value": value, "low": 0.4, "high": 0.6, "n": 200}
        summary = {"accuracy": accuracy, "split": "test", "samples": 32, "sampling": {}, "response_tokens": 9.0,
                   "by_level": {}}  # fmt: skip
        (place / "summary.json").write_text(json.dumps(summary))
    card.write(folder / "model", [card.Trained(recipe, explain(recipe), folder)])
    read = ModelCard.load(folder / "model/README.md")
    assert read.data.eval_results[0].metric_value == 0.5
    assert "| `hone eval` | 0.500 |" in read.text
    assert "0.900" not in read.text


def test_without_an_evaluation_it_says_so(recipe: Recipe, tmp_path: Path) -> None:
    folder = ran(tmp_path / "runs/small")
    (folder / "evals.jsonl").unlink()
    text = card.card([card.Trained(recipe, explain(recipe), folder)])
    assert "Not evaluated." in text
    assert "model-index" not in text


@pytest.mark.parametrize("damage", ["torn", "changed", "missing"])
def test_a_damaged_manifest_leaves_the_rest_of_the_card(
    recipe: Recipe, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ran(tmp_path / "runs/small")
    path = folder / "manifest.json"
    text = path.read_text()
    sealed.put(folder, path.name, text)
    if damage == "missing":
        path.unlink()
    else:
        path.write_text(text[:60] if damage == "torn" else text.replace("versions", "versi/ns"))
    card.write(folder / "model", [card.Trained(recipe, explain(recipe), folder)])
    assert f"{path}: it " in capsys.readouterr().err
    written = (folder / "model/README.md").read_text()
    assert "the versions and the hardware are not known" in written
    assert "| after this stage | 0.750 |" in written


@pytest.mark.parametrize("name, text", [("settings.json", "{"), ("summary.json", '{"split": "test"}')])
def test_a_damaged_evaluation_is_left_out_of_the_card(
    recipe: Recipe, tmp_path: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ran(tmp_path / "runs/small")
    place = folder / "evaluations/a"
    place.mkdir(parents=True)
    (place / "settings.json").write_text(json.dumps({"model": str(folder / "model")}))
    (place / "summary.json").write_text("{}")
    (place / name).write_text(text)
    card.write(folder / "model", [card.Trained(recipe, explain(recipe), folder)])
    assert f"{place / name}: " in capsys.readouterr().err
    assert "hone eval" not in (folder / "model/README.md").read_text()
