"""The FID's Inception: names, shapes and counts of the published file, and a straight-line float64 reference.

The published weights can't be had in a test, so no published FID is reproduced here; docs/evaluate.md says so too.
"""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.nn.functional as F

from reference.inception import inception_features
from rowdit.evaluate import inception
from rowdit.evaluate.inception import (
    BLOCKS,
    WEIGHTS,
    Inception,
    InceptionFeatures,
    load_inception,
    prepare,
    resize_tensorflow_1,
)


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    """Random weights under which no layer dies, named as in the published file."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Inception().state_dict().items()}

    def draw(name: str, shape: torch.Size) -> torch.Tensor:
        if name.endswith("running_var") or name.endswith("bn.weight"):
            return 0.5 + torch.rand(shape, generator=generator)
        if name.endswith("conv.weight"):
            return torch.randn(shape, generator=generator) * (2 / shape[1:].numel()) ** 0.5
        return 0.1 * torch.randn(shape, generator=generator)

    return {name: draw(name, shape) for name, shape in shapes.items() if not name.endswith("num_batches_tracked")}


def test_names_shapes_and_counts(state):
    """torchvision's names. 23,834,568 parameters is the known count with 1,000 classes; this one has 1,008."""
    with torch.device("meta"):
        network = Inception()
    assert sum(p.numel() for p in network.parameters()) == 23_834_568 + 8 * 2049
    assert sum(isinstance(m, torch.nn.Conv2d) for m in network.modules()) == 94
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert len(shapes) == 94 * 5 + 2
    assert shapes["Conv2d_4a_3x3.conv.weight"] == (192, 80, 3, 3)
    assert shapes["Mixed_5b.branch_pool.conv.weight"] == (32, 192, 1, 1)
    assert shapes["Mixed_6b.branch7x7dbl_2.conv.weight"] == (128, 128, 7, 1)
    assert shapes["Mixed_6e.branch7x7_3.bn.running_mean"] == (192,)
    assert shapes["Mixed_7a.branch7x7x3_4.conv.weight"] == (192, 192, 3, 3)
    assert shapes["Mixed_7c.branch3x3dbl_3b.conv.weight"] == (384, 384, 3, 1)
    assert shapes["fc.weight"] == (1008, 2048)


def test_against_the_straight_line(state):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(2, 3, 107, 123, generator=generator) * 2 - 1
    expected = inception_features(state, x)
    assert expected.shape == (2, 2048) and (expected > 0).double().mean() > 0.3
    # In float64 nothing hides behind rounding; in float32 there are 48 layers of sums.
    torch.testing.assert_close(load_inception(state).double()(x.double()), expected, rtol=1e-9, atol=1e-9)
    got = load_inception(state)(x)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(("block", "pool"), [("Mixed_5c", "max"), ("Mixed_7b", "max"), ("Mixed_7c", "average")])
def test_the_reference_tells_the_pools_apart(state, monkeypatch, block, pool):
    """The variant matters: with another pool in one block the features are others."""
    changed = tuple((n, c, b._replace(pool=pool) if n == block else b) for n, c, b in BLOCKS)
    monkeypatch.setattr(inception, "BLOCKS", changed)
    x = torch.rand(1, 3, 107, 107, generator=torch.Generator().manual_seed(1)) * 2 - 1
    expected = inception_features(state, x)
    assert (load_inception(state)(x).double() - expected).norm() / expected.norm() > 1e-2


def test_the_mean_leaves_out_the_padding():
    x = torch.rand(1, 2, 5, 6)
    got = inception._pool(x, "average")
    torch.testing.assert_close(got[0, 0, 0, 0], x[0, 0, :2, :2].mean())
    torch.testing.assert_close(got[0, 1, 4, 2], x[0, 1, 3:, 1:4].mean())


