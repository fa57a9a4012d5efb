"""Agent programs: started, answered, scored and ended; what was sampled is what is trained."""

import os
import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest

from hone.base import jsonl
from hone.base.settings import UserError
from hone.environments.make import make_episodes
from hone.environments.play import Episodes
from hone.environments.program import Launch, Program
from hone.environments.recorder import Recorder
from hone.environments.sandbox import has_bubblewrap
from hone.learn.samples import to_samples
from hone.preflight.check.episodes import played
from hone.recipe.sections.environment import EnvironmentConfig
from hone.recipe.sections.prompt import PromptConfig
from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.prompts import Renderer
from hone.stages import pipeline
from hone.tasks import make_task
from hone.types import Group, Problem, Reward, Turn
from tests.environments.templates import tokenizer_of
from tests.environments.trained import Ears, bits, check_run, recipe_of

pytest.importorskip("trl", reason="ships the templates")
pytest.importorskip("uvicorn")
PLAIN = Path(__file__).parent / "programs" / "plain.py"


class Voice:
    """Says the texts in turn, whatever is asked; keeps what it was given and said."""

    context = 4000

    def __init__(self, tokenizer, *texts):
        self.tokenizer, self.texts, self.calls, self.spoken = tokenizer, texts, [], []

    def generate(self, prompts, sampling, *, samples, seed, progress=None, stream_ids=None):
        self.calls.append((len(prompts), samples))
        return [[self._say(prompt) for _ in range(samples)] for prompt in prompts]

    def _say(self, prompt):
        said = self.tokenizer.decode(prompt.tolist()).count("Again.")
        text = self.texts[min(said, len(self.texts) - 1)]
        ids = np.asarray(self.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False))
        self.spoken.append(Turn(prompt, ids, np.full(len(ids), -0.5, np.float32), "stop", 7))
        return self.spoken[-1]


def problem(*orders, name="p"):
    return Problem(name, "t", ({"role": "user", "content": "Begin."},), "42", extra={"orders": list(orders)})


def play(problems, *texts, samples=1, program=PLAIN, **config):
    tokenizer = tokenizer_of("Qwen2.5")
    settings = EnvironmentConfig(program=("python", str(program)), **{"runtime": "process", "timeout": 60.0, **config})
    recorder = Recorder()
    episodes = Episodes(
        Renderer(tokenizer, PromptConfig(), ""), lambda: Program(Launch(settings, settings.program), recorder), settings
    )
    engine = Voice(tokenizer, *texts)
    groups = episodes.sample(problems, engine, SamplingConfig(max_tokens=30), samples=samples, seed=5)
    assert recorder._running is None  # every line was left, and the server stopped
    return engine, [rollout for group in groups for rollout in group]


def samples_of(rollout):
    return to_samples(Group(problem(), (rollout,), (Reward(0.0, {}, "wrong"),)))


def test_calls_that_extend_each_other_are_one_chain_and_the_file_is_the_reward():
    engine, rollouts = play([problem("file")], "eel", "bee tree", samples=3, reward="file")
    assert engine.calls == [(1, 3), (3, 1)]  # the programs' calls are sampled together
    text = tokenizer_of("Qwen2.5").decode
    for rollout in rollouts:
        assert (rollout.episode.end, rollout.episode.reward, rollout.text) == ("done", 6.0, "bee tree")
        assert rollout.episode.steps[1].parts == {"letters": 8.0}
        (sample,) = samples_of(rollout)
        assert text(sample.token_ids[sample.trained].tolist()) == "eel<|im_end|>bee tree<|im_end|>"
        assert (sample.logprobs[sample.trained] == -0.5).all()
        assert "user\nYou wrote 3 characters. Again.<|im_end|>" in text(sample.token_ids.tolist())
    recorded = [turn for rollout in rollouts for turn in rollout.turns]
    assert sorted(map(id, recorded)) == sorted(map(id, engine.spoken))  # every call that was sampled, and no other


def test_another_conversation_is_another_chain():
    _, (rollout,) = play([problem("forget", "fail")], "eel", "tree", reward="exit")
    first, second = samples_of(rollout)
    text = tokenizer_of("Qwen2.5").decode
    assert text(first.token_ids[first.trained].tolist()) == "eel<|im_end|>tree<|im_end|>"
    assert text(second.token_ids[second.trained].tolist()) == "eel<|im_end|>"
    assert "Begin." not in text(second.token_ids.tolist())
    assert (rollout.episode.end, rollout.episode.reward) == ("done", 0.0)


def test_failures_have_their_names_and_leave_nothing_behind():
    orders = ("crash", "flood", "fail", "file")
    _, rollouts = play([problem(order, name=order) for order in orders], "eel", reward="file")
    ends = {rollout.problem_id: (rollout.episode.end, rollout.episode.note) for rollout in rollouts}
    assert ends["crash"][0] == "environment_error"
    assert "without a call" in ends["crash"][1]
    assert "no such thing" in ends["crash"][1]
    assert "more than 1048576 bytes of output" in ends["flood"][1]
    assert "status 3" in ends["fail"][1]
    assert ends["file"][0] == "done"
    assert left_behind() == []


