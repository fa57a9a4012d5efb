"""Functions of the user's as rewards: the signatures people have, and everything that such a function can do wrong."""

import hashlib
import re
from dataclasses import replace
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

import hone.rewards
from hone.base.settings import ConfigError, UserError
from hone.grade.parse import parse
from hone.recipe.load import load
from hone.recipe.recipe import resolved
from hone.rewards import make_reward
from hone.rewards.base import Judged, Part, Score, failures, reward_groups
from hone.rewards.config import RewardConfig
from hone.rewards.functions import UserFunction
from hone.runs.manifest import user_files
from hone.tasks.countdown.task import CountdownConfig, CountdownTask
from hone.types import Grade, Problem, Rollout, Turn

TASK = CountdownTask(CountdownConfig())
PROBLEM = replace(
    TASK.problems("train")[0],
    id="p1",
    messages=({"role": "user", "content": "What is 6 * 7?"},),
    answer="42",
    reference="6 * 7 = 42",
    extra={"data_source": "my/sums", "extra_info": {"index": 3}, "answer": "#### 42"},
)


def rollout(text: str, index: int = 0, problem: str = "p1") -> Rollout:
    ids = np.arange(len(text.split()), dtype=np.int64)
    return Rollout(problem, index, (Turn(ids, ids, np.zeros(len(ids), np.float32), "stop", 0),), text)


GROUP = [rollout("It is 42", 0), rollout("It is 41, maybe", 1)]


@pytest.fixture
def reward(tmp_path):
    """Makes the reward of a function, given its source."""
    made = []

    def make(source: str, name: str = "f", **functions):
        file = tmp_path / f"mine{len(made)}.py"
        file.write_text(source)
        key = f"{file}:{name}"
        config = RewardConfig(parts={key: 1.0}, **({"functions": functions} if functions else {}))
        made.append(make_reward(config, TASK_WITH_COLUMNS))
        return made[-1]

    yield make
    for composed in made:
        for part in composed.parts.values():
            if part.workers:
                part.workers.close()


class TaskWithColumns(CountdownTask):
    def problems(self, split):
        return [PROBLEM]


TASK_WITH_COLUMNS = TaskWithColumns(CountdownConfig())


def totals(composed, group=GROUP):
    return [r.total for r in composed(PROBLEM, group)]


TRL = """
def f(prompts, completions, answer, **kwargs):
    assert len(prompts) == len(completions) == len(answer) == len(kwargs["level"])
    assert prompts[0] == "What is 6 * 7?" and answer[0] == "#### 42" and kwargs["ground_truth"][0] == "42"
    return [1.0 if a[-2:] in c else 0.0 for c, a in zip(completions, answer)]
"""
TRL_CHAT = """
def f(completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    assert kwargs["prompts"][0] == [{"role": "user", "content": "What is 6 * 7?"}]
    return [float(s[-2:] in c) for c, s in zip(contents, solution)]
"""
TRL_HINT = """
def f(completions: list[list[dict[str, str]]]):
    return [float("42" in text(c)) for c in completions]

def text(messages):
    return messages[-1]["content"]
"""
TRL_IDS = """
class F:
    def __call__(self, completion_ids, **kwargs):
        return [len(ids) == 3 for ids in completion_ids]

f = F()
"""
VERL = """
def f(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "my/sums" and extra_info["index"] == 3
    return float(ground_truth in solution_str)
"""
VERL_DICT = """
def f(data_source, solution_str, ground_truth, extra_info=None, weight=1.0, **kwargs):
    right = ground_truth in solution_str
    return {"score": weight * right, "acc": right, "said": solution_str}
"""
OPENRLHF = """
def f(queries, prompts, labels, **kwargs):
    answers = [q[len(p):] for q, p in zip(queries, prompts)]
    scores = numpy.array([float(l in a) for a, l in zip(answers, labels)])
    return {"rewards": scores, "scores": scores, "extra_logs": {"twice": 2 * scores}}

import numpy
"""
OPENRLHF_LIST = "def f(queries, prompts, labels): return [float(q.endswith('42')) for q in queries]"
HONE = "def f(problem, rollouts): return [float(problem.answer in r.text) for r in rollouts]"


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "source", [TRL, TRL_CHAT, TRL_HINT, TRL_IDS, VERL, VERL_DICT, OPENRLHF, OPENRLHF_LIST, HONE],
    ids=["trl", "trl-chat", "trl-hint", "trl-ids", "verl", "verl-dict", "openrlhf", "openrlhf-list", "hone"],
)  # fmt: skip
def test_signatures_work_unchanged(reward, source, asynchronous, isolate):
    if asynchronous:
        source = "import asyncio\n" + source.replace("def f(", "async def f(", 1).replace(
            "def __call__", "async def __call__"
        )
    assert totals(reward(source, **({"isolate": True} if isolate else {}))) == [1.0, 0.0]


