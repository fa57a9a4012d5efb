"""`hone sample`: chat with a model, answer one prompt or a file of prompts, or show answers to a task's problems.

    hone sample runs/demo                               two problems of the task, with their grades
    hone sample runs/demo --chat                        at a prompt; Ctrl-C stops an answer, Ctrl-D ends
    hone sample Qwen/Qwen3-0.6B --prompt "Why?" eval.sampling.temperature=0.6
    hone sample runs/demo --file prompts.txt --out answers.jsonl

A file has a prompt per line, or is .jsonl with rows {"prompt": "..."} or {"messages": [...]}; one row of the answers:

    {"index": 0, "sample": 0, "prompt": "Why?", "completion": "Because.", "finish": "stop", "tokens": 3, "model": "m"}
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.base import jsonl
from hone.base.progress import Track
from hone.base.settings import UserError
from hone.base.visible import visible
from hone.environments.make import make_episodes
from hone.environments.record import episode_row, transcript
from hone.rollout.native.core import Core
from hone.rollout.native.requests import Request
from hone.rollout.text import ShownText
from hone.serve.model import ServedModel
from hone.types import IntArray, Turn

RESERVED = {"index", "sample", "completion", "finish", "tokens", "model"}


def show_problems(model: ServedModel, count: int) -> None:
    """Print the model's answers to a few problems of its recipe, with their grades."""
    if model.task is None:
        raise UserError(f"{model.name} is not a recipe, so it has no problems: give --chat, --prompt or --file")
    chosen = model.task.problems(model.stage.eval.split)[:count]
    episodes = make_episodes(model.stage, model.renderer)
    answers = episodes.sample(chosen, model.engine, model.sampling, samples=1, seed=model.stage.seed)
    for problem, (rollout,) in zip(chosen, answers, strict=True):
        grade, row = model.task.grade(problem, rollout.text), episode_row(rollout)
        text = transcript(row) if row else rollout.text.removeprefix(model.renderer.prefix)
        print(visible(f"--- {problem.id}\n{model.renderer.prompt_text(problem)}{text}"))
        turns = f"{len(rollout.turns)} turns ({rollout.episode.end}), " if len(rollout.turns) > 1 else ""
        print(visible(f"=> {grade.verdict}, {turns}{rollout.num_tokens} tokens, finished by {rollout.finish}\n"))


def answer_one(model: ServedModel, text: str, seed: int) -> None:
    """Print the answer to one prompt while it is generated."""
    with model.engine.open() as core:
        _answer(model, core, [{"role": "user", "content": text}], seed, stream=0)


