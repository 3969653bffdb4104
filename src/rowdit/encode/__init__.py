"""Images to latents and back: encoders, and the job that writes latent shards."""

from __future__ import annotations

from rowdit.encode.encoders import Encoder, IdentityEncoder, encoder_of, open_encoder
from rowdit.encode.job import EncodeOptions, encode_split, verify

__all__ = [
    "EncodeOptions",
    "Encoder",
    "IdentityEncoder",
    "encode_split",
    "encoder_of",
    "open_encoder",
    "verify",
]