def test_what_a_function_logs_is_a_detail_of_its_score(reward):
    first, second = reward(VERL_DICT)(PROBLEM, GROUP)
    assert first.parts["f"] == first.parts["f/acc"] == 1.0
    assert second.parts["f/acc"] == 0.0
    assert "f/said" not in first.parts
    assert [r.parts["f/twice"] for r in reward(OPENRLHF)(PROBLEM, GROUP)] == [2.0, 0.0]
    logs = """
def f(completions, log_metric=None, log_extra=None, **kwargs):
    log_metric("share", 0.25); log_extra("size", [len(c) for c in completions]); log_extra("text", completions)
    return [0.0] * len(completions)
"""
    first, second = reward(logs)(PROBLEM, GROUP)
    assert (first.parts["f/share"], second.parts["f/size"]) == (0.25, len(GROUP[1].text))
    assert "f/text" not in first.parts


def test_none_leaves_the_sample_out_and_the_others_in(reward):
    composed = reward("def f(completions, **kwargs): return [None if '41' in c else 2.0 for c in completions]")
    kept, out = composed(PROBLEM, GROUP)
    assert (kept.total, kept.verdict) != (0.0, "verifier_error")
    assert (out.verdict, out.parts, out.note) == ("verifier_error", {}, "f: returned None")
    groups = reward_groups([PROBLEM], [tuple(GROUP)], composed)
    assert failures(groups) == (
        "1 of 2 samples have no reward and were left out: 1 x verifier_error (f: returned None)"
    )


def test_of_a_long_reason_the_message_has_beginning_and_end(reward):
    composed = reward("def f(completions, **kwargs): raise ValueError('x' * 300)")
    message = failures(reward_groups([PROBLEM], [tuple(GROUP)], composed))
    assert re.search(r"2 x verifier_error \(f: ValueError: x+ \.\.\. x+ \(mine0?\.py:1\)\)$", message)
    assert len(message) < 320


@pytest.mark.parametrize("isolate", [False, True])
def test_an_exception_leaves_out_what_the_call_was_about(reward, isolate):
    settings = {"isolate": True} if isolate else {}
    verl = "def f(solution_str, ground_truth):\n    if '41' in solution_str: raise KeyError('gold')\n    return 1.0"
    trl = "def f(completions):\n    if '41' in str(completions): raise KeyError('gold')\n    return [1.0]"
    trl = trl.replace("[1.0]", "[1.0] * len(completions)")
    for source, alone in [(verl, True), (trl, isolate)]:  # in the trainer's process TRL's function sees the group
        first, second = reward(source, **settings)(PROBLEM, GROUP)
        assert second.verdict == "verifier_error"
        assert second.note.startswith("f: KeyError: 'gold' (mine")
        assert (first.total, first.verdict) == ((1.0, "malformed") if alone else (0.0, "verifier_error"))


def test_a_function_that_hangs_is_stopped(reward):
    hang = """
import asyncio, time
async def f(solution_str, ground_truth):
    if '41' in solution_str: {}
    return 1.0
"""
    alone = reward(hang.format("await asyncio.sleep(99)"), deadline=0.5)(PROBLEM, GROUP)
    apart = reward(hang.format("time.sleep(99)"), isolate=True, deadline=2.0)(PROBLEM, GROUP)
    for first, second in (alone, apart):
        assert first.total == 1.0
        assert second.verdict == "verifier_timeout"


