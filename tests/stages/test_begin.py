"""What is refused before a run begins."""

from pathlib import Path

import pytest

from hone.base.settings import UserError
from hone.recipe.recipe import Recipe
from hone.stages.pipeline import begin


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"model": {"path": "runs/x/warmup/model"}}, "model.path"),
        ({"model": {"path": "./runs/x/warmup/model/"}}, "model.path"),
        ({"stage": "sft", "sft": {"data": "runs/x/rows.jsonl"}}, "sft.data"),
    ],
)
def test_a_run_does_not_set_aside_what_it_starts_from(tmp_path, monkeypatch, settings, key):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/x")
    (folder / "warmup" / "model").mkdir(parents=True)
    recipe = Recipe.model_validate({"name": "x", "task": {"name": "knights"}, **settings})
    with pytest.raises(
        UserError, match=rf"{key}: \S+ lies in runs/x, which is set aside .* give this run another name"
    ):
        begin(recipe, folder, resume=False)
    assert [path.name for path in Path("runs").iterdir()] == ["x"]


def test_a_run_beside_the_folder_that_it_starts_from_sets_its_own_aside(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("x", "x2"):
        Path("runs", name, "model").mkdir(parents=True)
    recipe = Recipe.model_validate({"name": "x", "task": {"name": "knights"}, "model": {"path": "runs/x2/model"}})
    begin(recipe, Path("runs/x"), resume=False)
    assert "runs/x was there already" in capsys.readouterr().err
    assert Path("runs/x2/model").is_dir()
    assert not Path("runs/x/model").exists()
