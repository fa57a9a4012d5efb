"""Short forms of settings, names of other trainers, and files that are no recipes."""

import ast
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.base.settings import ConfigError
from hone.base.validate import _all_keys
from hone.recipe.load import load, schema
from hone.recipe.names import OTHER_NAMES, OTHER_VALUES
from hone.recipe.recipe import Recipe
from hone.recipe.short import long_form

MINIMAL = "name: x\ntask: {name: knights}\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "r.yaml") -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
        return name

    return write


def problems(*arguments) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    return list(caught.value.lines)


# --- short forms --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("reward: outcome", {"outcome": 1.0}),
        ("reward: [outcome, well_formed]", {"outcome": 1.0, "well_formed": 1.0}),
        ("reward: {parts: [well_formed]}", {"well_formed": 1.0}),
        ("reward: my/reward.py:right", {"my/reward.py:right": 1.0}),
        ("reward: {parts: {outcome: 0.5}}", {"outcome": 0.5}),
    ],
)
def test_rewards(write, text, parts):
    write("def right(completions, **columns):\n    return [1.0 for _ in completions]\n", "my/reward.py")
    assert load(write(f"{MINIMAL}{text}")).reward.parts == parts
    assert load(write(MINIMAL), [text.replace(": ", "=", 1)]).reward.parts == parts


def test_a_short_reward_replaces_the_parts_and_keeps_their_settings(write):
    write(MINIMAL + "reward: {parts: {outcome: 1.0, overlong: 0.5}, overlong: {max_tokens: 256}}", "base.yaml")
    child = write("extends: base.yaml\nreward: [well_formed]")
    assert load(child).reward.parts == {"well_formed": 1.0}
    assert load(child).reward.overlong.max_tokens == 256
    assert load(child, ["reward.parts.outcome=0.5"]).reward.parts == {"well_formed": 1.0, "outcome": 0.5}
    assert load("base.yaml", ["reward.parts=[well_formed]"]).reward.parts == {"well_formed": 1.0}


def test_short_forms_in_stages_and_schedules(write):
    stages = "stages:\n  - {stage: sft}\n  - {reward: [well_formed], schedule: [{at: 5, reward: outcome}]}\n"
    (_, rl) = load(write(MINIMAL + stages)).stages
    assert rl.reward.parts == {"well_formed": 1.0}
    assert rl.schedule == ({"at": 5, "reward": {"parts": {"outcome": 1.0}}},)


@pytest.mark.parametrize("source", ["my/rows.jsonl", "rows.csv", "openai/gsm8k"])
def test_rows_as_a_task(write, source):
    if "." in source:
        write('{"question": "1 + 1?", "answer": "2"}\n', source)
    assert load(write(f"name: x\ntask: {source}")).task.source == source
    task = load(write(MINIMAL), [f"task={source}"]).task
    assert (task.name, task.source) == ("dataset", source)  # nothing of knights is left


def test_names_of_tasks_are_not_data(write):
    assert load(write("name: x\ntask: reasoning_gym:chain_sum")).task.name == "reasoning_gym:chain_sum"
    assert problems(write("name: x\ntask: knigths"))[0].startswith("r.yaml:2: task.name: 'knigths' is not allowed")
    assert problems(write("name: x\ntask: rows.jsonl"))[0].startswith("r.yaml:2: task.source: no file rows.jsonl")


def test_errors_in_short_forms_have_their_line(write):
    assert problems(write(MINIMAL + "\nreward: [outcom]"))[0].startswith("r.yaml:4: reward.parts: no reward 'outcom'")
    assert problems(write(MINIMAL + "\nreward: no/such.py:f"))[0].startswith("r.yaml:4: reward.parts: no/such.py:f")


def test_short_forms_are_of_the_top_level_only(write):
    judge = load(write(MINIMAL), ["eval.judge.model=m", "eval.judge.url=https://x.org/v1"]).eval.judge
    assert judge.model == "m"


@given(st.sampled_from(["optim", "steps", "name"]), st.text())
def test_other_settings_have_no_short_form(key, value):
    assert long_form(key, value) is value


def test_the_schema_knows_short_forms():
    keys = schema()["properties"]
    for key in ("model", "task", "launch", "reward"):
        assert {"type": "string"} in keys[key]["anyOf"]
    assert {"type": "array", "items": {"type": "string"}} in keys["reward"]["anyOf"]
    json.dumps(schema())


