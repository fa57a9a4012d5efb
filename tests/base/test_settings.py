"""Recipe files: reading, merging, overriding, and what the user is told when something is wrong."""

from pathlib import Path
from typing import get_args

import pytest

from hone.base.settings import ConfigError
from hone.recipe.load import load
from hone.recipe.sections.algo import AlgoConfig
from hone.tasks import TASKS

CHOICES = {name: get_args(AlgoConfig.model_fields[name].annotation) for name in ("advantage", "loss")}
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


# --- values ----------------------------------------------------------------------------------------------------------


def test_yaml_is_version_1_2(write):
    recipe = load(write(MINIMAL + "optim: {lr: 1e-5, betas: [0.5, .9]}\nprompt: {system: no}"))
    assert recipe.optim.lr == 0.00001  # text in YAML 1.1
    assert recipe.optim.betas == (0.5, 0.9)
    assert recipe.prompt.system == "no"  # false in YAML 1.1


def test_yaml_numbers_are_not_text(write):
    assert problems(write(MINIMAL + "prompt: {template: 010}")) == [
        "r.yaml:3: prompt.template: 10 is not allowed; give text "
        r"(default '{system}\n\nUser: {user}\nAssistant: ')"
    ]


def test_a_date_is_text(write):
    assert load(write("name: 2024-01-31\ntask: knights")).name == "2024-01-31"


def test_bare_strings(write):
    recipe = load(write("name: x\ntask: countdown\nmodel: Qwen/Qwen3-0.6B"))
    assert (recipe.task.name, recipe.model.path) == ("countdown", "Qwen/Qwen3-0.6B")


def test_the_task_selects_its_settings(write):
    assert load(write("name: x\ntask: {name: countdown, max_target: 50}")).task.max_target == 50


# --- extends ---------------------------------------------------------------------------------------------------------


def test_extends_merges_mappings_and_replaces_the_rest(write):
    write(MINIMAL + "optim: {lr: 1e-3, grad_clip: 2.0}\nsteps: 7\nseed: 1", "base/a.yaml")
    write("optim: {lr: 1e-4}\nseed: 2\ntask: {people: [2, 3]}", "base/b.yaml")
    child = write("extends: [../base/a.yaml, ../base/b.yaml]\nseed: 3\ntask: {people: [4]}", "child/r.yaml")
    recipe = load(child)
    assert (recipe.optim.lr, recipe.optim.grad_clip) == (1e-4, 2.0)  # later over earlier, the rest kept
    assert (recipe.steps, recipe.seed, recipe.task.people) == (7, 3, (4,))  # lists are replaced


def test_another_task_leaves_the_settings_of_the_old_one(write):
    write("name: x\ntask: {name: knights, people: [2]}", "a.yaml")
    assert load(write("extends: a.yaml\ntask: {name: countdown}")).task.numbers == (3, 4)
    assert load(write("extends: a.yaml\ntask: {name: knights}")).task.people == (2,)
    assert load("a.yaml", ["task=countdown"]).task.name == "countdown"
    assert load("a.yaml", ["task.name=countdown"]).task.name == "countdown"


def test_a_cycle_is_an_error(write):
    write("extends: c.yaml\n" + MINIMAL, "b.yaml")
    write("name: c\nextends: b.yaml", "c.yaml")
    assert problems("b.yaml") == [
        "c.yaml:2: extends: b.yaml leads back to itself (b.yaml -> c.yaml -> b.yaml); remove one of the links"
    ]


def test_a_diamond_is_none(write):
    write(MINIMAL, "a.yaml")
    write("extends: a.yaml\nseed: 1", "b.yaml")
    write("extends: a.yaml\nsteps: 2", "c.yaml")
    recipe = load(write("extends: [b.yaml, c.yaml]"))
    assert (recipe.seed, recipe.steps) == (1, 2)


def test_an_error_names_the_file_it_is_in(write):
    write(MINIMAL + "\n\nstpes: 3", "base.yaml")
    assert problems(write("extends: base.yaml\nseed: 1")) == ["base.yaml:5: stpes: unknown key; did you mean steps?"]
    assert problems(write("extends: bsae.yaml")) == [
        "r.yaml:1: extends: no file bsae.yaml; did you mean base.yaml?; paths are relative to r.yaml"
    ]


