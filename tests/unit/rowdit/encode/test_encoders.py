"""Encoders: shapes, scales, hashes, and what is refused."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch

from rowdit.data import ArrayDataset, DataError
from rowdit.encode import encoder_of, open_encoder
from rowdit.encode.train_vae import VAETraining, train_vae
from rowdit.models.vae import ConvVAE, VAEConfig

SMALL = VAEConfig(in_channels=1, latent_channels=2, downsample_factor=2, hidden_channels=8)


def shades(num_images: int = 64) -> ArrayDataset:
    """Smooth 8 x 8 images: a slope of random direction and height."""
    generator = np.random.default_rng(0)
    y, x = np.mgrid[-1:1:8j, -1:1:8j]
    a, b, c = generator.uniform(-60, 60, (3, num_images, 1, 1))
    images = (127 + a * x + b * y + c).clip(0, 255).astype(np.uint8)[:, None]
    return ArrayDataset(images, np.arange(num_images) % 3, ("a", "b", "c"), name="shades")


@pytest.fixture(scope="module")
def vae_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vae")
    train_vae(shades(), folder, SMALL, VAETraining(steps=60, batch_size=32, lr=1e-2))
    return folder


@pytest.fixture(scope="module")
def diffusers_folder(tmp_path_factory):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(8, 8),
        norm_num_groups=4,
        latent_channels=3,
        scaling_factor=0.5,
        shift_factor=0.25,
    )
    folder = tmp_path_factory.mktemp("autoencoder-kl")
    vae.save_pretrained(folder, safe_serialization=True)
    return folder


def some_pixels(channels: int, size: int = 8) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).integers(0, 256, (3, channels, size, size), np.uint8))


def test_identity_there_and_back_is_exact():
    encoder = open_encoder("identity", in_channels=3)
    images = some_pixels(3)
    means, deviations = encoder.encode(images)
    assert means.dtype == torch.float32 and not deviations.any()
    assert torch.equal(encoder.decode(means), images)
    assert encoder.latent_shape(8) == (3, 8, 8)


def test_a_trained_vae_decodes_what_it_encodes_and_its_latents_have_deviation_one(vae_folder):
    facts = json.loads((vae_folder / "vae.json").read_text())
    encoder = open_encoder(f"vae:{vae_folder}")
    images = torch.from_numpy(shades().images)
    means, deviations = encoder.encode(images)
    assert means.shape == deviations.shape == (64, 2, 4, 4) and (deviations > 0).all()
    spread = (means.var(correction=0) + deviations.square().mean()).sqrt()
    assert 0.95 < float(spread) < 1.05 and abs(float(means.mean())) < 0.05
    error = (encoder.decode(means).float() - images.float()).square().mean().sqrt()
    # The mean image would give 1 of the standard deviation, and 14.4 dB.
    assert float(error) < 0.5 * float(images.float().std())
    assert facts["psnr"] == pytest.approx(20 * np.log10(255 / float(error)), abs=0.1)


def test_training_is_a_function_of_its_seed(tmp_path):
    short = VAETraining(steps=3, batch_size=8)
    files = []
    for name, training in (("a", short), ("b", short), ("c", VAETraining(steps=3, batch_size=8, seed=1))):
        torch.manual_seed(len(files))
        train_vae(shades(), tmp_path / name, SMALL, training)
        files.append((tmp_path / name / "vae.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]


def test_the_hash_follows_the_weights_and_the_scale(vae_folder, tmp_path):
    before = open_encoder(f"vae:{vae_folder}").hash
    for name in ("vae.json", "vae.safetensors"):
        (tmp_path / name).write_bytes((vae_folder / name).read_bytes())
    moved = open_encoder(f"vae:{tmp_path}")
    assert moved.hash == before
    manifest = {"encoder": moved.describe(), "latent_shape": [2, 4, 4]}
    assert encoder_of(manifest).hash == before
    facts = json.loads((tmp_path / "vae.json").read_text())
    (tmp_path / "vae.json").write_text(json.dumps(facts | {"scale": 2 * facts["scale"]}))
    with pytest.raises(DataError, match="has changed since the latents were made"):
        encoder_of(manifest)


def test_diffusers_autoencoder_is_its_own_posterior_scaled(diffusers_folder):
    from diffusers import AutoencoderKL

    encoder = open_encoder(f"diffusers:{diffusers_folder}")
    assert (encoder.in_channels, encoder.downsample_factor, encoder.latent_shape(8)) == (3, 2, (3, 4, 4))
    images = some_pixels(3)
    means, deviations = encoder.encode(images)
    theirs = AutoencoderKL.from_pretrained(diffusers_folder, use_safetensors=True)
    with torch.no_grad():
        posterior = theirs.encode(images.float() / 127.5 - 1).latent_dist
        decoded = theirs.decode(means / 0.5 + 0.25).sample
    assert torch.allclose(means, (posterior.mean - 0.25) * 0.5, atol=1e-6)
    assert torch.allclose(deviations, posterior.std * 0.5, atol=1e-6)
    expected = ((decoded + 1) * 127.5).clamp(0, 255).round()
    assert (encoder.decode(means).float() - expected).abs().max() <= 1  # a half may round either way
    described = encoder.describe()
    assert (described["scale"], described["shift"], described["factor"]) == (0.5, 0.25, 2)


def test_a_pickled_autoencoder_is_refused(diffusers_folder, tmp_path):
    (tmp_path / "config.json").write_bytes((diffusers_folder / "config.json").read_bytes())
    torch.save({}, tmp_path / "diffusion_pytorch_model.bin")
    with pytest.raises(DataError, match="no AutoencoderKL in safetensors there"):
        open_encoder(f"diffusers:{tmp_path}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("jpeg", "unknown encoder 'jpeg': it is one of 'identity'"),
        ("vae:", "unknown encoder 'vae:'"),
        ("vae:/nowhere/at/all", "doesn't exist; make it with `rowdit train-vae`"),
    ],
)
def test_unknown_encoders(spec, message):
    with pytest.raises(DataError, match=message):
        open_encoder(spec)


def test_a_damaged_vae_is_named(vae_folder, tmp_path):
    (tmp_path / "vae.json").write_bytes((vae_folder / "vae.json").read_bytes())
    (tmp_path / "vae.safetensors").write_bytes((vae_folder / "vae.safetensors").read_bytes()[:-10])
    with pytest.raises(DataError, match="holds no autoencoder that can be read"):
        open_encoder(f"vae:{tmp_path}")


def test_a_kill_between_the_two_files_leaves_no_autoencoder(tmp_path, monkeypatch):
    """The new weights were once left beside the old scale."""
    train_vae(shades(), tmp_path, SMALL, VAETraining(steps=1, batch_size=8))
    replace = os.replace

    def killed(source, target):
        replace(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr("rowdit.encode.train_vae.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        train_vae(shades(), tmp_path, SMALL, VAETraining(steps=2, batch_size=8))
    with pytest.raises(DataError, match="vae.json doesn't exist; make it"):
        open_encoder(f"vae:{tmp_path}", "cpu")


def test_images_that_dont_fit_are_refused_before_training(tmp_path):
    with pytest.raises(DataError, match="have 1 channel.* takes 3"):
        train_vae(shades(), tmp_path, VAEConfig(in_channels=3))
    with pytest.raises(DataError, match="image_size 8 isn't divisible .* nearest valid: 16"):
        train_vae(shades(), tmp_path, VAEConfig(in_channels=1, downsample_factor=16))
    assert not list(tmp_path.iterdir())


def test_a_diverging_training_is_an_error_and_saves_nothing(tmp_path):
    with pytest.raises(DataError, match="diverged at step .* lower --lr"):
        train_vae(shades(), tmp_path, SMALL, VAETraining(steps=50, batch_size=8, lr=1e12))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes",
    [{"downsample_factor": 3}, {"downsample_factor": 1}, {"hidden_channels": 12}, {"latent_channels": 0}],
)
def test_impossible_shapes(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        VAEConfig(**changes)


def test_the_loss_is_the_evidence_bound():
    """Against the sum over pixels and latents, written out."""
    torch.manual_seed(0)
    vae = ConvVAE(SMALL).double()
    x, noise = torch.randn(2, 1, 8, 8, dtype=torch.float64), torch.randn(2, 2, 4, 4, dtype=torch.float64)
    mean, log_variance = vae.encode(x)
    sigma = (log_variance / 2).exp()
    z = torch.distributions.Normal(mean, sigma)
    divergence = torch.distributions.kl_divergence(z, torch.distributions.Normal(0.0, 1.0)).sum()
    error = (x - vae.decode(mean + sigma * noise)).square().sum() / (2 * 0.1**2)
    assert torch.allclose(vae.loss(x, noise), (error + divergence) / x.numel())
