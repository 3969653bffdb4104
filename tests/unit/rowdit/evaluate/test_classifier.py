"""The classifier that says whether samples show the class that they were asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rowdit.data import ArrayDataset, open_dataset
from rowdit.evaluate import ClassifierConfig, class_accuracy, train_classifier

QUICK = ClassifierConfig(width=8, num_epochs=2)


def bars(num_images: int, size: int = 14, channels: int = 1, seed: int = 0) -> ArrayDataset:
    """Class 0 a horizontal bar, class 1 a vertical one, on noise: easy, but not by brightness."""
    generator = np.random.default_rng(seed)
    images = generator.integers(0, 100, (num_images, channels, size, size), dtype=np.uint8)
    labels = np.arange(num_images) % 2
    for index, place in enumerate(generator.integers(0, size, num_images)):
        images[index, :, slice(None) if labels[index] else place, place if labels[index] else slice(None)] = 250
    return ArrayDataset(images, labels, ("horizontal", "vertical"), name="bars")


def accuracy(classifier, data: ArrayDataset) -> float:
    return class_accuracy(classifier, torch.from_numpy(data.images), torch.from_numpy(data.labels))


@pytest.mark.parametrize(("size", "channels"), [(4, 1), (14, 1), (15, 3), (28, 1)])
def test_learns_at_any_size(size, channels):
    classifier = train_classifier(bars(512, size, channels), config=ClassifierConfig(width=8, num_epochs=6))
    assert accuracy(classifier, bars(200, size, channels, seed=1)) > 0.9


def test_learns_real_images_at_14_pixels():
    train, reference = open_dataset("bundled", "train", 14), open_dataset("bundled", "reference", 14)
    images, labels = reference.fetch(np.arange(1000))
    classifier = train_classifier(train, config=ClassifierConfig(width=16, num_epochs=1))
    # One pass at half width gives about 0.83; chance is 0.1.
    assert class_accuracy(classifier, torch.from_numpy(images), torch.from_numpy(labels)) > 0.75


@pytest.mark.slow
def test_the_default_reaches_its_accuracy():
    train, reference = open_dataset("bundled", "train"), open_dataset("bundled", "reference")
    images, labels = reference.fetch(np.arange(len(reference)))
    classifier = train_classifier(train)
    assert class_accuracy(classifier, torch.from_numpy(images), torch.from_numpy(labels)) > 0.88


def test_a_function_of_its_seed():
    def weights(seed: int, global_seed: int) -> torch.Tensor:
        torch.manual_seed(global_seed)
        classifier = train_classifier(bars(64), config=ClassifierConfig(width=8, num_epochs=2, seed=seed))
        return torch.cat([parameter.flatten() for parameter in classifier.parameters()])

    assert torch.equal(weights(0, global_seed=1), weights(0, global_seed=2))
    assert not torch.equal(weights(0, global_seed=1), weights(1, global_seed=1))


def test_global_generator_is_left_alone():
    before = torch.get_rng_state()
    train_classifier(bars(16), config=QUICK)
    assert torch.equal(torch.get_rng_state(), before)


def test_trained_once_and_kept(tmp_path):
    data, steps = bars(256), []
    first = train_classifier(data, config=QUICK, folder=tmp_path, progress=lambda done, total: steps.append(total))
    assert steps == [4] * 4
    second = train_classifier(data, config=QUICK, folder=tmp_path, progress=lambda done, total: steps.append(total))
    assert steps == [4] * 4
    assert torch.equal(first(torch.from_numpy(data.images)), second(torch.from_numpy(data.images)))
    train_classifier(bars(256, seed=1), config=QUICK, folder=tmp_path)
    train_classifier(data, config=ClassifierConfig(width=8, num_epochs=1), folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_accuracy_counts():
    data = bars(512)
    classifier = train_classifier(data, config=ClassifierConfig(width=8, num_epochs=6))
    images = torch.from_numpy(data.images[:10])
    predicted = classifier.predict(images, batch_size=3)
    assert torch.equal(predicted, classifier.predict(images))
    wrong = torch.where(torch.arange(10) < 3, 1 - predicted, predicted)
    assert class_accuracy(classifier, images, wrong) == pytest.approx(0.7)


def test_bad_input_is_named(tmp_path):
    with pytest.raises(ValueError, match="at least 4 x 4 pixels, got 3 x 3"):
        train_classifier(bars(16, size=3))
    with pytest.raises(ValueError, match="at least 2 training images, the dataset has 1"):
        train_classifier(bars(1))
    classifier = train_classifier(bars(16), config=QUICK, folder=tmp_path)
    with pytest.raises(ValueError, match=r"uint8 images of shape \(1, 14, 14\), got torch.uint8 of shape \(1, 8, 8\)"):
        classifier.predict(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="as many labels as images are needed, at least one, got 3 and 2"):
        class_accuracy(classifier, torch.zeros(2, 1, 14, 14, dtype=torch.uint8), torch.zeros(3))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"can't be read.*delete it"):
        train_classifier(bars(16), config=QUICK, folder=tmp_path)
