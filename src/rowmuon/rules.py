"""Rule sets for known architectures."""

from __future__ import annotations

from typing import Literal

from rowmuon.routing import Rule

__all__ = ["DIT", "dit"]


def dit(adaln: Literal["muon", "adamw"] = "muon", chunked: bool = True) -> tuple[Rule, ...]:
    """Rules for Diffusion Transformers, by the published DiT's names and by those of diffusers.

    Attention, MLP and adaLN matrices of the blocks go to Muon, a fused qkv in 3 chunks, adaLN in 6, the fused first
    two of a SwiGLU in 2; embeddings, positions, the final layer and all vectors to AdamW.

    Args:
        adaln: where the adaLN modulation of the blocks goes. It is a third of a block's parameters.
        chunked: without, fused matrices are orthogonalised as the one matrix that they are stored as.
    """
    optional = True  # either family of names may be absent
    return (
        Rule(r".*", "adamw", what="vectors", max_ndim=1, optional=optional),
        Rule(r"(^|\.)(x_embedder|t_embedder|y_embedder|pos_embed|patch_embed)(\.|$)", "adamw", what="embeddings"),
        Rule(
            r"(^|\.)(emb|timestep_embedder|class_embedder|caption_projection)\.",
            "adamw",
            what="embeddings",
            optional=True,
        ),
        Rule(r"^(final_layer\.|proj_out)", "adamw", what="final layer", optional=optional),
        Rule(r"\.attn\.qkv\.", "muon", chunks=3 if chunked else 1, what="attention q, k, v", optional=optional),
        Rule(r"\.attn\.proj\.", "muon", what="attention out", optional=optional),
        Rule(r"\.attn\d\.to_(q|k|v)\.", "muon", what="attention q, k, v", optional=optional),
        Rule(r"\.attn\d\.to_out\.", "muon", what="attention out", optional=optional),
        Rule(
            r"\.mlp\.w12\.", "muon", chunks=2 if chunked else 1, what="MLP, gate and up", optional=optional
        ),  # SwiGLU's first two, fused
        Rule(r"\.mlp\.fc\d\.|\.ff\.net\.|\.mlp\.w\d+\.", "muon", what="MLP", optional=optional),
        Rule(
            r"\.adaLN_modulation\.|\.norm\d\.linear\.",
            adaln,
            chunks=6 if adaln == "muon" and chunked else 1,
            what="adaLN",
            optional=optional,
        ),
    )


DIT = dit()
"""The default rules for Diffusion Transformers; ``dit(adaln="adamw")`` moves the modulation to AdamW."""
