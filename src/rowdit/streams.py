"""Random numbers as functions of (seed, purpose, index).

Nothing that trains or samples keeps a generator. It asks for the numbers that belong to an index - the place of an
image in the training stream, the number of a generated image, an epoch - and to a purpose, a plain string such as
``"noise"``, ``"time"``, ``"class_dropout"``, ``"order"``, ``"flip"`` or ``"sample"``. So the numbers depend neither on
the batch size, nor on the number of ranks, nor on what was drawn before, and a resumed run needs no generator state.

How: Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), NumPy's implementation.

    key     (128 bits)  BLAKE2b of (seed, purpose)
    counter (256 bits)  (block, 0, index, 0), block = 1, 2, ...: each index owns 2^128 blocks of four 64-bit words

One word is one number. NumPy promises that a bit generator's words never change, but not what its ``Generator`` makes
of them; hence words become numbers here, by arithmetic that is exact (uniforms, permutations) or done in float64 and
rounded to float32 (normals, by the inverse of the normal distribution function).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

_DOMAIN = "rowdit.streams/1"  # changes only when every stream is meant to change
_BLOCK_WORDS = 1 << 20  # words turned into numbers at once: bounds the float64 temporaries at 8 MiB each


def uniform(seed: int, purpose: str, indices: Tensor | Sequence[int] | np.ndarray, shape: Sequence[int] = ()) -> Tensor:
    """Uniform numbers in [0, 1), one array of ``shape`` for each index.

    The numbers are multiples of 2^-24, all of which float32 holds exactly, so none is ever rounded up to 1.

    Args:
        seed: any integer.
        purpose: names the stream; two purposes share no numbers.
        indices: (B,) integers >= 0, in any order, repeats allowed.
        shape: shape of what each index gets.

    Returns:
        (B, *shape) float32 on the CPU. Row i depends on (seed, purpose, indices[i]) alone, and is the beginning of what
        a larger shape would give.

    Raises:
        ValueError: a negative index, or indices that aren't one-dimensional.
        TypeError: a seed or indices that aren't integers.

    Example:
        >>> a = uniform(0, "time", [3, 4])
        >>> b = uniform(0, "time", [4])
        >>> bool(a[1] == b[0])
        True
    """
    return _draw(seed, purpose, indices, shape, _uniform_from_words)


def normal(seed: int, purpose: str, indices: Tensor | Sequence[int] | np.ndarray, shape: Sequence[int]) -> Tensor:
    """Standard normal numbers, one array of ``shape`` for each index: z = Phi^-1((k + 1/2) / 2^52), k a 52-bit integer.

    The largest magnitude that can come out is 8.2, symmetric about zero.

    Args, Returns, Raises: as for :func:`uniform`.

    Example:
        >>> normal(0, "noise", [7, 8], (1, 28, 28)).shape
        torch.Size([2, 1, 28, 28])
    """
    return _draw(seed, purpose, indices, shape, _normal_from_words)


def permutation(seed: int, purpose: str, epoch: int, num: int) -> np.ndarray:
    """A random order of 0 .. num - 1: the stable argsort of ``num`` words.

    Args:
        seed: any integer.
        purpose: names the stream.
        epoch: >= 0; the index of the stream.
        num: >= 0; how many.

    Returns:
        (num,) int64. Two equal words (chance below num^2 / 2^65) keep their order, which is too rare to be a bias.

    Raises:
        ValueError: a negative epoch or num.

    Example:
        >>> sorted(permutation(0, "order", 2, 5).tolist())
        [0, 1, 2, 3, 4]
    """
    if num < 0:
        raise ValueError(f"num is {num}; a permutation needs num >= 0")
    words = _words(_key(seed, purpose), _check_indices([epoch]), num)[0]
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def _draw(
    seed: int,
    purpose: str,
    indices: Tensor | Sequence[int] | np.ndarray,
    shape: Sequence[int],
    numbers_from_words: Callable[[np.ndarray], Tensor],
) -> Tensor:
    key, rows = _key(seed, purpose), _check_indices(indices)
    num = math.prod(shape)
    out = torch.empty((len(rows), num), dtype=torch.float32, device="cpu")
    rows_per_block = max(1, _BLOCK_WORDS // max(1, num))
    for start in range(0, len(rows), rows_per_block):
        block = rows[start : start + rows_per_block]
        out[start : start + len(block)] = numbers_from_words(_words(key, block, num))
    return out.view(len(rows), *shape)


def _uniform_from_words(words: np.ndarray) -> Tensor:
    return torch.from_numpy((words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24))


def _normal_from_words(words: np.ndarray) -> Tensor:
    # k + 1/2 with k < 2^52 is exact in float64 and lies strictly inside (0, 2^52), so the inverse is finite.
    probability = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return torch.special.ndtri(torch.from_numpy(probability)).float()


def _words(key: np.ndarray, rows: np.ndarray, num: int) -> np.ndarray:
    """(len(rows), num) uint64: the first ``num`` words of each index's stretch of the counter."""
    generator = np.random.Philox(key=key)
    state = generator.state
    counter = state["state"]["counter"]
    words = np.empty((len(rows), num), dtype=np.uint64)
    for row, index in enumerate(rows.tolist()):
        counter[2] = index
        generator.state = state  # the counter's other words are zero and the buffer is empty, as in a fresh generator
        words[row] = generator.random_raw(num)
    return words


def _key(seed: int, purpose: str) -> np.ndarray:
    """The 128-bit Philox key of a stream, as two 64-bit words."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed is {seed!r}; streams need an integer seed")
    text = f"{_DOMAIN}\0{int(seed)}\0{purpose}".encode()
    return np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), dtype="<u8").astype(np.uint64)


def _check_indices(indices: Tensor | Sequence[int] | np.ndarray) -> np.ndarray:
    rows = indices.cpu().numpy() if isinstance(indices, Tensor) else np.asarray(indices)
    if rows.ndim != 1:
        raise ValueError(f"indices have shape {rows.shape}; streams need one dimension, (B,)")
    if len(rows) == 0:
        return rows.astype(np.int64)
    if rows.dtype.kind not in "iu":
        raise TypeError(f"indices are {rows.dtype}; streams need integers")
    if rows.min() < 0:
        raise ValueError(f"index {rows.min()} is negative; streams need indices >= 0")
    return rows
