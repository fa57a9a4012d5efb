"""Episodes, played by an engine that says what a script tells it to."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from hone.base import streams
from hone.environments.base import Environment, Observation
from hone.environments.play import Episodes
from hone.environments.pool import Failed, Pool
from hone.environments.tools import Tool, ToolEnvironment
from hone.grade.parse import parse
from hone.learn.samples import to_samples
from hone.recipe.sections.environment import EnvironmentConfig
from hone.recipe.sections.prompt import PromptConfig
from hone.recipe.sections.rollout import SamplingConfig
from hone.rewards.base import Composed, Judged, reward_groups
from hone.rewards.config import RewardConfig
from hone.rewards.rules import EnvironmentReward
from hone.rollout.prompts import Renderer
from hone.types import End, Episode, Grade, Group, Problem, Reward, Rollout, Step, Turn
from tests.environments.templates import tokenizer_of

pytest.importorskip("trl", reason="ships the templates")
PROBLEM = Problem("p1", "t", ({"role": "user", "content": "Guess."},), None)


class Scripted:
    """Says `script(problem, sample, turn)`; remembers every request's stream."""

    context = 4000

    def __init__(self, tokenizer, script: Callable[[int, int, int], str], stop: str = "<|im_end|>") -> None:
        self.tokenizer, self.script, self.stop = tokenizer, script, stop
        self.asked: list[int] = []

    def generate(self, prompts, sampling, *, samples, seed, progress=None, stream_ids=None):
        numbers = range(len(prompts)) if stream_ids is None else stream_ids
        self.asked += numbers
        return [[self._turn(p, n, g) for g in range(samples)] for p, n in zip(prompts, numbers, strict=True)]

    def _turn(self, prompt, number: int, sample: int) -> Turn:
        place = number & 0xFFFFF, (number >> 20 & 0x3FFFFF) - 1 if number >> 20 else sample, number >> 42
        text = self.script(*place)
        ids = np.asarray(self.tokenizer.encode(text + self.stop, add_special_tokens=False))
        return Turn(prompt, ids, np.zeros(len(ids), np.float32), "stop" if self.stop else "length", 3)


class Guess(Environment):
    """The number is 2. A question ends after the right answer, or raises, or hangs."""

    def reset(self, problem, seed):
        if problem.id == "broken":
            raise RuntimeError("no board")

    def step(self, message):
        said = message["content"]
        if said == "crash":
            raise RuntimeError("bug")
        if said == "exit":
            raise SystemExit(3)
        if said == "hang":
            time.sleep(60)
        if said == "garbage":
            return "nonsense"
        if said == "nothing":
            return Observation()
        if said == "bad message":
            return Observation(("text",))
        right = said == "2"
        return Observation(({"role": "user", "content": f"{said}: {right}"},), done=right, reward=float(right))

    def reward(self):
        return 10.0


def play(script, *, problems: Sequence[Problem] = (PROBLEM,), samples=1, make=Guess, model="Qwen2.5", **config):
    tokenizer = tokenizer_of(model)
    engine = Scripted(tokenizer, script)
    episodes = Episodes(Renderer(tokenizer, PromptConfig(), ""), make, EnvironmentConfig(**config))
    sampling = SamplingConfig(max_tokens=20)
    return engine, episodes.sample(problems, engine, sampling, samples=samples, seed=5)


def test_an_episode_goes_on_until_the_environment_says_so():
    engine, ((rollout,),) = play(lambda p, g, k: "132"[k])
    assert [step.message["content"] for step in rollout.episode.steps] == ["1", "3", "2"]
    assert [step.reward for step in rollout.episode.steps] == [0.0, 0.0, 1.0]
    assert (rollout.episode.end, rollout.episode.reward, rollout.text) == ("done", 10.0, "2")
    (sample,) = to_samples(Group(PROBLEM, (rollout,), (Reward(0.0, {}, "wrong"),)))
    text = tokenizer_of("Qwen2.5").decode(sample.token_ids.tolist())
    assert "assistant\n1<|im_end|>\n<|im_start|>user\n1: False<|im_end|>\n<|im_start|>assistant\n3<|im_end|>" in text
    assert engine.asked == [0, streams.turn(0, 0, 1), streams.turn(0, 0, 2)]