# --- overrides -------------------------------------------------------------------------------------------------------


def test_overrides_win_in_order(write):
    file = write(MINIMAL + "optim: {lr: 1e-3, grad_clip: 2.0}")
    overrides = ["optim.lr=1", "optim.lr=1e-5", "task.people=[2, 5]", "model=o/m", "prompt.system=''", "runs=a=b"]
    recipe = load(file, overrides)
    assert (recipe.optim.lr, recipe.optim.grad_clip) == (1e-5, 2.0)
    assert (recipe.task.people, recipe.model.path, recipe.prompt.system, recipe.runs) == ((2, 5), "o/m", "", "a=b")
    assert load(file, ["algo.dual_clip=null"]).algo.dual_clip is None
    assert load(file, ["optim={lr: 3.0}"]).optim.grad_clip == 2.0


def test_an_override_of_one_entry_keeps_the_default_entries(write):
    file = write(MINIMAL)
    assert load(file, ["reward.parts.well_formed=0.1"]).reward.parts == {"outcome": 1.0, "well_formed": 0.1}
    file = write(MINIMAL + "reward: {parts: {logic_rl: 1.0}}")
    assert load(file, ["reward.parts.well_formed=0.1"]).reward.parts == {"logic_rl": 1.0, "well_formed": 0.1}


@pytest.mark.parametrize(
    "override, message",
    [
        ("steps", "overrides read key=value with a dotted key, as in optim.lr=1e-5"),
        ("a..b=1", "overrides read key=value with a dotted key, as in optim.lr=1e-5"),
        ("optim.lr=[", "not valid YAML: expected the node content, but found '<stream end>'"),
        ("extends=a.yaml", "extends is read from files only; write a recipe that extends the other"),
        ("stages.rl.steps=1", "there is no stage rl; stages: none, this recipe is a single stage"),
        ("optim.lr=fast", "optim.lr: 'fast' is not allowed; give a number > 0 (default 1e-06)"),
        ("optim.lr.x=1", 'optim.lr: {"x": 1} is not allowed; give a number > 0 (default 1e-06)'),
        ("seed=-1", "seed: -1 is not allowed; give a whole number >= 0 and < 1048576 (default 0)"),
    ],
)
def test_wrong_overrides(write, override, message):
    assert problems(write(MINIMAL), [override]) == [f"override {override!r}: {message}"]


