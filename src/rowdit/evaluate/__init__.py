"""How good are the samples: distances between features, class accuracy, and the record of how they were measured."""

from __future__ import annotations

from rowdit.evaluate.classifier import Classifier, ClassifierConfig, class_accuracy, train_classifier
from rowdit.evaluate.features import EfficientNetLite0Features, FeatureNetwork
from rowdit.evaluate.frechet import FeatureStatistics, Moments, frechet_distance
from rowdit.evaluate.generate import balanced_labels, generate
from rowdit.evaluate.kid import kernel_distance, kernel_distances
from rowdit.evaluate.manifold import Overlap, overlap
from rowdit.evaluate.networks import NETWORKS, open_network
from rowdit.evaluate.reference import (
    Floor,
    Reference,
    compute_reference,
    load_or_compute_reference,
    real_floor,
    reference_fingerprint,
    score_images,
)
from rowdit.evaluate.score import Sampling, Score

__all__ = [
    "NETWORKS",
    "Classifier",
    "ClassifierConfig",
    "EfficientNetLite0Features",
    "FeatureNetwork",
    "FeatureStatistics",
    "Floor",
    "Moments",
    "Overlap",
    "Reference",
    "Sampling",
    "Score",
    "balanced_labels",
    "class_accuracy",
    "compute_reference",
    "frechet_distance",
    "generate",
    "kernel_distance",
    "kernel_distances",
    "load_or_compute_reference",
    "open_network",
    "overlap",
    "real_floor",
    "reference_fingerprint",
    "score_images",
    "train_classifier",
]