@pytest.mark.parametrize(
    "said, end, why",
    [
        ("crash", "environment_error", "RuntimeError: bug"),
        ("exit", "environment_error", "SystemExit: 3"),
        ("garbage", "environment_error", "step returned str"),
        ("nothing", "environment_error", "no message"),
        ("bad message", "environment_error", "is not a message"),
        ("hang", "environment_timeout", "no answer within 0.3 s"),
    ],
)
def test_a_failing_environment_ends_its_own_episode_alone(said, end, why):
    _, ((bad, good),) = play(lambda p, g, k: said if g == 0 else "2", samples=2, timeout=0.3)
    assert bad.episode.end == end
    assert why in bad.episode.note
    assert good.episode.end == "done"


@pytest.mark.parametrize("said", ["crash", "2"])
def test_an_episode_that_holds_a_container_is_closed_however_it_ends(said):
    class Held(Guess):
        def close(self):
            closed.append(self)

    closed: list[Held] = []
    _, ((rollout,),) = play(lambda p, g, k: said, make=Held, name="harbor:tasks")
    assert rollout.episode.end == ("environment_error" if said == "crash" else "done")
    assert closed


def test_a_program_or_container_has_time_to_be_killed_before_its_call_is_given_up():
    renderer = Renderer(tokenizer_of("Qwen2.5"), PromptConfig(), "")
    for name, seconds in (("harbor:tasks", 50.0), ("verifiers:words", 50.0), ("guess.py:Guess", 20.0)):
        assert Episodes(renderer, Guess, EnvironmentConfig(name=name, timeout=20.0))._pool.timeout == seconds


def test_an_episode_that_cannot_begin_has_no_turn_and_no_reward():
    broken = Problem("broken", "t", PROBLEM.messages, None)
    _, ((bad,), (good,)) = play(lambda p, g, k: "2", problems=(broken, PROBLEM))
    assert (bad.episode.end, bad.num_tokens, bad.turns[0].policy_version) == ("environment_error", 0, 3)
    groups = [Group(broken, (bad,), (Reward(0.0, {}, "verifier_error"),))]
    assert [int(s.trained.sum()) for g in groups for s in to_samples(g)] == [0]
    assert good.episode.end == "done"


def test_the_limits():
    _, ((rollout,),) = play(lambda p, g, k: "1", max_turns=3)
    assert (rollout.episode.end, len(rollout.turns)) == ("max_turns", 3)
    _, ((rollout,),) = play(lambda p, g, k: "1", max_turns=30, max_tokens=400)
    last = rollout.turns[-1]
    assert rollout.episode.end == "max_tokens"
    assert len(last.prompt_ids) + 20 <= 400


def test_the_samples_of_a_problem_share_their_first_prompt_and_their_seed():
    seeds = []

    class Seen(Guess):
        def reset(self, problem, seed):
            seeds.append((problem.id, seed))

    other = Problem("p2", "t", PROBLEM.messages, None)
    engine, _ = play(lambda p, g, k: "2" if k else "1", problems=(PROBLEM, other), samples=2, make=Seen)
    assert engine.asked[:2] == [0, 1]
    assert len(set(engine.asked)) == 2 + 4
    assert len(dict(seeds)) == len(set(seeds)) == 2


def calculator_call(expression: str) -> str:
    return f'<tool_call>\n{{"name": "twice", "arguments": {{"n": {expression}}}}}\n</tool_call>'


def twice(n: int) -> int:
    """Doubles.

    Args:
        n: A number.
    """
    if n > 100:
        raise ValueError("too large")
    return 2 * n


async def later(n: int) -> str:
    """Says it later.

    Args:
        n: A number.
    """
    return f"{n} later"


def test_tools_answer_calls_and_their_exceptions_are_answers_too():
    said = [calculator_call("3"), calculator_call("300"), calculator_call('"x"'), "6 it is"]
    _, ((rollout,),) = play(lambda p, g, k: said[k], make=lambda: ToolEnvironment((Tool(twice), Tool(later))))
    replies = [step.replies[0]["content"] for step in rollout.episode.steps[:3]]
    assert replies[:2] == ["6", '{"error": "too large"}']
    assert "not of type integer" in replies[2]
    assert rollout.episode.steps[0].replies[0]["role"] == "tool"
    assert rollout.text == "6 it is"
    assert rollout.episode.end == "done"
    prompt = tokenizer_of("Qwen2.5").decode(rollout.turns[0].prompt_ids.tolist())
    assert '"name": "twice"' in prompt
    assert '"name": "later"' in prompt
    assert Tool(later).call({"n": 2}) == "2 later"