def chat(model: ServedModel, seed: int) -> None:
    """A conversation. Without a chat template every line is a separate prompt."""
    history: list[dict[str, str]] = []
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # editing and history at the prompt
    keeps = "" if not model.renderer.is_raw else " This model has no chat template: every line is a separate prompt."
    print(f"{visible(model.name)}.{keeps} /new starts over, Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
    with model.engine.open() as core:
        turns = 0
        while True:
            try:
                line = input("> ")
            except EOFError:
                print()
                return
            if not line.strip():
                continue
            if line.strip() == "/new":
                history = []
                continue
            message = {"role": "user", "content": line}
            try:
                answer = _answer(model, core, [*history, message], seed, stream=turns)
            except UserError as error:  # too long: the line is not kept
                print(f"{visible(error)}; or start over with /new", file=sys.stderr)
                continue
            turns += 1
            if not model.renderer.is_raw:
                history += [message, {"role": "assistant", "content": answer}]


def _answer(model: ServedModel, core: Core, messages: Sequence[Mapping[str, str]], seed: int, stream: int) -> str:
    """Print an answer while it is generated, until Ctrl-C; returns its text."""
    ids = model.renderer.messages_ids(messages)
    sampling = model.sampling.model_copy(update={"max_tokens": model.room(len(ids))})
    shown = ShownText(model.decode, sampling.stop)
    (number,) = core.submit([Request(ids, sampling, seed, stream, streamed=True)])
    parts = [model.renderer.prefix]
    print(visible(model.renderer.prefix), end="", flush=True)
    finish = ""
    with _interrupt() as interrupted:
        while core.busy:
            if interrupted.is_set():
                core.cancel(number)
            for output in core.step():
                new = "".join(shown.push(token) for token in output.tokens.tolist())
                if output.turn is not None:
                    new, finish = new + shown.rest(), output.turn.finish
                parts.append(new)
                print(visible(new), end="", flush=True)
    print()
    if finish != "stop":
        why = f"cut at {sampling.max_tokens} tokens" if finish == "length" else "stopped"
        print(visible(f"[{why}]"), file=sys.stderr)
    return "".join(parts)


@contextlib.contextmanager
def _interrupt() -> Iterator[threading.Event]:
    """Context manager in which Ctrl-C only sets the event: a running step must not be interrupted."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


# --- files -----------------------------------------------------------------------------------


def answer_file(model: ServedModel, prompts: Sequence[dict[str, Any]], out: Path, samples: int, seed: int) -> None:
    """Answer every prompt (see `read_prompts`) and write each finished answer to `out`; existing answers are kept.

    The random numbers of an answer depend only on the seed and its position, so an interrupted file can be completed
    with the same answers. Raises UserError if `out` belongs to other prompts or another model.
    """
    conversations = [_messages(prompt) for prompt in prompts]
    if (
        model.renderer.is_raw
        and (i := next((i for i, m in enumerate(conversations) if _turns(m) > 1), None)) is not None
    ):
        raise UserError(f"prompt {i} is a conversation, and {model.name} has no chat template; give one message")
    done = _answered(out, prompts, model)
    ids = [model.renderer.messages_ids(messages) for messages in conversations]
    missing = [(i, g) for i in range(len(prompts)) for g in range(samples) if (i, g) not in done]
    out.parent.mkdir(parents=True, exist_ok=True)
    with Track("answering", len(prompts) * samples, len(prompts) * samples - len(missing)) as progress:
        for (i, g), turn in _turns_of(model, ids, missing, seed):
            text = ShownText(model.decode, model.sampling.stop)
            answer = "".join([*(text.push(token) for token in turn.completion_ids.tolist()), text.rest()])
            row = {**prompts[i], "completion": model.renderer.prefix + answer, "finish": turn.finish}
            row |= {"tokens": len(turn.completion_ids), "model": model.path}
            jsonl.append(out, {"index": i, "sample": g, **row})
            progress.advance()
    jsonl.write(out, sorted(jsonl.read(out), key=lambda row: (row["index"], row["sample"])))
    print(f"{visible(out)}: {len(prompts) * samples} answers to {len(prompts)} prompts", file=sys.stderr)


def _turns_of(
    model: ServedModel, ids: Sequence[IntArray], missing: Sequence[tuple[int, int]], seed: int
) -> Iterator[tuple[tuple[int, int], Turn]]:
    """The missing samples as they finish, as ((prompt, sample), turn)."""
    most = {i: g + 1 for i, g in missing}  # missing is in order: this keeps the last sample of each
    wanted = set(missing)
    requests = [
        Request(ids[i], model.sampling.model_copy(update={"max_tokens": model.room(len(ids[i]))}), seed, i, n)
        for i, n in most.items()
    ]
    with model.engine.open() as core:
        place = dict(zip(core.submit(requests), most))
        while core.busy:
            for output in core.step():
                key = place[output.request], output.sample
                if output.turn is not None and key in wanted:
                    yield key, output.turn


def read_prompts(source: Path) -> list[dict[str, Any]]:
    """Read rows with `prompt` or `messages`; other columns are kept. Raises UserError for a row with neither."""
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--file {source}: {error}; give a text file of prompts, or .jsonl") from error
    if source.suffix != ".jsonl":
        return [{"prompt": line} for line in lines if line.strip()]
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{source}:{number}: not JSON ({error.msg}); give one object per line") from error
        if not isinstance(row, dict) or not (isinstance(row.get("prompt"), str) or _is_conversation(row)):
            raise UserError(f'{source}:{number}: give {{"prompt": "..."}}, or {{"messages": [...]}} with the user last')
        if taken := sorted(RESERVED & set(row)):
            raise UserError(f"{source}:{number}: column {', '.join(taken)} is written with the answers; rename it")
        rows.append(row)
    return rows


def _is_conversation(row: dict[str, Any]) -> bool:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        return False
    return messages[-1].get("role") == "user" and all(isinstance(m.get("content"), str) for m in messages)


def _messages(prompt: Mapping[str, Any]) -> list[dict[str, str]]:
    return prompt.get("messages") or [{"role": "user", "content": prompt["prompt"]}]


def _turns(messages: Sequence[Mapping[str, str]]) -> int:
    return sum(message.get("role") != "system" for message in messages)


def _answered(out: Path, prompts: Sequence[Mapping[str, Any]], model: ServedModel) -> set[tuple[int, int]]:
    """(prompt, sample) of the answers of earlier calls; an incomplete line is dropped."""
    jsonl.keep(out, lambda row: True)
    done = set()
    for row in jsonl.read(out):
        i = row.get("index", -1)
        same = 0 <= i < len(prompts) and all(row.get(key) == value for key, value in prompts[i].items())
        if not same or row.get("model") != model.path:
            raise UserError(f"{out} holds answers to other prompts or of another model; move it, or give another --out")
        done.add((i, row["sample"]))
    return done