@pytest.mark.parametrize("size", [(64, 64), (256, 256), (299, 299), (400, 31)])
def test_tensorflow_1_resizing_pixel_by_pixel(size):
    height, width = size
    x = torch.randint(0, 256, (1, 1, height, width), generator=torch.Generator().manual_seed(0)).float()
    got = resize_tensorflow_1(x, 299)[0, 0]
    image = x[0, 0].double()
    for row, column in [(0, 0), (1, 1), (17, 250), (150, 298), (298, 3), (298, 298)]:
        y, z = row * height / 299, column * width / 299
        y0, z0 = int(y), int(z)
        y1, z1 = min(y0 + 1, height - 1), min(z0 + 1, width - 1)
        top = image[y0, z0] + (image[y0, z1] - image[y0, z0]) * (z - z0)
        bottom = image[y1, z0] + (image[y1, z1] - image[y1, z0]) * (z - z0)
        assert got[row, column].item() == pytest.approx(float(top + (bottom - top) * (y - y0)), abs=0.02)
    assert got.shape == (299, 299)
    assert got[0, 0] == x[0, 0, 0, 0], "the top left corners agree, not the centres"


def test_the_two_scales():
    images = torch.tensor([0, 64, 128, 255], dtype=torch.uint8).view(4, 1, 1, 1).expand(4, 1, 299, 299)
    assert prepare(images, "tensorflow")[:, :, 0, 0].tolist() == [[(v - 128) / 128] * 3 for v in (0, 64, 128, 255)]
    torch.testing.assert_close(
        prepare(images, "pytorch_fid")[:, 0, 0, 0], 2 * torch.tensor([0.0, 64.0, 128.0, 255.0]) / 255 - 1
    )
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (1, 3, 64, 64), generator=generator, dtype=torch.uint8)
    expected = F.interpolate(noise.float(), size=(299, 299), mode="bilinear", align_corners=False) / 127.5 - 1
    torch.testing.assert_close(prepare(noise, "pytorch_fid"), expected, rtol=0, atol=1e-5)
    assert (prepare(noise, "tensorflow") - prepare(noise, "pytorch_fid")).abs().max() > 0.1


class TestWeightsFile:
    @pytest.fixture
    def published(self, tmp_path, state, monkeypatch):
        """A file of these random weights that the code takes for the published one."""
        path = tmp_path / "weights.pth"
        torch.save({**state, "Conv2d_1a_3x3.bn.num_batches_tracked": torch.tensor(0)}, path)
        content = path.read_bytes()
        fake = WEIGHTS.__class__("weights.pth", WEIGHTS.url, len(content), hashlib.sha256(content).hexdigest())
        monkeypatch.setattr(inception, "WEIGHTS", fake)
        return path

    def test_features_from_a_file(self, published, state):
        network = InceptionFeatures(weights=published, batch_size=2)
        images = torch.randint(0, 256, (3, 1, 28, 28), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        features = network(images)
        assert features.shape == (3, 2048) and features.dtype == torch.float32
        expected = inception_features(state, prepare(images[2:], "tensorflow"))
        torch.testing.assert_close(features[2:].double(), expected, rtol=1e-3, atol=1e-4 * float(expected.max()))
        assert (
            network.fingerprint()["resize"]
            != InceptionFeatures(weights=published, resize="pytorch_fid").fingerprint()["resize"]
        )
        with pytest.raises(TypeError, match="images must be uint8"):
            network(images.float())
        with pytest.raises(ValueError, match="resize is 'bicubic'"):
            InceptionFeatures(weights=published, resize="bicubic")

    def test_another_file_is_refused_unread(self, tmp_path):
        path = tmp_path / "evil.pth"
        path.write_bytes(b"cos\nsystem\n(S'touch evil'\ntR.")
        with pytest.raises(ValueError, match=rf"evil.pth isn't the published .* its sha256 is .* not {WEIGHTS.sha256}"):
            InceptionFeatures(weights=path)

    def test_no_file(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with pytest.raises(FileNotFoundError, match="--weights, or fetch it with --download"):
            InceptionFeatures()
        with pytest.raises(FileNotFoundError, match="there is no file .*nix.pth; it should be pt_inception"):
            InceptionFeatures(weights=tmp_path / "nix.pth")

    def test_weights_of_another_network(self, state):
        with pytest.raises(ValueError, match="aren't the weights of the FID's Inception"):
            load_inception({name: tensor for name, tensor in state.items() if not name.startswith("fc.")})
