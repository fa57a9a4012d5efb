"""`hone check`: what it says of a sound recipe, and of each fault that it is there to find."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from hone.base.settings import UserError
from hone.model.tiny import TAGS, create, train_tokenizer
from hone.preflight.check import content
from hone.preflight.check.base import judge_base, measured
from hone.preflight.check.episodes import played
from hone.preflight.check.findings import Finding, distinct, lines
from hone.preflight.check.probes import Probe, Probed, judge_scores, probes, reordered, score
from hone.preflight.check.run import check, cli_check, dry_run
from hone.preflight.check.subject import Subject
from hone.preflight.check.template import check_absence, check_template
from hone.recipe.load import load
from hone.recipe.sections.model import TinyConfig
from hone.recipe.sections.prompt import PromptConfig
from hone.rewards import make_reward
from hone.rewards.config import RewardConfig
from hone.rollout.prompts import Renderer
from hone.tasks.countdown.task import CountdownConfig, CountdownTask
from hone.tasks.knights.task import KnightsConfig, KnightsTask
from hone.tasks.rows.task import DatasetConfig, DatasetTask
from hone.types import Grade, Group, Problem, Reward, Rollout, Turn

KNIGHTS = KnightsTask(KnightsConfig(people=(2,), train=8))

RECIPE = """
name: small
runs: {runs}
task: {{name: knights, people: [2], train: 12, validation: 0, test: 4, quiz: brief}}
prompt: {{style: raw, system: "", template: "Puzzle: {{user}}\\n"}}
model: {{path: tiny, tiny: {{hidden_size: 32, layers: 1, heads: 2, kv_heads: 1, mlp_size: 32}}}}
samples_per_prompt: 4
sampling: {{max_tokens: 24}}
stages:
  - {{stage: sft, sft: {{examples: 64}}}}
  - {{stage: rl, steps: 2}}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(runs=tmp_path / "runs"))
    return path


def levels(findings):
    return {f.name: f.level for f in findings}


def rows(config, task=KNIGHTS):
    problem = task.problems("train")[0]
    return score(problem, probes(task, problem, task.problems("train")[1:]), make_reward(config, task), len)


# --- probes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [KNIGHTS, CountdownTask(CountdownConfig(train=8))])
def test_probes_are_what_they_are_called(task):
    for problem in task.problems("train"):
        found = {p.name: p for p in probes(task, problem, task.problems("train"))}
        verdicts = {name: task.grade(problem, p.text).verdict for name, p in found.items()}
        assert all((verdicts[name] == "correct") == (p.kind == "right") for name, p in found.items()), verdicts
        assert verdicts["wrong answer"] == "wrong"
        assert [len(p.text) for name, p in found.items() if name in ("100 kB of words", "100 kB of tags")] >= [
            90_000
        ] * 2


def test_sound_rewards_pass():
    for config in (RewardConfig(), RewardConfig(parts={"outcome": 1.0, "thinking": 0.2})):
        assert {f.level for f in judge_scores(rows(config)) if f.name != "time"} == {"pass"}


def test_format_that_pays_for_a_wrong_answer_is_a_warning_and_more_than_a_right_one_a_failure():
    assert levels(judge_scores(rows(RewardConfig(parts={"logic_rl": 1.0}))))["shape"] == "warn"
    tamed = RewardConfig(parts={"logic_rl": 1.0, "thinking": 1.0})
    assert levels(judge_scores(rows(tamed)))["shape"] == "pass"
    long = RewardConfig(parts={"outcome": 1.0, "overlong": -9.0}, overlong={"max_tokens": 90_000, "buffer": 80_000})
    found = list(judge_scores(rows(long)))
    assert "fail" in {f.level for f in found if f.name == "hack"}  # a negative weight pays for length


