"""Recipes once read: stages, notices, the resolved form, presets."""

import json
from pathlib import Path

import pytest

from hone.config import ConfigError
from hone.recipe import Pipeline, Recipe, find, load, load_for_task, notices, presets, resolved, schema

MINIMAL = "name: x\ntask: {name: knights}\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "r.yaml") -> str:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    return write


def problems(*arguments, **options) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*arguments, **options)
    return list(caught.value.lines)


# --- notices ---------------------------------------------------------------------------------------------------------


def test_a_clip_that_cannot_bite_is_said_and_allowed(write):
    assert any("clip_low, clip_high and dual_clip" in line for line in notices(load(write(MINIMAL))))
    assert any("clip_high" in line for line in notices(load(write(MINIMAL + "algo: {clip_high: 0.28}"))))
    assert notices(load(write(MINIMAL + "algo: {updates_per_rollout: 2}"))) == []


def test_settings_of_another_kind_of_stage_are_said(write):
    assert notices(load(write(MINIMAL + "stage: sft\nsteps: 5\nalgo: {loss: gspo}"))) == [
        "algo has no effect in a stage of kind sft",
        "steps has no effect in a stage of kind sft",
    ]
    recipe = load(write(MINIMAL + "model: {path: o/m, tiny: {layers: 2}}\nalgo: {updates_per_rollout: 2}"))
    assert notices(recipe) == ["model.tiny has no effect: model.path is o/m"]


# --- stages ----------------------------------------------------------------------------------------------------------

STAGED = """\
name: two
task: knights
optim: {lr: 1e-4}
stages:
  - stage: sft
    sft: {epochs: 2}
    optim: {grad_clip: 0.5}
  - name: later
    optim: {lr: 1e-5}
    steps: 30
"""


def test_stages_share_the_top_level(write):
    pipeline = load(write(STAGED))
    assert isinstance(pipeline, Pipeline)
    first, second = pipeline.stages
    assert (first.name, first.stage, first.optim.lr, first.optim.grad_clip) == ("sft", "sft", 1e-4, 0.5)
    assert (second.name, second.stage, second.optim.lr, second.optim.grad_clip) == ("later", "rl", 1e-5, 1.0)
    assert (pipeline.name, pipeline.runs, first.runs, second.steps) == ("two", "runs", "runs/two", 30)


def test_overrides_of_stages(write):
    file = write(STAGED)
    everywhere = load(file, ["optim.lr=1", "model=o/m", "name=n", "runs=r"])
    assert [s.optim.lr for s in everywhere.stages] == [1.0, 1.0]  # over what the stages say themselves
    assert [s.model.path for s in everywhere.stages] == ["o/m", "o/m"]
    assert [(s.name, s.runs) for s in everywhere.stages] == [("sft", "r/n"), ("later", "r/n")]
    for one in ("stages.later.optim.lr=1", "stages.1.optim.lr=1"):
        assert [s.optim.lr for s in load(file, [one]).stages] == [1e-4, 1.0]
    assert problems(file, ["stages.rl.steps=1"]) == [
        "override 'stages.rl.steps=1': there is no stage rl; stages: sft, later"
    ]
    parts = load(write(STAGED + "reward: {parts: {logic_rl: 1.0}}"), ["reward.parts.well_formed=0.1"]).stages[1].reward
    assert parts.parts == {"logic_rl": 1.0, "well_formed": 0.1}


@pytest.mark.parametrize(
    "old, new, lines",
    [
        ("    steps: 30", "    stpes: 30", ["r.yaml:10: stpes: unknown key; did you mean steps?"]),
        (
            "{epochs: 2}",
            "{epochs: two}",
            ["r.yaml:6: sft.epochs: 'two' is not allowed; give a whole number > 0 (default 1)"],
        ),
        (
            "task: knights",
            "task: knight",
            ["r.yaml:2: task.name: 'knight' is not allowed; did you mean knights? give one of knights, countdown"],
        ),  # said once
        ("name: later", "name: sft", ["r.yaml:8: stages.1.name: two stages are called sft; give one another name"]),
        (
            "    steps: 30",
            "    runs: r",
            ["r.yaml:10: stages.1.runs: belongs to the whole recipe; move it to the top level"],
        ),
        (
            "    steps: 30",
            "    model: o/m",
            [
                "r.yaml:10: stages.1.model.path: has no effect: a stage starts from the "
                "model "
                "that the one before it left; remove it"
            ],
        ),
        ("name: two", "nmae: two", ["r.yaml:1: name: required, and not given; add it"]),
        (
            STAGED[STAGED.index("  - ") :],
            "  warmup: {}\n",
            ["r.yaml:4: stages: give a list with one mapping per stage, as in `- stage: sft`"],
        ),
    ],
)
def test_what_is_wrong_in_stages(write, old, new, lines):
    assert problems(write(STAGED.replace(old, new))) == lines


# --- resolved --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        MINIMAL,
        STAGED,
        "name: x\ntask: {name: countdown, train_file: rows.jsonl}\noptim: {lr: 3e-7, betas: [0.9, 0.999]}",
        MINIMAL + 'prompt: {template: "{user}\\n\\t\\u00e9\\U0001F600: \'"}\nreward: {parts: {logic_rl: 0.3}}',
    ],
)
def test_a_resolved_recipe_is_read_back_equal(write, text):
    write("", "rows.jsonl")
    recipe = load(write(text))
    values = json.loads(json.dumps(resolved(recipe)))
    folder = f"{recipe.runs}/{recipe.name}"
    write(json.dumps(values), f"{folder}/config.resolved.json")
    again = load(folder)
    assert again == recipe
    assert resolved(again) == values


def test_a_run_folder_is_that_run_wherever_it_has_been_moved_to(write):
    write(json.dumps(resolved(load(write(MINIMAL)))), "elsewhere/renamed/config.resolved.json")
    moved = load("elsewhere/renamed")
    assert (moved.name, moved.runs) == ("renamed", "elsewhere")


def test_a_resolved_recipe_holds_the_defaults(write):
    values = resolved(load(write(MINIMAL)))
    assert values["optim"]["eps"] == 1e-8
    assert values.keys() == Recipe.model_fields.keys()


def test_a_resolved_recipe_can_be_overridden(write):
    write(json.dumps(resolved(load(write(STAGED)))), "run/config.resolved.json")
    assert load("run", ["stages.later.steps=3"]).stages[1].steps == 3


# --- around ----------------------------------------------------------------------------------------------------------


def test_presets_are_valid():
    assert "demo" in presets()
    for name, file in presets().items():
        assert find(name) == file
        load(name, check_files=False)


def test_the_name_of_a_task_is_a_recipe_of_defaults(write):
    assert load_for_task("countdown", ["task.max_target=50"]).task.max_target == 50
    assert load_for_task(write(MINIMAL)).task.name == "knights"


def test_the_schema_knows_the_keys_of_files():
    keys = schema()["properties"]
    assert {"extends", "stages", *Recipe.model_fields} == keys.keys()
    assert {"type": "string"} in keys["model"]["anyOf"]
    assert schema()["additionalProperties"] is False


def test_recipes_are_frozen(write):
    recipe = load(write(MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 2
