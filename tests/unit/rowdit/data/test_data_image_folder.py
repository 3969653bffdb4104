"""Folders of images: what is found, in which order, and what becomes of bad files."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rowdit.data import DataError, Dataset, ImageFolder, batch_at, encoded, image_folder, open_dataset
from rowdit.data.decode import BadImageError


def write(path: Path, value: int = 0, size: tuple[int, int] = (8, 8)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, value).save(path)
    return path


def truncate(path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
    Image.fromarray(noise).save(path, "PNG")
    path.write_bytes(path.read_bytes()[:2000])


@pytest.fixture
def pets(tmp_path) -> Path:
    """Two classes of five; file i of all ten is grey 10 * i."""
    root = tmp_path / "pets"
    for place in range(10):
        write(root / ("cat" if place < 5 else "dog") / f"{place}.png", 10 * place)
    return root


def values(dataset: Dataset, indices=None) -> list[int]:
    indices = np.arange(len(dataset)) if indices is None else np.asarray(indices)
    return dataset.fetch(indices)[0][:, 0, 0, 0].tolist()


def test_classes_and_files_come_sorted(pets):
    dataset = ImageFolder(pets, 4)
    assert isinstance(dataset, Dataset)
    assert dataset.class_names == ("cat", "dog") and dataset.num_classes == 2 and len(dataset) == 10
    assert dataset.image_shape == (3, 4, 4)
    images, labels = dataset.fetch(np.array([7, 0]))
    assert images.shape == (2, 3, 4, 4) and images.dtype == np.uint8 and labels.dtype == np.int64
    assert images[:, 0, 0, 0].tolist() == [70, 0] and labels.tolist() == [1, 0]
    assert dataset.files[7] == "dog/7.png"


def test_files_below_the_class_belong_to_it_and_any_usual_extension_counts(tmp_path):
    for name in ("a/1.png", "a/deep/er/2.PNG", "a/deep/3.jpg", "b/4.JPEG", "b/5.webp", "b/6.bmp", "b/7.tif", "b/8.gif"):
        write(tmp_path / name)
    (tmp_path / "a" / "notes.txt").write_text("x")
    (tmp_path / "a" / "LICENSE").write_text("x")
    dataset = ImageFolder(tmp_path, 4)
    assert dataset.files[:3] == ["a/1.png", "a/deep/3.jpg", "a/deep/er/2.PNG"]
    assert dataset.labels.tolist() == [0] * 3 + [1] * 5
    assert dataset.ignored == {".txt": 1, "": 1}
    assert values(dataset) == [0] * 8


def test_hidden_files_and_folders_are_ignored(pets):
    write(pets / "cat" / ".thumb.png")
    write(pets / "cat" / ".cache" / "x.png")
    write(pets / ".git" / "y.png")
    dataset = ImageFolder(pets, 4)
    assert len(dataset) == 10 and dataset.class_names == ("cat", "dog")


def test_grey_images_and_the_background(pets):
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(pets / "cat" / "0.png")
    assert ImageFolder(pets, 4, channels=1).image_shape == (1, 4, 4)
    assert values(ImageFolder(pets, 4), [0]) == [255]
    assert ImageFolder(pets, 4, background=(7, 8, 9)).fetch(np.array([0]))[0][0, :, 0, 0].tolist() == [7, 8, 9]


def test_linked_files_and_folders_are_followed_and_loops_end(pets, tmp_path):
    elsewhere = write(tmp_path / "elsewhere" / "e.png", 200).parent
    os.symlink(elsewhere, pets / "cat" / "more")
    os.symlink(pets / "cat" / "0.png", pets / "dog" / "zz.png")
    os.symlink(pets / "cat", pets / "cat" / "again")
    os.symlink(pets, pets / "dog" / "up")
    os.symlink(pets, pets / "whole")
    os.symlink("self", pets / "dog" / "self")
    os.symlink(pets / "dog", elsewhere / "x")
    os.symlink(elsewhere, pets / "dog" / "y")
    dataset = ImageFolder(pets, 4)
    assert dataset.class_names == ("cat", "dog")
    cats = [file for file in dataset.files if file.startswith("cat")]
    dogs = [file for file in dataset.files if file.startswith("dog")]
    fives = [f"{i}.png" for i in range(5, 10)]
    assert cats == [
        *(f"cat/{i}.png" for i in range(5)),
        "cat/more/e.png",
        *(f"cat/more/x/{name}" for name in fives),
    ] + ["cat/more/x/zz.png"]
    assert dogs == [*(f"dog/{name}" for name in fives), "dog/y/e.png", "dog/zz.png"]
    assert len(values(dataset)) == len(dataset) == 19


def test_a_dangling_link_is_a_bad_image_and_a_pipe_is_none(pets):
    os.symlink("nowhere.png", pets / "cat" / "5.png")
    os.mkfifo(pets / "cat" / "6.png")
    assert ImageFolder(pets, 4).files[5] == "cat/5.png"
    assert len(ImageFolder(pets, 4)) == 11
    skipping = ImageFolder(pets, 4, bad_images="skip")
    assert len(skipping) == 10 and "No such file" in skipping.bad_files["cat/5.png"]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda root: shutil.rmtree(root), "pets doesn't exist; name a folder"),
        (lambda root: (shutil.rmtree(root), root.write_text("")), "pets is not a folder"),
        (lambda root: (shutil.rmtree(root), root.mkdir()), "has no sub-folder and 0 image"),
        (lambda root: (shutil.rmtree(root), write(root / "a.png")), "has no sub-folder and 1 image.*belong in"),
        (lambda root: (root / "fish").mkdir(), "fish: no image in this class.*add images or remove"),
        (
            lambda root: ((root / "fish").mkdir(), (root / "fish" / "a.heic").write_text("")),
            "fish: no image in this class.*1 of .heic",
        ),
        (lambda root: (shutil.rmtree(root), (root / "fish").mkdir(parents=True)), "no image in any of.*fish"),
    ],
    ids=["missing", "file", "empty", "flat", "empty_class", "other_files", "no_class_with_images"],
)
def test_unusable_folders_are_named(pets, prepare, message):
    prepare(pets)
    with pytest.raises(DataError, match=message):
        ImageFolder(pets, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bad_images": "ignore"}, "'ignore' is not one of error, skip, replace"),
        ({"channels": 4}, "channels 4"),
        ({"image_size": 0}, "image_size 0"),
        ({"background": (0, 0, 256)}, "three bytes"),
    ],
)
def test_arguments_out_of_range_are_refused(pets, options, message):
    with pytest.raises(ValueError, match=message):
        ImageFolder(pets, **{"image_size": 4, **options})


def test_given_classes_fix_the_labels_and_unknown_folders_are_named(pets):  # T16
    dataset = ImageFolder(pets, 4, class_names=("bird", "dog", "cat"))
    assert dataset.num_classes == 3 and dataset.class_names == ("bird", "dog", "cat")
    assert dataset.labels.tolist() == [1] * 5 + [2] * 5 and dataset.files[0] == "dog/5.png"
    with pytest.raises(DataError, match="dog is not one of the 1 classes.*cat"):
        ImageFolder(pets, 4, class_names=("cat",))


def test_a_bad_image_is_an_error_by_default(pets):  # T18
    truncate(pets / "dog" / "7.png")
    dataset = ImageFolder(pets, 4)
    assert values(dataset, [6, 8]) == [60, 80]
    for _ in range(2):  # from the file, then from what is known of it
        with pytest.raises(BadImageError, match=r"dog/7\.png: .*truncated.*bad_images='skip' or 'replace'"):
            dataset.fetch(np.array([6, 7]))
    assert list(dataset.bad_files) == ["dog/7.png"]


def test_skipped_images_are_not_part_of_the_dataset(pets):  # T18
    truncate(pets / "cat" / "1.png")
    (pets / "dog" / "9.png").write_text("no image")
    dataset = ImageFolder(pets, 4, bad_images="skip")
    assert values(dataset) == [0, 20, 30, 40, 50, 60, 70, 80]
    assert dataset.labels.tolist() == [0] * 4 + [1] * 4
    assert set(dataset.bad_files) == {"cat/1.png", "dog/9.png"}
    (pets / "cat" / "1.png").unlink()
    (pets / "dog" / "9.png").unlink()
    assert ImageFolder(pets, 4).fingerprint == dataset.fingerprint


def test_a_class_that_skipping_empties_is_named(pets):
    for path in (pets / "dog").iterdir():
        path.write_text("no image")
    with pytest.raises(DataError, match=r"none is left of class dog \(dog/5\.png: not an image"):
        ImageFolder(pets, 4, bad_images="skip")


def test_the_replacement_is_the_next_good_one_of_the_class(pets):  # T18
    for name in ("cat/1.png", "cat/2.png", "cat/4.png"):
        truncate(pets / name)
    dataset = ImageFolder(pets, 4, bad_images="replace")
    assert values(dataset) == [0, 30, 30, 30, 0, 50, 60, 70, 80, 90]
    assert dataset.labels.tolist() == [0] * 5 + [1] * 5
    assert set(dataset.bad_files) == {"cat/1.png", "cat/2.png", "cat/4.png"} and dataset.num_replaced == 3


@pytest.mark.parametrize("cache", [False, True])
def test_replacements_do_not_depend_on_batches_ranks_or_what_came_before(pets, cache):  # T18
    for name in ("cat/1.png", "cat/2.png", "dog/9.png"):
        truncate(pets / name)

    def stream(batch_size: int, world_size: int) -> np.ndarray:
        ranks = [ImageFolder(pets, 4, bad_images="replace", cache=cache) for _ in range(world_size)]
        batches = [
            batch_at(ranks[rank], seed=1, images_seen=seen, batch_size=batch_size, rank=rank, world_size=world_size)
            for seen in range(0, 24, batch_size)
            for rank in range(world_size)
        ]
        return np.concatenate([batch.images.numpy() for batch in batches])

    expected = stream(24, 1)
    assert (stream(4, 1) == expected).all()
    assert (stream(8, 4) == expected).all()
    assert (stream(3, 3) == expected).all()


def test_a_class_without_a_good_image_is_named_when_replacing(pets):
    for path in (pets / "dog").iterdir():
        path.write_text("no image")
    dataset = ImageFolder(pets, 4, bad_images="replace")
    assert values(dataset, [0, 4]) == [0, 40]
    with pytest.raises(DataError, match="none of the 5 images of class dog can be used.*not an image"):
        dataset.fetch(np.array([6]))


def test_no_permission_is_no_bad_image(pets, monkeypatch):
    def fail(*args, **options):
        raise PermissionError(13, "Permission denied", "a.png")

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(PermissionError):
        ImageFolder(pets, 4, bad_images="replace").fetch(np.array([0]))
    with pytest.raises(PermissionError):
        ImageFolder(pets, 4, bad_images="skip")


def test_bombs_are_bad_images(pets):
    write(pets / "cat" / "1.png", size=(100, 100))
    dataset = ImageFolder(pets, 4, max_pixels=9_999)
    with pytest.raises(BadImageError, match=r"1\.png: 100 x 100 = 10000 pixels.*raise max_pixels"):
        dataset.fetch(np.array([1]))
    assert values(ImageFolder(pets, 4, max_pixels=9_999, bad_images="replace"), [1]) == [20]


def test_the_cache_reads_each_file_once(pets, monkeypatch):
    reads = []
    original = encoded.read_image
    monkeypatch.setattr(
        encoded, "read_image", lambda path, *args, **kw: reads.append(path) or original(path, *args, **kw)
    )
    truncate(pets / "cat" / "2.png")
    dataset = ImageFolder(pets, 4, bad_images="skip", cache=True)
    assert len(reads) == 10
    assert values(dataset) == values(dataset) == [0, 10, 30, 40, 50, 60, 70, 80, 90]
    assert len(reads) == 10
    dataset.fetch(np.array([1]))[0][:] = 99
    assert values(dataset, [1]) == [10]


def test_the_fingerprint_follows_files_classes_and_geometry(pets, tmp_path):
    base = ImageFolder(pets, 4).fingerprint
    assert base.startswith("folder-contents:10x3x4x4:square-bicubic:sha256-")
    others = [
        ImageFolder(pets, 8).fingerprint,
        ImageFolder(pets, 4, channels=1).fingerprint,
        ImageFolder(pets, 4, background=(0, 0, 0)).fingerprint,
        ImageFolder(pets, 4, class_names=("dog", "cat")).fingerprint,
    ]
    shutil.copytree(pets, tmp_path / "copy")
    assert ImageFolder(tmp_path / "copy", 4).fingerprint == base
    assert ImageFolder(pets, 4, bad_images="replace", cache=True).fingerprint == base
    os.rename(pets / "cat" / "4.png", pets / "cat" / "5.png")
    others.append(ImageFolder(pets, 4).fingerprint)
    write(pets / "cat" / "5.png", 40, size=(9, 9))
    others.append(ImageFolder(pets, 4).fingerprint)
    assert len({base, *others}) == 7


def test_large_folders_are_known_by_names_and_sizes(pets, monkeypatch):
    path = pets / "cat" / "0.bmp"
    write(path, 1)
    monkeypatch.setattr(image_folder, "FEW_BYTES", 100)
    by_name, by_content = (ImageFolder(pets, 4, hash_contents=hashed).fingerprint for hashed in (None, True))
    assert by_name.startswith("folder-names:") and by_content.startswith("folder-contents:")
    write(path, 2)
    assert ImageFolder(pets, 4).fingerprint == by_name
    assert ImageFolder(pets, 4, hash_contents=True).fingerprint != by_content
    write(path, 2, size=(9, 9))
    assert ImageFolder(pets, 4).fingerprint != by_name


def test_a_folder_survives_pickling(pets):
    dataset = pickle.loads(pickle.dumps(ImageFolder(pets, 4, cache=True)))
    assert values(dataset) == [10 * i for i in range(10)]


def test_open_dataset_knows_its_sources(pets):
    assert len(open_dataset("bundled")) == 12_000
    assert open_dataset("bundled", "reference", 14).image_shape == (1, 14, 14)
    dataset = open_dataset(f"folder:{pets}", image_size=4, bad_images="replace", channels=1)
    assert dataset.image_shape == (1, 4, 4)
    with pytest.raises(DataError, match="train-images"):
        open_dataset(f"fashion-mnist:{pets}")
    for spec in ("cifar", "folder:", "bundled:x", ""):
        with pytest.raises(ValueError, match=f"unknown dataset '{spec}'.*folder:PATH"):
            open_dataset(spec, image_size=4)
    with pytest.raises(ValueError, match="needs an image_size"):
        open_dataset(f"folder:{pets}")
    with pytest.raises(ValueError, match="split 'val'"):
        open_dataset("bundled", "val")


def test_a_folder_without_splits_holds_out_every_tenth_image_of_a_class(tmp_path):
    for place in range(23):
        write(tmp_path / "many" / f"{place:02}.png", place)
    for place in range(9):
        write(tmp_path / "few" / f"{place}.png", 100 + place)
    train, reference = (open_dataset(f"folder:{tmp_path}", split, 4) for split in ("train", "reference"))
    assert values(reference) == [9, 19] and reference.labels.tolist() == [1, 1]
    assert values(train) == [*range(100, 109), *(value for value in range(23) if value not in (9, 19))]
    assert train.class_names == reference.class_names == ("few", "many")
    assert len({train.fingerprint, reference.fingerprint, ImageFolder(tmp_path, 4).fingerprint}) == 3
    assert len(ImageFolder(tmp_path, 4)) == 32


def test_a_folder_that_is_too_small_for_a_reference_says_so(pets):
    assert len(open_dataset(f"folder:{pets}", "train", 4)) == 10
    with pytest.raises(DataError, match="no class has 10 images.*train and reference"):
        open_dataset(f"folder:{pets}", "reference", 4)


def test_the_reference_does_not_move_when_bad_images_are_skipped(tmp_path):
    for place in range(20):
        write(tmp_path / "a" / f"{place:02}.png", place)
    truncate(tmp_path / "a" / "03.png")
    train, reference = (
        open_dataset(f"folder:{tmp_path}", split, 4, bad_images="skip") for split in ("train", "reference")
    )
    assert values(reference) == [9, 19] and 3 not in values(train) and len(train) == 17


def test_splits_are_sub_folders_and_share_the_training_sets_classes(pets, tmp_path):
    root = tmp_path / "split"
    shutil.copytree(pets, root / "train")
    shutil.copytree(pets / "dog", root / "val" / "dog")
    train, reference = (open_dataset(f"folder:{root}", split, 4) for split in ("train", "reference"))
    assert len(train) == 10 and len(reference) == 5
    assert reference.class_names == train.class_names == ("cat", "dog")
    assert set(reference.fetch(np.arange(5))[1].tolist()) == {1}
    write(root / "val" / "fish" / "a.png")
    with pytest.raises(DataError, match="fish is not one of the 2 classes"):
        open_dataset(f"folder:{root}", "reference", 4)


def test_classes_called_like_splits_are_classes(tmp_path):
    for name in ("train", "car"):  # vehicles
        write(tmp_path / name / "a.png")
    assert open_dataset(f"folder:{tmp_path}", image_size=4).class_names == ("car", "train")


def test_a_missing_split_is_named(pets, tmp_path):
    shutil.copytree(pets, tmp_path / "split" / "train")
    with pytest.raises(DataError, match="has the split train, but none called reference, val"):
        open_dataset(f"folder:{tmp_path / 'split'}", "reference", 4)
