"""Ranks on a Ray cluster: Ray Train starts them, and starts them again where one is lost.

The files of the run are those of any other: the first rank writes them, so the folder is on a disk that all machines
see, and what went on before a loss goes on from ``last``.
"""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from raglane._utils.messages import argument, current_flags, flags, message, quote, require
from raglane.errors import ArgumentError, RaglaneError
from raglane.training.folder import LAST, repair
from raglane.training.job import Job, TrainingResult
from raglane.training.ranks import Ranks, lost
from raglane.training.state import Totals, TrainingState, Watcher, load_state
from raglane.training.tasks import TASKS
from raglane.training.trainer import Trainer

# How often workers are started again, and seconds between two looks at how far they are.
_ATTEMPTS, _LOOK = 4, 0.2
# Where Ray keeps what it wants to, in the folder of the run: all machines see that.
_OWN = ".ray"


def connected() -> Any:
    """Ray, connected to the cluster that the environment or this machine has, or to one that is started here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    ray = require("ray", "ray")
    if not ray.is_initialized():
        quiet = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        except ConnectionError:
            ray.init(**quiet)
    return ray


def check_machines(ray: Any, folder: Path, given_as: str) -> None:
    """Refuse a cluster of which a machine lacks this version of Raglane, or a folder that all machines must share."""
    machines = [machine for machine in ray.nodes() if machine["Alive"]]
    if len(machines) < 2:
        return
    pinned = require("ray.util.scheduling_strategies", "ray").NodeAffinitySchedulingStrategy
    look = ray.remote(num_cpus=0, max_retries=0)(_look)
    answers = [
        look.options(scheduling_strategy=pinned(machine["NodeID"], soft=False)).remote(str(folder.absolute()))
        for machine in machines
    ]
    for machine, answer in zip(machines, answers, strict=True):
        name = machine["NodeManagerHostname"]
        try:
            found, sees = ray.get(answer)
        except Exception as error:
            # Also where Raglane cannot be imported, of which Ray tells in many lines.
            found, sees = f"none that can be imported ({(str(error).strip() or 'no reason').splitlines()[-1]})", True
        if found != version("raglane"):
            got, rule = f"the machine {name}, with Raglane {found}", f"on machines with Raglane {version('raglane')}"
            fix = "install that version there, or pass Ray a runtime_env that installs it"
            raise ArgumentError(message("engine", got, rule, fix))
        if not sees:
            got = f"{quote(str(folder.parent))}, which the machine {name} does not find"
            rule, fix = "a folder on storage shared by all machines", f"give another {argument(given_as)}"
            raise ArgumentError(message(given_as, got, rule, fix))


def _look(folder: str) -> tuple[str, bool]:
    """The version of Raglane of a machine, and whether it sees a folder."""
    return version("raglane"), os.path.isdir(folder)


class _Messages:
    """The messages of workers, kept by an actor of its own until the waiting process takes them."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, ...]] = []
        self.error: BaseException | None = None

    def tell(self, *words: Any) -> None:
        self._kept.append(words)

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error

    def failed(self) -> BaseException | None:
        return self.error

    def take(self) -> list[tuple[Any, ...]]:
        """The messages since the last call."""
        kept, self._kept = self._kept, []
        return kept


class _Reporter:
    """Tells Ray how far a rank is, which each of them does at the same moments, and the waiting process besides."""

    def __init__(self, ranks: Ranks, messages: Any, folder: Path) -> None:
        self._ranks, self._messages, self._folder = ranks, messages, folder
        self._batches = 0

    def _tell(self, *words: Any) -> None:
        if self._ranks.is_first:
            self._messages.tell.remote(*words)

    def started(self, state: TrainingState, epochs: int, batches: int) -> None:
        self._batches = batches
        self._tell("started", state, epochs, batches)

    def batch_done(self, epoch: int, batch: int, totals: Totals) -> None:
        """A batch is done; in the middle of an epoch all ranks report."""
        if batch == (self._batches + 1) // 2:
            from ray import train

            train.report({"epoch": epoch, "batch": batch, "train_loss": totals.mean_loss})
            self._tell("batch_done", epoch, batch, Totals(**totals.to_config()))

    def epoch_done(self, row: dict[str, float], is_best: bool) -> None:
        from ray import train

        train.report(dict(row))
        self._tell("epoch_done", row, is_best)


