"""The verbs that use a model: `hone eval`, `hone sample`, `hone serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hone.cli.arguments import Checkpoint, Target, load_recipe


def evaluate(
    recipe: Target,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL | KEY=VALUE]...",
            show_default=False,
            help="Runs, checkpoints, Hugging Face folders or ids, or URL#model of an OpenAI-compatible endpoint "
            "(default: the recipe's own model), and settings such as eval.samples=32.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; another seed gives an independent sample.")] = 0,
    k: Annotated[str, typer.Option(help="Values of k for pass@k, such as 1,8,32; default: powers of 2.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder to append to; default: `evaluations` in the run.")] = None,
    answerer: Annotated[
        str | None, typer.Option(help="A frozen model that answers, given the evaluated model's reasoning.")
    ] = None,
    gold_perplexity: Annotated[
        bool, typer.Option("--gold-perplexity", help="Also measure the perplexity of the gold answers.")
    ] = False,
) -> None:
    """Evaluate models on the same held-out problems, with intervals.

    Settings come from the recipe's eval section. Every sample is kept and none is drawn twice, so the same command
    continues an interrupted evaluation.
    """
    from hone.base.settings import UserError

    arguments = models or []
    overrides = [one for one in arguments if "=" in one and not one.startswith((".", "/", "~")) and "://" not in one]
    models_ = [one for one in arguments if one not in overrides]
    loaded = load_recipe(recipe, overrides)
    if not all(part.strip().isdigit() for part in k.split(",") if k):
        raise UserError(f"--k {k}: give whole numbers, such as 1,8,32")
    if answerer is not None:
        if len(models_) > 1 or seed or k or gold_perplexity:
            raise UserError("--answerer: takes one model, and no --seed, --k or --gold-perplexity; remove them")
        from hone.measure.two_model import cli_two_model
        from hone.recipe.recipe import stages_of
        from hone.runs.layout import which_model

        checkpoint = Path(models_[0]) if models_ else None
        stage, path = which_model(stages_of(loaded), Path(loaded.runs) / loaded.name, checkpoint)
        cli_two_model(stage, path, answerer, out)
        return
    from hone.measure.run import cli_eval

    ks = [int(part) for part in k.split(",") if part]
    cli_eval(loaded, models_, seed=seed, ks=ks, out=out, score_gold=gold_perplexity)


AnyModel = Annotated[
    str, typer.Argument(metavar="MODEL", help="A recipe, a run folder, a checkpoint, a model folder or a hub id.")
]
HowSampled = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings such as eval.sampling.temperature=0.6.")
]


def sample(
    model: AnyModel,
    overrides: HowSampled = None,
    checkpoint: Checkpoint = None,
    problems: Annotated[int | None, typer.Option(min=1, help="Answer this many problems of the recipe's task.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Chat with the model; Ctrl-D ends the chat.")] = False,
    prompt: Annotated[str | None, typer.Option(help="Answer this.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Answer each line (or .jsonl row); continues an existing --out.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The .jsonl file for the answers to --file.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="The run's checkpoint of this step, as in RUN@STEP.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Answers per prompt of --file.")] = 1,
    seed: Annotated[int | None, typer.Option(min=0, help="Default: the recipe's.")] = None,
) -> None:
    """Sample answers from a model.

    To problems of its task, in a chat, to one prompt, or to a file of prompts.
    """
    from hone.base.settings import UserError

    ways = [
        name
        for name, value in (("--problems", problems), ("--chat", chat), ("--prompt", prompt), ("--file", file))
        if value not in (None, False)
    ]
    if len(ways) > 1:
        raise UserError(f"{' and '.join(ways)}: give only one of them")
    if (file is None) != (out is None):
        raise UserError("--file (prompts) and --out (answers) go together: give both")
    if samples > 1 and file is None:
        raise UserError("--samples has no effect without --file")
    if step is not None and (checkpoint is not None or "@" in model):
        raise UserError(f"--step {step}: the checkpoint is named already; give it only once")

    from hone.serve import sample as verb
    from hone.serve.model import load_served

    prompts = verb.read_prompts(file) if file is not None else []
    model_ = load_served(model if step is None else f"{model}@{step}", overrides or (), checkpoint)
    seed = model_.stage.seed if seed is None else seed
    if prompt is not None:
        verb.answer_one(model_, prompt, seed)
    elif out is not None:
        verb.answer_file(model_, prompts, out, samples, seed)
    elif chat or (not ways and model_.task is None):
        verb.chat(model_, seed)
    else:
        verb.show_problems(model_, problems or 2)


def serve(
    model: AnyModel,
    overrides: HowSampled = None,
    checkpoint: Checkpoint = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    host: Annotated[str, typer.Option(help="The default is reachable from this machine only.")] = "127.0.0.1",
) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API.

    Until Ctrl-C.
    """
    from hone.serve.server import serve as run

    run(model, overrides or (), checkpoint, host, port)