@pytest.mark.parametrize(
    "returned, message",
    [
        ("[1.0]", "gave 1 rewards for 2 completions"),
        ("[1.0, float('nan')]", "gave nan; a reward is a finite number from -1e+15 to 1e+15, or None where"),
        ("[1.0, float('inf')]", "gave inf"),
        ("[1.0, 1e308]", "gave 1e+308; a reward is a finite number from -1e+15 to 1e+15"),
        ("[1.0, -1e308]", "gave -1e+308; a reward is a finite number"),
        ("[1.0, 10**400]", "gave a whole number of 1329 bits; a reward is a finite number"),
        ("[1.0, -(10**9000)]", "gave a whole number of 29898 bits; a reward is a finite number"),
        ("[1.0, '0.5']", "gave str '0.5'; a reward is a number, or None"),
        ("[1.0, [0.5]]", "gave list [0.5]"),
        ("0.5", "gave float, not a list of 2 numbers"),
        ("None", "gave NoneType, not a list of 2 numbers"),
        ("{'score': 1}", "gave dict, not a list of 2 numbers"),
    ],
)
def test_what_is_no_reward_is_an_error_that_names_the_function(reward, returned, message):
    with pytest.raises(UserError, match=r"mine0\.py:f: ") as caught:
        totals(reward(f"def f(completions): return {returned}"))
    assert message in str(caught.value)


def test_a_sum_beyond_what_a_reward_can_be_is_an_error_that_names_the_parts(reward):
    composed = reward("def f(completions): return [1e10, 0.0]")
    composed.weights["f"] = 1e6
    with pytest.raises(UserError, match=r"the sum of the parts is 1e\+16 \(f 1e\+10 x 1e\+06\)"):
        composed(PROBLEM, GROUP)


def test_a_logged_number_too_large_for_a_float_is_not_kept(reward):
    source = "def f(completions, log_metric=None): log_metric('size', 10**400); return [1.0] * len(completions)"
    assert [(r.total, "f/size" in r.parts) for r in reward(source)(PROBLEM, GROUP)] == [(1.0, False)] * 2


TWO_TASKS = """
def sums(completions, kind, **kwargs):
    return [len(c) / 8 if k == "sums" else None for c, k in zip(completions, kind)]
def code(completions, kind, **kwargs):
    return [0.5 if k == "code" else None for k in kind]
"""
OF_TWO_TASKS = [replace(PROBLEM, id=kind, extra={"kind": kind}) for kind in ("sums", "code", "neither")]


def test_functions_of_several_tasks_add_up_as_in_trl(tmp_path):
    """Each returns None for the other task's rows; a row that no function is for has no reward."""
    file = tmp_path / "both.py"
    file.write_text(TWO_TASKS)
    weights = {"sums": 1.0, "code": 2.0}
    config = RewardConfig(parts={f"{file}:{name}": weight for name, weight in weights.items()})
    task = SimpleNamespace(name="both", problems=lambda split: OF_TWO_TASKS, grade=TASK.grade)
    groups = make_reward(config, task).score_all(OF_TWO_TASKS, [GROUP] * 3)
    assert [r.verdict for r in groups[2]] == ["verifier_error"] * 2
    assert {r.note for r in groups[2]} == {"sums, code: returned None"}
    ours = [r.total for group in groups[:2] for r in group]
    assert groups[0][0].parts.keys() & {"sums", "code"} == {"sums"}

    trl = pytest.importorskip("trl")
    torch = pytest.importorskip("torch")
    spaces: dict = {}
    exec(TWO_TASKS, spaces)
    oracle = trl.GRPOTrainer._calculate_rewards.__wrapped__
    kinds, texts = ["sums", "sums", "code", "code"], [rollout.text for rollout in GROUP] * 2
    itself = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True), state=SimpleNamespace(global_step=0),
        environments=None, _log_completion_extra=None,
        _log_metric=None, reward_funcs=[spaces["sums"], spaces["code"]], reward_processing_classes=[None, None],
        reward_func_names=["sums", "code"], args=SimpleNamespace(report_to=[]),
    )  # fmt: skip
    per_function = oracle(itself, [{"kind": kind} for kind in kinds], ["q"] * 4, texts, [[1]] * 4)
    theirs = (per_function * torch.tensor(list(weights.values()))).nansum(dim=1)
    assert ours == pytest.approx(theirs.tolist())
    assert len(set(ours)) > 1


def test_what_is_no_score_of_verl_and_openrlhf(reward):
    with pytest.raises(UserError, match="gave a mapping without 'score': acc"):
        totals(reward("def f(solution_str, ground_truth): return {'acc': 1}"))
    with pytest.raises(UserError, match="gave a mapping without 'rewards': scores"):
        totals(reward("def f(queries, prompts, labels): return {'scores': [1, 2]}"))


