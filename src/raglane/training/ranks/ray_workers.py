"""Ranks on a Ray cluster: Ray Train starts them, and restarts all of them if one dies.

The first rank writes the files of the run to a folder that all machines share. Restarted ranks
resume from ``last``.
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

from raglane._utils.messages import argument, current_flags, flags, quote, require
from raglane.errors import ArgumentError, RaglaneError
from raglane.training.folder import LAST, repair
from raglane.training.job import Job, TrainingResult
from raglane.training.ranks import Ranks, lost
from raglane.training.state import Callback, Totals, TrainingState, load_state
from raglane.training.trainer import Trainer

# The number of starts of the workers.
_ATTEMPTS = 4
# Seconds between two checks of their messages.
_POLL = 0.2
# The files of Ray, in the folder of the run, which all machines share.
_OWN = ".ray"


def connected() -> Any:
    """Return ``ray``, connected to the cluster of the environment or this machine; start one if
    there is none.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    ray = require("ray", "ray")
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        except ConnectionError:
            ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    return ray


def check_machines(ray: Any, folder: Path, given_as: str) -> None:
    """Raise if a machine of the cluster lacks this version of Raglane, or does not share the
    folder.
    """
    machines = [machine for machine in ray.nodes() if machine["Alive"]]
    if len(machines) < 2:
        return
    pinned = require("ray.util.scheduling_strategies", "ray").NodeAffinitySchedulingStrategy
    look = ray.remote(num_cpus=0, max_retries=0)(_look)
    answers = [
        look.options(scheduling_strategy=pinned(machine["NodeID"], soft=False)).remote(
            str(folder.absolute())
        )
        for machine in machines
    ]
    for machine, answer in zip(machines, answers, strict=True):
        name = machine["NodeManagerHostname"]
        try:
            content, sees = ray.get(answer)
        except Exception as error:
            # E.g. Raglane cannot be imported there; the last line of Ray's message has the reason.
            content = f"none that can be imported ({(str(error).strip() or 'no reason').splitlines()[-1]})"
            sees = True
        if content != version("raglane"):
            got = f"the machine {name}, with Raglane {content}"
            rule = f"Raglane {version('raglane')} on every machine"
            fix = "install it there, or pass Ray a runtime_env that does"
            raise ArgumentError("engine", got, rule, fix)
        if not sees:
            got = f"{quote(str(folder.parent))}, which does not exist on the machine {name}"
            rule = "a folder on storage that all machines share"
            fix = f"pass another {argument(given_as)}"
            raise ArgumentError(given_as, got, rule, fix)


def _look(folder: str) -> tuple[str, bool]:
    """Return the version of Raglane on a machine, and True if a folder exists there."""
    return version("raglane"), os.path.isdir(folder)


