"""Weights -> a verified model, ready to be published.

    weights > graph > silu > precision > engine > verify > report

Each step's files stay in the run folder; a step whose inputs have not changed is taken over from the last run. What the
gate refuses is tried again one step closer to FP32, and told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import edgeyolo

from .export_gate import Gate, faster
from .export_options import (
    Attempt,
    ExportOptions,
    ExportTarget,
    Fuse,
    Images,
    Pictures,
    Precision,
    attempts,
    choose_folder,
    choose_images,
    choose_target,
    engine_options,
    pair,
)
from .export_record import RECORD, REFERENCE, Artefact, Made, installed, leave, outcome_notes, plain
from .files import digest
from .model.calibration import (
    AT_LEAST,
    CalibrationCache,
    calibration_array,
    calibration_digest,
    calibration_versions,
    graph_digest,
)
from .model.engine import build_engine, gpu_facts, runnable
from .model.graph import Graph, inspect_onnx
from .model.onnx import GraphOptions, export_onnx
from .model.precision import PrecisionPlan, to_fp16, to_int8
from .model.precision_error import worst_nodes
from .model.silu import fuse_silu as fuse_graph
from .model.weights import Weights, open_weights
from .runfolder import RunFolder, Step

__all__ = ["Export", "export"]

GRAPH = "graph.onnx"
DEFAULT_IMGSZ = (640, 640)


@dataclass(frozen=True)
class Export:
    """A finished run. folder: what `publish()` takes. models: its model files, the preferred one first.
    passed: whether the first of them passed the gate. record: what `export.json` holds."""

    folder: Path
    models: tuple[Path, ...]
    passed: bool
    statement: str
    record: dict[str, Any]


def export(
    weights: Path | str,
    *,
    precision: Precision = "fp16",
    calib: Images | None = None,
    verify_on: Images | None = None,
    labels: bool = True,
    imgsz: int | tuple[int, int] | None = None,
    batch: int | tuple[int, int] = 1,
    dynamic: bool = False,
    head: Literal["auto", "raw", "end2end"] = "auto",
    fuse_silu: Fuse = "auto",
    target: ExportTarget = "auto",
    sm: str | Sequence[str] = (),
    dla: int | None = None,
    workspace: float | None = None,
    hardware_compatible: bool = False,
    version_compatible: bool = False,
    out: Path | str | None = None,
    trust: bool = False,
    told: Callable[[str], None] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Export:
    """Exports a detection model, verifies it on pictures, and leaves a folder that `publish()` takes.

    weights: an Ultralytics .pt, or an FP32 .onnx. trust: unpickle a .pt with layers of its own, which runs its code.
    precision: "fp32", "fp16" or "int8". calib: real pictures, for fp16 and int8: a folder, glob, list, or a data.yaml.
    verify_on: pictures to verify on; by default such of `calib` that do not calibrate, the `val` split of a data.yaml.
    labels: where those pictures have YOLO labels, the loss of mAP is judged too; False leaves them out.
    imgsz: input size, an int or (height, width) in pixels. batch: images of a run, or (least, most). dynamic: the size
    is free as well, from half to twice of imgsz.
    head: "raw" (NMS by edgeyolo), "end2end" where the model has such a head, "auto": as it was trained to be used.
    fuse_silu: x * (0.5 * tanh(0.5 x) + 0.5) in place of x * sigmoid(x), for engines. "auto": where the engine runs on
    the spot, the faster one of both that passes.
    target: "tensorrt" (on the GPU that it is for), "tensorrt-rtx" for the compute capabilities `sm`, "onnx"; "auto":
    TensorRT where it runs, else onnx. dla: DLA core. workspace: GiB. hardware_compatible, version_compatible: of
    TensorRT's engines.
    out: the run folder, runs/export/NAME-PRECISION by default. A run that was interrupted is taken up there.
    told: called with a line of text for each step and decision. progress: with (step, done, of all); 0, 0 as it begins.

    A precision that fails the gate is not what comes out: the next one closer to FP32 is tried, and the record tells.
    Where nothing passes, the result says so (`passed`), and `publish()` refuses it.
    Raises InvalidInput, ManifestError or EngineError as the steps do, DeviceError without the GPU that a target needs.
    """
    options = ExportOptions(
        precision=precision,
        imgsz=None if imgsz is None else pair("imgsz", imgsz),
        batch=pair("batch", batch),
        dynamic=dynamic,
        head=head,
        fuse_silu=fuse_silu,
        target=target,
        sm=(sm,) if isinstance(sm, str) else tuple(sm),
        dla=dla,
        workspace=workspace,
        hardware_compatible=hardware_compatible,
        version_compatible=version_compatible,
        labels=labels,
    )
    say = told or (lambda line: None)
    chosen, why = choose_target(options)
    pictures = choose_images(precision, calib, verify_on)
    opened = open_weights(Path(weights).expanduser(), trust=trust, warn=told)
    folder = choose_folder(out, opened.path, precision)

    def step_told(step: Step) -> None:
        say(f"{step.name}: {'as before' if step.reused else f'{step.seconds:.1f} s'}")

    advance = progress or (lambda step, done, total: None)
    with RunFolder.locked(folder, step_told, lambda step: advance(step, 0, 0)) as run:
        for note in filter(None, (why, *pictures.notes)):
            say(note)
        return _Line(run, opened, options, chosen, pictures, say, advance).run_all([why] if why else [])


class _Line:
    """One run: what each step hands to the next."""

    def __init__(
        self,
        run: RunFolder,
        weights: Weights,
        options: ExportOptions,
        target: Literal["tensorrt", "tensorrt-rtx", "onnx"],
        pictures: Pictures,
        say: Callable[[str], None],
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.run, self.weights, self.options, self.target = run, weights, options, target
        self.pictures, self.say, self.progress = pictures, say, progress
        self.versions = {**calibration_versions(), "edgeyolo": edgeyolo.__version__}
        self.gate = Gate(pictures.verification, use_labels=options.labels)
        self.refused: list[dict[str, Any]] = []
        self.silu: dict[str, Any] = {"requested": options.fuse_silu, "applied": False, "why": ""}
        self.calibration: dict[str, Any] | None = None

    def run_all(self, notes: list[str]) -> Export:
        # Of an earlier run: should this one fail, publish() must not take that one for it.
        (self.run.path / RECORD).unlink(missing_ok=True)
        graph = self.make_graph()
        self.gate.check_labels(graph.names)
        last: dict[str, Any] = {}
        for attempt in self.plan():
            if attempt.keep:
                attempt = replace(attempt, keep=self.where_the_error_arises(attempt))
            made = self.convert(attempt, graph)
            last = self.verify(attempt, made, graph)
            if last["verification"]["passed"] or (attempt.precision == "fp32" and not attempt.fused):
                break
            self.refused.append({"attempt": attempt.name, "failures": (failures := last["verification"]["failures"])})
            self.say(f"{attempt.name} refused: {'; '.join(failures)}")
        return self.finish(last, graph, notes)

    def make_graph(self) -> Graph:
        """The FP32 graph: what everything else is made from and compared with."""
        options, weights = self.options, self.weights
        wanted = GraphOptions(
            imgsz=options.imgsz or weights.default_imgsz or DEFAULT_IMGSZ,
            batch=options.batch,
            dynamic=options.dynamic,
            head=weights.heads[0] if options.head == "auto" else options.head,
        )
        inputs = {"weights": weights.sha256, "options": asdict(wanted), "versions": installed("torch", "ultralytics")}

        def make(files: tuple[Path, ...]) -> None:
            export_onnx(weights, files[0], wanted)

        step = self.run.step("graph", [GRAPH], {**inputs, **self.versions}, make)
        self.reference = step.files[0]
        return inspect_onnx(self.reference)

    def plan(self) -> list[Attempt]:
        """The attempts in their order, with or without the fused SiLU first."""
        precision, fuse = self.options.precision, self.options.fuse_silu
        plain = Attempt(precision)
        if self.target == "onnx":
            self.silu["why"] = "the target is onnx, where the tanh form is slower"
        elif fuse == "off":
            self.silu["why"] = "off, as asked for"
        elif fuse == "on":
            self.silu["why"] = "on, as asked for"
            return list(attempts(replace(plain, fused=True)))
        elif precision == "int8":
            self.silu["why"] = "auto: no gain for int8"
        else:
            ready, why = runnable(self.target)
            if ready:
                return self.compete(plain)
            self.silu["why"] = f"auto: the engine cannot be run and timed here ({why})"
        return list(attempts(plain))

    def compete(self, plain: Attempt) -> list[Attempt]:
        """Both forms are built, gated and timed; the faster one that passes goes first."""
        graph = inspect_onnx(self.reference)
        fused = replace(plain, fused=True)
        engines, passed = {}, {}
        for attempt in (plain, fused):
            engines[attempt] = self.convert(attempt, graph)
            passed[attempt] = self.verify(attempt, engines[attempt], graph)["verification"]["passed"]
        if passed[plain] and passed[fused]:
            times = faster(engines[plain].model, engines[fused].model)
            self.silu["ms"] = {"sigmoid": times[0], "tanh": times[1]}
            order = [fused, plain] if times[1] < times[0] else [plain]
            self.silu["why"] = f"auto: both pass; {times[0]:.3f} ms without, {times[1]:.3f} ms with"
        else:
            order = [fused] if passed[fused] else [plain]
            self.silu["why"] = "auto: the other one failed the gate"
        return [*order, *list(attempts(plain))[1:]]

    def fused_graph(self) -> Path:
        def make(files: tuple[Path, ...]) -> dict[str, Any]:
            return asdict(fuse_graph(self.reference, files[0]))

        step = self.run.step("silu", ["fused.onnx"], {"graph": digest(self.reference), **self.versions}, make)
        self.silu |= {"fused": len(step.facts["fused"]), "kept": step.facts["kept"]}
        return step.files[0]

    def convert(self, attempt: Attempt, graph: Graph) -> Made:
        """The graph in the attempt's precision and, for engines, the engine of it."""
        source = self.fused_graph() if attempt.fused else self.reference
        path, plan = (source, None) if attempt.precision == "fp32" else self.lower(attempt, source, graph)
        if self.target == "onnx":
            return Made(path, path, plan, None)
        settings = engine_options(self.target, self.options, graph, self.run.path)
        gpu = {key: value for key, value in (gpu_facts() or {}).items() if key != "free"}
        inputs = {"source": digest(path), "options": plain(asdict(settings)), "gpu": gpu, **self.versions}

        def make(files: tuple[Path, ...]) -> dict[str, Any]:
            return plain(build_engine(path, files[0], settings, {}).to_dict())

        step = self.run.step(f"engine-{attempt.name}", [f"{attempt.name}.engine"], inputs, make)
        return Made(path, step.files[0], plan, step.facts)

    def lower(self, attempt: Attempt, source: Path, graph: Graph) -> tuple[Path, PrecisionPlan]:
        images = list(self.pictures.calibration)
        extra = {"keep": list(attempt.keep)}
        key = calibration_digest(
            weights_sha256=self.weights.sha256,
            images=images,
            imgsz=graph.imgsz,
            precision=attempt.precision,
            versions=self.versions,
            graph=graph_digest(source),
            options=extra,
        )
        cache = CalibrationCache(self.run.path / "calibration")

        def make(files: tuple[Path, ...]) -> dict[str, Any]:
            known = cache.load(key, files[0])
            if known is not None:
                return known
            unreadable: list[tuple[Path, str]] = []
            array = calibration_array(images, graph.imgsz, at_least=AT_LEAST, unreadable=unreadable)
            for _, reason in unreadable:
                self.say(f"left out of the calibration: {reason}")
            if attempt.precision == "fp16":
                plan = to_fp16(source, files[0], array)
            else:
                plan = to_int8(source, files[0], array, keep=attempt.keep)
            value = {**plan.to_dict(), "unreadable": [str(path) for path, _ in unreadable]}
            cache.save(key, files[0], value)
            return value

        step = self.run.step(f"precision-{attempt.name}", [f"{attempt.name}.onnx"], {"calibration": key}, make)
        facts = {name: value for name, value in step.facts.items() if name != "unreadable"}
        unread = len(step.facts["unreadable"])
        self.calibration = {"digest": key, "images": len(images) - unread, "unreadable": unread}
        return step.files[0], PrecisionPlan.from_dict(facts)

    def where_the_error_arises(self, attempt: Attempt) -> tuple[str, ...]:
        graph = inspect_onnx(self.reference)
        few = calibration_array(self.pictures.calibration, graph.imgsz, limit=8, unreadable=[])
        worst = worst_nodes(self.reference, self.run.path / "int8.onnx", few)
        self.say(f"{len(worst)} layers go back to fp16, where most of the error arises: {', '.join(worst[:5])} ...")
        return tuple(worst)

    def verify(self, attempt: Attempt, made: Made, graph: Graph) -> dict[str, Any]:
        """The gate, its record, and the report of this attempt."""
        if self.target == "onnx":
            candidate, statement, device = made.graph, "graph verified", "cpu"
        elif runnable(self.target)[0]:
            candidate, statement, device = made.model, "engine verified", "auto"
        else:
            candidate, statement, device = made.graph, "graph verified, engine not run", "cpu"
        plan = None if made.plan is None else made.plan.to_dict()
        record = {
            "attempt": attempt.name,
            "precision": attempt.precision,
            "kept_fp16": list(attempt.keep),
            "fused": attempt.fused,
            "graph": made.graph.name,
            "model": made.model.name,
            "engine": made.engine,
            "plan": plan,
        }
        if not self.pictures.verification:
            done = {"passed": False, "statement": "not verified: no pictures", "precision": attempt.precision}
            return {**record, "verification": {**done, "failures": ["no pictures to verify on were given"]}}
        inputs = {
            "reference": digest(self.reference),
            "candidate": digest(candidate),
            "model": digest(made.model),
            "statement": statement,
            "told": {"requested": self.options.precision, "refused": self.refused},  # by the page
            **self.gate.inputs(),
            **self.versions,
        }
        page = f"report-{attempt.name}.html"

        def make(files: tuple[Path, ...]) -> dict[str, Any]:
            outcome = self.gate.judge(
                self.reference, candidate, graph, attempt.precision, statement, device, self.progress
            )
            self.gate.report(
                files[0], self.describe({**record, "verification": outcome.to_dict()}, graph), outcome, plan
            )
            return outcome.to_dict()

        step = self.run.step(f"verify-{attempt.name}", [page], inputs, make)
        return {**record, "verification": step.facts, "report": page}

    def describe(self, last: dict[str, Any], graph: Graph) -> dict[str, Any]:
        """The record of the run: export.json without its models and its time."""
        engine = last["engine"] or {}
        return {
            "format": 1,
            "edgeyolo": edgeyolo.__version__,
            "models": [],
            "target": self.target,
            "precision": {
                "requested": self.options.precision,
                "reached": last["precision"],
                "kept_fp16": last["kept_fp16"],
            },
            "imgsz": list(graph.imgsz),
            "batch": list(graph.batch),
            "dynamic": graph.dynamic,
            "head": graph.head,
            "names": {str(key): name for key, name in graph.names.items()},
            "stride": graph.stride,
            "weights": {"file": self.weights.path.name, "sha256": self.weights.sha256},
            "graph": {"file": GRAPH, "sha256": digest(self.reference)},
            "calibration": self.calibration if last["plan"] is not None else None,
            "silu": {**self.silu, "applied": last["fused"]},
            "refused": self.refused,
            "engine": {key: value for key, value in engine.items() if key != "layers"} or None,
            "versions": {
                **self.versions,
                **installed("torch", "ultralytics"),
                **({engine["target"]: engine["version"]} if engine else {}),
            },
            "gpu": engine.get("gpu"),
            "seconds": self.run.seconds(),
            "notes": list(self.pictures.notes),
        }

    def finish(self, last: dict[str, Any], graph: Graph, notes: list[str]) -> Export:
        record, folder, done = self.describe(last, graph), self.run.path, last["verification"]
        record["notes"] = [*notes, *record["notes"], *outcome_notes(last, self.options.precision, self.refused)]
        if self.target == "onnx":
            artefacts = [Artefact("model.onnx", folder / last["model"], "onnx", last["precision"], done)]
        else:
            artefacts = [
                Artefact("model.engine", folder / last["model"], self.target, last["precision"], done),
                # For machines that cannot run the engine. It was compared with its weights when it was exported.
                Artefact(GRAPH, self.reference, "onnx", "fp32", REFERENCE),
            ]
        leave(folder, record, artefacts, folder / last["report"] if "report" in last else None)
        paths = tuple(folder / artefact.name for artefact in artefacts)
        return Export(folder, paths, done["passed"], done["statement"], record)
