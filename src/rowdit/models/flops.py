"""FLOPs of a DiT: two for each multiply-add of a matrix product, as torch.utils.flop_counter counts. Elementwise work
(norms, GELU, softmax) isn't counted.
"""

from __future__ import annotations

from rowdit.models.dit import TIME_FREQUENCIES, DiTConfig


def forward_flops(config: DiTConfig) -> int:
    """FLOPs of one forward pass, for one image.

    With T tokens, width D, MLP width M and L blocks of which each has the matrices qkv (3 D, D), proj (D, D), fc1 and
    fc2 (M D each) for tokens, adaLN (6 D, D) for the image, and attention's two T x T x D products:

        2 [ L (T (4 D^2 + 2 D M) + 2 T^2 D + 6 D^2) + T D (patch in + patch out) + (256 D + D^2) + 2 D^2 ]
    """
    T, D, M = config.num_tokens, config.hidden_size, config.mlp_size
    block = T * (4 * D * D + 2 * D * M) + 2 * T * T * D + 6 * D * D
    patch_out = config.patch_dim * (2 if config.learn_sigma else 1)
    ends = T * D * (config.patch_dim + patch_out)
    time_embedding = TIME_FREQUENCIES * D + D * D
    final_modulation = 2 * D * D
    return 2 * (config.depth * block + ends + time_embedding + final_modulation)
