"""Every mode of image to bytes (T17), of every shape (T19), and damaged ones named (T18)."""

from __future__ import annotations

import errno
import io
import pickle
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from rowdit.data import decode
from rowdit.data.decode import BadImageError, read_image


def encoded(image: Image.Image, kind: str = "PNG", **options) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, kind, **options)
    file.seek(0)
    return file


def read(image: Image.Image, kind: str = "PNG", size: int | None = None, save: dict | None = None, **options):
    return read_image(encoded(image, kind, **(save or {})), size or image.width, **options)


def pixel(image: np.ndarray, row: int = 0, column: int = 0) -> list[int]:
    return image[:, row, column].tolist()


GREYS = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4


def test_grey_becomes_rgb_or_stays_grey():
    assert (read(Image.fromarray(GREYS)) == GREYS).all()
    assert read(Image.fromarray(GREYS)).shape == (3, 8, 8)
    assert (read(Image.fromarray(GREYS), channels=1) == GREYS[None]).all()


def test_rgb_becomes_grey_by_luma():
    red = Image.new("RGB", (4, 4), (255, 0, 0))
    assert pixel(read(red, channels=1)) == [76]  # 0.299 * 255


def test_bilevel():
    black_and_white = Image.fromarray(GREYS > 100)
    assert black_and_white.mode == "1"
    assert (read(black_and_white) == np.where(GREYS > 100, 255, 0)).all()


def test_alpha_shows_the_background_in_its_share():
    image = Image.new("RGBA", (3, 3))
    image.putdata([(200, 100, 0, 0), (200, 100, 0, 255), (200, 100, 0, 51)] * 3)
    on_white = read(image)
    assert pixel(on_white, 0, 0) == [255, 255, 255]
    assert pixel(on_white, 0, 1) == [200, 100, 0]
    assert pixel(on_white, 0, 2) == [244, 224, 204]  # 0.2 * colour + 0.8 * 255
    on_blue = read(image, background=(0, 0, 255))
    assert pixel(on_blue, 0, 0) == [0, 0, 255] and pixel(on_blue, 0, 2) == [40, 20, 204]


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_what_is_transparent_is_background(mode):
    image = Image.new("LA", (2, 2), (10, 0)).convert(mode)
    assert pixel(read(image, background=(1, 2, 3))) == [1, 2, 3]


def test_a_palette_with_an_alpha_channel():  # PA, which no common file format keeps
    image = Image.new("RGBA", (1, 1), (10, 20, 30, 0)).convert("PA")
    assert image.mode == "PA"
    assert decode._to_eight_bits(image, (1, 2, 3)).getpixel((0, 0)) == (1, 2, 3)


@pytest.mark.parametrize("mode", ["RGBa", "La"])
def test_premultiplied_alpha(mode):
    values = {"RGBa": (40, 20, 0, 51), "La": (40, 51)}[mode]  # colour 200, alpha 0.2
    image = decode._to_eight_bits(Image.new(mode, (1, 1), values), (0, 0, 0))
    assert image.getpixel((0, 0))[0] == 40


def test_palettes_with_one_and_with_many_transparent_colours():
    image = Image.fromarray(np.array([[0, 1], [2, 2]], np.uint8))
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    assert image.mode == "P"
    assert pixel(read(image), 0, 1) == [40, 50, 60]
    one = read(image, save={"transparency": 1}, background=(0, 255, 0))
    assert pixel(one, 0, 0) == [10, 20, 30] and pixel(one, 0, 1) == [0, 255, 0]
    many = read(image, save={"transparency": b"\x00\xff\x33"}, background=(0, 0, 0))
    assert pixel(many, 0, 0) == [0, 0, 0] and pixel(many, 0, 1) == [40, 50, 60] and pixel(many, 1, 0) == [14, 16, 18]


@pytest.mark.parametrize(("mode", "clear", "other"), [("L", 8, 9), ("RGB", (8, 8, 8), (8, 8, 9)), ("1", 0, 1)])
def test_a_transparent_colour_without_an_alpha_channel(mode, clear, other):
    image = Image.new(mode, (2, 2), other)
    image.putpixel((1, 0), clear)
    result = read(image, save={"transparency": clear}, background=(200, 0, 0))
    assert pixel(result, 0, 1) == [200, 0, 0]
    assert pixel(result, 0, 0) == list(image.convert("RGB").getpixel((0, 0)))


def test_cmyk_and_its_inks():
    inks = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert pixel(read(inks, "TIFF")) == [255, 0, 0]
    assert np.abs(read(inks, "JPEG", save={"quality": 100}).astype(int)[:, 4, 4] - [255, 0, 0]).max() <= 3


