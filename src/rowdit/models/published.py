"""Weights of other people's DiT in this one, and of this one in theirs: the public DiT checkpoints and diffusers.

    model = from_public(read_weights("DiT-XL-2-256x256.pt"))            # facebookresearch/DiT's names
    model = load_diffusers("DiT-XL-2-256/transformer")                  # a folder of diffusers' DiTTransformer2DModel
    save_diffusers(model, "out/transformer")                            # and back

**What such a model predicts isn't a velocity.** The published DiTs are DDPM models (arXiv:2212.09748): from x at
timestep k = 0 .. 999 they give the noise epsilon in the first C channels and numbers for the variance in the other C.
Here they are the same function of the same input, with t = k / 1000 (:func:`published_time`) and
``model(x, t, y, all_channels=True)``; sampling from them takes a DDPM sampler and their noise schedule. The samplers of
`rowdit.flow` expect a velocity along straight paths, and give nothing useful with these weights before fine-tuning.

Files are read without executing anything: safetensors, or torch's format with ``weights_only=True``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rowdit.models.dit import DiT, DiTConfig

State = dict[str, Tensor]
NUM_HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16}
"""Heads of the published widths: shapes of weights don't tell."""
DIFFUSERS_WEIGHTS = "diffusion_pytorch_model.safetensors"


class WeightsError(ValueError):
    """Weights that don't fit; the message names what is missing, unexpected or of another shape."""


def published_time(timestep: Tensor) -> Tensor:
    """The time argument of :class:`DiT` for a DDPM timestep, (B,) in 0 .. 999: t = timestep / 1000.

    Example:
        >>> published_time(torch.tensor([0, 500, 999]))
        tensor([0.0000, 0.5000, 0.9990])
    """
    return timestep.float() / 1000


