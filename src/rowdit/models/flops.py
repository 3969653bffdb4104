"""FLOPs of a DiT: two for each multiply-add of a matrix product, as torch.utils.flop_counter counts. Elementwise work
(norms, GELU, softmax) isn't counted.
"""

from __future__ import annotations

from rowdit.models.config import TIME_FREQUENCIES, DiTConfig


def forward_flops(config: DiTConfig) -> int:
    """FLOPs of one forward pass, for one image.

    With T tokens, width D, MLP width M and L blocks of which each has the matrices qkv (3 D, D), proj (D, D), fc1 and
    fc2 (M D each; a SwiGLU has three) for tokens, adaLN (6 D, D) for the image, and attention's two T x T x D products:

        2 [ L (T (4 D^2 + 2 D M) + 2 T^2 D + 6 D^2) + T D (patch in + patch out) + (256 D + D^2) + 2 D^2 ]

    and D E + D^2 for a caption's embedding of width E.
    """
    T, D, M = config.num_tokens, config.hidden_size, config.mlp_size
    matrices = 2 if config.mlp == "gelu" else 3
    block = T * (4 * D * D + matrices * D * M) + 2 * T * T * D + 6 * D * D
    ends = T * D * config.patch_size**2 * (config.in_channels + config.out_channels)
    time_embedding = TIME_FREQUENCIES * D + D * D
    caption = 0 if config.caption_dim is None else config.caption_dim * D + D * D
    final_modulation = 2 * D * D
    return 2 * (config.depth * block + ends + time_embedding + caption + final_modulation)