@pytest.mark.parametrize("mode", ["HSV", "YCbCr", "LAB", "RGBX"])
def test_other_colour_spaces(mode):
    values = {"HSV": (0, 255, 255), "YCbCr": (76, 85, 255), "LAB": (136, 208, 195), "RGBX": (255, 0, 0, 9)}[mode]
    image = decode._to_eight_bits(Image.new(mode, (1, 1), values), decode.WHITE)
    assert image.mode == "RGB"
    red, green, blue = image.getpixel((0, 0))
    assert red >= 250 and green <= 12 and blue <= 12


SIXTEEN = np.array(
    [[0, 128, 129, 257], [32768, 65535, 65407, 65406], [1, 2, 3, 4], [1000, 2000, 3000, 4000]], np.uint16
)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_are_scaled_not_clipped(kind):
    result = read(Image.fromarray(SIXTEEN), kind)
    assert (result == np.rint(SIXTEEN / 257)).all()
    assert result[0, :2].tolist() == [[0, 0, 1, 1], [128, 255, 255, 254]]


def test_sixteen_bits_of_the_other_byte_order():
    image = Image.frombytes("I;16B", (4, 4), SIXTEEN.astype(">u2").tobytes())
    assert (read(image, "TIFF") == np.rint(SIXTEEN / 257)).all()


def test_sixteen_bits_with_a_transparent_value():
    result = read(Image.fromarray(SIXTEEN), save={"transparency": 257}, background=(9, 8, 7))
    assert pixel(result, 0, 3) == [9, 8, 7]
    assert pixel(result, 0, 2) == [1, 1, 1]  # 129 / 257 is 1 too, but 129 isn't the transparent value


def test_a_pgm_of_ten_bits_is_scaled_by_its_own_maximum():
    file = io.BytesIO(b"P5 2 2 1023\n" + struct.pack(">4H", 0, 1023, 512, 256))
    assert read_image(file, 2)[0].tolist() == [[0, 255], [128, 64]]


def test_wide_integers_and_floats_need_a_stated_scale():
    assert pixel(read(Image.fromarray(np.full((2, 2), 65535, np.int32)), "TIFF")) == [255] * 3
    assert pixel(read(Image.fromarray(np.full((2, 2), 0.5, np.float32)), "TIFF")) == [128] * 3
    for values, told in (
        (np.full((2, 2), 65536, np.int32), "65536"),
        (np.full((2, 2), -1, np.int32), "-1"),
        (np.full((2, 2), 1.5, np.float32), "1.5"),
        (np.array([[0, np.nan], [0, 0]], np.float32), "nan"),
    ):
        with pytest.raises(BadImageError, match=f"{told}.*stated scale"):
            read(Image.fromarray(values), "TIFF")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_the_exif_orientation_is_applied(kind, orientation):
    upright = np.zeros((40, 40), np.uint8)
    upright[:20, :20], upright[:20, 20:], upright[20:, :20] = 240, 160, 80
    # How a camera that is held so stores the upright scene: the inverse of what the tag tells viewers to do.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: np.rot90(upright),
        7: upright[::-1, ::-1].T,
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    save = {"exif": exif, **({"lossless": True} if kind == "WEBP" else {})}
    result = read(Image.fromarray(np.ascontiguousarray(stored)), kind, size=40, save=save)
    assert np.abs(result[0].astype(int) - upright)[5:15, 5:35].max() < 12  # JPEG
    assert np.abs(result[0].astype(int) - upright)[25:35, 5:35].max() < 12


def test_a_damaged_exif_block_is_as_none():
    file = encoded(Image.fromarray(GREYS), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert read_image(file, 8).shape == (3, 8, 8)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "WEBP", "TIFF", "JPEG"])
def test_one_pixel(kind):
    result = read(Image.new("RGB", (1, 1), (10, 200, 30)), kind, size=16)
    assert result.shape == (3, 16, 16)
    assert (result == result[:, :1, :1]).all()


@pytest.mark.parametrize("shape", [(1, 5000), (5000, 1), (3, 60_000)])
def test_strips_take_no_more_memory_than_they_have(shape):  # T19: the short side at 256 would make 1 x 5000 a gigabyte
    height, width = shape
    values = (np.arange(height * width) % 251).astype(np.uint8).reshape(height, width)
    result = read(Image.fromarray(values), size=256)
    assert result.shape == (3, 256, 256)