def test_a_program_that_hangs_is_killed():
    _, (rollout,) = play([problem("hang")], "eel", timeout=5.0)
    why = "the program neither called the model nor ended within 5 s"
    assert (rollout.episode.end, rollout.episode.note) == ("environment_timeout", why)
    assert left_behind() == []


def left_behind():
    return [p for p in psutil.Process().children(recursive=True) if str(PLAIN) in " ".join(p.cmdline())]


def test_limits_end_the_episode_and_the_program_is_told():
    _, (rollout,) = play([problem("file")], "eel", reward="exit", max_turns=1)
    assert (rollout.episode.end, rollout.episode.reward, len(rollout.turns)) == ("max_turns", 0.0, 1)
    room = len(rollout.turns[0].prompt_ids) + 30
    _, (rollout,) = play([problem("file")], "eel", reward="file", max_tokens=room)
    assert (rollout.episode.end, rollout.episode.reward, len(rollout.turns)) == ("max_tokens", 0.0, 1)
    _, (rollout,) = play([problem("file")], "eel", reward="file", max_tokens=room - 1)
    assert rollout.episode.end == "environment_error"
    assert "first prompt" in rollout.episode.note


@pytest.mark.skipif(not has_bubblewrap(), reason="needs bubblewrap")
def test_inside_bubblewrap_a_program_sees_its_own_files_and_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_TOKEN", "secret")
    (tmp_path / "secret").write_text("x")
    other = tmp_path / "agent" / "look.py"
    other.parent.mkdir()
    other.write_text(
        f"""
import json, os, socket, sys
sys.path.insert(0, {str(PLAIN.parent)!r})
seen = {{"secret": os.path.exists({str(tmp_path / "secret")!r})}}
seen["home"] = os.path.exists({str(Path.home() / ".bashrc")!r})
seen["token"] = "GITHUB_TOKEN" in os.environ
for name, where in (("network", ("1.1.1.1", 53)), ("loopback", ("127.0.0.1", 22))):
    try:
        socket.create_connection(where, 1)
        seen[name] = True
    except OSError:
        seen[name] = False
try:
    open({str(PLAIN.parent / "new")!r}, "w")
    seen["write"] = True
except OSError:
    seen["write"] = False
open("own", "w").write("x")
print(seen)
import plain
assert not any(seen.values())
json.dump({{"reward": 1, **seen}}, open(os.environ["HONE_REWARD"], "w"))
""".replace("import plain", "try:\n    import plain\nexcept SystemExit:\n    pass")
    )
    _, (rollout,) = play(
        [problem()], "eel", program=other, runtime="bwrap", reward="file", readable=(str(PLAIN.parent),)
    )
    assert (rollout.episode.end, rollout.episode.note) == ("done", None)
    assert rollout.episode.reward == 1.0
    assert set(rollout.episode.steps[-1].parts) == {"secret", "home", "token", "network", "loopback", "write"}


def test_the_server_answers_nobody_without_the_key():
    import json
    import urllib.error
    import urllib.request

    recorder = Recorder()
    line = recorder.enter()
    try:
        for key, status in (("", 401), ("Bearer hone-x", 401), (f"Bearer {line.key}", 400)):
            body = json.dumps({"messages": [{"role": "assistant", "content": "?"}]}).encode()
            request = urllib.request.Request(f"{line.url}/chat/completions", body, {"Authorization": key})
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request)
            assert refused.value.code == status
        assert line.url.startswith("http://127.0.0.1:")
        assert os.stat(line.socket.parent).st_mode & 0o077 == 0
    finally:
        recorder.leave(line)


def test_what_cannot_be_started_is_an_error_before_the_run(monkeypatch, tmp_path):
    with pytest.raises(UserError, match="there is no program 'no-such-agent'"):
        Launch(EnvironmentConfig(program=("no-such-agent",), runtime="process"), ("no-such-agent",))
    settings = EnvironmentConfig(program=("python", "x.py"), runtime="process", readable=("/no/such/folder",))
    with pytest.raises(UserError, match="readable: /no/such/folder does not exist"):
        Launch(settings, settings.program)
    monkeypatch.setattr("hone.environments.program.has_bubblewrap", lambda: False)
    with pytest.raises(UserError, match="install bubblewrap"):
        Launch(EnvironmentConfig(program=("python",)), ("python",))


