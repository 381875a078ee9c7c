"""The network of FID through the `features` door, with random weights: needs, features, refusals.

The true weights are not here, so that no figure of these tests is an FID of anything.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mmaccel.cli import main
from mmaccel.evaluation.quality.distances import frechet_distance

needs_network = pytest.mark.skipif(
    find_spec("torch_fidelity") is None,
    reason="torch-fidelity is not installed (pip install torch-fidelity)",
)


def import_network() -> Any:
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    return FeatureExtractorInceptionV3


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the right names and shapes: the network as it is before weights are loaded."""
    network_class = import_network()
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("inception") / "random.pth"
    torch.save({}, file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network_class, "load_state_dict", lambda self, state: None)
        network = network_class("inception-v3-compat", ["2048"], str(file))
    torch.save(network.state_dict(), file)
    return file


def save(folder: Path, images: torch.Tensor) -> Path:
    folder.mkdir()
    for k, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{k}.png")
    return folder


@needs_network
def test_images_by_inception(weights: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (6, 3, 24, 20), generator=generator, dtype=torch.uint8)
    first, second = save(tmp_path / "a", images[:3]), save(tmp_path / "b", images[3:] // 2)
    file = tmp_path / "report.json"
    options = ("--features", "inception", "--weights", str(weights), "--json", str(file))
    assert main(["evaluate", "pictures", str(first), "--against", str(second), *options]) == 0
    report = json.loads(file.read_text())
    network = import_network()("inception-v3-compat", ["2048"], str(weights))
    features = [network(part)[0].double().numpy() for part in (images[:3], images[3:] // 2)]
    assert report["frechet"]["distance"] == pytest.approx(frechet_distance(*features), rel=1e-6)
    assert (report["frechet"]["width"], report["n_against"]) == (2048, 3)
    assert "low rank" in report["frechet"]["bias"] and report["frechet"]["distance"] > 0
