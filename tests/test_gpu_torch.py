"""torch's tensors in and out. torch keeps its context current once it has used the GPU: that is not checked here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import edgeyolo
from test_gpu_frames import same
from toy_model import expected, pictures, toy_engine

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.fixture
def model(gpu: object, tmp_path: Path) -> Iterator[edgeyolo.Detector]:
    with edgeyolo.load(toy_engine(tmp_path / "toy.engine"), conf=0.3) as detector:
        yield detector


@pytest.fixture
def image() -> NDArray[np.uint8]:
    return pictures(1, seed=5)[0]


def test_torch_on_a_gpu(model: edgeyolo.Detector, image: NDArray[np.uint8]) -> None:
    """torch's own tensors in, its tensors out; on its streams, without a synchronise of ours."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    frames = [torch.from_numpy(picture).cuda() for picture in pictures(20)]
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for frame in frames:
                # Work of some milliseconds that the picture comes out of.
                noise = torch.rand(4000, 4000, device="cuda")
                late = (frame.int() + 0 * (noise @ noise).sum().int()).to(torch.uint8)
                same(model(late), frame.cpu().numpy())
    planes = torch.from_numpy(image).cuda().permute(2, 0, 1).contiguous()
    same(model(planes.permute(1, 2, 0)), image)
    with pytest.raises(edgeyolo.InvalidInput, match="permute"):
        model(planes)
    result = model.submit(frames[0], on_device=True).result()
    boxes, scores, class_ids = expected(frames[0].cpu().numpy(), conf=0.3)
    for array, truth in ((result.boxes, boxes), (result.scores, scores), (result.class_ids, class_ids)):
        tensor = torch.from_dlpack(array)
        assert tensor.device == torch.device("cuda:0")
        np.testing.assert_array_equal(tensor.cpu().numpy(), truth)