@pytest.mark.parametrize("arguments", ["a, b", "**kwargs", "", "completions, solution_str, ground_truth", "prompts"])
@pytest.mark.parametrize("isolate", [False, True])
def test_a_signature_that_cannot_be_told_apart_shows_the_four(reward, arguments, isolate):
    with pytest.raises(UserError) as caught:
        reward(f"def f({arguments}): return []", **({"isolate": True} if isolate else {}))
    shown = str(caught.value)
    assert ("fits 2 signatures" if "solution_str" in arguments else "fits no signature") in shown
    for other in ("f(prompts, completions, **columns)", "extra_info), as in verl", "f(queries, prompts, labels)"):
        assert other in shown
    assert "f(problem, rollouts)" in shown


def test_a_column_that_is_not_there_is_said_at_the_start(reward):
    with pytest.raises(UserError, match="asks for proof, which problems of countdown do not have; there are answer, "):
        reward("def f(completions, proof): return []")
    reward("def f(completions, proof=None): return []")
    with pytest.raises(UserError, match="asks for reward_router_address"):
        reward("def f(solution_str, ground_truth, reward_router_address): return 0.0")


def test_a_file_that_cannot_be_imported(reward):
    with pytest.raises(UserError, match=r"mine0.py:f: cannot be imported: ZeroDivisionError: division by zero \(mine0"):
        reward("1 / 0\ndef f(completions): pass")
    with pytest.raises(UserError, match=r"no function 'g' in .*; there are f$"):
        reward("def f(completions): pass", "g")
    with pytest.raises(UserError, match=r"SyntaxError: '\(' was never closed \(mine\d\.py:2\)"):
        reward("x = 1\ndef f(completions): return f(")


def test_a_plain_function_may_start_a_loop_of_its_own(reward):
    source = """
import asyncio
async def one(completion): return float("42" in completion)
async def every(completions): return await asyncio.gather(*map(one, completions))
def f(completions): return asyncio.run(every(completions))
"""
    assert totals(reward(source)) == totals(reward(source, isolate=True)) == [1.0, 0.0]


def test_names_in_metrics_are_short_unless_they_clash(tmp_path):
    source = """
def f(completions): return [1.0] * len(completions)
def outcome(completions): return [0.0] * len(completions)
"""
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(source)
    one, two, other = f"{tmp_path}/a.py:f", f"{tmp_path}/b.py:f", f"{tmp_path}/a.py:outcome"
    composed = make_reward(RewardConfig(parts={one: 1.0, two: 2.0, other: 1.0}), TASK)
    assert set(composed.parts) == {one, two, other}
    assert set(make_reward(RewardConfig(parts={one: 1.0, "outcome": 1.0}), TASK).parts) == {"f", "outcome"}
    assert totals(composed) == [3.0, 3.0]


def test_in_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package_of_mine").mkdir()
    (tmp_path / "package_of_mine" / "rewards.py").write_text(HONE)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: x\ntask: countdown\nreward: {parts: {outcome: 1.0, package_of_mine/rewards.py:f: 0.5}}\n")
    loaded = load(recipe)
    assert loaded.reward.parts == {"outcome": 1.0, "package_of_mine/rewards.py:f": 0.5}
    assert user_files(resolved(loaded)) == {"package_of_mine/rewards.py:f": hashlib.sha256(HONE.encode()).hexdigest()}
    changed = load(recipe, ["reward.parts.package_of_mine/rewards.py:f=2", "reward.functions.isolate=true"])
    assert changed.reward.parts["package_of_mine/rewards.py:f"] == 2.0
    assert totals(make_reward(load(recipe, ["reward.parts.package_of_mine.rewards:f=1"]).reward, TASK))[0] == 1.5
    recipe.write_text(
        "name: x\ntask: countdown\nreward:\n  parts:\n    package_of_mine/rewards.py:f: 1.0\n    no/such.py:f: 1.0\n"
    )
    with pytest.raises(ConfigError, match=r"recipe.yaml:6: reward.parts: no/such.py:f: no/such.py cannot be read"):
        load(recipe)
    assert load(recipe, check_files=False).reward.parts["no/such.py:f"] == 1.0


class Plugin(Part):
    tasks = ("countdown",)

    def __call__(self, problem, group):
        return [Score(0.75) for _ in group]


