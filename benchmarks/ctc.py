"""Beam search for CTC against flashlight-text and pyctcdecode, each in an environment of its own.

    python benchmarks/ctc.py --python OTHER/bin/python > benchmarks/results/ctc.md

OTHER is an environment with flashlight-text, pyctcdecode and kenlm. It gets the same
log-probabilities, and the decoders take turns. All return the best hypothesis of each item, in one
thread, because the other decoders have one. flashlight-text sums over alignments (``log_add``),
with the 100 likeliest tokens of each step. pyctcdecode has its default pruning: only tokens above
exp(-5), and prefixes within exp(-10) of the best. This library prunes nothing but the beam. Times
are medians of the processor's time, which other programs on the machine hardly change. "as likely"
counts the items whose best hypothesis has at least the score of the other's, computed from all
alignments.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

PEERS = ("flashlight-text", "pyctcdecode")
Decoded = list[list[int]]


def items(classes: int, count: int, longest: int) -> list[Any]:
    """Return log-probabilities ``(T, C)`` like those of a model: most steps have one likely token,
    7 of 10 a blank.
    """
    random = np.random.default_rng(classes)
    found = []
    for length in random.integers(longest // 4, longest + 1, count):
        logits = random.standard_normal((length, classes))
        likely = np.where(random.random(length) < 0.7, 0, random.integers(1, classes, length))
        logits[np.arange(length), likely] += random.uniform(2, 12, length)
        found.append((logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32))
    return found


# -- in the other environment
# ------------------------------------------------------------------------------------------


def flashlight(batch: list[Any], beam: int, arpa: str) -> Callable[[], Decoded]:
    """Return a search by flashlight-text, with bigrams if there is a file of them."""
    from flashlight.lib.text import decoder
    from flashlight.lib.text.dictionary import Dictionary

    classes = batch[0].shape[1]
    options = decoder.LexiconFreeDecoderOptions(
        beam_size=beam,
        beam_size_token=min(classes, 100),
        beam_threshold=1e9,
        lm_weight=0.5 * math.log(10) if arpa else 0.0,  # kenlm returns logarithms to base 10
        sil_score=0.0,
        log_add=True,
        criterion_type=decoder.CriterionType.CTC,
    )
    model = decoder.ZeroLM()
    if arpa:
        from flashlight.lib.text.decoder.kenlm import KenLM

        words = Dictionary()
        for token in range(classes):
            words.add_entry(f"t{token}", token)
        model = KenLM(arpa, words)
    search = decoder.LexiconFreeDecoder(options, model, -1, 0, [])

    def decode() -> Decoded:
        found = []
        for rows in batch:
            path = np.array(search.decode(rows.ctypes.data, *rows.shape)[0].tokens)[1:-1]
            starts = path[np.insert(path[1:] != path[:-1], 0, True)]
            found.append(starts[starts > 0].tolist())
        return found

    return decode


def pyctcdecode(batch: list[Any], beam: int, arpa: str) -> Callable[[], Decoded]:
    """Return a search by pyctcdecode."""
    from pyctcdecode import build_ctcdecoder

    if arpa:
        raise SystemExit("pyctcdecode has n-grams of words only")
    first = 0x4E00
    search = build_ctcdecoder(["", *(chr(first + token) for token in range(1, batch[0].shape[1]))])
    return lambda: [
        [ord(sign) - first for sign in search.decode_beams(rows, beam_width=beam)[0][0]]
        for rows in batch
    ]


def serve(peer: str, data: str, beam: int, arpa: str) -> None:
    """Decode once per line of the input, and print seconds and results."""
    with np.load(data) as stored:
        batch = [stored[name] for name in stored.files]
    decode = (flashlight if peer == PEERS[0] else pyctcdecode)(batch, beam, arpa)
    print(importlib.metadata.version(peer), flush=True)
    for _ in sys.stdin:
        begun = time.process_time()
        found = decode()
        print(json.dumps([time.process_time() - begun, found]), flush=True)


# -- here
# --------------------------------------------------------------------------------------------------


def write_arpa(ngram: Any, path: Path) -> None:
    """Write a bigram model in the format of ARPA, with the symbols t0, t1, ..., <s> and </s>."""
    grams, end = ngram._grams, ngram.num_tokens
    names = [*(f"t{token}" for token in range(end)), "</s>"]
    first, tokens = grams.first.tolist(), grams.tokens.tolist()
    chances, backoff = (
        (grams.log_probs / np.log(10)).tolist(),
        (grams.backoff / np.log(10)).tolist(),
    )
    following = grams.next.tolist()
    state = {token: following[token] for token in range(end + 1) if following[token]}
    ones = [
        f"{chances[t]:.6f}\t{names[t]}\t{backoff[state[t]] if t in state else 0:.6f}"
        for t in range(end + 1)
    ]
    ones.append(f"-99\t<s>\t{backoff[grams.begin]:.6f}")
    contexts = {place: names[token] for token, place in state.items()} | {grams.begin: "<s>"}
    twos = [
        f"{chances[gram]:.6f}\t{name} {names[tokens[gram]]}"
        for place, name in contexts.items()
        for gram in range(first[place], first[place + 1])
    ]
    counts = f"\\data\\\nngram 1={len(ones)}\nngram 2={len(twos)}\n"
    path.write_text(
        "\n".join([counts, "\\1-grams:", *ones, "", "\\2-grams:", *twos, "", "\\end\\", ""])
    )


def exact_scores(log_probs: Any, tokens: Any, ngram: Any) -> Any:
    """Return the scores of token sequences, summed over all alignments, ``(B,)``."""
    import torch

    import raglane as rl

    scores = -rl.transduction.ctc_loss(log_probs, tokens, reduction="none")
    if ngram is not None:
        prefixes = [one[:place] for one in tokens for place in range(len(one))]
        chances = ngram(
            rl.Ragged([torch.zeros(0, dtype=torch.int64), *prefixes])[1:], tokens.values
        )
        scores = scores + 0.5 * tokens.with_values(chances).sum()
    return scores


def compare(
    folder: Path, python: str, sizes: tuple[int, int, int, int], grams: bool, rounds: int
) -> Iterator[str]:
    """Yield a line of the table per other decoder."""
    import torch

    import raglane as rl

    classes, beam, count, longest = sizes
    batch = items(classes, count, longest)
    data, arpa = folder / "items.npz", folder / "grams.arpa"
    np.savez(data, *batch)
    ngram = None
    if grams:
        texts = np.random.default_rng(1).integers(1, classes, (500, 30)).tolist()
        ngram = rl.transduction.NGram(texts, classes, n=2)
        write_arpa(ngram, arpa)
    search = rl.transduction.CTCBeamSearch(beam_size=beam, scorer=ngram, scorer_weight=0.5)
    torch.set_num_threads(1)
    ragged = rl.Ragged([torch.from_numpy(rows) for rows in batch])
    for peer in PEERS[: 1 if grams else None]:
        command = [
            python,
            __file__,
            "--serve",
            peer,
            str(data),
            str(beam),
            str(arpa) if grams else "",
        ]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdin is not None
            assert other.stdout is not None
            version = other.stdout.readline().strip()
            times: dict[str, list[float]] = {peer: [], "own": []}
            for _ in range(rounds):
                other.stdin.write("\n")
                other.stdin.flush()
                seconds, theirs = json.loads(other.stdout.readline())
                times[peer].append(seconds)
                begun = time.process_time()
                found = search(ragged)
                times["own"].append(time.process_time() - begun)
            other.stdin.close()
        own, other_scores = (
            exact_scores(ragged, tokens, ngram) for tokens in (found.best(), rl.Ragged(theirs))
        )
        same = int((own >= other_scores - 1e-3).sum())
        medians = [np.median(listed) * 1e3 for listed in times.values()]
        yield (
            f"| {classes:,} | {beam} | {'bigrams' if grams else 'none'} | {peer} {version} | {medians[0]:,.0f} |"
            f" {medians[1]:,.0f} | {medians[0] / medians[1]:.0f} | {same} of {count} |"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", help="the interpreter of the other environment")
    parser.add_argument("--rounds", type=int, default=3, help="of all decoders (default: 3)")
    parser.add_argument("--items", type=int, default=32, help="sequences (default: 32)")
    parser.add_argument(
        "--longest", type=int, default=400, help="steps of the longest; at least a quarter of it"
    )
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        peer, data, beam, arpa = options.serve
        return serve(peer, data, int(beam), arpa)
    from raglane.native.machine import cpu_name

    lines = [
        "# Beam search for CTC\n",
        f"`python benchmarks/ctc.py --python OTHER/bin/python`: {cpu_name()}. {options.items} items of"
        f" {options.longest // 4} to {options.longest} steps, one thread, milliseconds of processor time for all.\n",
        "| classes | beam | n-grams | other | other | raglane | ratio | as likely |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    with TemporaryDirectory() as folder:
        for grams in (False, True):
            for classes in (32, 1000):
                for beam in (16, 100):
                    sizes = (classes, beam, options.items, options.longest)
                    lines += compare(Path(folder), options.python, sizes, grams, options.rounds)
    print("\n".join(lines))
    return None


if __name__ == "__main__":
    main()