def test_a_reward_that_asks_a_model_is_judged_by_its_best_right_answer():
    kinds = [("worked solution", "right", 0.9), ("gold answer", "right", 0.4), ("wrong answer", "wrong", 0.4),
             ("empty", "none", 0.0), ("dummy thinking, wrong", "hack", 0.1)]  # fmt: skip
    made = [Probed(Probe(n, k, ""), Reward(t, {}, "correct" if k == "right" else "wrong"), 9.0) for n, k, t in kinds]
    assert levels(judge_scores(made))["hack"] == "fail"
    assert levels(judge_scores(made, by_model=True)) == {"gold": "pass", "hack": "pass", "shape": "pass"}
    # All other probes have the same reasoning: that they score alike is no fault of the reward.
    assert levels(judge_scores(made[1:], by_model=True)) == {"hack": "warn"}


def test_a_question_that_is_graded_correct_is_told_from_other_cheats():
    made = [
        Probed(Probe(name, kind, ""), Reward(total, {}, "correct" if total else "wrong"), 0.0)
        for name, kind, total in (
            ("gold answer", "right", 1.0),
            ("empty", "none", 0.0),
            ("question repeated", "hack", 1.0),
            ("both at once", "hack", 1.0),
        )
    ]
    question, both = (f.message for f in judge_scores(made) if f.name == "hack")
    assert "the question is equal to its answer" in question
    assert "task.grading=text" in question
    assert both == "both at once is graded correct: make the grader stricter"


def test_a_question_that_is_a_sum_is_no_answer_to_itself(tmp_path):
    """Its value is the answer, and repeating it is none: the check has nothing to say against such rows."""
    rows = [{"question": f"{i} + {i + 1}", "answer": str(2 * i + 1)} for i in range(3, 30)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = DatasetTask(DatasetConfig(source=str(tmp_path / "sums.jsonl"), validation=2, test=2, grading="exact"))
    problem, *others = task.problems("train")
    reward = make_reward(RewardConfig(parts={"outcome": 1.0}), task)
    found = list(judge_scores(score(problem, probes(task, problem, others), reward, len)))
    assert [f for f in found if f.level == "fail"] == []


def test_the_remedy_is_for_what_was_paid():
    kinds = [("gold answer", "right", 1.0), ("empty", "none", 0.0), ("gold, then wrong", "hack", 1.0),
             ("tags only", "hack", 2.0)]  # fmt: skip
    made = [Probed(Probe(n, k, ""), Reward(t, {}, "correct" if k == "right" else "wrong"), 0.0) for n, k, t in kinds]
    first, second = [f.message for f in judge_scores(made) if f.level == "fail"]
    assert first == "gold, then wrong scores 1, a right answer 1; read the last answer only"
    assert second.endswith("give correctness more weight, or cap the parts that pay for it")


def test_a_grader_that_takes_the_first_answer_is_caught():
    class First(KnightsTask):
        def grade(self, problem, text):
            return super().grade(problem, text.split("</answer>")[0] + "</answer>")

    found = [f for f in judge_scores(rows(RewardConfig(), First(KNIGHTS.config))) if f.level == "fail"]
    assert [f.message.split(" is graded")[0] for f in found] == ["gold, then wrong"]


def test_a_grader_that_looks_for_the_answer_anywhere_is_caught():
    class Anywhere(CountdownTask):
        def grade(self, problem, text):
            gold = str(problem.reference).split("<answer>")[1].split("</answer>")[0]
            return Grade("correct" if gold in text else "wrong", text[:10])

    task = Anywhere(CountdownConfig(train=8))
    failed = {f.message.split(" is graded")[0] for f in judge_scores(rows(RewardConfig(), task)) if f.level == "fail"}
    assert {"gold, then wrong", "both at once", "answer in the thinking"} <= failed


def test_a_task_that_refuses_its_own_gold_answer():
    class Never(KnightsTask):
        def grade(self, problem, text):
            return Grade("wrong")

    task = Never(KNIGHTS.config)
    with pytest.raises(UserError, match="is graded correct in none of the formats tags, boxed, line, hashes, plain"):
        probes(task, task.problems("train")[0], [])


def failing(verdict, note, names):
    """Probes of which those named have no score."""
    return [
        Probed(p.probe, Reward(0.0, {}, verdict, note=note), 0.0) if p.probe.name in names else p
        for p in rows(RewardConfig())
    ]


def test_an_answer_without_a_score_is_no_answer_that_scores_0():
    """Of a right one it is a failure that says why; of others it may be meant. Neither is a hack, or a punishment."""
    found = list(judge_scores(failing("verifier_error", "f: IndexError", {"gold answer", "empty", "tags only"})))
    told = {(f.level, f.subject): f.message for f in found if f.name == "scored"}
    assert told["fail", "right"].startswith("no score for gold answer, which training would leave out: verifier_error")
    assert "f: IndexError; repair the reward" in told["fail", "right"]
    assert told["warn", "other"].startswith("no score for empty, tags only, ")
    assert levels(found)["hack"] == levels(found)["gold"] == "pass"
    everything = {p.probe.name for p in rows(RewardConfig())}
    found = list(judge_scores(failing("verifier_timeout", "no result within 1 s", everything)))
    assert [f.name for f in found] == ["scored", "scored"]


def test_a_task_that_grades_nothing_is_judged_by_its_reward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"What is {n} + {n}?", "answer": 2 * n} for n in range(50, 70)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(
        "def last(completions, answer):\n"
        "    return [float(c.split()[-1:] == [str(a)]) for c, a in zip(completions, answer)]\n"
        "def anywhere(completions, answer): return [float(str(a) in c) for c, a in zip(completions, answer)]\n"
    )
    (tmp_path / "r.yaml").write_text(
        "name: r\nruns: runs\nmodel: {path: tiny}\ntask: {name: dataset, source: rows.jsonl, grading: none}\n"
        "reward: {parts: {mine.py:NAME: 1.0}}\nsteps: 1\nsampling: {max_tokens: 32}\n"
    )
    text = (tmp_path / "r.yaml").read_text()
    results = {}
    for name in ("last", "anywhere"):
        (tmp_path / "r.yaml").write_text(text.replace("NAME", name))
        results[name] = check(load("r.yaml"), with_model=False)
    assert not results["last"].failed, results["last"].findings
    assert {f.name for f in results["anywhere"].findings if f.level == "fail"} == {"hack"}
    assert any(f.message.startswith("task.grading is none") for f in results["last"].findings)