def smooth(height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    return np.stack([255 * x, 255 * y, 127 + 127 * np.sin(2 * x + 2 * y)], axis=-1).astype(np.uint8)


@pytest.mark.parametrize("shape", [(255, 257), (257, 255), (301, 457), (100, 700), (64, 64)])
def test_the_result_is_the_resized_image_cropped_in_the_middle(shape):  # T19
    image = Image.fromarray(smooth(*shape))
    size = 64
    scale = size / min(shape)
    height, width = round(shape[0] * scale), round(shape[1] * scale)
    top, left = (height - size) // 2, (width - size) // 2
    whole = image.resize((width, height), Image.Resampling.BICUBIC)
    expected = np.asarray(whole.crop((left, top, left + size, top + size))).transpose(2, 0, 1)
    # There the long side and the crop are rounded to whole pixels, which moves the image by up to 3/4 of a pixel, and a
    # pixel is a step of at most 4; here neither is.
    assert np.abs(read(image, size=size).astype(int) - expected).max() <= 4


def test_the_square_is_the_middle_one():
    values = np.zeros((4, 12), np.uint8)
    values[:, 4:8] = 200
    assert (read(Image.fromarray(values), size=4) == 200).all()
    assert (read(Image.fromarray(values.T.copy()), size=4) == 200).all()


def test_a_jpeg_decoded_at_a_reduced_scale_is_nearly_the_whole_one():
    image = Image.fromarray(smooth(900, 1100))
    file = encoded(image, "JPEG", quality=95)
    reduced = read_image(file, 64).astype(int)
    file.seek(0)
    whole = read(Image.open(file).convert("RGB"), "PNG", size=64).astype(int)
    assert np.abs(reduced - whole).max() <= 4


def test_animations_give_their_first_frame():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    result = read(frames[0], "GIF", save={"save_all": True, "append_images": frames[1:]})
    assert pixel(result) == [255, 0, 0]


def test_too_many_pixels_are_refused_before_decoding_and_allowed_on_request():
    image = Image.new("L", (300, 200), 9)
    with pytest.raises(BadImageError, match="300 x 200 = 60000 pixels, more than max_pixels = 59999.*raise max_pixels"):
        read(image, size=8, max_pixels=59_999)
    assert (read(image, size=8, max_pixels=60_000) == 9).all()


def test_our_limit_counts_where_pillows_is_lower(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    image = Image.new("L", (300, 200), 9)
    assert (read(image, size=8) == 9).all()
    assert Image.MAX_IMAGE_PIXELS == 1000
    with pytest.raises(BadImageError, match="more than max_pixels = 900"):
        read(image, size=8, max_pixels=900)


def test_a_bomb_of_a_thousand_megapixels_is_refused_quickly():
    header = encoded(Image.new("L", (1, 1))).getvalue()
    size = struct.pack(">II", 40_000, 40_000)
    chunk = b"IHDR" + size + header[24:29]
    bomb = header[:12] + chunk + struct.pack(">I", zlib.crc32(chunk)) + header[33:]
    with pytest.raises(BadImageError, match="max_pixels"):
        read_image(io.BytesIO(bomb), 8)
    with pytest.raises(BadImageError):  # allowed to be so large, but there is no such image in the file
        read_image(io.BytesIO(bomb[:40]), 8, max_pixels=10**6)


KINDS = ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"]


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.002, 0.5, 0.9])
def test_truncated_files_are_named(tmp_path, kind, share):  # T18
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    content = encoded(Image.fromarray(noise), kind).getvalue()
    path = tmp_path / "broken.img"
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(BadImageError) as caught:
        read_image(path, 32)
    assert caught.value.name == str(path) and str(caught.value).startswith(f"{path}: ")
    assert caught.value.reason and "\n" not in caught.value.reason


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_bytes_never_escape_as_another_error(kind):
    rng = np.random.default_rng(0)
    content = encoded(Image.fromarray(smooth(24, 24)), kind).getvalue()
    for _ in range(60):
        damaged = bytearray(content)
        for place in rng.integers(0, min(len(content), 400), 4):
            damaged[place] = rng.integers(256)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                assert read_image(io.BytesIO(damaged), 8, max_pixels=10**6).shape == (3, 8, 8)
            except BadImageError as error:
                assert error.reason


def test_a_missing_file_is_bad_and_a_failing_machine_is_not(tmp_path, monkeypatch):
    with pytest.raises(BadImageError, match=r"nothing\.png: .*No such file"):
        read_image(tmp_path / "nothing.png", 8)

    def fail(*args):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(OSError, match="Too many open files") as caught:
        read_image(tmp_path / "a.png", 8)
    assert not isinstance(caught.value, BadImageError)


def test_errors_call_a_stream_by_the_name_that_was_given():
    with pytest.raises(BadImageError, match="^shard-3/00017.png: "):
        read_image(io.BytesIO(b"no image"), 8, name="shard-3/00017.png")


def test_the_error_survives_pickling():
    error = pickle.loads(pickle.dumps(BadImageError("a.png", "truncated")))
    assert (error.name, error.reason, str(error)) == ("a.png", "truncated", "a.png: truncated")