def test_a_malformed_call_may_end_the_episode():
    _, ((rollout,),) = play(
        lambda p, g, k: "<tool_call>", make=lambda: ToolEnvironment((Tool(twice),)), malformed="end"
    )
    assert rollout.episode.end == "malformed_call"
    assert "without" in rollout.episode.steps[0].error


class Graded:
    name, system = "t", ""

    def problems(self, split):
        return [PROBLEM]

    def grade(self, problem, text):
        return Grade("correct")


def test_rewards_of_the_environment_and_verdicts_of_its_failures():
    _, groups = play(lambda p, g, k: "crash" if g else "12"[k], samples=2)
    reward = Composed(Graded(), {"environment": EnvironmentReward(RewardConfig())}, {"environment": 0.5})
    ((good, bad),) = [group.rewards for group in reward_groups([PROBLEM], groups, reward)]
    assert (good.total, good.parts["environment"], good.verdict) == (5.5, 11.0, "correct")
    assert (bad.verdict, bad.note) == ("verifier_error", "environment: RuntimeError: bug")


def test_an_episode_that_was_cut_off_before_any_reward_earned_none_and_one_that_ended_so_has_no_value():
    part = EnvironmentReward(RewardConfig())

    def value(end: End) -> float | None:
        rollout = Rollout("p", 0, (), "", Episode(end))
        return part(PROBLEM, [Judged(rollout, parse(""), Grade("wrong"))])[0].value

    assert [value(end) for end in ("max_tokens", "max_turns", "malformed_call")] == [0.0, 0.0, 0.0]
    assert value("done") is None