def test_what_is_slow_or_not_finite_is_said():
    good = Probed(Probe("gold answer", "right", ""), Reward(1.0, {}, "correct"), 0.001)
    others = [
        Probed(Probe(n, "none", ""), Reward(0.0, {}, "wrong"), 0.001)
        for n in ("empty", "wrong answer", "dummy thinking, wrong")
    ]
    slow = Probed(Probe("long", "none", ""), Reward(0.0, {}, "wrong"), 0.2)
    assert levels(judge_scores([good, *others]))["time"] == "pass"
    assert levels(judge_scores([good, *others, slow]))["time"] == "warn"
    worked = Probed(Probe("worked solution", "right", ""), good.reward, good.seconds)
    assert levels(judge_scores([worked, *others, slow], by_model=True)).keys() == {"gold", "hack", "shape"}
    hang = Probed(slow.probe, slow.reward, 3.0)
    assert levels(judge_scores([good, *others, hang]))["time"] == "fail"
    odd = Probed(slow.probe, Reward(float("nan"), {}, "wrong"), 0.0)
    assert levels(judge_scores([good, *others, odd])) == {"finite": "fail"}


# --- template --------------------------------------------------------------------------------

TEXTS = [p.messages[0]["content"] + str(p.reference) for p in KNIGHTS.problems("train")]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat(content="m['content']", template=CHATML, **more):
    tokenizer = train_tokenizer(TEXTS, 400)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template.replace("CONTENT", content)
    for name, value in more.items():
        setattr(tokenizer, name, value)
    return tokenizer


