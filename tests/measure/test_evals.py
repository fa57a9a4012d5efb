"""Several models on the same problems: nothing is drawn twice, whatever is cut; a real model and a stand-in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from hone.base.settings import UserError
from hone.measure import models as finding
from hone.measure import run as evals
from hone.measure.models import Model
from hone.measure.store import Store, digest, read_measured, stored
from hone.recipe.load import load
from hone.recipe.recipe import Recipe
from hone.rollout import prompts
from hone.runs.layout import label_of, model_folder
from hone.tasks import make_task
from hone.types import Problem, Rollout, Turn

RECIPE = """
name: small
runs: {runs}
model: {{path: tiny, tiny: {{vocab_size: 300, hidden_size: 16, layers: 1, heads: 1, kv_heads: 1, mlp_size: 32}}}}
task: {{name: countdown, train: 20, validation: 5, test: 70, numbers: [3]}}
prompt: {{style: raw, system: "", template: "{{user}}\\n"}}
eval: {{problems: 70, samples: 3, sampling: {{max_tokens: 4}}}}
"""


class Fake:
    """Answers with its block, and remembers what it was asked."""

    def __init__(self, fail_after: int = 10**9) -> None:
        self.asked: list[tuple[int, int, int]] = []  # problems, samples, seed
        self.left = fail_after

    def prompt_text(self, problem: Problem) -> str:
        return "Q: " + problem.id

    def answers(
        self, block: Sequence[Problem], samples: int, seed: int, missing: set, progress: object
    ) -> Iterator[tuple[Problem, int, Rollout]]:
        self.asked.append((len(block), samples, seed))
        for problem in block:
            for g in range(samples):
                if self.left == 0:
                    raise UserError("the endpoint is gone")
                self.left -= 1
                nothing = np.zeros(2, np.int64)
                turn = Turn(np.zeros(1, np.int64), nothing, np.zeros(2, np.float32), "stop", 0)
                yield problem, g, Rollout(problem.id, g, (turn,), f"{problem.id} {seed} {g}")


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(runs=tmp_path / "runs"))
    loaded = load(path)
    assert isinstance(loaded, Recipe)
    return loaded


def draw(recipe: Recipe, out: Path, fake: Fake, seed: int = 0, **config: int) -> Store:
    task = make_task(recipe.task, 0)
    model = Model("m", "somewhere", "abc", False, lambda: fake)
    store = Store.open(out, evals.settings(recipe, task, model, seed))
    wanted = recipe.eval.model_copy(update=config)
    evals.draw(store, model, task.problems("test")[: wanted.problems], task, wanted, seed)
    return store


def lines(store: Store) -> list[dict]:
    return [json.loads(line) for line in (store.folder / "samples.jsonl").read_text().splitlines()]


def test_every_sample_is_kept_with_what_it_came_from(recipe: Recipe, tmp_path: Path) -> None:
    fake = Fake()
    rows = lines(draw(recipe, tmp_path / "out", fake))
    assert [ask[:2] for ask in fake.asked] == [(64, 3), (6, 3)]
    assert len(rows) == 210
    assert {"problem_id", "index", "seed", "verdict", "text", "tokens", "finish", "extracted"} <= rows[0].keys()
    assert rows[4]["text"] == f"{rows[4]['problem_id']} {rows[4]['seed']} 1"
    got = read_measured(stored(tmp_path / "out")[0])
    assert (len(got), set(got.drawn.tolist()), got.seed, got.facts["weights"]) == (70, {3}, 0, "abc")


def test_the_same_command_draws_nothing_twice_and_more_only_what_lacks(recipe: Recipe, tmp_path: Path) -> None:
    store = draw(recipe, tmp_path / "out", Fake(), problems=64, samples=8)
    again = Fake()
    draw(recipe, tmp_path / "out", again, problems=64, samples=8)
    assert again.asked == []
    draw(recipe, tmp_path / "out", again, problems=64, samples=12)  # more samples of the same
    assert [ask[:2] for ask in again.asked] == [(64, 4)]
    assert again.asked[0][2] not in {row["seed"] for row in lines(store)[: 64 * 8]}  # other random numbers
    whole = draw(recipe, tmp_path / "whole", Fake(), problems=64, samples=12)
    assert sorted(map(str, lines(store))) == sorted(map(str, lines(whole)))


@pytest.mark.parametrize("after", [0, 1, 100, 200])
def test_a_cut_goes_on_where_it_was(recipe: Recipe, tmp_path: Path, after: int) -> None:
    with pytest.raises(UserError, match="gone"):
        draw(recipe, tmp_path / "out", Fake(fail_after=after))
    (folder,) = (tmp_path / "out").iterdir()
    kept = (folder / "samples.jsonl").read_text() if (folder / "samples.jsonl").exists() else ""
    assert len(kept.splitlines()) == after  # what an endpoint had answered was paid for
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"problem_id": "torn by a ki')
    store = draw(recipe, tmp_path / "out", Fake())
    whole = draw(recipe, tmp_path / "whole", Fake())
    assert (store.folder / "samples.jsonl").read_text().startswith(kept)  # append-only
    assert lines(store) == lines(whole)


def test_models_share_the_random_streams_and_seeds_do_not(recipe: Recipe, tmp_path: Path) -> None:
    first, second, other = Fake(), Fake(), Fake()
    draw(recipe, tmp_path / "a", first)
    draw(recipe, tmp_path / "b", second)
    draw(recipe, tmp_path / "b", other, seed=1)
    assert first.asked == second.asked
    assert not {ask[2] for ask in first.asked} & {ask[2] for ask in other.asked}
    assert len(stored(tmp_path / "b")) == 2  # another seed is another evaluation


def test_what_decides_the_samples_decides_the_folder(recipe: Recipe) -> None:
    task = make_task(recipe.task, 0)
    model = Model("m", "somewhere", "abc", False, Fake)
    base = evals.settings(recipe, task, model, 0)
    assert digest(base) == digest({**base, "label": "renamed", "model": "moved", "code_version": "2"})
    sampling = {**base["sampling"], "temperature": 0.5}
    others = ({"sampling": sampling}, {"weights": "x"}, {"seed": 1}, {"split": "validation"}, {"prompt": {}})
    for other in others:
        assert digest(base) != digest({**base, **other})


def test_an_unknown_model_stops_before_anything_is_loaded(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: no such folder"):
        evals.cli_eval(recipe, ["./nowhere"])
    with pytest.raises(UserError, match=r"typo: no such folder; .* a hub id with its owner"):  # not asked of a hub
        evals.cli_eval(recipe, ["typo"])
    with pytest.raises(UserError, match=r"no model here"):
        evals.cli_eval(recipe, [str(tmp_path)])
    with pytest.raises(UserError, match=r"--k 4: pass@k needs.*eval.samples is 3"):
        evals.cli_eval(recipe, ["./nowhere"], ks=[1, 4])


def test_labels_and_folders_of_runs(tmp_path: Path) -> None:
    stage = tmp_path / "runs/demo/rl"
    for folder in (stage / "checkpoints/step_000020/model", stage / "checkpoints/step_000010/model"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    (tmp_path / "runs/demo/stages.json").write_text(json.dumps([{"name": "rl", "kind": "rl", "folder": "rl"}]))
    assert model_folder(tmp_path / "runs/demo") == stage / "checkpoints/step_000020/model"  # the newest there is
    assert label_of(stage / "checkpoints/step_000010") == "demo/rl step 10"
    (stage / "model").mkdir()
    (stage / "model/config.json").write_text("{}")
    assert model_folder(tmp_path / "runs/demo") == stage / "model"
    assert [label_of(p) for p in (tmp_path / "runs/demo", stage, stage / "model")] == ["demo", "demo/rl", "demo/rl"]


def test_two_real_models_and_their_difference(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.model import tiny

    monkeypatch.setattr(prompts, "TOKENIZER_TEXTS", 100)
    small = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"problems": 5, "samples": 2})})
    for seed in (0, 1):
        tiny.create(tmp_path / f"m{seed}", recipe.model.tiny, prompts.tokenizer_texts(recipe), seed)
    paths = [str(tmp_path / f"m{seed}") for seed in (0, 1)]
    assert finding.weights_digest(Path(paths[0])) != finding.weights_digest(Path(paths[1]))
    folder = evals.cli_eval(small, paths)
    out = capsys.readouterr().out
    assert "5 test problems, 2 sample(s) each, seed 0; temperature 1" in out
    assert "m1 - m0: +0.000 [+0.000, +0.000], p = 1" in out
    assert "pass@2" in out
    a, b = (read_measured(path) for path in stored(folder))
    assert (a.label, b.label, len(a), len(b)) == ("m0", "m1", 5, 5)
    kept = [(path / "samples.jsonl").read_text() for path in stored(folder)]
    assert kept[0] != kept[1]
    evals.cli_eval(small, paths, out=tmp_path / "again")
    assert [(path / "samples.jsonl").read_text() for path in stored(tmp_path / "again")] == kept
    summary = json.loads((stored(folder)[0] / "summary.json").read_text())
    assert summary["pass_at_k"].keys() == {"1", "2"}
    assert summary["sampling"]["max_tokens"] == 4


def test_gold_answers_are_scored_as_the_model_itself_would(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hone.model import tiny
    from hone.rewards.gold import gold_text

    monkeypatch.setattr(prompts, "TOKENIZER_TEXTS", 100)
    small = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"problems": 3, "samples": 2})})
    for seed in (0, 1):
        tiny.create(tmp_path / f"m{seed}", recipe.model.tiny, prompts.tokenizer_texts(recipe), seed)
    paths = [str(tmp_path / f"m{seed}") for seed in (0, 1)]
    folder = evals.cli_eval(small, paths, score_gold=True)
    assert "m1: gold perplexity" in capsys.readouterr().out
    store = stored(folder)[0]
    rows = {(r["problem_id"], r["index"]): r for r in map(json.loads, (store / "gold.jsonl").read_text().splitlines())}
    assert len(rows) == 3 * (1 + 2)
    model = AutoModelForCausalLM.from_pretrained(paths[0])
    tokenizer = AutoTokenizer.from_pretrained(paths[0])
    samples = [json.loads(line) for line in (store / "samples.jsonl").read_text().splitlines()]
    problem = make_task(recipe.task, 0).problems("test")[0]
    prompt = json.loads((store / "problems.jsonl").read_text().splitlines()[0])["prompt"]
    for index in (None, 1):
        said = next((s["text"] for s in samples if (s["problem_id"], s["index"]) == (problem.id, index)), "").strip()
        before = f"{prompt}{said}\n" if said else prompt
        before += rows[problem.id, index]["cue"]
        answer = gold_text(problem)
        ids = torch.tensor([tokenizer.encode(before + answer, add_special_tokens=False)])
        n = len(rows[problem.id, index]["logprobs"])
        with torch.no_grad():
            logprobs = model(ids).logits.float().log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        assert rows[problem.id, index]["logprobs"] == pytest.approx(logprobs[-n:].tolist(), abs=2e-5)
    kept = (store / "gold.jsonl").read_text()
    evals.cli_eval(small, paths, score_gold=True)
    assert (store / "gold.jsonl").read_text() == kept  # nothing twice
    own = [np.mean(r["logprobs"]) for r in rows.values() if r["index"] is not None]
    summary = json.loads((store / "summary.json").read_text())["gold_perplexity"]
    assert summary["after_reasoning"]["value"] == pytest.approx(np.exp(-np.mean(own)))


def test_a_hosted_model_has_no_gold_perplexity(recipe: Recipe) -> None:
    with pytest.raises(UserError, match="gives no log-probs"):
        evals.cli_eval(recipe, ["http://127.0.0.1:9/v1#name"], score_gold=True)