def test_of_a_thousand_episodes_fifty_are_hostile():
    """Right verdicts, bounded time, and none is lost."""
    hostile = ("hang", "crash", "garbage", "exit", "bad message")
    problems = [Problem(f"p{i}", "t", PROBLEM.messages, None) for i in range(1000)]

    def said(p: int, g: int, k: int) -> str:
        return hostile[p // 20 % 5] if p % 20 == 7 else "12"[k]

    started = time.monotonic()
    _, groups = play(said, problems=problems, timeout=0.3)
    assert time.monotonic() - started < 60
    assert len(groups) == 1000
    for p, (rollout,) in enumerate(groups):
        assert rollout.problem_id == f"p{p}"
        if p % 20 == 7:
            hangs = hostile[p // 20 % 5] == "hang"
            assert rollout.episode.end == ("environment_timeout" if hangs else "environment_error")
        else:
            assert (rollout.episode.end, rollout.episode.reward, len(rollout.turns)) == ("done", 10.0, 2)


# --- the pool -----------------------------------------------------------------------------------


def test_results_come_in_order_from_several_threads():
    threads = set()

    def call(i):
        threads.add(threading.get_ident())
        time.sleep(0.01 * (5 - i))
        return i

    assert Pool(3, 5.0).run([lambda i=i: call(i) for i in range(5)]) == [0, 1, 2, 3, 4]
    assert len(threads) == 3


def test_calls_that_take_no_time_need_few_threads():
    pool = Pool(64, 5.0)
    threads = set()
    for _ in range(5):
        pool.run([lambda: threads.add(threading.get_ident())] * 200)
    assert len(threads) < 32


@pytest.mark.timeout(30)
@pytest.mark.parametrize("permitted", [1, 2])
def test_where_the_machine_allows_no_more_threads_those_there_are_run_all_calls(monkeypatch, permitted):
    begun, start = [], threading.Thread.start

    def limited(thread):
        if len(begun) == permitted:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    assert Pool(8, 5.0).run([lambda i=i: time.sleep(0.01) or i for i in range(10)]) == list(range(10))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Pool(8, 5.0).run([lambda: 1])


class Appended(deque):
    """A deque that is empty when it is first looked at, and gets a call right after."""

    append_call = None

    def __bool__(self):
        seen, append = len(self) > 0, self.append_call
        if append is not None:
            self.append_call = None
            thread = threading.Thread(target=append, daemon=True)
            thread.start()
            thread.join(0.2)  # it may wait for a lock of this thread
        return seen


def test_a_thread_that_goes_to_sleep_hears_of_a_call_that_comes_at_this_moment():
    pool, since = Pool(1, 5.0), time.monotonic()
    pool._waiting, pool._threads, pool._waking = Appended(), 1, True
    pool._waiting.append_call = lambda: pool.start([lambda: 1])
    assert pool._await_call()
    assert time.monotonic() - since < 1.0


def test_calls_that_wait_for_each_other_run_at_the_same_time():
    pool, everybody = Pool(16, 5.0), threading.Barrier(16)
    for _ in range(3):
        pool.run([lambda: None] * 100)
        assert not any(isinstance(result, Failed) for result in pool.run([everybody.wait] * 16))


def test_of_many_calls_some_hang_some_crash_and_none_is_lost():
    def call(i):
        if i % 20 == 0:
            time.sleep(30)
        if i % 20 == 10:
            raise ValueError(f"call {i}")
        return i

    started = time.monotonic()
    results = Pool(16, 0.2).run([lambda i=i: call(i) for i in range(1000)])
    assert time.monotonic() - started < 10
    for i, result in enumerate(results):
        if i % 20 == 0:
            assert result == Failed("timeout", "no answer within 0.2 s")
        elif i % 20 == 10:
            assert result == Failed("error", f"ValueError: call {i}")
        else:
            assert result == i


def test_environments_answer_while_other_turns_are_sampled():
    """An engine that has more to sample than environments have to answer does not wait for them."""
    order = []

    class Slow(Guess):
        def step(self, message):
            time.sleep(0.02)
            return super().step(message)

    class OneByOne(Scripted):
        """One turn ends at a time."""

        @contextmanager
        def turns(self, sampling, seed, keep, progress):
            engine, prompts = self, deque()

            class Turns:
                running = property(lambda self: sum(len(prompt.speakers) for prompt in prompts))

                def submit(self, new):
                    prompts.extend(replace(p, speakers=(s,)) for p in new for s in p.speakers)

                def ended(self):
                    order.append("sampled")
                    prompt = prompts.popleft()
                    return [(prompt.speakers[0], engine._turn(prompt.ids, prompt.stream, prompt.speakers[0][1]))]

                def forget(self, speaker):
                    order.append("forgotten")

            yield Turns()

    tokenizer = tokenizer_of("Qwen2.5")
    problems = [Problem(f"p{i}", "t", PROBLEM.messages, None) for i in range(4)]
    episodes = Episodes(Renderer(tokenizer, PromptConfig(), ""), Slow, EnvironmentConfig())
    engine = OneByOne(tokenizer, lambda p, g, k: "12"[k])
    groups = episodes.sample(problems, engine, SamplingConfig(max_tokens=20), samples=1, seed=5)
    assert [len(rollout.turns) for (rollout,) in groups] == [2] * 4
    # Answers are waited for when they are as many as the turns that are left: after 2, 4, 6, 7 and 8 turns.
    assert order == [*["sampled"] * 6, *["forgotten"] * 2, "sampled", "forgotten", "sampled", "forgotten"]


# --- what is written down -----------------------------------------------------------------------


def test_seconds_of_each_turn_are_means_over_the_rollouts_that_have_it():
    from hone.environments.record import turn_seconds

    def rollout(*seconds):
        turn = Turn(np.arange(2), np.arange(1), np.zeros(1, np.float32), "stop", 0)
        steps = tuple(Step({"role": "assistant", "content": ""}, seconds=pair) for pair in seconds)
        return Rollout("p", 0, (turn,) * len(steps), "", Episode(steps=steps))

    rows = turn_seconds([rollout((1.0, 0.5), (3.0, 0.0)), rollout((2.0, 0.1))])
    assert rows == [
        {"rollouts": 2, "generation": 1.5, "environment": pytest.approx(0.3), "slowest": 0.5},
        {"rollouts": 1, "generation": 3.0, "environment": 0.0, "slowest": 0.0},
    ]
    assert turn_seconds([rollout((1.0, 0.0))]) == []


def test_rows_and_transcripts():
    from hone.environments.record import episode_means, episode_row, transcript

    said = [calculator_call("3"), "6 it is"]
    _, ((rollout,),) = play(lambda p, g, k: said[k], make=lambda: ToolEnvironment((Tool(twice),)))
    row = {"text": rollout.text, **episode_row(rollout)}
    assert (row["turns"], row["chains"], row["end"]) == (2, 1, "done")
    assert transcript(row) == "[calls twice {'n': 3}]\n  <tool> 6\n6 it is"
    plain = {"text": "a whole answer"}
    assert transcript(plain) == "a whole answer"
    assert episode_means([row, plain]) == {"turns": 1.5, "tool_calls": 0.5}
    assert episode_means([plain]) == {}