def found(tokenizer, max_tokens=400, longest=2048, **prompt):
    renderer = Renderer(tokenizer, PromptConfig(**prompt), "Think.")
    problems = KNIGHTS.problems("train")
    return {
        f.name: f for f in check_template(renderer, problems, max_tokens, [str(p.reference) for p in problems], longest)
    }


def test_a_sound_chat_template_passes():
    results = found(chat(eos_token="<|im_end|>"))
    assert {f.level for f in results.values()} == {"pass"}
    assert "'<|im_start|>assistant\\n'" in results["generation"].message
    assert {"prompt", "tags", "opening", "generation", "thinking", "stop", "length"} <= set(results)


@pytest.mark.parametrize(
    ("model", "has_messages", "said"),
    [
        ("x/tiny-Instruct", False, "Instruct"),
        ("/m/gemma-3-1b-it/", False, "it"),
        ("x/base", True, "rows hold messages"),
    ],
)
def test_the_absence_of_a_template_is_said(model, has_messages, said):
    (one,) = check_absence(model, has_messages)
    assert (one.level, one.name) == ("warn", "template")
    assert said in one.message
    assert "chat_template.jinja" in one.message
    assert not list(check_absence("x/base-it2", False))


def test_a_check_asks_for_the_template_unless_raw_prompts_are_wanted(tmp_path):
    of_letters(tmp_path)
    (tmp_path / "r.yaml").write_text(
        f"name: r\nruns: {tmp_path}/runs\nmodel: {{path: tiny}}\nsteps: 1\nsampling: {{max_tokens: 32}}\n"
        f"task: {{name: dataset, source: {tmp_path}/letters.jsonl, validation: 0, test: 1}}\n"
    )
    warned = {}
    for style in ("auto", "raw"):
        recipe = load(tmp_path / "r.yaml", [f"prompt.style={style}"])
        subject = Subject(recipe, recipe)
        assert subject.renderer.is_raw
        tuned = recipe.model_copy(update={"model": recipe.model.at("x/tiny-Instruct")})
        findings = content.template_of(tuned, subject.task, subject.renderer, None)
        warned[style] = [f.level for f in findings if "no chat template" in f.message]
    assert warned == {"auto": ["warn"], "raw": []}


def test_a_template_that_drops_thinking_is_said():
    dropped = chat("m['content'].split('</think>')[-1]", eos_token="<|im_end|>")
    assert found(dropped)["thinking"].level == "warn"


def test_a_turn_that_ends_otherwise_than_the_text_is_said():
    result = found(chat())["turn"]
    assert result.level == "warn"
    assert "'<|im_end|>', the tokenizer with '<|endoftext|>'" in result.message


def test_a_template_without_a_generation_prompt_is_said():
    bare = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    assert found(chat(template=bare))["generation"].level == "warn"


def test_the_opening_tag_is_named():
    opened = chat(template=CHATML.replace("assistant\n", "assistant\n<think>\n"), eos_token="<|im_end|>")
    assert "every prompt ends in <think>" in found(opened)["opening"].message
    assert "the model has to write it" in found(chat())["opening"].message
    assert "every prompt ends in <think>" in found(chat(), open_think=True)["opening"].message


def test_tags_that_are_special_tokens_reach_the_reward():
    tokenizer = chat()
    tokenizer.add_tokens(list(TAGS), special_tokens=True)
    assert found(tokenizer)["tags"].level == "pass"


def test_a_prompt_that_the_tokenizer_cannot_write():
    inner = train_tokenizer(TEXTS, 400)
    tokens = inner.backend_tokenizer
    from tokenizers import normalizers

    tokens.normalizer = normalizers.Lowercase()
    broken = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|endoftext|>", pad_token="<|pad|>")
    result = found(broken, style="raw")["prompt"]
    assert result.level == "fail"
    assert "does not survive the tokenizer" in result.message