@pytest.mark.slow
def test_a_killed_run_trains_the_same_bits(tmp_path, monkeypatch):
    environment = {
        "program": ["python", str(PLAIN)],
        "runtime": "process",
        "reward": "file",
        "timeout": 60,
        "variables": {"ORDERS": "file forget"},
    }
    recipe = recipe_of(tmp_path, environment, prompts_per_step=2)
    run = check_run(recipe, Ears(monkeypatch))
    expected = bits(run)
    assert any(row["grad_norm"] for row in jsonl.read(run / "metrics.jsonl"))
    (run / "results.json").unlink()
    shutil.rmtree(run / "model")
    for newer in ("step_000002", "step_000003"):  # as if it had been killed in step 2
        shutil.rmtree(run / "checkpoints" / newer, ignore_errors=True)
    assert pipeline.run(recipe, resume=True) == run
    assert bits(run) == expected


LIMITED = """
import json, os, sys, urllib.request

def ask(messages, **more):
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    head = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, head)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]

messages = json.load(sys.stdin)["prompt"]
first = ask(messages, max_tokens=3, temperature=0.0)
messages += [first["message"], {"role": "user", "content": "More."}]
second = ask(messages, stop=STOPS, temperature=1.0)
messages += [second["message"], {"role": "user", "content": "And more."}]
third = ask(messages, max_completion_tokens=500)
with open(os.environ["HONE_REWARD"], "w") as file:
    json.dump({"reward": len(second["message"]["content"]), "cuts": first["finish_reason"] == "length"}, file)
"""


def test_limits_of_single_calls_are_kept_and_trained_as_they_were_sampled(tmp_path, monkeypatch):
    stops = [chr(code) for code in range(48, 123)]
    (tmp_path / "limited.py").write_text(LIMITED.replace("STOPS", repr(stops[:16])))
    environment = {"program": ["python", str(tmp_path / "limited.py")], "runtime": "process", "reward": "file"}
    ears = Ears(monkeypatch)
    run = check_run(recipe_of(tmp_path, {**environment, "timeout": 60}), ears)
    turns = [turn for _, turn in ears.turns]
    text = tokenizer_of("Qwen2.5").decode
    first = [turn for turn in turns if "More." not in text(turn.prompt_ids.tolist())]
    third = [turn for turn in turns if "And more." in text(turn.prompt_ids.tolist())]
    second = [turn for turn in turns if not any(turn is other for other in (*first, *third))]
    assert len(first) == len(second) == len(third) >= 6
    assert {len(turn.completion_ids) for turn in first} == {3}
    for turn in second:
        said = text(turn.completion_ids.tolist())
        assert not any(stop in text(turn.completion_ids[:-1].tolist()) for stop in stops[:16])
        assert turn.finish == "length" or any(stop in said for stop in stops[:16])
    assert any(turn.finish == "stop" and len(turn.completion_ids) < 24 for turn in second)
    assert max(len(turn.completion_ids) for turn in third) == 24  # the recipe's
    for row in jsonl.read(run / "metrics.jsonl"):
        assert row["episode/cuts"] == 1.0
        assert row["episode/cut"] >= 1.0
        assert row["episode/other_sampling"] == 1.0
        assert row["length/truncated"] == 0.0  # the programs went on, and ended


def test_the_check_before_a_run_plays_the_program(tmp_path):
    environment = {"program": ["python", str(PLAIN)], "runtime": "process", "reward": "file", "timeout": 60}
    renderer = Renderer(tokenizer_of("Qwen2.5"), PromptConfig(), "")
    findings = {}
    for orders in ("file", "crash"):
        stage = recipe_of(tmp_path, {**environment, "variables": {"ORDERS": orders}})
        findings[orders] = list(played(stage, make_task(stage.task, 0), renderer))
    levels = {orders: [(one.level, one.name) for one in found] for orders, found in findings.items()}
    assert levels["file"] == [("warn", "sandbox"), *[("pass", "environment")] * 3]
    assert levels["crash"][:2] == [("warn", "sandbox"), ("fail", "environment")]
    assert "without a call of the model" in findings["crash"][1].message
    with pytest.raises(UserError, match="whose tokenizer has a chat template"):
        make_episodes(stage, Renderer(tokenizer_of("Qwen2.5"), PromptConfig(style="raw"), ""))


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"environment": {"program": ["python"], "name": "a.py:B"}}, "remove one"),
        ({"environment": {"name": "a.py:B", "runtime": "process"}}, "is for programs"),
        ({"environment": {"name": "verifiers:x", "reward": "exit"}}, "gives its own"),
        ({"environment": {"name": "openenv:here"}}, "names no server"),
        ({"environment": {"program": ["python"]}}, "set this to file or exit"),
        ({"environment": {"program": ["python"], "reward": "exit"}, "tools": ["calculator"]}, "tools of its own"),
        ({"environment": {"program": ["python"], "reward": "exit"}, "algo": {"credit": "turn"}}, "for single turns"),
        ({"environment": {"program": ["python"], "reward": "exit"}, "prompt": {"style": "raw"}}, "set this to chat"),
    ],
)
def test_settings_that_cannot_work_are_errors(settings, why, tmp_path):
    with pytest.raises(UserError, match=why):
        recipe_of(tmp_path, **settings)
