"""From any image file to (C, size, size) bytes. Each of Pillow's modes has one stated way to grey or RGB.

    1, L, RGB, RGBX, P, HSV, YCbCr, CMYK    Pillow's own conversion
    LA, La, PA, RGBA, RGBa, and any mode
      with a transparent colour             laid over the background: a * colour + (1 - a) * background, a in [0, 1]
    I;16 (all byte orders)                  v / 257, rounded: 65535 is 255 (clipping would make most of it white)
    I                                       the same (16-bit PGM opens so); refused unless 0 <= v <= 65535
    F                                       v * 255, rounded; refused unless 0 <= v <= 1
    LAB                                     to sRGB by LittleCMS

The orientation in the EXIF block is applied. Then the square in the middle, min(H, W) a side, is resampled to size x
size by the bicubic filter: that is resizing the short side and cropping the middle, without the distortion of rounding
the long side to whole pixels first, and a 1 x 5000 strip costs nothing. Large JPEGs are decoded at a reduced scale, of
at least twice ``size``. Of animations the first frame counts. Embedded colour profiles are ignored, as in the usual
pipelines of this field.
"""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageCms

from rowdit.data.batch import DataError
from rowdit.data.resize import REDUCING_GAP

MAX_PIXELS = 89_478_485  # a quarter of a GiB as RGB; Pillow warns from here on
WHITE = (255, 255, 255)

_UPRIGHT = {  # EXIF orientation (tag 0x0112) -> what makes the image upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_pillow_limit_lock = threading.Lock()


class BadImageError(DataError):
    """One image can't be used. ``reason`` says why, without the file's name.

    Args:
        name: of the file.
        reason: what is wrong, and the way out where there is one.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def read_image(
    source: str | Path | BinaryIO,
    size: int,
    *,
    channels: int = 3,
    background: tuple[int, int, int] = WHITE,
    max_pixels: int = MAX_PIXELS,
    name: str | None = None,
) -> np.ndarray:
    """Read one image file as a square of bytes; the module's docstring says how.

    Args:
        source: a path, or an open binary file.
        size: >= 1, pixels a side of the result.
        channels: 3 for RGB, 1 for grey (ITU-R 601 luma).
        background: RGB bytes that show where the image is transparent.
        max_pixels: an image with more is refused before it is decoded.
        name: what errors call the image; by default the path.

    Returns:
        (channels, size, size) uint8.

    Raises:
        BadImageError: the file is missing, damaged, truncated, too large, or has values without a stated scale.
        OSError: the machine's fault rather than the file's (no permission, a failing disk, too many open files).
    """
    called = name or str(source if isinstance(source, str | Path) else getattr(source, "name", "image"))
    try:
        image = _load(source, size, max_pixels)
    except BadImageError as error:
        raise BadImageError(called, error.reason) from error.__cause__
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise whatever they stumble over in a damaged file
        code = error.errno if isinstance(error, OSError) else None
        if code not in (None, errno.ENOENT, errno.ELOOP):
            raise
        raise BadImageError(called, _one_line(error)) from error
    try:
        return _to_bytes(_middle_square(_to_eight_bits(image, background), size), channels)
    except BadImageError as error:
        raise BadImageError(called, error.reason) from error.__cause__


def _load(source: str | Path | BinaryIO, size: int, max_pixels: int) -> Image.Image:
    """The decoded first frame, upright, in the file's own mode."""
    with _open(source) as image:
        num_pixels = image.width * image.height
        if num_pixels > max_pixels:
            raise BadImageError("", _too_large(f"{image.width} x {image.height} = {num_pixels}", max_pixels))
        least = max(1, int(size * REDUCING_GAP))
        image.draft(image.mode, (least, least))  # JPEG only: decode at 1/2, 1/4 or 1/8, not below ``least``
        image.load()
        turn = _UPRIGHT.get(_orientation(image))
        return image if turn is None else image.transpose(turn)


def _open(source: str | Path | BinaryIO) -> Image.Image:
    """Image.open without Pillow's own limit, which warns or refuses by another rule than ``max_pixels``."""
    with _pillow_limit_lock:  # the limit is a global of Pillow's, read while the header is
        pillow_limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            return Image.open(source)
        finally:
            Image.MAX_IMAGE_PIXELS = pillow_limit


def _too_large(how_many: str, max_pixels: int) -> str:
    return (
        f"{how_many} pixels, more than max_pixels = {max_pixels}, which guards against files that unpack to more than "
        f"the memory holds; if the image is meant to be so large, raise max_pixels, otherwise scale it down"
    )


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:  # a damaged EXIF block beside sound pixels: as if there were none
        return 1


def _to_eight_bits(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """To mode L or RGB, as the table in the module's docstring has it."""
    if image.mode.startswith("I;16"):
        return _lay_over(_from_sixteen_bits(image), background)
    if image.mode == "I":
        return Image.fromarray(_scale_down(_in_range(np.asarray(image), 65535, "32-bit integers")))
    if image.mode == "F":
        values = _in_range(np.asarray(image), 1, "floating-point values")
        return Image.fromarray(np.rint(values * 255).astype(np.uint8))
    if image.mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        return _lay_over(ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB"), background)
    return _lay_over(image, background)


def _lay_over(image: Image.Image | None, background: tuple[int, int, int]) -> Image.Image:
    if image is None:
        raise BadImageError("", "its colours can't be converted to sRGB")
    if image.has_transparency_data:
        if image.mode == "La":
            image = image.convert("LA")  # Pillow has no direct way from La to RGBA
        opaque = Image.new("RGBA", image.size, (*background, 255))
        return Image.alpha_composite(opaque, image.convert("RGBA")).convert("RGB")
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def _from_sixteen_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    grey = Image.fromarray(_scale_down(values))
    clear = image.info.get("transparency")  # of a PNG: the one value that is transparent
    if clear is not None:
        grey.putalpha(Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    return grey


def _scale_down(values: np.ndarray) -> np.ndarray:
    """0..65535 to 0..255: v / 257, rounded."""
    return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)


def _in_range(values: np.ndarray, top: int, kind: str) -> np.ndarray:
    if not (values.min() >= 0 and values.max() <= top):  # NaN fails too
        raise BadImageError(
            "", f"{kind} from {values.min()} to {values.max()}, but only 0..{top} has a stated scale; save it in 8 bits"
        )
    return values


def _middle_square(image: Image.Image, size: int) -> Image.Image:
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    return image.resize((size, size), Image.Resampling.BICUBIC, box=box, reducing_gap=REDUCING_GAP)


def _to_bytes(image: Image.Image, channels: int) -> np.ndarray:
    if channels == 1:
        return np.asarray(image.convert("L"))[None]
    return np.ascontiguousarray(np.asarray(image.convert("RGB")).transpose(2, 0, 1))


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return "not an image that Pillow can read" if text.startswith("cannot identify") else text