def test_lengths_that_do_not_fit():
    assert found(chat(), max_tokens=2000, longest=2048)["length"].level == "fail"
    assert found(chat(), max_tokens=8)["room"].level == "warn"
    assert "room" not in found(chat())


# --- the base model --------------------------------------------------------------------------


def group(totals, verdict="wrong", finish="stop", text="x"):
    ids = np.zeros(3, dtype=np.int64)
    turn = Turn(ids, ids, np.zeros(3, dtype=np.float32), finish, 0)
    answers = tuple(Rollout("p", i, (turn,), text) for i in range(len(totals)))
    rewards = tuple(Reward(t, {}, "correct" if t == 1 else verdict) for t in totals)
    return Group(Problem("p", "t", (), 1), answers, rewards)


def test_the_share_of_groups_that_teach():
    dull, telling, solved = group([0, 0, 0, 0]), group([0, 1, 0, 0]), group([1, 1, 1, 1])
    assert measured([dull, telling, solved])["groups_with_gradient"] == pytest.approx(1 / 3)
    assert measured([dull, telling, solved])["solve_rate"] == pytest.approx(5 / 12)
    assert levels(judge_base([dull, telling], False))["gradient"] == "pass"
    assert levels(judge_base([telling, *[dull] * 9], False))["gradient"] == "warn"
    assert levels(judge_base([telling, *[dull] * 9], True))["gradient"] == "pass"  # others take their place
    nothing = list(judge_base([dull] * 3, True))
    assert levels(nothing)["gradient"] == "fail"
    assert "easier problems" in nothing[0].message
    assert "harder problems" in next(judge_base([solved], False)).message


def test_unreadable_and_cut_off_answers_are_shown():
    babble = [group([0, 1], "malformed", "length", "and then and then")]
    assert levels(judge_base([*babble, group([0, 0], "malformed", text="and so")], False))["readable"] == "warn"
    assert levels(judge_base(babble, False))["cut off"] == "warn"
    assert levels(judge_base([group([0, 1])], False))["readable"] == "pass"
    failed = [group([0, 1], "verifier_timeout")]
    assert levels(judge_base(failed, False))["verifier"] == "fail"
    assert measured(failed)["solve_rate"] == 1.0  # the other one was not graded


# --- the whole -------------------------------------------------------------------------------


def test_without_a_model(recipe, capsys):
    assert cli_check(load(recipe), 2, False, None, False) == 0
    out = capsys.readouterr().out
    assert "100 kB of words" in out
    assert "gold answers are read and graded correct" in out
    assert out.strip().endswith("0 fail")
    assert not (recipe.parent / "runs").exists()


def test_a_test_split_that_there_are_not_enough_puzzles_for(recipe):
    """Otherwise a run says so at its first evaluation, after the warm-up."""
    with pytest.raises(UserError, match=r"distinct puzzles of 2 people for the test split, \d+ were asked for"):
        check(load(recipe, ["task.people=[2]", "task.names=2", "task.test=5000"]), with_model=False)


def test_json_and_the_exit_code(recipe, capsys):
    assert cli_check(load(recipe, ["sampling.max_tokens=2040"]), 2, False, None, True) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["failed"]
    assert {f["name"] for f in result["findings"] if f["level"] == "fail"} == {"length"}
    assert result["scores"][0]["verdict"] == "correct"
    assert result["base"] is None


def test_with_a_model_that_knows_nothing(recipe, tmp_path):
    assert "train them" in {f.name: f for f in check(load(recipe)).findings}["model"].message
    create(tmp_path / "base", TinyConfig(hidden_size=32, layers=1, heads=2, kv_heads=1, mlp_size=32), TEXTS, 0)
    result = check(load(recipe), problems=2, checkpoint=tmp_path / "base")
    assert result.base["samples"] == 8
    assert result.base["solve_rate"] == 0.0
    assert levels(result.findings)["gradient"] == "fail"
    assert result.failed
    with pytest.raises(UserError, match=r"no config\.json"):
        check(load(recipe), checkpoint=tmp_path)


