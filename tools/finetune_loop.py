"""The loop of a fine-tuning: epochs, checkpoints, and the way back after a kill, too little memory, or values that are
not finite."""

from __future__ import annotations

import gc
import math
import time as clock
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgeyolo.errors import DeviceError, InvalidInput

from .export import Export
from .finetune_options import NBS, FineTuneOptions
from .finetune_setup import Progress, Setup, Told
from .metrics import Metrics
from .publish import Publication
from .train import snapshot
from .train.augment import Batch
from .train.checkpoint import load_for_training, load_resume, rng_state, save_checkpoint, save_resume, set_rng_state
from .train.clock import Clock
from .train.curves import save_curves
from .train.evaluate import Validation
from .train.flat import ParamGroup
from .train.log import RunLog, described, losses, means
from .train.schedule import warm_up_and_decay
from .train.step import TrainStep, detection_step
from .train.watch import Diverged, NotFinite, Watch, find, out_of_memory

__all__ = ["FineTune", "Loop"]

BEST, LAST, RESUME = "best.pt", "last.pt", "resume.state"
WEIGHT_DECAY = 5e-4
LOOK_STEPS, LOOK_SECONDS = 50, 2.0  # between two looks at the device
VALIDATION_BATCH = 16
ROUNDING = 0.002  # of mAP: what saving in half precision moves it on a few pictures


@dataclass(frozen=True)
class FineTune:
    """A finished run. best: the checkpoint with the best mAP50-95. metrics: of that file, measured at the end.
    start: mAP of the weights that the run began with. history: a row for each epoch. export, publication: where asked
    for; no publication where the export did not pass its gate, or where the start was better."""

    folder: Path
    best: Path
    last: Path
    metrics: Metrics
    start: Mapping[str, float]
    history: tuple[Mapping[str, Any], ...]
    export: Export | None = None
    publication: Publication | None = None

    def worse(self) -> str:
        """What to say where the start was better; without labels to measure on nothing was."""
        now, before = self.metrics.map50_95, self.start.get("map50_95", math.nan)
        return f"mAP50-95 is {now:.4f}, less than {before:.4f} at the start" if now < before - ROUNDING else ""


