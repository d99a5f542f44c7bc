"""The page of ``raglane serve`` in a browser: each task answers for itself, at the width of a computer
and of a phone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from playwright.sync_api import Browser, Page, expect

import raglane as rl
from pages.browser import PHONE, WIDE, visit
from raglane.serve import Engine
from raglane.serve.app import create_app
from servers import served

pytestmark = pytest.mark.pages

_SMALL: dict[str, Any] = {"epochs": 1, "hidden_size": 4, "validation_fraction": 0, "threads": 1}
_WALKS = [
    (20 + np.random.default_rng(seed).normal(size=(12, 2))).astype(np.float32) for seed in range(8)
]
_TEXTS = [["the", "cat", "sat"], ["a", "dog", "ran"]] * 4


def _module() -> rl.nn.LSTM:
    torch.manual_seed(0)
    return rl.nn.LSTM(3, 2).eval()


def _models() -> dict[str, Any]:
    torch.manual_seed(0)
    labels: dict[Any, Any] = {
        "classify": ["up", "down"] * 4,
        "regress": [float(walk.mean()) for walk in _WALKS],
        "multilabel": [["a", "b"], ["a"]] * 4,
        "forecast": None,
    }
    models: dict[str, Any] = {
        task: rl.fit(_WALKS, column, task=task, **_SMALL) for task, column in labels.items()
    }
    quantiles: dict[str, Any] = {"loss": "quantile", "quantile": (0.1, 0.5, 0.9)}
    column = labels["regress"]
    models["quantile"] = rl.fit(_WALKS, column, task="regress", **quantiles, **_SMALL)
    models["backwards"] = rl.fit(_WALKS, labels["classify"], bidirectional=True, **_SMALL)
    models["tag"] = rl.fit(_TEXTS, [["x", "y", "z"]] * 8, task="tag", bidirectional=False, **_SMALL)
    models["language"] = rl.fit([" ".join(text) for text in _TEXTS], task="language", **_SMALL)
    models["module"] = _module()
    return models


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(create_app(_models(), max_streams=20)) as where:
        yield f"http://{where}/"


# What the answer to the sample has: texts of the whole sequence, and the names of the live curves.
TASKS: dict[str, tuple[list[str], list[str]]] = {
    "classify": (["class", "probability", "up", "down"], ["down", "up"]),
    "regress": (["number", "prediction"], ["labels"]),
    "quantile": (["q0.1", "q0.5", "q0.9"], ["q0.1", "q0.5", "q0.9"]),
    "multilabel": ([], []),
    "forecast": (["step 1", "step", "x0", "x1", "52"], ["next x0", "next x1"]),
    "tag": (["element", "tag", "cat"], []),
    "language": (["bits for the text"], []),
    "module": (["output 1", "output 2", "40"], ["output 1", "output 2"]),
}


@pytest.mark.parametrize("width", [WIDE, PHONE])
@pytest.mark.parametrize("task", TASKS)
def test_the_sample_of_each_task(browser: Browser, address: str, task: str, width: int) -> None:
    texts, curves = TASKS[task]
    with visit(browser, address, width) as here:
        page = here.page
        page.select_option("#model", task)
        page.click("#predict")
        expect(page.locator("#result > *").first).to_be_visible()
        assert page.locator("#result .error").count() == 0
        for text in texts:
            assert text in page.inner_text("#result")
        page.click("#start")
        # The elements come faster than the page is looked at, so the fourth itself may not be seen.
        expect(page.locator("#now")).to_contain_text(re.compile(r"element ([4-9]|\d{2,})\b"))
        page.click("#stop")
        expect(page.locator("#plot")).to_be_visible(visible=bool(curves))
        expect(page.locator("#plot polyline")).to_have_count(len(curves))
        names = page.locator("#names li")
        assert names.count() >= max(1, len(curves))
        for name, item in zip(curves, names.all_inner_texts(), strict=False):
            assert name in item
        assert here.problems() == []


def _typed(page: Page, text: str) -> str:
    """Return what the page answers to a sequence."""
    page.fill("#sequence", text)
    page.evaluate("document.getElementById('result').replaceChildren()")
    page.click("#predict")
    expect(page.locator("#result > *").first).to_be_visible()
    return page.inner_text("#result")


def test_pasted_tables_and_dates(browser: Browser, address: str) -> None:
    with visit(browser, address, PHONE) as here:
        here.page.select_option("#model", "forecast")
        rows = [f"{20 + step},{21 - step}" for step in range(5)]
        plain = _typed(here.page, "\n".join(rows))
        assert "step 6" in plain
        assert _typed(here.page, "\n".join(["x0,x1", *rows])) == plain
        assert _typed(here.page, "\n".join(rows).replace(",", "\t")) == plain
        assert _typed(here.page, "\n".join(rows).replace(",", " ; ")) == plain
        dated = [f"2024-02-{26 + step:02},{row}" for step, row in enumerate(rows[:3])]
        months = _typed(here.page, "\n".join(["day,x0,x1", *dated]))
        assert "2024-02-29" in months
        assert "2024-03-01" in months
        assert "step" not in months
        hours = [f"2024-02-28 2{step}:30,{row}" for step, row in enumerate(rows[:3])]
        assert "2024-02-28 23:30" in (text := _typed(here.page, "\n".join(hours)))
        assert "2024-02-29 00:30" in text
        assert here.problems() == []


def test_mistakes_and_models_without_streams(browser: Browser, address: str) -> None:
    """Errors look like errors; those of the server fail a request, which the console notes."""
    with visit(browser, address) as here:
        page = here.page
        page.select_option("#model", "classify")
        for text in ("1,2\n3,four", "[[1, 2", ""):
            assert _typed(page, text) != ""
            expect(page.locator("#result .error[role=alert]")).to_be_visible()
        assert here.problems() == []
        assert "shape" in _typed(page, "1,2,3")
        expect(page.locator("#result .error")).to_be_visible()
        page.click("#start")
        expect(page.locator("#now .error")).to_contain_text("frames must be")
        page.select_option("#model", "backwards")
        expect(page.locator("#reason")).to_contain_text("reads sequences from the end")
        expect(page.locator("#stream")).to_be_hidden()


def test_a_token(browser: Browser) -> None:
    app = create_app({"lstm": rl.nn.LSTM(3, 2).eval()}, max_streams=2, token="secret")
    with served(app) as where, visit(browser, f"http://{where}/", PHONE) as here:
        assert "token" in _typed(here.page, "1,2,3")
        here.page.fill("#token", "secret")
        assert "output 1" in _typed(here.page, "1,2,3")
        here.page.click("#start")
        expect(here.page.locator("#now")).to_contain_text(re.compile(r"element ([2-9]|\d{2,})\b"))
        assert here.too_wide() <= 0


def test_the_client_in_javascript(browser: Browser, address: str) -> None:
    """That of the page of the protocol, with another address and size of a frame."""
    text = (Path(__file__).parents[2] / "docs" / "streams.md").read_text()
    code = text.partition("```js\n")[2].partition("```")[0]
    for old, new in (
        ("ws://127.0.0.1:8000/streams?model=voice", f"ws{address[4:]}streams?model=module"),
        ("new Float32Array(512)", "new Float32Array([1, -2, 3, 4, 5, -6])"),
        ("console.log(probabilities)", "window.answers.push(...probabilities)"),
    ):
        assert old in code
        code = code.replace(old, new)
    code += "streams.say({ stream: 7, state: true }); streams.say({ stream: 8, state: true });\n"
    code += "window.calls = streams.calls;"
    with visit(browser, address) as here:
        here.page.evaluate(f"async () => {{ window.answers = []; {code} }}")
        here.page.wait_for_function("window.answers.length === 4 && window.calls.get(7).state")
        answers = here.page.evaluate("window.answers")
        assert here.page.evaluate("window.calls.get(7).state.at") == 2
        assert here.errors == []
    frames = rl.Ragged([torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]])])
    out = Engine(_module(), max_streams=1).run(frames).values
    assert answers == out.flatten().tolist()


@pytest.mark.parametrize("width", [WIDE, PHONE])
def test_the_routes(browser: Browser, address: str, width: int) -> None:
    with visit(browser, f"{address}docs", width) as here:
        assert "/v2/models/{name}/infer" in here.page.inner_text("main")
        assert here.problems() == []