# --- unknown keys -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "temperature=0.7",
            "temperature: unknown key; did you mean sampling.temperature? write sampling.temperature=0.7",
        ),
        ("top_p=0.5", "top_p: unknown key; did you mean sampling.top_p? write sampling.top_p=0.5"),
        ("use_vllm=true", "use_vllm: unknown key; hone's name for it is rollout.engine: vllm"),
        ("report_to=wandb", "report_to: unknown key; hone's name for it is sinks"),
        ("lora.r=8", "lora.r: unknown key; hone's name for it is lora.rank"),
        ("optim.learning_rate=1", "optim.learning_rate: unknown key; hone's name for it is optim.lr"),
        ("algo.beta=0.1", "algo.beta: unknown key; hone's name for it is algo.kl.coef"),
        (
            "num_train_epochs=2",
            "num_train_epochs: unknown key; hone's name for it is sft.epochs in stage: sft, and steps in stage: rl",
        ),
        (
            "per_device_train_batch_size=2",
            "per_device_train_batch_size: unknown key; hone's name for it is prompts_per_step, which counts problems: "
            "TRL's value, times accumulation steps and processes, divided by num_generations; memory is bounded by "
            "tokens_per_microbatch",
        ),
        ("logging_steps=1", "logging_steps: unknown key; remove it: every step is recorded"),
        (
            "reward={my/r.py:f: 1}",
            "reward.my/r.py:f: unknown key; rewards are entries of parts: write reward: {parts: {my/r.py:f: 1.0}}",
        ),
    ],
)
def test_what_is_meant(write, override, message):
    assert problems(write(MINIMAL), [override]) == [f"override {override!r}: {message}"]


def test_names_of_other_trainers_lead_to_settings_that_exist():
    keys = set(_all_keys(Recipe))
    for other, ours in OTHER_NAMES.items():
        first = ours.replace(":", " ").replace(",", " ").split()[0]
        assert first in keys or ours.startswith("none:"), (other, ours)
        assert other not in Recipe.model_fields
    choices = json.dumps(Recipe.model_json_schema())
    assert all(f'"{ours}"' in choices for ours in OTHER_VALUES.values())


def test_the_recipe_for_users_of_trl(write):
    """docs/trl.md: it loads, and every argument of TRL that stands there leads to a setting."""
    page = (Path(__file__).parents[2] / "docs" / "trl.md").read_text(encoding="utf-8")
    (script,), (recipe,) = re.findall(r"```python\n(.*?)```", page, re.S), re.findall(r"```yaml\n(.*?)```", page, re.S)
    write('{"prompt": "1 + 1?", "answer": "2"}\n', "rows.jsonl")
    write("def correct(completions, **columns): ...\ndef well_formatted(completions, **columns): ...\n", "rewards.py")
    loaded = load(write(recipe))
    (config, *_) = [call for call in ast.walk(ast.parse(script)) if isinstance(call, ast.Call) and call.keywords]
    trl = {keyword.arg: ast.literal_eval(keyword.value) for keyword in config.keywords}
    completions = trl["per_device_train_batch_size"] * trl["gradient_accumulation_steps"]
    assert loaded.prompts_per_step * loaded.samples_per_prompt == completions
    assert (loaded.steps, loaded.optim.lr, loaded.algo.clip_high) == (200, trl["learning_rate"], trl["epsilon_high"])
    for key in trl:
        (line,) = problems(write(MINIMAL), [f"{key}=1"])
        assert "hone's name for it is" in line or "did you mean" in line, line


# --- files that are no recipes ------------------------------------------------------------------


def test_a_reward_is_not_a_recipe(write):
    write("def right(completions, **columns):\n    return [1.0]\n\n\ndef _inner():\n    pass\n", "my/reward.py")
    assert problems("my/reward.py") == [
        "my/reward.py: a Python file, not a recipe; its functions are right; as a reward: hone train RECIPE "
        "reward=my/reward.py:right, or hone train --data ROWS --reward my/reward.py:right"
    ]
    write("def broken(:\n", "broken.py")
    assert problems("broken.py")[0].startswith("broken.py: a Python file, not a recipe, and it cannot be parsed")


def test_rows_are_not_a_recipe(write):
    assert problems(write("{}\n", "rows.jsonl")) == [
        "rows.jsonl: a file of rows, not a recipe; to train on them: hone train RECIPE task=rows.jsonl, or hone train "
        "--data rows.jsonl --model MODEL"
    ]
    write("{}", "m/config.json")
    assert problems("m") == [
        "m: no recipe.yaml and no config.resolved.json in this folder. It holds a model: write model=PATH after a "
        "recipe"
    ]