class _Mailbox:
    """An actor that stores the messages of workers until the waiting process takes them."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, ...]] = []
        self.error: BaseException | None = None

    def put(self, *words: Any) -> None:
        self._kept.append(words)

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error

    def failed(self) -> BaseException | None:
        return self.error

    def take(self) -> list[tuple[Any, ...]]:
        """Return the messages since the last call."""
        messages = self._kept
        self._kept = []
        return messages


class _Reporter(Callback):
    """Reports progress to Ray, on all ranks at the same steps, and to the waiting process."""

    def __init__(self, ranks: Ranks, messages: Any, folder: Path) -> None:
        self._ranks = ranks
        self._messages = messages
        self._folder = folder
        self._batches = 0

    def _send(self, *words: Any) -> None:
        if self._ranks.is_first:
            self._messages.put.remote(*words)

    def started(self, state: TrainingState, epochs: int, batches: int) -> None:
        self._batches = batches
        self._send("started", state, epochs, batches)

    def batch_done(self, epoch: int, batch: int, totals: Totals) -> None:
        """Report in the middle of an epoch."""
        if batch == (self._batches + 1) // 2:
            from ray import train

            train.report({"epoch": epoch, "batch": batch, "train_loss": totals.mean_loss})
            self._send("batch_done", epoch, batch, Totals(**totals.to_config()))

    def epoch_done(self, row: dict[str, float], is_best: bool) -> None:
        from ray import train

        train.report(dict(row))
        self._send("epoch_done", row, is_best)


def _worker(config: dict[str, Any]) -> None:
    """Run the job as a worker of Ray."""
    import ray
    from ray import train

    context = train.get_context()
    # Each worker has one visible GPU, so `local` is 0.
    ranks = Ranks(context.get_world_rank(), context.get_world_size())
    messages = config["messages"]
    job: Job = ray.get(config["job"][0])
    if job.folder is None:
        raise ValueError("a run without a folder")
    with flags(config["flags"]):
        try:
            if ranks.is_first:
                # A previous worker may have been killed while it wrote.
                repair(job.folder)
            ranks.from_first(None)
            resume = job.resume or (job.folder / LAST).exists()
            Trainer(
                replace(job, resume=resume), ranks, _Reporter(ranks, messages, job.folder)
            ).run()
        except (RaglaneError, OSError) as error:
            if not ranks.is_lost(error) and "LostRank" not in type(error).__name__:
                ray.get(messages.fail.remote(error))
            raise


def launch_on_ray(job: Job, callback: Callback | None = None) -> TrainingResult:
    """Run a training in workers of a Ray cluster."""
    folder = job.folder
    if folder is None:
        raise ArgumentError(
            "out",
            "None",
            "a folder that all machines of the cluster share",
            f"pass {argument('out')}",
        )
    ray = connected()
    require("ray.train.torch", "ray")
    messages = ray.remote(num_cpus=0)(_Mailbox).remote()
    ray_folder = folder / _OWN
    try:
        ray_folder.mkdir(exist_ok=True)
        check_machines(ray, ray_folder, "out")
        shared = ray.put(replace(job, folder=folder.absolute()))
        config = {"messages": messages, "flags": current_flags(), "job": [shared]}
        with _receiving(ray, messages, callback):
            for _ in range(_ATTEMPTS):
                error = _fit(job, config, ray_folder.absolute())
                failure = ray.get(messages.failed.remote())
                if failure is not None:
                    raise failure
                if error is None:
                    break
            else:
                raise lost(f"workers that died in {_ATTEMPTS} attempts", folder) from error
    finally:
        shutil.rmtree(ray_folder, ignore_errors=True)
        ray.kill(messages)
    return TrainingResult(folder, job.settings.terms.metric, load_state(folder / LAST)[0])


def _fit(job: Job, config: dict[str, Any], ray_folder: Path) -> BaseException | None:
    """Start the workers once; return the error if they fail."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from raglane.training.inference import pick_device

    settings = job.settings
    on_gpus = settings.device == "cuda" or pick_device(settings.device).type == "cuda"
    trainer = TorchTrainer(
        _worker,
        train_loop_config=config,
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if on_gpus else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=settings.processes,
            use_gpu=on_gpus,
            resources_per_worker={"CPU": settings.threads or 1} | ({"GPU": 1} if on_gpus else {}),
        ),
        run_config=RunConfig(name="run", storage_path=str(ray_folder)),
    )
    try:
        trainer.fit()
    except Exception as error:
        return error
    return None


@contextmanager
def _receiving(ray: Any, messages: Any, callback: Callback | None) -> Any:
    """Pass messages of the workers to the callback while the context is open."""
    ended = threading.Event()

    def receive() -> None:
        while True:
            last = ended.wait(_POLL)
            with suppress(Exception):
                for method, *arguments in ray.get(messages.take.remote()):
                    getattr(callback, method)(*arguments)
            if last:
                return

    listener = threading.Thread(target=receive, daemon=True)
    if callback is not None:
        listener.start()
    try:
        yield
    finally:
        ended.set()
        if callback is not None:
            listener.join(10)