class Loop:
    """epoch, position: how many epochs, and how many batches of the one after them, are done."""

    step: TrainStep

    def __init__(
        self, setup: Setup, options: FineTuneOptions, folder: Path, begun: float, save_seconds: float, log: RunLog,
        say: Told, show: Progress,
    ) -> None:  # fmt: skip
        self.setup, self.options, self.folder = setup, options, folder
        self.log, self.say, self.show = log, say, show
        self.epoch = self.position = 0
        self.batch, self.amp, self.epochs = setup.batch, setup.amp, setup.epochs  # may change on the way
        self.best, self.start = -math.inf, dict[str, float]()
        self.history: list[dict[str, Any]] = []
        self.begun, self.save_seconds = begun, save_seconds
        self.closed = self.saved = clock.monotonic()  # when the last epoch ended, when the state was saved
        self.on_data = Clock(setup.device)
        self.safe: dict[str, Any] = {}  # the state at the epoch's begin, where a recovery begins

    def run(self) -> FineTune:
        self.make_step(self.safe.get("step"))
        self.closed = clock.monotonic()
        while self.epoch < self.epochs or not self.start:
            wrong: Exception | None = None
            try:
                if not self.start:
                    self.measure_start()
                    continue
                pictures, seconds = self.train_epoch()
                metrics = self.measure(f"epoch {self.epoch + 1}")
            except Exception as error:
                if not isinstance(error, NotFinite) and not out_of_memory(error):
                    raise
                # Its traceback holds frames, and these the memory that the next try needs.
                wrong = error.with_traceback(None)
            if isinstance(wrong, NotFinite):
                self.leave_half_precision(wrong)
            elif wrong is not None:
                self.halve_batch()
            else:
                self.close_epoch(metrics, pictures, seconds)
        return self.finish()

    def measure_start(self) -> None:
        self.start = means(self.measure("the start"))
        self.say(f"start: {described(self.start)}")
        self.safe = self.state()
        self.save(self.safe)
        self.closed = clock.monotonic()

    def train_epoch(self) -> tuple[int, float]:
        """The rest of an epoch: pictures and seconds. Nothing in it waits for the device but a look now and then."""
        watch, first = Watch(self.step), self.position
        begun = looked = clock.monotonic()
        self.on_data.restart()
        for number, batch, update in self.batches():
            self.step(*batch, update=update)
            self.position += 1
            done, now, last = self.position - first, clock.monotonic(), self.position == self.steps
            if last or done % LOOK_STEPS == 0 or now - looked > LOOK_SECONDS or not self.save_seconds:
                values, looked = watch.look(), clock.monotonic()
                rate = done * self.batch / (looked - begun)
                self.log.steps({"step": number + 1, "loss": values["total"], "norm": values["norm"], "rate": rate})
                self.show(f"epoch {self.epoch + 1} of {self.epochs}", self.position, self.steps, rate)
                if not last and looked - self.saved >= self.save_seconds:
                    self.save(self.state())
                if not last and self.seconds_left() < 0:
                    self.say(f"the time is up in epoch {self.epoch + 1}, after {self.position} of {self.steps} steps")
                    self.epochs = self.epoch + 1
                    break
        return (self.position - first) * self.batch, clock.monotonic() - begun

    def batches(self) -> Iterator[tuple[int, Batch, bool]]:
        """From where the run stands to the end of its epoch: (number of the step, batch, does it end in an update)."""
        data, seed, begin = self.setup.data, self.options.seed, self.position
        closed = self.epoch >= self.epochs - self.options.close_mosaic
        # Filled up, so that all batches have one shape: on CUDA another one is another graph.
        order = data.batches(self.epoch, self.batch, seed, start=begin * self.batch, last="fill")
        for number, indices in enumerate(order, self.epoch * self.steps + begin):
            with self.on_data:
                batch = self.setup.augment(indices, data, number, closed)
            yield number, batch, self.updates[number]

    def measure(self, what: str) -> Metrics:
        return self.validation(
            self.step.ema.model, lambda done, total: self.show(f"measuring {what}", done, total, 0.0)
        )

    def close_epoch(self, metrics: Metrics, pictures: int, seconds: float) -> None:
        """Checkpoint, resume state, log. Whoever is killed in here does the epoch again, with the same outcome."""
        measured, now = means(metrics), clock.monotonic()
        row = {
            "epoch": self.epoch + 1,
            **measured,
            **losses((self.step.sums / self.position).tolist()),
            "lr": float(self.step.schedule.lr.max()),
            "images_per_s": pictures / seconds,
            "seconds": seconds,
            "data_seconds": self.on_data.seconds(),
            "whole_seconds": now - self.closed,
            "batch": self.batch,
            "amp": self.amp,
            "skipped": self.step.stats().skipped,
        }
        self.history.append(row)
        self.epoch, self.position, self.closed = self.epoch + 1, 0, now
        self.step.reset_sums()
        labelled = math.isfinite(measured["map50_95"])
        if measured["map50_95"] > self.best or not labelled:  # without labels to measure on: the last one
            self.best = measured["map50_95"] if labelled else self.best
            self.save_model(BEST, metrics)
        self.follow_time(row)
        self.safe = self.state()
        self.save(self.safe)
        self.log.epoch(row)
        self.say(f"epoch {self.epoch} of {self.epochs}: {described(measured)}, {row['images_per_s']:.0f} images/s")

    def finish(self) -> FineTune:
        """Measures what is left behind: the file, with its weights in half precision."""
        best = self.folder / BEST
        self.save_model(LAST, None)
        if not best.exists():
            raise InvalidInput(f"{best} is gone, and the run has ended: take {self.folder / LAST}, or train anew")
        self.validation.forget()
        self.drop_step()  # their memory is needed no more
        made = load_for_training(best).model.to(self.setup.device)
        metrics = self.validation(made, lambda done, total: self.show("measuring the best", done, total, 0.0))
        measured = means(metrics)
        self.say(f"{best}: {described(measured)}; at the start: {described(self.start)}")
        save_curves(self.folder, metrics)
        seconds = sum(row["whole_seconds"] for row in self.history)
        self.log.finish(metrics, {"mAP50-95": f"{measured['map50_95']:.4f}", "minutes": f"{seconds / 60:.1f}"})
        done = FineTune(self.folder, best, self.folder / LAST, metrics, self.start, tuple(self.history))
        for line in self.setup.reminders:
            self.say(line)
        if done.worse():
            self.say(f"{done.worse()}: look at the labels, train longer or at a lower rate")
        return done

    # ---------------------------------------------------------------------------------------------------- the step
    def make_step(self, saved: dict[str, Any] | None) -> None:
        """A step for the present batch, precision and place in the run, with what the run has learned so far."""
        vars(self).pop("validation", None)  # it holds the averaged model, and a graph in the step's memory
        self.drop_step()
        self.steps = -(-len(self.setup.data) // self.batch)
        self.most_epochs = max(self.epochs, self.options.epochs_for(self.steps))
        self.accumulate = max(min(round(NBS / self.batch), self.steps * self.epochs), 1)
        self.step = detection_step(
            self.setup.model().to(self.setup.device),
            optimizer=self.setup.rates.optimizer,
            lr=self.setup.rates.lr,
            weight_decay=WEIGHT_DECAY * self.batch * max(round(NBS / self.batch), 1) / NBS,
            schedule=self.table,
            amp=self.amp,
            accumulate=self.accumulate > 1,
        )
        if self.options.freeze:
            self.step.freeze(self.options.freeze)
        if saved:
            snapshot.put(self.step, saved, self.epoch * self.steps + self.position)
        self.validation = Validation(
            self.setup.val.pictures, self.setup.val.labels, self.setup.names, imgsz=self.setup.imgsz,
            batch=min(self.batch, VALIDATION_BATCH), recorder=self.step.recorder,
        )  # fmt: skip

    def drop_step(self) -> None:
        vars(self).pop("step", None)
        gc.collect()
        if self.setup.device.type == "cuda":
            torch.cuda.empty_cache()

    def table(self, groups: list[ParamGroup]) -> Any:
        """The schedule, as long as it may become; rows behind the run's end are never read."""
        self.groups, rates = groups, self.setup.rates
        rows, self.updates = warm_up_and_decay(
            groups, epochs=self.epochs, batches=self.steps, accumulate=self.accumulate, momentum=rates.momentum,
            warmup_bias_lr=rates.warmup_bias_lr,
        )  # fmt: skip
        return np.concatenate((rows, np.repeat(rows[-1:], self.most_epochs * self.steps - len(rows), 0)))

    def follow_time(self, row: Mapping[str, Any]) -> None:
        """With a time budget: as many epochs as still fit, and a learning rate that ends with them."""
        if self.options.time is None:
            return
        last = row["whole_seconds"] - row["seconds"]  # about what the end takes: one more measurement
        each = float(np.median([epoch["whole_seconds"] for epoch in self.history[-5:]]))
        fit = self.epoch + int(max(self.seconds_left() - last, 0) / each)
        # An epoch's time varies a little; near the end every epoch counts.
        if abs(fit - self.epochs) > 0.02 * self.epochs:
            self.epochs = max(min(fit, self.most_epochs), self.epoch)
            table = self.table(self.groups)[:, : self.step.schedule.table.shape[1]]
            self.step.schedule.rewrite(table, step=self.epoch * self.steps)

    def seconds_left(self) -> float:
        return math.inf if self.options.time is None else self.options.time - (clock.monotonic() - self.begun)

    # -------------------------------------------------------------------------------------- state, and recovery
    def state(self) -> dict[str, Any]:
        """All that a run needs to go on from here. Waits for the device."""
        return {
            "step": snapshot.take(self.step),
            "epoch": self.epoch,
            "position": self.position,
            "batch": self.batch,
            "amp": self.amp,
            "epochs": self.epochs,
            "best": self.best,
            "start": self.start,
            "history": [dict(row) for row in self.history],
            "seconds": clock.monotonic() - self.begun,
            "rng": rng_state(),
        }

    def save(self, state: dict[str, Any]) -> None:
        save_resume(self.folder / RESUME, state, run=self.setup.identity)
        self.saved = clock.monotonic()

    def save_model(self, name: str, metrics: Metrics | None) -> None:
        lines = save_checkpoint(
            self.folder / name, self.step.ema.model, self.setup.names, imgsz=self.setup.imgsz,
            data=self.setup.data_name, metrics=metrics, epoch=self.epoch,
        )  # fmt: skip
        for line in lines:
            self.say(line)

    def resume(self) -> None:
        if not (self.folder / RESUME).exists():
            self.say(f"{self.folder}: no epoch was begun, so this is the start")
            return
        self.safe = load_resume(self.folder / RESUME, run=self.setup.identity)
        self.epoch, self.position = self.safe["epoch"], self.safe["position"]
        self.batch, self.amp, self.epochs = (self.safe[key] for key in ("batch", "amp", "epochs"))
        self.best, self.start, self.history = (self.safe[key] for key in ("best", "start", "history"))
        self.begun -= self.safe["seconds"]
        try:
            set_rng_state(self.safe["rng"])
        except InvalidInput as error:  # another number of GPUs; batches are drawn from the seed and the step
            self.say(f"random generators of other code are left as they are: {error}")
        self.log.resume(self.history)
        self.say(f"resumed: {self.epoch} of {self.epochs} epochs and {self.position} steps are done")

    def go_back(self) -> None:
        """To the state that is safe, with a step for the present batch and precision. That is the epoch's begin, or
        where the run was resumed; pictures count there, since the batch may have been another."""
        before = self.safe.get("position", 0)  # nothing is safe yet where the start did not fit
        self.epoch, self.position = self.safe.get("epoch", 0), before * self.safe.get("batch", 0) // self.batch
        try:
            self.make_step(self.safe.get("step"))
        except Exception as error:
            if not out_of_memory(error):
                raise
            return self.halve_batch()
        if before:
            self.step.sums.mul_(self.position / before)  # of means over steps
        return None

    def place(self) -> str:
        if not self.position:
            return "it begins anew"
        return f"it goes on from the state that was resumed, after {self.position} of {self.steps} steps"

    def halve_batch(self) -> None:
        """After too little memory: the epoch once more, in smaller steps."""
        if self.batch == 1:
            raise DeviceError(
                f"not even one picture of {self.setup.imgsz} pixels fits into the memory: use a smaller image size, "
                "freeze layers, or free memory that other processes hold"
            )
        self.batch //= 2
        epoch = self.epoch + 1
        self.go_back()
        self.say(f"out of memory in epoch {epoch}: {self.place()} with half the batch, {self.batch}")

    def leave_half_precision(self, seen: NotFinite) -> None:
        """Finds the tensor that was the first, by doing the epoch again; then the epoch once more, in the next wider
        precision. Raises Diverged where there is none."""
        what = f"epoch {self.epoch + 1}: {seen}; {self.look_again()}"
        if self.amp == "off":
            raise Diverged(f"{what}. The last good state is kept. Lower the learning rate (lr), or look at the labels")
        bf16 = self.setup.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        self.amp = "bf16" if self.amp == "fp16" and bf16 else "off"
        self.go_back()
        self.say(f"{what}. From here on amp is {self.amp}; {self.place()}")

    def look_again(self) -> str:
        self.go_back()
        try:
            found = find(self.step, self.batches())  # which leaves epoch and position alone
        except Exception as error:
            if not out_of_memory(error):
                raise
            return "the first tensor could not be looked for, for want of memory"
        return f"the first: {found}" if found else "not so when it was repeated"
