"""Images to be scored: the same bytes from a folder and from arrays; what can't be scored is named."""

from __future__ import annotations

import os
import zipfile

import numpy as np
import pytest
from PIL import Image

from rowdit.data import ArrayDataset
from rowdit.evaluate.images import ArrayImages, DatasetImages, FolderImages, ImagesError, open_images


def noise(num: int = 5, channels: int = 3, size: int = 12) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (num, size, size, channels), dtype=np.uint8)


@pytest.fixture
def colour() -> np.ndarray:
    return noise()


def save_folder(path, images_NHWC, pattern="{:03d}.png"):
    for i, image in enumerate(images_NHWC):
        file = path / pattern.format(i)
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file)
    return path


class TestTheSameBytes:
    @pytest.mark.parametrize("channels", [1, 3])
    def test_folder_and_arrays(self, tmp_path, channels):
        images = noise(channels=channels)
        expected = images.transpose(0, 3, 1, 2)
        folder = save_folder(tmp_path / "folder", images)
        np.savez(tmp_path / "plain.npz", arr_0=images, arr_1=np.arange(5))
        np.savez_compressed(tmp_path / "packed.npz", images=images)
        np.savez(tmp_path / "channels_first.npz", arr_0=expected)
        np.save(tmp_path / "one.npy", images)
        sources = [open_images(folder)]
        sources += [open_images(tmp_path / n) for n in ("plain.npz", "packed.npz", "channels_first.npz", "one.npy")]
        for source in sources:
            assert len(source) == 5 and source.image_shape == (channels, 12, 12)
            got = source.fetch(np.array([3, 0, 4]))
            assert got.dtype == np.uint8 and np.array_equal(got, expected[[3, 0, 4]])
        assert isinstance(sources[1]._array_NHWC, np.memmap), "what isn't packed is mapped, not loaded"

    def test_in_sub_folders_in_the_order_of_paths_hidden_ones_left_out(self, tmp_path, colour):
        save_folder(tmp_path, colour[:2], "b/{:03d}.png")
        save_folder(tmp_path, colour[2:4], "a/deep/{:03d}.png")
        save_folder(tmp_path, colour[4:], ".cache/{:03d}.png")
        (tmp_path / "notes.txt").write_text("no image")
        source = FolderImages(tmp_path)
        assert np.array_equal(source.fetch(np.arange(4)), colour[[2, 3, 0, 1]].transpose(0, 3, 1, 2))
        assert len(FolderImages(tmp_path, limit=3)) == 3

    def test_brought_to_a_size(self, tmp_path, colour):
        folder = save_folder(tmp_path, colour[:, :, :10])
        source = FolderImages(folder, image_size=8)
        assert source.image_shape == (3, 8, 8) and source.fetch(np.arange(5)).shape == (5, 3, 8, 8)
        assert source.how == "centre crop, bicubic to 8"
        with pytest.raises(ImagesError, match=r"000.png is 10 x 12 pixels, no square; say how large with --image-size"):
            FolderImages(folder)

    def test_a_dataset(self, colour):
        dataset = ArrayDataset(colour.transpose(0, 3, 1, 2), np.zeros(5, int), ("a",), name="toy")
        source = DatasetImages(dataset)
        assert source.identity == dataset.fingerprint and source.image_shape == (3, 12, 12)
        assert np.array_equal(source.fetch(np.array([1])), colour[1:2].transpose(0, 3, 1, 2))
        assert open_images("bundled").image_shape == (1, 28, 28)

    def test_samples_beside_their_grid(self, tmp_path, colour):
        save_folder(tmp_path / "images", colour)
        save_folder(tmp_path, noise(1, size=40), "grid.png")
        (tmp_path / "sampling.json").write_text("{}")
        assert len(open_images(tmp_path)) == 5


class TestSignature:
    def test_changes_with_the_images_and_with_what_is_done_to_them(self, tmp_path, colour):
        folder = save_folder(tmp_path, colour)
        before = FolderImages(folder).signature
        assert FolderImages(folder).signature == before
        assert FolderImages(folder, image_size=8).signature != before
        os.utime(folder / "002.png", ns=(1, 1))
        assert FolderImages(folder).signature != before

    def test_of_arrays(self, tmp_path, colour):
        np.save(tmp_path / "a.npy", colour)
        before = ArrayImages(tmp_path / "a.npy").signature
        np.save(tmp_path / "a.npy", colour[:4])
        assert ArrayImages(tmp_path / "a.npy").signature != before