def _worker(config: dict[str, Any]) -> None:
    """The part of a worker."""
    import ray
    from ray import train

    context = train.get_context()
    # Of the GPUs Ray shows each worker its own.
    ranks = Ranks(context.get_world_rank(), context.get_world_size())
    messages = config["messages"]
    job: Job = ray.get(config["job"][0])
    if job.folder is None:
        raise ValueError("a run without a folder")
    with flags(config["flags"]):
        try:
            if ranks.is_first:
                # A worker before this one may have been killed while it wrote.
                repair(job.folder)
            ranks.from_first(None)
            resume = job.resume or (job.folder / LAST).exists()
            Trainer(replace(job, resume=resume), ranks, _Reporter(ranks, messages, job.folder)).run()
        except (RaglaneError, OSError) as error:
            if not ranks.is_lost(error) and "LostRank" not in type(error).__name__:
                ray.get(messages.fail.remote(error))
            raise


def launch_on_ray(job: Job, watcher: Watcher | None = None) -> TrainingResult:
    """Do a training in workers of a Ray cluster."""
    folder = job.folder
    if folder is None:
        rule = "a folder that all workers of the cluster share"
        raise ArgumentError(message("out", "None", rule, f"give {argument('out')}"))
    ray = connected()
    require("ray.train.torch", "ray")
    messages = ray.remote(num_cpus=0)(_Messages).remote()
    own = folder / _OWN
    try:
        own.mkdir(exist_ok=True)
        check_machines(ray, own, "out")
        given = {
            "messages": messages,
            "flags": current_flags(),
            "job": [ray.put(replace(job, folder=folder.absolute()))],
        }
        with _heard(ray, messages, watcher):
            for _ in range(_ATTEMPTS):
                error = _fit(job, given, own.absolute())
                told = ray.get(messages.failed.remote())
                if told is not None:
                    raise told
                if error is None:
                    break
            else:
                raise lost("workers that were lost again and again", folder) from error
    finally:
        shutil.rmtree(own, ignore_errors=True)
        ray.kill(messages)
    state = load_state(folder / LAST)[0]
    return TrainingResult(folder, TASKS[job.settings.task].terms(job.settings)[0], state)


def _fit(job: Job, given: dict[str, Any], own: Path) -> BaseException | None:
    """Let Ray train once; gives the error with which that ended."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from raglane.training.inference import pick_device

    settings = job.settings
    on_gpus = settings.device == "cuda" or pick_device(settings.device).type == "cuda"
    trainer = TorchTrainer(
        _worker,
        train_loop_config=given,
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if on_gpus else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=settings.ranks,
            use_gpu=on_gpus,
            resources_per_worker={"CPU": settings.threads or 1} | ({"GPU": 1} if on_gpus else {}),
        ),
        run_config=RunConfig(name="run", storage_path=str(own)),
    )
    try:
        trainer.fit()
    except Exception as error:
        return error
    return None


@contextmanager
def _heard(ray: Any, messages: Any, watcher: Watcher | None) -> Any:
    """Within it a watcher hears what the workers tell."""
    ended = threading.Event()

    def hear() -> None:
        while True:
            last = ended.wait(_LOOK)
            with suppress(Exception):
                for what, *said in ray.get(messages.take.remote()):
                    getattr(watcher, what)(*said)
            if last:
                return

    listener = threading.Thread(target=hear, daemon=True)
    if watcher is not None:
        listener.start()
    try:
        yield
    finally:
        ended.set()
        if watcher is not None:
            listener.join(10)