def plain(completions):
    return [0.25 for _ in completions]


def test_installed_packages_register_rewards(monkeypatch):
    points = {
        "plugin": EntryPoint("plugin", f"{__name__}:Plugin", "hone.rewards"),
        "plain": EntryPoint("plain", "operator:itemgetter", "hone.rewards"),
        "broken": EntryPoint("broken", "nosuchpackage:f", "hone.rewards"),
    }
    monkeypatch.setattr(hone.rewards, "registered", lambda: points)
    monkeypatch.setattr(EntryPoint, "load", lambda self: Plugin if self.name == "plugin" else None.no_such)
    config = RewardConfig(parts={"plugin": 2.0})
    assert totals(make_reward(config, TASK)) == [1.5, 1.5]
    with pytest.raises(UserError, match="reward 'broken' of nosuchpackage:f: cannot be imported"):
        make_reward(RewardConfig(parts={"broken": 1.0}), TASK)
    with pytest.raises(ValidationError, match=r"no reward 'plugi'; there are .*; of installed packages broken, plain"):
        RewardConfig(parts={"plugi": 1.0})


def test_groups_of_a_step_are_scored_at_once(reward, tmp_path):
    """One call of the task's grader for all, and the scores come back to their places."""
    seen = []

    class Batch(TaskWithColumns):
        def grade_all(self, items):
            seen.append(len(items))
            return [self.grade(problem, text) for problem, text in items]

    composed = reward(VERL)
    composed.task = Batch(CountdownConfig())
    other = replace(PROBLEM, id="p2", answer="41")
    groups = reward_groups([PROBLEM, other, PROBLEM], [tuple(GROUP), (GROUP[1],), ()], composed)
    assert seen == [3]
    assert [[r.total for r in group.rewards] for group in groups] == [[1.0, 0.0], [1.0], []]


HELPER = """
def _said(completion): return completion[0]["content"]
def _right(completion, answer): return float(answer in _said(completion))
def f(completions, ground_truth): return [_right(c, a) for c, a in zip(completions, ground_truth)]
"""


@pytest.mark.parametrize("isolate", [False, True])
def test_messages_are_given_if_a_helper_reads_them(reward, isolate):
    assert totals(reward(HELPER, **({"isolate": True} if isolate else {}))) == [1.0, 0.0]


def test_a_column_that_some_rows_have_is_none_for_the_others(tmp_path):
    (tmp_path / "mine.py").write_text("def f(completions, colour): return [float(c == 'red') for c in colour]")
    base = {"task": "t", "messages": (), "answer": "1"}
    part = UserFunction(RewardConfig(), f"{tmp_path}/mine.py:f", "f")
    plain, red = Problem("a", **base), Problem("b", **base, extra={"colour": "red"})
    part.check([plain, red])
    with pytest.raises(UserError, match="asks for colour"):
        part.check([plain])
    groups = [(p, [Judged(rollout("x"), parse("x"), Grade("wrong"))]) for p in (plain, red)]
    assert [[s.value for s in group] for group in part.score_all(groups)] == [[0.0], [1.0]]


def test_a_plain_function_that_takes_long_says_what_is_waited_for(reward, capsys):
    slow = reward("import time\ndef f(completions): time.sleep(0.3); return [1.0] * len(completions)", deadline=0.05)
    assert totals(slow) == totals(slow) == [1.0, 1.0]  # it is not stopped
    err = capsys.readouterr().err
    assert err.count("no result after 0.05 s") == 1
    assert "reward.functions.isolate: true" in err


@pytest.mark.parametrize("how", ["def", "async def"])
def test_a_function_that_calls_os_exit_does_not_end_the_run_as_if_it_were_finished(reward, how):
    composed = reward(f"import os\n{how} f(completions):\n    os._exit(0)\n")
    with pytest.raises(UserError, match=r"called os\._exit\(0\), which would end the run here"):
        reward_groups([PROBLEM], [GROUP], composed)


def test_processes_that_a_function_forks_end_by_os_exit_as_ever(reward):
    forks = "    pid = os.fork()\n    if not pid:\n        os._exit(7)\n"
    forks += "    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
    composed = reward(f"import os\ndef f(completions):\n{forks}    return [float(code)] * len(completions)\n")
    (group,) = reward_groups([PROBLEM], [GROUP], composed)
    assert [r.total for r in group.rewards] == [7.0, 7.0]