class TestRefused:
    @pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint16])
    def test_arrays_of_another_type(self, tmp_path, colour, dtype):
        np.savez(tmp_path / "a.npz", arr_0=colour.astype(dtype))
        with pytest.raises(ImagesError, match=f"a.npz: images of {np.dtype(dtype)}; they must be uint8 in 0..255"):
            open_images(tmp_path / "a.npz")

    @pytest.mark.parametrize("shape", [(5, 12, 12), (5, 12, 12, 4), (0, 12, 12, 3), (5, 0, 12, 3)])
    def test_arrays_of_another_shape(self, tmp_path, shape):
        np.savez(tmp_path / "a.npz", arr_0=np.zeros(shape, np.uint8))
        with pytest.raises(ImagesError, match=r"a.npz: shape \(.*\); images have \(N, H, W, C\) with C = 1 or 3"):
            open_images(tmp_path / "a.npz")

    def test_no_such_array(self, tmp_path, colour):
        np.savez(tmp_path / "a.npz", x=colour, y=colour)
        with pytest.raises(ImagesError, match="there is no array 'arr_0' in it, but x, y"):
            open_images(tmp_path / "a.npz")

    def test_python_objects_are_not_unpickled(self, tmp_path):
        np.savez(tmp_path / "a.npz", arr_0=np.array([{"a": 1}], dtype=object))
        np.save(tmp_path / "b.npy", np.array([{"a": 1}], dtype=object))
        for name in ("a.npz", "b.npy"):
            with pytest.raises(ImagesError, match=name):
                open_images(tmp_path / name)

    @pytest.mark.parametrize("cut", [0, 10, 1000])
    def test_a_file_cut_short(self, tmp_path, colour, cut):
        np.savez(tmp_path / "a.npz", arr_0=colour)
        content = (tmp_path / "a.npz").read_bytes()
        (tmp_path / "a.npz").write_bytes(content[:cut])
        with pytest.raises(ImagesError, match="a.npz can't be read .*; is it whole"):
            open_images(tmp_path / "a.npz")

    def test_an_archive_that_is_none_of_numpy(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            archive.writestr("arr_0.npy", b"hello")
        with pytest.raises(ImagesError, match="a.npz can't be read"):
            open_images(tmp_path / "a.npz")

    def test_a_size_for_arrays(self, tmp_path, colour):
        np.savez(tmp_path / "a.npz", arr_0=colour)
        with pytest.raises(ImagesError, match="arrays are taken as they are; leave --image-size out"):
            open_images(tmp_path / "a.npz", image_size=8)

    def test_sizes_that_differ(self, tmp_path, colour):
        folder = save_folder(tmp_path, colour)
        Image.fromarray(noise(1, size=13)[0]).save(folder / "003.png")
        with pytest.raises(ImagesError, match=r"003.png is 13 x 13 pixels, but 000.png is 12 x 12 pixels"):
            FolderImages(folder).fetch(np.arange(5))

    def test_colour_among_grey_ones(self, tmp_path, colour):
        folder = save_folder(tmp_path, noise(channels=1))
        Image.fromarray(colour[0]).save(folder / "002.png")
        with pytest.raises(ImagesError, match=r"002.png is in colour \(mode RGB\), but 000.png is grey"):
            FolderImages(folder).fetch(np.arange(5))

    def test_grey_among_colour_becomes_colour(self, tmp_path, colour):
        folder = save_folder(tmp_path, colour)
        Image.fromarray(colour[2, :, :, 0]).save(folder / "002.png")
        assert np.array_equal(FolderImages(folder).fetch(np.array([2]))[0], np.stack([colour[2, :, :, 0]] * 3))

    def test_a_damaged_image(self, tmp_path, colour):
        folder = save_folder(tmp_path, colour)
        (folder / "001.png").write_bytes(b"no image")
        with pytest.raises(ImagesError, match=r"001.png can't be read as an image"):
            FolderImages(folder).fetch(np.arange(5))
        (folder / "000.png").write_bytes((folder / "002.png").read_bytes()[:60])
        with pytest.raises(ValueError, match=r"000.png"):
            FolderImages(folder).fetch(np.arange(5))

    def test_nothing_there(self, tmp_path):
        with pytest.raises(ImagesError, match="holds no images"):
            open_images(tmp_path)
        with pytest.raises(ImagesError, match="there is no file .*nix.npz"):
            open_images(tmp_path / "nix.npz")
        with pytest.raises(ImagesError, match="neither a folder, nor an npz or npy file, nor a dataset"):
            open_images(tmp_path / "nix")

    @pytest.mark.parametrize("content", ["checkpoints", "config.json"])
    def test_a_run(self, tmp_path, content):
        (tmp_path / content).mkdir() if content == "checkpoints" else (tmp_path / content).write_text("{}")
        save_folder(tmp_path, noise(1), "samples/step_0000100.png")
        with pytest.raises(ImagesError, match="is a run; name images"):
            open_images(tmp_path)

    def test_latents(self):
        class Latents:
            image_shape, fingerprint, num_classes, class_names = (4, 8, 8), "latents", 1, ("a",)

            def __len__(self):
                return 3

            def fetch(self, indices):
                return np.zeros((len(indices), 4, 8, 8), np.float32), np.zeros(len(indices), np.int64)

        with pytest.raises(ImagesError, match="float32, latents rather than pixels"):
            DatasetImages(Latents()).fetch(np.arange(2))
