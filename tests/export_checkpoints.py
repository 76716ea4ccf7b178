"""Ultralytics checkpoints of untrained networks, and ONNX graphs of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

ASSETS = Path(__file__).resolve().parents[1] / "assets"


def network(yaml: str, seed: int = 0, *, tiny: bool = True, **options: Any) -> Any:
    """A network from its YAML file with random weights, in training mode as a trainer holds it.

    tiny: a quarter of the channels of scale n, so that tests are quick; the layers are the same.
    """
    from ultralytics.nn import tasks

    kinds = {"-seg": "SegmentationModel", "-pose": "PoseModel", "-obb": "OBBModel", "-cls": "ClassificationModel"}
    kind = next((name for part, name in kinds.items() if part in yaml), "DetectionModel")
    torch.manual_seed(seed)
    config: Any = yaml
    if tiny:
        config = tasks.yaml_model_load(yaml)
        config["scales"] = {"t": [0.34, 0.0625, 1024]}
        config["scale"] = "t"
    model = getattr(tasks, kind)(config, verbose=False, **options)
    model.names = {i: f"class {i}" for i in range(getattr(model.model[-1], "nc", 80))}
    return model


def enliven(model: Any, images: torch.Tensor) -> Any:
    """Gives a random network answers that depend on its input, as training does, and are spread.

    As built, signals die out on the way: every box is the same and any two graphs agree. Here each layer's signal is
    brought to a mean square of one. Its mean is left in: with that taken out as well, a random network is chaotic, and
    rounding alone moves boxes by many pixels.
    """

    def normalise(layer: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        layer.running_mean.zero_()
        layer.running_var.fill_(float(inputs[0].square().mean()))

    def spread(layer: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        values = torch.nn.functional.conv2d(inputs[0], layer.weight)
        # Boxes less: float32 has steps of 6e-5 at 640, and what is compared is to stay within three of them.
        gain = (1 / 16 if layer in boxes else 1 / 4) / values.std()
        layer.weight *= gain
        layer.bias -= gain * values.mean()

    head = model.model[-1]
    boxes = {branch[-1] for name in ("cv2", "one2one_cv2") for branch in getattr(head, name, None) or ()}
    layers = [(layer, normalise) for layer in model.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    for name in ("cv2", "one2one_cv2", "cv3", "one2one_cv3"):
        for branch in getattr(head, name, None) or ():
            branch[-1].bias.data.fill_(-2.0 if name.endswith("cv3") else 2.0)
            layers.append((branch[-1], spread))
    hooks = [layer.register_forward_pre_hook(change) for layer, change in layers]
    with torch.no_grad():
        model.eval()(images)
    for hook in hooks:
        hook.remove()
    return model


def save(path: Path, **checkpoint: Any) -> Path:
    torch.save(checkpoint, path)
    return path


def answers(model: Any, images: torch.Tensor) -> torch.Tensor:
    """The decoded output of a network outside export mode."""
    with torch.no_grad():
        output: torch.Tensor = model(images)[0]
    return output
