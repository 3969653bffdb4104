"""Sampling: image i depends on (seed, i) alone, and the model comes back as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rowdit import streams
from rowdit.data import to_uint8
from rowdit.evaluate import balanced_labels, generate
from rowdit.models.dit import DiT, DiTConfig

SHAPE = (1, 8, 8)
NUM_CLASSES = 3


@pytest.fixture(scope="module")
def model() -> DiT:
    """A DiT with weights that matter: at adaLN-zero's start every velocity would be zero."""
    config = DiTConfig(
        image_size=8, in_channels=1, patch_size=2, hidden_size=32, depth=2, num_heads=2, num_classes=NUM_CLASSES
    )
    model = DiT(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def sample(model: nn.Module, num_images: int = 20, **options) -> torch.Tensor:
    options = {"seed": 0, "image_shape": SHAPE, "num_classes": NUM_CLASSES, "num_steps": 4} | options
    return generate(model, balanced_labels(num_images + options.get("first_index", 0), 3)[-num_images:], **options)


def assert_same_images(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal but for rounding: a matrix product may sum in another order for another batch, and a pixel at the border
    between two grey levels then falls to the other side."""
    difference = (a.int() - b.int()).abs()
    assert int(difference.max()) <= 1
    assert float((difference > 0).float().mean()) < 0.005


class TestReproducible:
    def test_same_again(self, model):
        assert torch.equal(sample(model), sample(model))

    @pytest.mark.parametrize("batch_size", [1, 7, 1000])
    @pytest.mark.parametrize("guidance", [1.0, 2.5])
    def test_batch_size_does_not_matter(self, model, batch_size, guidance):
        assert_same_images(sample(model, batch_size=batch_size, guidance=guidance), sample(model, guidance=guidance))

    def test_parts_made_elsewhere_are_the_same_images(self, model):
        whole = sample(model, 20)
        parts = [sample(model, 5, first_index=0), sample(model, 15, first_index=5)]
        assert_same_images(torch.cat(parts), whole)

    def test_seeds_and_indices_differ(self, model):
        images = sample(model)
        assert not torch.equal(images, sample(model, seed=1))
        assert not torch.equal(images, sample(model, first_index=1))
        assert len({image.numpy().tobytes() for image in images}) == len(images)

    def test_global_generator_is_left_alone(self, model):
        before = torch.get_rng_state()
        sample(model)
        assert torch.equal(torch.get_rng_state(), before)


class TestResult:
    def test_shape_and_type(self, model):
        images = sample(model, 5)
        assert images.shape == (5, *SHAPE)
        assert images.dtype == torch.uint8
        assert sample(model, 0).shape == (0, *SHAPE)

    def test_a_straight_path_ends_at_the_data(self):
        """v = (x - target) / t is the exact velocity towards one image a class: Euler arrives there."""

        class Straight(nn.Module):
            def __init__(self):
                super().__init__()
                self.targets = nn.Parameter(torch.tensor([-1.0, 0.0, 1.0])[:, None, None, None].expand(3, *SHAPE))

            def forward(self, x, t, y):
                return (x - self.targets[y]) / t[:, None, None, None]

        images = sample(Straight(), 6, num_steps=5)
        assert images.flatten(1).unique(dim=1).squeeze().tolist() == [0, 128, 255, 0, 128, 255]

    @pytest.mark.parametrize("sampler", ["euler", "heun"])
    def test_samplers_go_from_noise_to_data(self, sampler):
        """A velocity that is constant in time is integrated exactly: x(0) = x(1) - v."""

        class Constant(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.tensor(0.5))

            def forward(self, x, t, y):
                return (self.scale * y)[:, None, None, None].expand_as(x)

        noise = streams.normal(0, "sample", range(6), SHAPE)
        expected = to_uint8(noise - 0.5 * balanced_labels(6, 3)[:, None, None, None])
        assert_same_images(sample(Constant(), 6, sampler=sampler, num_steps=5), expected)

    def test_noise_is_the_sample_stream(self):
        """With no velocity the image is the noise itself."""

        class Still(nn.Module):
            def __init__(self):
                super().__init__()
                self.zero = nn.Parameter(torch.zeros(()))

            def forward(self, x, t, y):
                return self.zero * x

        expected = to_uint8(streams.normal(3, "sample", [5, 6], SHAPE))
        assert torch.equal(sample(Still(), 2, seed=3, first_index=5), expected)

    def test_labels_and_guidance_matter(self, model):
        options = {"seed": 0, "image_shape": SHAPE, "num_classes": NUM_CLASSES, "num_steps": 4}
        zeros, null = torch.zeros(4, dtype=torch.long), torch.full((4,), NUM_CLASSES)
        conditional, unconditional = generate(model, zeros, **options), generate(model, null, **options)
        assert not torch.equal(conditional, unconditional)
        assert_same_images(generate(model, zeros, guidance=0.0, **options), unconditional)
        assert not torch.equal(generate(model, zeros, guidance=3.0, **options), conditional)

    def test_progress(self, model):
        calls = []
        sample(model, 10, batch_size=4, progress=lambda done, total: calls.append((done, total)))
        assert calls == [(4, 10), (8, 10), (10, 10)]

    def test_balanced_labels(self):
        assert balanced_labels(7, 3).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_captions_are_conditions_too():
    config = DiTConfig(8, 1, 2, hidden_size=16, depth=1, num_heads=2, num_classes=0, caption_dim=5)
    model = DiT(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    captions = torch.randn(6, 5, generator=generator)
    options = {"seed": 0, "image_shape": SHAPE, "num_classes": 0, "guidance": 2.0, "num_steps": 3}
    images = generate(model, captions, batch_size=4, **options)
    assert_same_images(generate(model, captions[4:], first_index=4, **options), images[4:])
    assert not torch.equal(generate(model, captions.flip(0), **options), images)
    with pytest.raises(ValueError, match="vector of integers"):
        generate(model, captions, **(options | {"num_classes": 3}))


class TestModelComesBack:
    def test_modes_are_restored_one_by_one(self, model):
        model.train()
        model.blocks[0].eval()  # frozen on purpose
        before = [module.training for module in model.modules()]
        sample(model, 2)
        assert [module.training for module in model.modules()] == before
        model.train()

    def test_modes_are_restored_after_an_error(self, model):
        model.train()

        def stop(done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            sample(model, 2, progress=stop)
        assert model.training

    def test_sampled_in_eval_mode_without_gradient(self):
        class Watching(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.zeros(()))
                self.seen = set()

            def forward(self, x, t, y):
                self.seen.add((self.training, torch.is_grad_enabled()))
                return self.weight * x

        model = Watching().train()
        sample(model, 2)
        assert model.seen == {(False, False)}


class TestBadInput:
    def sample_with(self, model, labels, **options):
        options = {"seed": 0, "image_shape": SHAPE, "num_classes": NUM_CLASSES, "num_steps": 2} | options
        return generate(model, labels, **options)

    @pytest.mark.parametrize("label", [-1, 4])
    def test_labels_out_of_range(self, model, label):
        with pytest.raises(ValueError, match=rf"0\.\.3 \(3 is the null class\), got {label}"):
            self.sample_with(model, torch.tensor([0, label]))

    def test_labels_of_the_wrong_kind(self, model):
        with pytest.raises(ValueError, match="vector of integers"):
            self.sample_with(model, torch.tensor([0.0, 1.0]))
        with pytest.raises(ValueError, match="vector of integers"):
            self.sample_with(model, torch.tensor([[0, 1]]))

    def test_options_out_of_range(self, model):
        labels = torch.tensor([0])
        with pytest.raises(ValueError, match="there is no sampler 'eular'; there are euler, heun"):
            self.sample_with(model, labels, sampler="eular")
        with pytest.raises(ValueError, match="batch_size must be at least 1 and first_index at least 0, got 0 and 0"):
            self.sample_with(model, labels, batch_size=0)
        with pytest.raises(ValueError, match="num_steps"):
            self.sample_with(model, labels, num_steps=0)
        with pytest.raises(ValueError, match="guidance"):
            self.sample_with(model, labels, guidance=float("nan"))

    def test_a_diverged_model_is_named(self):
        class Diverged(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.tensor(float("nan")))

            def forward(self, x, t, y):
                return torch.where(y[:, None, None, None] == 1, self.weight, 0.0) * x

        with pytest.raises(FloatingPointError, match=r"1 of 2 sampled images aren't finite \(first: image 11\)"):
            self.sample_with(Diverged(), torch.tensor([0, 1]), first_index=10)


@pytest.mark.gpu
def test_cuda_makes_the_same_images(model):
    import copy

    on_cuda = sample(copy.deepcopy(model).cuda())
    assert on_cuda.device.type == "cpu"
    difference = (on_cuda.int() - sample(model).int()).abs()
    assert float((difference > 1).float().mean()) < 0.01  # TF32 products may be on
