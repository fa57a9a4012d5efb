"""Recipes once read: stages, notices, the resolved form, presets."""

import json
from pathlib import Path

import pytest

from hone.base.settings import ConfigError, UserError
from hone.base.validate import with_defaults
from hone.recipe.load import find, load, load_for_task, presets, schema
from hone.recipe.notes import notices
from hone.recipe.recipe import KINDS, Pipeline, Recipe, kinds_with, resolved
from hone.tasks import TASKS

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


def test_all_stages_of_a_pipeline_have_its_device(write):
    file = write(STAGED + "device: cpu\n")
    assert [stage.device for stage in load(file).stages] == ["cpu", "cpu"]
    assert [stage.device for stage in load(file, ["device=cuda"]).stages] == ["cuda", "cuda"]


def test_a_stage_is_no_key_of_an_override(write):
    file = write(STAGED)
    assert problems(file, ["later.steps=1"]) == [
        "override 'later.steps=1': later is a stage; write stages.later.steps=1"
    ]
    assert load(file, ["stages.later.steps=1", "sft.examples_per_step=9"]).stages[1].steps == 1  # sft is a section too


def test_a_data_file_that_is_not_there(write):
    file = write("name: r\ntask: {name: dataset, source: gone.jsonl}\n")
    assert problems(file) == [f"r.yaml:2: task.source: no file gone.jsonl; paths are relative to {Path.cwd()}"]


def test_the_name_of_a_task_that_is_nearly_right(write):
    with pytest.raises(UserError, match=r"kights: no such task, recipe or data; did you mean knights?"):
        load_for_task("kights")


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
            [f"r.yaml:2: task.name: 'knight' is not allowed; did you mean knights? give one of {', '.join(TASKS)}"],
        ),  # said once
        ("name: later", "name: sft", ["r.yaml:8: stages.1.name: two stages are called sft; rename one"]),
        (
            "    steps: 30",
            "    runs: r",
            ["r.yaml:10: stages.1.runs: belongs to the whole recipe; move it to the top level"],
        ),
        (
            "    steps: 30",
            "    model: {tiny: {layers: 2}}",
            [
                "r.yaml:10: stages.1.model.tiny: cannot differ from that of stage sft, whose model this stage "
                "continues; remove it, or start afresh with model.path"
            ],
        ),
        (
            "    steps: 30",
            "    model: stages.nobody",
            [
                "r.yaml:10: stages.1.model.path: stages.nobody is not an earlier stage with a model; those are: sft",
            ],
        ),
        (
            "    steps: 30",
            "    sft: {epochs: 2}",
            [
                "r.yaml:10: stages.1.sft: a setting of stages of kind sft, and this stage is of kind rl (the default); "
                "remove it, or move it to the top level of the recipe, if it is for other stages"
            ],
        ),
        (
            "    steps: 30",
            "    device: cpu",
            [
                "r.yaml:10: stages.1.device: cpu, but auto in stage sft: all stages run in the same processes; set "
                "device once, at the top level of the recipe"
            ],
        ),
        ("name: two", "nmae: two", ["r.yaml:1: name: required, and not given; add it"]),
        (
            STAGED[STAGED.index("  - ") :],
            "  warmup: {}\n",
            ["r.yaml:4: stages: give a list with one mapping per stage, such as `- stage: sft`"],
        ),
    ],
)
def test_what_is_wrong_in_stages(write, old, new, lines):
    assert problems(write(STAGED.replace(old, new))) == lines


def test_a_setting_of_another_kind_is_an_error_where_it_is_written(write):
    text = MINIMAL + "stage: sft\nsteps: 5\nalgo: {loss: gspo}"
    kinds = "a setting of stages of kind rl and distil, and this stage is of kind sft"
    of = f"{kinds}; remove it, or set stage: rl or distil"
    assert problems(write(text)) == [f"r.yaml:4: steps: {of}", f"r.yaml:5: algo: {of}"]
    assert problems(write(MINIMAL), ["teacher=m"]) == [
        "override 'teacher=m': teacher: a setting of stages of kind generate and distil, and this stage is of kind rl "
        "(the default); remove it, or set stage: generate or distil"
    ]


def test_a_setting_of_another_kind_is_passed_over_where_it_is_inherited(write):
    shared = STAGED + "algo: {loss: gspo, updates_per_rollout: 2}\nsft: {examples: 640}\n"
    first, second = load(write(shared)).stages
    assert (first.sft.examples, second.algo.loss, notices(load("r.yaml"))) == (640, "gspo", [])
    overridden = load("r.yaml", ["steps=7", "sft.epochs=3"])
    assert (overridden.stages[1].steps, overridden.stages[0].sft.epochs) == (7, 3)
    resolved_ = write(json.dumps(resolved(load("r.yaml"))), "run/config.resolved.json")
    assert load(str(Path(resolved_).parent)).stages[1].algo.loss == "gspo"


def test_a_shared_setting_that_no_stage_has_is_noted(write):
    (line,) = notices(load(write(STAGED), ["generate.keep=all"]))
    assert line == "generate has no effect: it is for stages of kind generate, and there is none"


def test_every_setting_belongs_to_a_kind():
    assert set(Recipe.model_fields) == {key for settings in KINDS.values() for key in settings.model_fields}


def test_the_schema_refuses_a_setting_of_another_kind():
    stages = schema()["properties"]["stages"]["items"]
    allowed = {rule["if"]["properties"]["stage"]["const"]: rule for rule in stages["allOf"]}
    keys = {kind: set(rule["then"]["propertyNames"]["enum"]) for kind, rule in allowed.items()}
    assert {"sft", "optim"} < keys["sft"]
    assert {"teacher", "optim"} < keys["distil"]
    assert not {"sft", "teacher", "generate"} & keys["rl"]
    assert [kind for kind, rule in allowed.items() if "required" not in rule["if"]] == ["rl"]  # the default


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


def test_evaluation_samples_as_training_does_but_for_what_it_is_told() -> None:
    follows = Recipe.model_validate(
        {"name": "r", "task": {"name": "knights"}, "sampling": {"max_tokens": 900, "temperature": 0.7},
         "eval": {"sampling": {"temperature": 1.0}}}
    )  # fmt: skip
    assert (follows.eval.sampling.max_tokens, follows.eval.sampling.temperature) == (900, 1.0)
    assert with_defaults(follows.model_dump(mode="json"), Recipe) == follows.model_dump(mode="json")
    # A recorded run that evaluated with other limits stays what it was.
    before = follows.model_dump(mode="json")
    before["eval"]["sampling"]["max_tokens"] = 256
    assert with_defaults(before, Recipe)["eval"]["sampling"]["max_tokens"] == 256


def test_the_table_of_kinds_in_the_documentation() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "config.md").read_text()
    table = text[text.index("| settings | kinds of stages |") :].split("\n\n")[0].splitlines()[2:]
    documented = {}
    for row in table:
        keys, kinds = (cell.replace("`", "").split() for cell in row.strip("|").split("|"))
        documented |= {key: set(KINDS) if kinds == ["all"] else set(kinds) for key in keys}
    assert documented == {key: set(kinds_with(key)) for key in Recipe.model_fields if key != "runs"}