# --- what is wrong, one line each ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, message",
    [
        # unknown keys: a slip, a key of another place, a name that others use, nothing like it
        ("optim: {lrr: 1}", "optim.lrr: unknown key; did you mean optim.lr?"),
        (
            "algo: {advantage: ppo}",
            "algo.advantage: 'ppo' is not allowed; did you mean gae? "
            f"give one of {', '.join(CHOICES['advantage'])} (default 'grpo')",
        ),
        ("optim.lr: 1", "optim.lr: keys with dots are for the command line; write optim: {lr: ...}"),
        ("sampels_per_prompt: 4", "sampels_per_prompt: unknown key; did you mean samples_per_prompt?"),
        ("max_people: 4", "max_people: unknown key; valid here: "),
        ("clip_high: 0.3", "clip_high: unknown key here; did you mean algo.clip_high? move it there"),
        ("num_generations: 4", "num_generations: unknown key; hone's name for it is samples_per_prompt"),
        ("algo: {steps: 4}", "algo.steps: unknown key here; did you mean steps? move it there"),
        # wrong types: the value, and what is allowed
        ("steps: many", "steps: 'many' is not allowed; give a whole number > 0 (default 100)"),
        ("steps: '5'", "steps: '5' is not allowed; give a whole number > 0 (default 100); remove the quotes"),
        ("steps: 1e3", "steps: 1000.0 is not allowed; give a whole number > 0 (default 100); write 1000"),
        ("steps: true", "steps: true is not allowed; give a whole number > 0 (default 100)"),
        ("steps: 0", "steps: 0 is not allowed; give a whole number > 0 (default 100)"),
        ("steps:", "steps: null is not allowed; give a whole number > 0 (default 100)"),
        ("sampling: {top_p: 1.5}", "sampling.top_p: 1.5 is not allowed; give a number > 0.0 and <= 1.0 (default 1.0)"),
        ("optim: {lr: .inf}", "optim.lr: Infinity is not allowed; give a finite number > 0 (default 1e-06)"),
        ("optim: {betas: [0.9]}", "optim.betas.1: required, and not given; add it"),
        ("optim: {betas: [0.9, x]}", "optim.betas.1: 'x' is not allowed; give a number"),
        ("algo: {mask_truncated: 1}", "algo.mask_truncated: 1 is not allowed; give true or false (default false)"),
        (
            "algo: {kl: 0.1}",
            "algo.kl: 0.1 is not allowed; give a mapping (indented `key: value` lines); its keys are "
            "coef, estimator, place",
        ),
        (
            "stage: rll",
            "stage: 'rll' is not allowed; did you mean rl? give one of sft, rl, generate, distil (default 'rl')",
        ),
        (
            "algo: {loss: ppo}",
            f"algo.loss: 'ppo' is not allowed; give one of {', '.join(CHOICES['loss'])} (default 'clipped')",
        ),
        ("name: a/b", "name: given twice (first at r.yaml:1); remove one"),
        # impossible together
        (
            "samples_per_prompt: 1",
            "samples_per_prompt: algo.advantage grpo compares the samples of a group, so it needs 2 or more; "
            "or set algo.advantage to reinforce_pp",
        ),
        (
            "algo: {updates_per_rollout: 17}",
            "algo.updates_per_rollout: 17 updates cannot share the 16 prompts of a "
            "step (prompts_per_step); lower it, or draw more",
        ),
        (
            "sampling: {temperature: 0}",
            "sampling.temperature: at 0 answers are not sampled, so no distribution is trained; give a number > 0",
        ),
        (
            "reward: {parts: {outcome: 0}}",
            "reward.parts: no part has a weight, so every reward is 0; give one, such as outcome: 1.0",
        ),
        (
            "model: {tiny: {heads: 3}}",
            "model.tiny.hidden_size: 128 cannot be split into 3 heads of even size; give a multiple of 6",
        ),
        (
            "sampling: {max_tokens: 2048}",
            "sampling.max_tokens: 2048 leaves no room for a prompt in "
            "model.tiny.max_positions 2048; lower this or raise that",
        ),
        (
            "reward: {parts: {countdown: 1}}",
            "reward.parts.countdown: this reward is for the task countdown, not for knights; remove it",
        ),
        (
            "stage: sft\nsft: {styles: {lucky: 1}}",
            "sft.styles.lucky: task knights does not have this style; give careful or hasty",
        ),
        # not there
        (
            "model: ./nowhere",
            "model.path: ./nowhere is not a folder here; give `tiny`, the folder of a Hugging Face "
            "checkpoint, or a hub id such as Qwen/Qwen3-0.6B",
        ),
        (
            "model: {path: /}",
            "model.path: / has no config.json; give `tiny`, the folder of a Hugging Face "
            "checkpoint, or a hub id such as Qwen/Qwen3-0.6B",
        ),
    ],
)
def test_one_line_says_where_what_and_how(write, line, message):
    actual = problems(write(MINIMAL + "\n" + line))
    assert len(actual) == 1
    expected = f"r.yaml:{4 + line.count(chr(10))}: {message}"
    assert actual[0].startswith(expected)
    assert actual[0] == expected or message.endswith("valid here: ")


def test_the_folder_of_a_stage_is_not_that_of_its_model(write):
    folder = Path("runs/x/warmup/model")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert problems(write(MINIMAL + "model: runs/x/warmup/")) == [
        "r.yaml:3: model.path: runs/x/warmup/ has no config.json; give runs/x/warmup/model, the model inside of it"
    ]


