"""The command line: what each verb hands on, and how it ends."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import types
from collections import namedtuple
from pathlib import Path

import pytest

import hone.measure  # noqa: F401  # the parent of a module that a test replaces
from hone.cli import app as cli
from hone.preflight import doctor

RECIPE = "name: x\ntask: {name: knights, people: [2], train: 3}\nalgo: {updates_per_rollout: 2}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hone", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


def stand_in(monkeypatch, module: str, **functions) -> None:
    """Put a module with these functions in the place of a heavy one."""
    fake = types.SimpleNamespace(**functions)
    monkeypatch.setitem(sys.modules, module, fake)
    parent, _, name = module.rpartition(".")
    monkeypatch.setattr(importlib.import_module(parent), name, fake, raising=False)


def stand_in_pipeline(monkeypatch, run) -> None:
    stand_in(monkeypatch, "hone.stages.pipeline", checked=lambda recipe, resume: [], run=run)


# --- train -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["r.yaml"], ("run", 100, False)),
        (["r.yaml", "--resume", "steps=7"], ("run", 7, True)),
        (["--dry-run", "r.yaml", "steps=7"], ("dry_run", 7)),
    ],
)
def test_train_hands_over_the_recipe(folder, run, monkeypatch, arguments, expected):
    calls = []
    stand_in_pipeline(monkeypatch, lambda recipe, resume, findings: calls.append(("run", recipe.steps, resume)))
    stand_in(
        monkeypatch, "hone.preflight.check.run", dry_run=lambda recipe: calls.append(("dry_run", recipe.steps)) or 0
    )
    assert run("train", *arguments) == (0, "", "")
    assert calls == [expected]


def test_a_wrong_recipe_is_one_line_and_starts_nothing(folder, run, monkeypatch):
    stand_in_pipeline(monkeypatch, None)  # calling it would raise
    assert run("train", "r.yaml", "stpes=7") == (
        2,
        "",
        "override 'stpes=7': stpes: unknown key; did you mean steps?\n",
    )


def test_notices_go_to_stderr(folder, run, monkeypatch):
    stand_in_pipeline(monkeypatch, lambda recipe, resume, findings: None)
    code, out, error = run("train", "r.yaml", "algo.correction.cap=3.0")
    assert (code, out) == (0, "")
    assert error.startswith("note: algo.correction.cap has no effect")


def ends_with(error: BaseException):
    def run(*_, **__):
        raise error

    return run


def test_ctrl_c_is_130(folder, run, monkeypatch):
    stand_in_pipeline(monkeypatch, ends_with(KeyboardInterrupt()))
    handler = signal.getsignal(signal.SIGINT)
    try:
        assert run("train", "r.yaml")[0] == 130
    finally:
        signal.signal(signal.SIGINT, handler)  # of pytest


def test_our_own_faults_keep_their_traceback(folder, run, monkeypatch):
    stand_in_pipeline(monkeypatch, ends_with(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError, match="ours"):
        run("train", "r.yaml")


# --- the other verbs -------------------------------------------------------------------------------------------------


def test_eval_hands_over_its_options(folder, run, monkeypatch):
    calls = []
    stand_in(
        monkeypatch,
        "hone.measure.run",
        cli_eval=lambda recipe, models, **options: calls.append((recipe.eval.problems, models, options)),
    )
    run("eval", "r.yaml", "eval.problems=5", "c", "http://h/v1#m=1", "--out", "o", "--seed", "3", "--k", "1,8")
    assert calls == [(5, ["c", "http://h/v1#m=1"], {"seed": 3, "ks": [1, 8], "out": Path("o"), "score_gold": False})]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["x"], ("show_problems", 2)),
        (["x", "--problems", "3"], ("show_problems", 3)),
        (["x", "--chat"], ("chat", 7)),
        (["plain"], ("chat", 7)),
        (["plain", "--problems", "3"], ("show_problems", 3)),  # says that it has none
        (["x", "--prompt", "Why?", "--seed", "5"], ("answer_one", "Why?", 5)),
        (["x", "--file", "f", "--out", "o", "--samples", "4"], ("answer_file", ["f"], Path("o"), 4, 7)),
    ],
)
def test_sample_does_what_is_asked(run, monkeypatch, arguments, expected):
    import hone.serve  # noqa: F401  the parent of what is replaced

    calls, loaded = [], []

    def load_served(target, overrides, checkpoint):
        loaded.append((list(overrides), checkpoint))
        return types.SimpleNamespace(task=None if target == "plain" else 1, stage=types.SimpleNamespace(seed=7))

    def note(name):
        return lambda model, *rest: calls.append((name, *rest))

    verbs = {name: note(name) for name in ("show_problems", "chat", "answer_one", "answer_file")}
    stand_in(monkeypatch, "hone.serve.sample", read_prompts=lambda file: [str(file)], **verbs)
    stand_in(monkeypatch, "hone.serve.model", load_served=load_served)
    assert run("sample", *arguments, "a.b=1", "--checkpoint", "c") == (0, "", "")
    assert (calls, loaded) == ([expected], [(["a.b=1"], Path("c"))])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--chat", "--prompt", "a"], "--chat and --prompt: give only one of them"),
        (["--file", "f"], "--file (prompts) and --out (answers)"),
        (["--prompt", "a", "--samples", "2"], "--samples has no effect without --file"),
    ],
)
def test_sample_refuses_what_contradicts_itself(run, arguments, message):
    code, _, error = run("sample", "x", *arguments)
    assert code == 2
    assert message in error


def test_reset_asks_the_run(folder, run, monkeypatch):
    stand_in(monkeypatch, "hone.runs.layout", ask=lambda target: f"asked {target}")
    assert run("reset", "runs/mine") == (0, "asked runs/mine\n", "")


def test_verify_ends_with_1_if_something_is_outside(folder, run, monkeypatch):
    for inside, code in ((True, 0), (False, 1)):
        checks = [types.SimpleNamespace(inside=True), types.SimpleNamespace(inside=inside)]
        stand_in(monkeypatch, "hone.measure.reproduce", verify=lambda recipe, seed, resume, checks=checks: checks)
        assert run("verify", "demo", "--seed", "4")[0] == code


def test_report_prints_the_page(folder, run, monkeypatch):
    import hone.report  # noqa: F401  the parent of what is replaced

    stand_in(monkeypatch, "hone.report.build", build=lambda runs, out: (out or runs[0] / "report") / "report.html")
    assert run("report", "runs/x") == (0, "runs/x/report/report.html\n", "")
    assert run("report", "runs/x", "--out", "o")[1] == "o/report.html\n"


def test_config_show_prints_every_value(folder, run):
    code, text, _ = run("config", "show", "r.yaml", "optim.lr=3e-7")
    assert code == 0
    assert "optim:\n  lr: 3e-07\n  betas:\n  - 0.9\n" in text
    as_json = run("config", "show", "r.yaml", "--json", "optim.lr=3e-7")[1]
    assert json.loads(as_json)["optim"]["eps"] == 1e-8
    Path("again.json").write_text(as_json)  # a recipe again
    assert run("config", "show", "again.json", "--json") == (0, as_json, "")


def test_explain_prints_every_stage_and_starts_nothing(folder, run, monkeypatch):
    stand_in_pipeline(monkeypatch, None)  # calling it would raise
    code, out, error = run("explain", "r.yaml", "algo.clip_high=0.28", "algo.correction.cap=3.0")
    assert (code, error) == (0, "")
    assert out.startswith("stage x: reinforcement learning, 100 steps\n")
    assert "clip(rho_t, 0.8, 1.28)" in out
    assert out.endswith("  note        algo.correction.cap has no effect while correction.kind is none\n")
    assert run("explain", "r.yaml", "algo.los=gspo") == (
        2,
        "",
        "override 'algo.los=gspo': algo.los: unknown key; did you mean algo.loss?\n",
    )
    assert run("explain", "gone.yaml")[0] == 2


def test_config_schema_and_presets(run):
    assert json.loads(run("config", "schema")[1])["title"] == "hone recipe"
    assert "demo" in run("config", "presets")[1].split()


def test_data_show_prints_problems_with_their_answers(folder, run):
    code, out, _ = run("data", "show", "r.yaml", "task.names=[Anna, Ben]", "--problems", "2", "--style", "careful")
    assert code == 0
    assert out.count("--- ") == 2
    assert "Anna" in out
    assert out.count("<answer>") == 2
    assert run("data", "show", "countdown", "--problems", "1", "--split", "test")[1].count("answer: ") == 1
    assert run("data", "show", "r.yaml", "--style", "lucky") == (
        2,
        "",
        "--style lucky: task knights writes careful, hasty\n",
    )


def row(statements: str, solution: list[bool], text: str) -> str:
    values = {"names": ["Ann", "Bob"], "statements": statements, "solution": solution, "solution_text_format": text}
    return json.dumps({"quiz": "q", **values})


# Ann: "Bob is a knave." Bob: "Ann and I are knaves." Only Ann can be telling the truth.
ANN_FIRST = row(
    "(('lying', 1), ('and', ('lying', 0), ('lying', 1)))", [True, False], "(1) Ann is a knight\n(2) Bob is a knave"
)
BOB_FIRST = row(
    "(('and', ('lying', 0), ('lying', 1)), ('lying', 0))", [False, True], "(1) Ann is a knave\n(2) Bob is a knight"
)


def test_data_check_solves_the_rows_again(folder, run):
    Path("good.jsonl").write_text(ANN_FIRST + "\n")
    assert run("data", "check", "good.jsonl") == (0, "good.jsonl: 1 rows, 0 faulty\n", "")
    Path("bad.jsonl").write_text(ANN_FIRST + "\n" + ANN_FIRST.replace("[true, false]", "[false, true]") + "\n")
    code, out, _ = run("data", "check", "good.jsonl", "bad.jsonl")
    assert code == 1
    assert "bad.jsonl: 2 rows, 1 faulty\n  row 2: " in out
    assert run("data", "check", "gone.jsonl") == (2, "", "gone.jsonl: no such data file\n")


def test_data_overlap_sees_through_names_and_order(folder, run):
    Path("a.jsonl").write_text(ANN_FIRST + "\n")
    Path("b.jsonl").write_text(BOB_FIRST + "\n")
    table = run("data", "overlap", "a.jsonl", "b.jsonl")[1].splitlines()
    assert table[1].split()[:4] == ["2", "1", "1", "1"]


def test_version_help_and_usage(run):
    import hone

    assert run("--version") == (0, f"hone {hone.__version__}\n", "")
    code, out, _ = run("--help")
    assert code == 0
    for verb in ("train", "explain", "eval", "sample", "report", "data", "config", "doctor"):
        assert f"\n  {verb} " in out
    assert run("train", "r.yaml", "--fast")[0] == 2
    assert run("fly")[0] == 2


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "--num_generations",
            "settings are written KEY=VALUE, without dashes; hone's name for it is samples_per_prompt",
        ),
        ("--model-name-or-path", "hone's name for it is model.path"),
        ("--samples_per_prompt", "hone's name for it is samples_per_prompt"),
        ("--lr", "hone's name for it is optim.lr"),
        ("--logging_steps", "leave it out: every step is recorded"),
    ],
)
def test_an_option_that_is_a_setting_is_said(run, option, message):
    code, _, err = run("train", "r.yaml", option, "8")
    assert code == 2
    assert f"No such option: {option}" in err
    assert message in err


@pytest.mark.parametrize(
    "verb", ["init a", "reset a", "report a", "verify a", "view a", "runs show a", "config schema"]
)
def test_a_verb_without_settings_recommends_none(run, verb):
    code, _, err = run(*verb.split(), "--optim.lr", "8")
    assert code == 2
    assert "No such option: --optim.lr" in err
    assert "KEY=VALUE" not in err


@pytest.mark.parametrize("verb", ["check a", "eval a", "data show a", "data check a", "config show a", "sample a"])
def test_every_verb_with_settings_says_how_to_write_them(run, verb):
    assert "settings are written KEY=VALUE" in run(*verb.split(), "--optim.lr", "8")[2]


def test_every_line_of_help_fits_80_columns(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for group in ((), ("data",), ("runs",), ("config",)):
        _, out, _ = run(*group, "--help")
        verbs = out[out.index("Commands:") :].splitlines()
        assert len(verbs) > 2
        assert not [line for line in verbs if line.endswith("...") or len(line) > 80]


@pytest.mark.parametrize("verb", ["schema", "presets"])  # more and less than the output buffer holds
def test_a_closed_pipe_is_no_fault(verb):
    reader, writer = os.pipe()
    os.close(reader)  # as `hone config schema | head` does in the end
    command = [sys.executable, "-m", "hone.cli.app", "config", verb]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


# --- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_says_what_is_and_fails_only_on_what_cannot_work(folder, run, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", (doctor.python, doctor.packages, doctor.extras, doctor.writable))
    code, out, _ = run("doctor")
    assert code == 0
    assert {line.split()[0] for line in out.splitlines()} == {"ok"}
    monkeypatch.setattr(doctor, "RANGES", {"torch": ((99, 0), None)})
    code, out, _ = run("doctor")
    assert code == 1
    assert "hone works with >=99.0: pip install 'torch>=99.0'" in out


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize("free, level", [(0.5e9, "fail"), (3e9, "warn"), (50e9, "ok")])
def test_doctor_looks_at_disk_and_memory(folder, monkeypatch, free, level):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, free))
    monkeypatch.setattr("psutil.virtual_memory", lambda: types.SimpleNamespace(available=free if free != 3e9 else 2e9))
    assert [f.level for check in (doctor.disk, doctor.memory) for f in check()] == [level, level]


def test_doctor_finds_a_folder_that_cannot_be_written(folder, monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    (finding,) = doctor.writable()
    assert finding.level == "fail"
    assert "Permission denied" in finding.text


def test_doctor_multiplies_once():
    findings = {f.name: f for f in doctor.device()}
    assert "fail" not in {f.level for f in findings.values()}
    assert "GFLOP/s" in findings["speed"].text
