"""``raglane sample``: text from a language model."""

from __future__ import annotations

from typing import Annotated

import typer

from raglane.cli import console, options
from raglane.training.options import RUN

_Prompt = Annotated[str, typer.Option(help="How each text begins.", show_default=False, rich_help_panel=RUN)]
_Count = Annotated[int, typer.Option(help="How many texts.", rich_help_panel=RUN)]
_Length = Annotated[int, typer.Option(help="The most tokens that are drawn for a text.", rich_help_panel=RUN)]
_Temperature = Annotated[
    float, typer.Option(help="Below 1 the likely becomes likelier; 0 takes the likeliest.", rich_help_panel=RUN)
]
_Seed = Annotated[int, typer.Option(help="Of the draw.", rich_help_panel=RUN)]


@options.command
def sample(
    run: options.Run,
    *,
    prompt: _Prompt = "",
    count: _Count = 5,
    length: _Length = 200,
    temperature: _Temperature = 1.0,
    seed: _Seed = 0,
    device: options.Device = "auto",
    cell: options.Cell = None,
    debug: options.Debug = False,  # noqa: ARG001
) -> None:
    """Draw text from the best model of a run of the task language: one text per line.

    For example:

    raglane sample runs/names --count 10 --temperature 0.8

    raglane sample runs/novel --prompt "It was" --length 500
    """
    from raglane.training import sampling
    from raglane.training.checkpoint import load_model
    from raglane.training.folder import tidy
    from raglane.training.inference import pick_device

    where = pick_device(device)
    tidy(run)
    texts = sampling.sample(
        load_model(run, cell),
        prompt=prompt,
        count=count,
        length=length,
        temperature=temperature,
        seed=seed,
        device=where,
    )
    for text in texts:
        console.say(text)