def test_a_task_without_worked_answers_cannot_be_learned_from_them(write):
    assert problems(write("name: x\nstage: sft\ntask: reasoning_gym:chain_sum\nsft: {styles: {careful: 1}}")) == [
        "r.yaml:3: task: reasoning_gym:chain_sum has no worked answers to learn from (it has no `trace`); give rows "
        "that have some as sft.data, start with a stage rl from an existing model, or give another task"
    ]


@pytest.mark.parametrize(
    "text, lines",
    [
        ("", ["r.yaml:1: the file is empty; a recipe needs at least name and task"]),
        ("hello", ["r.yaml:1: 'hello' is not a recipe; write `key: value` lines"]),
        ("name: x\ntask: [", ["r.yaml:2: not valid YAML: expected the node content, but found '<stream end>'"]),
        ("name: x\n\n\n\ta: 3", ["r.yaml:4: not valid YAML: found character '\\t' that cannot start any token"]),
        ("name: x\n<<: {a: b}", ["r.yaml:2: keys are plain words here; to build on another file use extends"]),
        (
            "name: !!python/name:os.system x",
            ["r.yaml:1: tag tag:yaml.org,2002:python/name:os.system is not allowed; write a plain value"],
        ),
        ("task: knights", ["r.yaml:1: name: required, and not given; add it"]),
        (
            "name: x\ntask: {people: [2]}",
            [f"r.yaml:2: task.name: required, and not given; add one of {', '.join(TASKS)}"],
        ),
        (
            "name: x\ntask: knigths",
            [f"r.yaml:2: task.name: 'knigths' is not allowed; did you mean knights? give one of {', '.join(TASKS)}"],
        ),
        ("name: x\ntask:\n  name: countdown\n  people: [2]", ["r.yaml:4: task.people: unknown key; valid here: "]),
        (
            "name: x\ntask:\n  name: knights\n  train_file: rows.jsonl",
            ["r.yaml:4: task.train_file: no file rows.jsonl; paths are relative to "],
        ),
        (
            "name: ../x\ntask: knights",
            ["r.yaml:1: name: '../x' is not allowed; give text of letters, digits, `.`, `_` and `-`"],
        ),
        (
            "steps: x\ntask: knights\nseed: y\nname: x",  # several at once, in the order of the file
            [
                "r.yaml:1: steps: 'x' is not allowed; give a whole number > 0 (default 100)",
                "r.yaml:3: seed: 'y' is not allowed; give a whole number >= 0 and < 1048576 (default 0)",
            ],
        ),
    ],
)
def test_whole_files(write, text, lines):
    actual = problems(write(text))
    assert len(actual) == len(lines)
    for line, start in zip(actual, lines, strict=True):
        assert line.startswith(start)
        assert line == start or start[-1] == " "


def test_yaml_tags_run_nothing(write, tmp_path):
    problems(write(f"name: !!python/object/apply:os.mkdir ['{tmp_path}/made']"))
    assert not (tmp_path / "made").exists()


def test_a_recipe_that_is_not_there(write):
    write(MINIMAL, "warm.yaml")
    assert problems("warn.yaml") == [
        "warn.yaml: no such recipe or run; did you mean warm.yaml? "
        "`hone config presets` lists those that come with hone"
    ]
    assert "did you mean" not in problems("nothing.yaml")[0]  # one ending in common is no likeness
    assert "did you mean warm.yaml?" in problems("warm")[0]
    Path("empty").mkdir()
    assert problems("empty") == ["empty: no recipe.yaml and no config.resolved.json in this folder"]
    Path("bytes.yaml").write_bytes(b"name: \xff")
    assert problems("bytes.yaml") == ["bytes.yaml: not UTF-8 text (invalid start byte at byte 6); save it as UTF-8"]


def test_a_hub_id_is_not_looked_for_on_disk(write):
    assert load(write(MINIMAL + "model: Qwen/Qwen3-0.6B")).model.path == "Qwen/Qwen3-0.6B"
    Path("runs").mkdir()
    assert problems(write(MINIMAL + "model: runs/gone"))[0].startswith("r.yaml:3: model.path: runs/gone is not a")
    assert load("r.yaml", check_files=False).model.path == "runs/gone"  # a report does not need it