def test_a_reward_that_asks_a_model(recipe, tmp_path):
    overrides = ["stages.rl.reward.parts={perplexity: 1.0}"]
    without = check(load(recipe, overrides), with_model=False)
    assert (levels(without.findings)["reward"], without.scores) == ("warn", [])
    create(tmp_path / "base", TinyConfig(hidden_size=32, layers=1, heads=2, kv_heads=1, mlp_size=32), TEXTS, 0)
    result = check(load(recipe, overrides), problems=2, checkpoint=tmp_path / "base")
    assert {row["probe"]: row["parts"]["leak"] for row in result.scores}["answer in the thinking"] == 1.0
    assert "gold_ppl" in result.scores[0]["parts"]


def test_dry_run_shows_stages_prompts_and_the_reward(recipe, capsys):
    dry_run(load(recipe))
    out = capsys.readouterr().out
    assert "stage rl (rl)" in out
    assert out.count("prompt of knights-2-") == 2
    assert "gold answer" in out
    assert not (recipe.parent / "runs").exists()


def test_findings_of_several_problems():
    some = [Finding("pass", "a", "1"), Finding("pass", "a", "2"), Finding("pass", "b", "1"), Finding("fail", "b", "2")]
    assert distinct(some) == [some[0], some[3]]
    hacks = [Finding("fail", "hack", f"{s} scores {n}", s) for n in range(3) for s in ("junk", "empty")]
    assert distinct(hacks) == hacks[:2]
    assert lines(distinct(some)).splitlines() == ["pass  a  1", "FAIL  b  2", "1 pass, 0 warn, 1 fail"]


def test_a_reward_that_reads_one_form_of_a_right_answer_is_said_once():
    def judged(worked, gold, wrong):
        kinds = [("worked solution", "right", worked), ("gold answer", "right", gold), ("wrong answer", "wrong", wrong)]
        kinds += [("empty", "none", 0.0), ("dummy thinking, wrong", "hack", 0.0)]
        made = [
            Probed(Probe(n, k, f"So it is.\nAnswer: {n}"), Reward(t, {}, "correct" if k == "right" else "wrong"), 0.0)
            for n, k, t in kinds
        ]
        return list(judge_scores(made))

    one_form = judged(worked=0.0, gold=1.0, wrong=0.0)
    assert [(f.level, f.name) for f in one_form if f.level != "pass"] == [("warn", "gold")]
    assert "ends in 'Answer: worked solution' (worked solution) scores 0, as an empty" in one_form[0].message
    nothing = judged(worked=0.0, gold=0.0, wrong=0.0)
    assert [(f.level, f.name) for f in nothing] == [("fail", "gold")]
    hacked = judged(worked=0.0, gold=1.0, wrong=1.5)
    assert ("fail", "hack") in {(f.level, f.name) for f in hacked}


LETTERS = [(f"Sort {' '.join(reversed(word))}", ", ".join(word)) for word in ("abfg", "bcde", "aefh", "cdgh", "adef")]


def of_letters(folder, **settings):
    path = folder / "letters.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in LETTERS))
    return DatasetTask(DatasetConfig(source=str(path), train=5, validation=0, test=0, **settings))


def test_a_grader_that_takes_letters_in_another_order_is_said(tmp_path):
    assert [reordered(gold) for gold in ("a b f g", "a, b", "no", "x and y", "1, 2", "aa", "north")] == [
        *("g f b a", "b, a", "on", None, None, None, "htron")
    ]
    found = {f.name: f for f in content.data(of_letters(tmp_path))}
    assert (found["order"].level, found["data"].level) == ("warn", "pass")
    assert "5 of 5 gold answers are graded correct in another order too" in found["order"].message
    assert "task.grading=text" in found["order"].message
    assert [f.name for f in content.data(of_letters(tmp_path, grading="text"))] == ["data"]
    task = of_letters(tmp_path)
    own = SimpleNamespace(problems=task.problems, grade=task.grade)
    assert [f.name for f in content.data(own)] == ["data"], "it has no setting task.grading"