def read_weights(path: str | Path) -> State:
    """Tensors by name from a safetensors file or one of torch's; of a training checkpoint its average ("ema").

    Raises:
        WeightsError: a file that holds anything but tensors.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own class, and pickle's
        raise WeightsError(
            f"{path} can't be read as plain tensors ({type(error).__name__}). A training checkpoint may hold other "
            "objects, which could execute code: save its 'ema' entry alone with torch.save, or as safetensors"
        ) from error
    for key in ("ema", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise WeightsError(f"{path} holds no table of tensors by name")
    return content


# ---------------------------------------------------------------------------------------------------------------------
# the public DiT: the same names


def from_public(state: Mapping[str, Tensor], *, num_heads: int | None = None) -> DiT:
    """The model of a checkpoint with the public DiT's names, in the checkpoint's dtype.

    Args:
        state: tensors by name; ``pos_embed`` (1, T, D) included.
        num_heads: needed for a width that isn't one of the published ones.

    Raises:
        WeightsError: names are missing or left over, or shapes don't fit together.
    """
    config = _public_config(state, num_heads)
    return _filled(config, state)


def to_public(model: DiT) -> State:
    """The model's tensors for the public DiT class, which must be built with the same learn_sigma.

    Raises:
        WeightsError: an option that the public model doesn't have.
    """
    _refuse_options(model.config, "the public DiT")
    if model.config.freq_shift:
        raise WeightsError(f"freq_shift = {model.config.freq_shift}: the public DiT spaces its times as 0 does")
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def save_public(model: DiT, path: str | Path) -> None:
    """Writes :func:`to_public` as safetensors.

    Raises:
        WeightsError: as :func:`to_public`.
    """
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in to_public(model).items()}, path)


def _public_config(state: Mapping[str, Tensor], num_heads: int | None) -> DiTConfig:
    first = _shape(state, "x_embedder.proj.weight", 4)
    hidden_size, in_channels, patch_size, _ = first
    num_classes = _shape(state, "y_embedder.embedding_table.weight", 2)[0] - 1
    num_tokens = _shape(state, "pos_embed", 3)[1]
    side = math.isqrt(num_tokens)
    if side * side != num_tokens:
        raise WeightsError(f"pos_embed has {num_tokens} tokens, which aren't a square image's")
    out_channels = _shape(state, "final_layer.linear.weight", 2)[0] // patch_size**2
    if out_channels not in (in_channels, 2 * in_channels):
        raise WeightsError(f"the final layer gives {out_channels} channels of an image of {in_channels}")
    if num_heads is None and hidden_size not in NUM_HEADS:
        raise WeightsError(f"width {hidden_size} is none of the published {sorted(NUM_HEADS)}; say num_heads=...")
    return DiTConfig(
        image_size=side * patch_size,
        in_channels=in_channels,
        patch_size=patch_size,
        hidden_size=hidden_size,
        depth=1 + max((int(name.split(".")[1]) for name in state if name.startswith("blocks.")), default=-1),
        num_heads=num_heads or NUM_HEADS[hidden_size],
        num_classes=num_classes,
        mlp_ratio=_shape(state, "blocks.0.mlp.fc1.weight", 2)[0] / hidden_size,
        learn_sigma=out_channels != in_channels,
    )


# ---------------------------------------------------------------------------------------------------------------------
# diffusers

# ours, within a block or outside -> theirs; q, k and v are one matrix here and three there
_OUTSIDE = {
    "x_embedder.proj": "pos_embed.proj",
    "final_layer.adaLN_modulation.1": "proj_out_1",
    "final_layer.linear": "proj_out_2",
}
_EMBEDDERS = {  # one here, a copy in every block there
    "t_embedder.mlp.0": "norm1.emb.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "norm1.emb.timestep_embedder.linear_2",
    "y_embedder.embedding_table": "norm1.emb.class_embedder.embedding_table",
}
_IN_BLOCK = {
    "adaLN_modulation.1": "norm1.linear",
    "attn.proj": "attn1.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
}
_QKV = ("attn1.to_q", "attn1.to_k", "attn1.to_v")
_FIXED = {
    "activation_fn": "gelu-approximate", "attention_bias": True, "norm_type": "ada_norm_zero",
    "norm_elementwise_affine": False,
}  # fmt: skip


def from_diffusers(state: Mapping[str, Tensor], config: Mapping[str, Any], *, freq_shift: Literal[0, 1] = 1) -> DiT:
    """The model of a `DiTTransformer2DModel`.

    Args:
        state: its state dict.
        config: its configuration, as in its config.json.
        freq_shift: 1 computes what diffusers computes. diffusers spaces the frequencies of the time embedding a little
            wider than the published DiT, also for the published weights; 0 is the spacing that those were trained with.

    Raises:
        WeightsError: a configuration that has no counterpart here; time and class embeddings that differ between
            blocks; names that are missing or left over.
    """
    ours = _config_from_diffusers(config, freq_shift)
    known = dict(state)
    converted: State = {}
    for name, theirs in _OUTSIDE.items():
        _move(known, theirs, converted, name)
    for name, theirs in _EMBEDDERS.items():
        for kind in _kinds(name):
            copies = [_take(known, f"transformer_blocks.{i}.{theirs}.{kind}") for i in range(ours.depth)]
            if not all(torch.equal(copies[0], copy) for copy in copies[1:]):
                raise WeightsError(
                    f"{theirs}.{kind} isn't the same in all blocks: this model was trained with an embedding for each "
                    "block, and a DiT has one for all"
                )
            converted[f"{name}.{kind}"] = copies[0]
    for i in range(ours.depth):
        for name, theirs in _IN_BLOCK.items():
            _move(known, f"transformer_blocks.{i}.{theirs}", converted, f"blocks.{i}.{name}")
        for kind in ("weight", "bias"):
            parts = [_take(known, f"transformer_blocks.{i}.{theirs}.{kind}") for theirs in _QKV]
            converted[f"blocks.{i}.attn.qkv.{kind}"] = torch.cat(parts)
    known.pop("pos_embed.pos_embed", None)  # fixed, and the same here
    if known:
        raise WeightsError(f"unexpected tensors: {sorted(known)[:5]}")
    return _filled(ours, converted)


def to_diffusers(model: DiT) -> tuple[dict[str, Any], State]:
    """Configuration and state dict of the `DiTTransformer2DModel` that computes the same as ``model``.

    It takes timestep = 1000 t, and class num_classes for none.

    Raises:
        WeightsError: an option that diffusers' class doesn't have; among them freq_shift = 0, unless the class is told:
            :func:`diffusers_model` does.
    """
    if model.config.freq_shift != 1:
        raise WeightsError(
            "freq_shift = 0: a DiTTransformer2DModel that is loaded from files spaces the times as 1 does. "
            "rowdit.models.published.diffusers_model(model) makes one that computes the same; or train with "
            "--model.freq-shift 1"
        )
    return _to_diffusers(model)


def _to_diffusers(model: DiT) -> tuple[dict[str, Any], State]:
    ours, state = model.config, model.state_dict()
    _refuse_options(ours, "diffusers' DiTTransformer2DModel")
    config = {
        "_class_name": "DiTTransformer2DModel",
        "num_attention_heads": ours.num_heads,
        "attention_head_dim": ours.head_dim,
        "in_channels": ours.in_channels,
        "out_channels": ours.out_channels,
        "num_layers": ours.depth,
        "sample_size": ours.image_size,
        "patch_size": ours.patch_size,
        "num_embeds_ada_norm": ours.num_classes,
        "norm_eps": 1e-6,
        **_FIXED,
    }
    if ours.mlp_size != 4 * ours.hidden_size:
        raise WeightsError(f"mlp_ratio = {ours.mlp_ratio}: diffusers' DiTTransformer2DModel has 4")
    converted: State = {}
    for name, theirs in _OUTSIDE.items():
        for kind in _kinds(name):
            converted[f"{theirs}.{kind}"] = state[f"{name}.{kind}"]
    for i in range(ours.depth):
        block = f"transformer_blocks.{i}"
        for name, theirs in _EMBEDDERS.items():
            for kind in _kinds(name):
                converted[f"{block}.{theirs}.{kind}"] = state[f"{name}.{kind}"]
        for name, theirs in _IN_BLOCK.items():
            for kind in _kinds(name):
                converted[f"{block}.{theirs}.{kind}"] = state[f"blocks.{i}.{name}.{kind}"]
        for kind in ("weight", "bias"):
            parts = state[f"blocks.{i}.attn.qkv.{kind}"].chunk(3)
            for theirs, part in zip(_QKV, parts, strict=True):
                converted[f"{block}.{theirs}.{kind}"] = part
    return config, {name: tensor.detach() for name, tensor in converted.items()}


def diffusers_model(model: DiT) -> Any:
    """A `DiTTransformer2DModel` that computes the same as ``model``, whatever its freq_shift. Needs diffusers.

    With freq_shift = 0 that holds for this object alone: its own `save_pretrained` doesn't keep the spacing.
    """
    from diffusers import DiTTransformer2DModel  # an extra

    config, state = _to_diffusers(model)
    theirs = DiTTransformer2DModel.from_config(config)
    theirs.load_state_dict(state)
    for block in theirs.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = model.config.freq_shift
    return theirs.eval()


def save_diffusers(model: DiT, folder: str | Path) -> None:
    """Writes config.json and weights that `DiTTransformer2DModel.from_pretrained(folder)` reads.

    Raises:
        WeightsError: as :func:`to_diffusers`.
    """
    from safetensors.torch import save_file

    config, state = to_diffusers(model)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Copies share memory in the model, and safetensors writes each tensor on its own.
    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, folder / DIFFUSERS_WEIGHTS)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_diffusers(folder: str | Path, *, freq_shift: Literal[0, 1] = 1) -> DiT:
    """The model of a folder that `DiTTransformer2DModel.save_pretrained` has written. See :func:`from_diffusers`."""
    folder = Path(folder)
    files = [folder / DIFFUSERS_WEIGHTS, folder / "diffusion_pytorch_model.bin"]
    weights = next((file for file in files if file.exists()), None)
    if weights is None or not (folder / "config.json").exists():
        raise WeightsError(f"{folder} has no config.json or no {DIFFUSERS_WEIGHTS}")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return from_diffusers(read_weights(weights), config, freq_shift=freq_shift)


def _config_from_diffusers(config: Mapping[str, Any], freq_shift: Literal[0, 1]) -> DiTConfig:
    for key, value in _FIXED.items():
        if config.get(key, value) != value:
            raise WeightsError(f"{key} = {config[key]!r} in diffusers' config; only {value!r} has a counterpart here")
    in_channels = config["in_channels"]
    out_channels = config.get("out_channels") or in_channels
    if out_channels not in (in_channels, 2 * in_channels):
        raise WeightsError(f"out_channels = {out_channels}: must be in_channels = {in_channels}, or twice as many")
    return DiTConfig(
        image_size=config["sample_size"],
        in_channels=in_channels,
        patch_size=config["patch_size"],
        hidden_size=config["num_attention_heads"] * config["attention_head_dim"],
        depth=config["num_layers"],
        num_heads=config["num_attention_heads"],
        num_classes=config["num_embeds_ada_norm"],
        learn_sigma=out_channels != in_channels,
        freq_shift=freq_shift,
    )


# ---------------------------------------------------------------------------------------------------------------------
# both


def _filled(config: DiTConfig, state: Mapping[str, Tensor]) -> DiT:
    """A DiT of that shape with these weights."""
    with torch.device("meta"):
        model = DiT(config)
    expected = model.state_dict()
    missing = sorted(name for name in expected if name not in state and name != "pos_embed")
    extra = sorted(name for name in state if name not in expected)
    if missing or extra:
        raise WeightsError(f"these aren't a DiT's weights: missing {missing[:5]}, unexpected {extra[:5]}")
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise WeightsError(f"{name} is {tuple(tensor.shape)}; the model has {tuple(expected[name].shape)}")
    model.to_empty(device="cpu")
    model.init_buffers()
    model.load_state_dict(dict(state), strict="pos_embed" in state)
    return model.to(state["x_embedder.proj.weight"].dtype).eval()


def _refuse_options(config: DiTConfig, where: str) -> None:
    for name, published in (("qk_norm", False), ("positions", "sincos"), ("mlp", "gelu"), ("caption_dim", None)):
        if getattr(config, name) != published:
            raise WeightsError(f"{name} = {getattr(config, name)!r}: {where} has no such thing")


def _kinds(name: str) -> tuple[str, ...]:
    return ("weight",) if name == "y_embedder.embedding_table" else ("weight", "bias")


def _move(known: State, theirs: str, converted: State, name: str) -> None:
    for kind in _kinds(name):
        converted[f"{name}.{kind}"] = _take(known, f"{theirs}.{kind}")


def _take(known: State, name: str) -> Tensor:
    if name not in known:
        raise WeightsError(f"{name} is missing")
    return known.pop(name)


def _shape(state: Mapping[str, Tensor], name: str, ndim: int) -> tuple[int, ...]:
    if name not in state:
        raise WeightsError(f"these aren't a DiT's weights: {name} is missing (there are {sorted(state)[:3]}, ...)")
    shape = tuple(state[name].shape)
    if len(shape) != ndim:
        raise WeightsError(f"{name} is {shape}; it must have {ndim} dimensions")
    return shape