def test_a_box_that_nothing_asks_for_is_not_tried(tmp_path):
    of_letters(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def plain(completions, answer):\n"
        "    return [float(c.strip().endswith(f'Answer: {a}')) for c, a in zip(completions, answer)]\n"
    )
    (tmp_path / "r.yaml").write_text(
        f"name: r\nruns: {tmp_path}/runs\nmodel: {{path: tiny}}\nsteps: 1\nsampling: {{max_tokens: 32}}\n"
        f"task: {{name: dataset, source: {tmp_path}/letters.jsonl, validation: 0, test: 1}}\n"
        f"reward: {{parts: {{'{tmp_path}/mine.py:plain': 1.0}}}}\n"
    )
    said = {}
    for system in ("Sort the letters.", "Give the answer as \\\\boxed{...}."):
        recipe = load(tmp_path / "r.yaml", [f"prompt.system={json.dumps(system)}"])
        said[system] = [f.message for f in content.rewards(Subject(recipe, recipe)) if f.name == "gold"]
    without, with_box = said.values()
    assert all("does not read this form" not in message for message in without)
    message = next(message for message in with_box if "does not read this form" in message)
    assert "ends in 'Answer: \\\\boxed{" in message


def test_the_reward_of_an_environment_is_not_asked_about_texts(tmp_path):
    """Texts that no episode produced have none, which is no fault of the reward."""
    of_letters(tmp_path)
    (tmp_path / "game.py").write_text(
        "class Guess:\n"
        "    def reset(self, problem, seed):\n"
        "        self.gold = problem.answer\n"
        "    def step(self, message):\n"
        "        return None\n"
    )
    (tmp_path / "r.yaml").write_text(
        f"name: r\nruns: {tmp_path}/runs\nmodel: {{path: tiny}}\nsteps: 1\nsampling: {{max_tokens: 32}}\n"
        f"task: {{name: dataset, source: {tmp_path}/letters.jsonl, validation: 0, test: 1}}\n"
        f"environment: {tmp_path}/game.py:Guess\nreward: environment\n"
    )
    recipe = load(tmp_path / "r.yaml")
    assert [(f.level, f.name) for f in content.rewards(Subject(recipe, recipe))] == [("pass", "reward")]


@pytest.mark.parametrize(("pays", "said"), [("gold in answer", ["reward 1", "reward 0"]), ("True", ["reward 1"])])
def test_an_environment_that_pays_nonsense_as_well_is_said(tmp_path, pays, said):
    of_letters(tmp_path)
    (tmp_path / "game.py").write_text(
        "from hone import Environment, Observation\n"
        "class Game(Environment):\n"
        "    def reset(self, problem, seed):\n"
        "        self.gold = problem.answer\n"
        "    def step(self, message):\n"
        "        gold, answer = self.gold, message['content']\n"
        f"        return Observation(done=True, reward=float({pays}))\n"
    )
    (tmp_path / "r.yaml").write_text(
        f"name: r\nruns: {tmp_path}/runs\nmodel: {{path: tiny}}\nsteps: 1\nsampling: {{max_tokens: 32}}\n"
        f"task: {{name: dataset, source: {tmp_path}/letters.jsonl, validation: 0, test: 1}}\n"
        f"environment: {tmp_path}/game.py:Game\nreward: environment\n"
    )
    recipe = load(tmp_path / "r.yaml")
    subject = Subject(recipe, recipe)
    findings = list(played(recipe, subject.task, subject.renderer))
    episodes = {f.message.split(", ")[-1] for f in findings if "ended by" in f.message}
    assert episodes == set(said)
    paid = [f.level for f in findings if "no more than nonsense" in f.message]
    assert paid == (["warn"] if pays == "True" else [])
