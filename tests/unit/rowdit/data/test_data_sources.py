"""Folders, tar shards, Parquet files and Hugging Face datasets: the same images from each are the same dataset."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rowdit.commands import data as data_command
from rowdit.data import DataError, Dataset, Loader, ParquetImages, batch_at, open_dataset
from rowdit.data.decode import BadImageError
from rowdit.data.encoded import bad_images_met

SOURCES = ("folder", "tar", "parquet", "hf")


@dataclass(frozen=True)
class Sample:
    """A named, encoded image and its class, "cat" or "dog"."""

    name: str
    data: bytes
    label: int


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def grey(value: int, size: tuple[int, int] = (8, 8)) -> bytes:
    return encoded(Image.new("L", size, value))


def pets(num: int = 10) -> list[Sample]:
    """Image i is grey 10 i; the first half are cats."""
    return [Sample(f"{i:03d}.png", grey(10 * i), int(i >= num // 2)) for i in range(num)]


def write_folder(root: Path, samples: list[Sample]) -> str:
    for sample in samples:
        folder = root / ("cat", "dog")[sample.label]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / sample.name).write_bytes(sample.data)
    return f"folder:{root}"


def write_tar(root: Path, samples: list[Sample], per_shard: int = 2, label: str = "cls") -> str:
    """By the package `webdataset` itself."""
    webdataset = pytest.importorskip("webdataset")
    root.mkdir(parents=True, exist_ok=True)
    with webdataset.ShardWriter(str(root / "%03d.tar"), maxcount=per_shard, verbose=0) as sink:
        for sample in samples:
            stem, _, extension = sample.name.partition(".")
            content = {"cls": sample.label} if label == "cls" else {"json": {label: sample.label}}
            sink.write({"__key__": stem, extension: sample.data, **content})
    return f"tar:{root}"


def write_parquet(root: Path, samples: list[Sample], per_group: int = 3, per_file: int = 7) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    root.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(samples), per_file):
        some = samples[start : start + per_file]
        table = pyarrow.table({"label": [s.label for s in some], "image": [s.data for s in some]})
        parquet.write_table(table, root / f"{start:03d}.parquet", row_group_size=per_group)
    return f"parquet:{root}"


def write_hf(root: Path, samples: list[Sample]) -> str:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    columns = {
        "image": [{"bytes": sample.data, "path": None} for sample in samples],
        "label": [sample.label for sample in samples],
    }
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(root))
    return f"hf:{root}"


WRITERS: dict[str, Callable[[Path, list[Sample]], str]] = {
    "folder": write_folder,
    "tar": write_tar,
    "parquet": write_parquet,
    "hf": write_hf,
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Indexes and the libraries' own caches stay in the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def opened(source: str, root: Path, samples: list[Sample], split: str = "train", **options) -> Dataset:
    """What a source gives of samples that were written for it; fewer than ten a class, so none is held out."""
    spec = WRITERS[source](root / source, samples)
    return open_dataset(spec, split, options.pop("image_size", 4), **options)


def everything(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    return dataset.fetch(np.arange(len(dataset)))


@pytest.mark.parametrize("source", SOURCES)
def test_samples_come_in_the_sources_order_with_their_labels(tmp_path, source):
    dataset = opened(source, tmp_path, pets(), channels=1)
    images, labels = everything(dataset)
    assert isinstance(dataset, Dataset) and dataset.image_shape == (1, 4, 4) and len(dataset) == 10
    assert images[:, 0, 0, 0].tolist() == list(range(0, 100, 10))
    assert labels.dtype == np.int64 and labels.tolist() == [0] * 5 + [1] * 5
    assert dataset.class_names == (("cat", "dog") if source in ("folder", "hf") else ("0", "1"))


def difficult() -> list[Sample]:
    """T17 and T19: modes, transparency, sizes and an EXIF rotation."""
    generator = np.random.default_rng(0)
    colours = Image.fromarray(generator.integers(0, 256, (9, 7, 3), np.uint8))
    turned = Image.Exif()
    turned[0x0112] = 6
    clear = Image.fromarray(generator.integers(0, 256, (8, 8, 4), np.uint8), "RGBA")
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([9, 9, 9, 200, 100, 50])
    deep = Image.fromarray(generator.integers(0, 65536, (8, 8)).astype(np.uint16))
    images = {
        "00.png": encoded(colours.convert("L")),
        "01.png": encoded(clear.convert("LA")),
        "02.png": encoded(palette, transparency=0),
        "03.jpg": encoded(colours.convert("CMYK"), "JPEG"),
        "04.png": encoded(deep),
        "05.png": encoded(clear),
        "06.png": encoded(Image.new("RGB", (1, 1), (1, 2, 3))),
        "07.jpg": encoded(colours, "JPEG", exif=turned, quality=95),
        "08.png": encoded(colours.resize((255, 257))),
        "09.png": encoded(colours.resize((1, 500))),
        "10.webp": encoded(colours, "WEBP", lossless=True),
    }
    return [Sample(name, data, int(i > 5)) for i, (name, data) in enumerate(images.items())]


@pytest.mark.parametrize("source", SOURCES[1:])
def test_all_sources_decode_alike(tmp_path, source):  # T17, T19
    samples = difficult()
    for options in ({}, {"channels": 1}, {"background": (0, 128, 255)}):
        root = tmp_path / str(options)
        ours, theirs = (opened(kind, root, samples, image_size=6, **options) for kind in (source, "folder"))
        for a, b in zip(everything(ours), everything(theirs), strict=True):
            assert (a == b).all()


@pytest.mark.parametrize("source", SOURCES)
def test_bad_images_are_an_error_skipped_or_replaced(tmp_path, source):  # T18
    samples = pets()
    samples[1] = Sample(samples[1].name, b"no image at all", 0)
    samples[9] = Sample(samples[9].name, samples[9].data[:40], 1)  # cut off; its replacement is the class's first
    spec = WRITERS[source](tmp_path / source, samples)
    dataset = open_dataset(spec, image_size=4)
    with pytest.raises(BadImageError, match="not an image that Pillow can read; mend or remove it, or open"):
        dataset.fetch(np.array([1]))
    assert dataset.fetch(np.array([0, 2]))[1].tolist() == [0, 0]

    skipping = open_dataset(spec, image_size=4, bad_images="skip")
    images, labels = everything(skipping)
    assert images[:, 0, 0, 0].tolist() == [0, 20, 30, 40, 50, 60, 70, 80] and labels.tolist() == [0] * 4 + [1] * 4
    assert len(skipping.bad_files) == 2

    replacing = open_dataset(spec, image_size=4, bad_images="replace")
    images, labels = everything(replacing)
    assert images[:, 0, 0, 0].tolist() == [0, 20, 20, 30, 40, 50, 60, 70, 80, 50]
    assert replacing.num_replaced == 2 and len(replacing.bad_files) == 2
    assert "met by this rank: 2, the first" in bad_images_met(replacing)
    assert "2 images were served in place" in bad_images_met(replacing)
    assert everything(open_dataset(spec, image_size=4, bad_images="replace"))[0].tolist() == images.tolist()

    hopeless = [Sample(s.name, b"", s.label) if s.label else s for s in pets()]
    spec = WRITERS[source](tmp_path / "hopeless", hopeless)
    for policy, message in (("skip", "none is left of class"), ("replace", "none of the 5 images of class")):
        with pytest.raises(DataError, match=message):
            everything(open_dataset(spec, image_size=4, bad_images=policy))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_one_stream_in_equal_parts(tmp_path, source, world_size):  # T15: seven shards of two
    dataset = opened(source, tmp_path, pets(14))
    for step in range(3):
        whole = batch_at(dataset, seed=5, images_seen=8 * step, batch_size=8)
        shares = [
            batch_at(dataset, seed=5, images_seen=8 * step, batch_size=8, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        assert {len(share.labels) for share in shares} == {8 // world_size}
        assert torch.equal(torch.cat([share.images for share in shares]), whole.images)


@pytest.mark.parametrize("source", SOURCES[1:])
def test_workers_and_pickles_read_the_same(tmp_path, source):
    dataset = opened(source, tmp_path, pets())
    expected = [batch_at(dataset, seed=1, images_seen=4 * step, batch_size=4).images for step in range(1, 4)]
    with Loader(dataset, seed=1, images_seen=4, batch_size=4, num_workers=1) as loader:
        assert all(torch.equal(next(loader).images, images) for images in expected)
    again = pickle.loads(pickle.dumps(dataset))
    assert (everything(again)[0] == everything(dataset)[0]).all()


@pytest.mark.parametrize("source", ["tar", "parquet"])
def test_labels_are_checked_at_the_start_and_the_sample_is_named(tmp_path, source):  # T16
    samples = pets()
    samples[7] = Sample("007.png", samples[7].data, 2)
    spec = WRITERS[source](tmp_path / source, samples)
    where = {"tar": r"tar/003\.tar: 007\.png", "parquet": r"parquet/007\.parquet: row 0"}[source]
    with pytest.raises(
        DataError, match=where + r": label 2 \(1 such samples\) is outside 0\.\.1; .* 2 is the null class"
    ):
        open_dataset(spec, image_size=4, num_classes=2)
    assert open_dataset(spec, image_size=4).num_classes == 3
    assert open_dataset(spec, image_size=4, num_classes=5).class_names == ("0", "1", "2", "3", "4")
    with pytest.raises(DataError, match="2 classes are named .*not 3"):
        open_dataset(spec, image_size=4, num_classes=3, class_names=("cat", "dog"))


@pytest.mark.parametrize("source", SOURCES)
def test_every_tenth_of_a_class_is_held_out_where_there_are_no_splits(tmp_path, source):
    spec = WRITERS[source](tmp_path / source, pets(22))
    train, reference = (open_dataset(spec, split, 4) for split in ("train", "reference"))
    assert (len(train), len(reference)) == (20, 2)
    assert everything(reference)[0][:, 0, 0, 0].tolist() == [90, 200] and reference.labels.tolist() == [0, 1]
    assert train.class_names == reference.class_names and train.fingerprint != reference.fingerprint


@pytest.mark.parametrize("source", SOURCES)
def test_the_fingerprint_follows_the_content(tmp_path, source):
    marks = set()
    other = [*pets()[:9], Sample("009.png", grey(91), 1)]  # of the same length
    assert len(other[9].data) == len(pets()[9].data)
    for name, samples in (("a", pets()), ("b", pets()), ("c", pets(9)), ("d", other)):
        marks.add(opened(source, tmp_path / name, samples).fingerprint)
    # The members of a tar carry the time they were written, so two writings may differ.
    assert len(marks) == 3 or (source == "tar" and len(marks) == 4)
    assert all(mark.startswith(f"{source}-contents") for mark in marks)


@pytest.mark.parametrize("source", SOURCES[1:])
def test_splits_by_name(tmp_path, source):
    if source == "hf":
        datasets = pytest.importorskip("datasets")
        parts = {}
        for name, num in (("train", 8), ("test", 4)):
            write_hf(tmp_path / name, pets(num))
            parts[name] = datasets.load_from_disk(str(tmp_path / name))
        datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "all"))
    else:
        WRITERS[source](tmp_path / "all" / "train", pets(8))
        WRITERS[source](tmp_path / "all" / "test", pets(4))
    sizes = [len(open_dataset(f"{source}:{tmp_path / 'all'}", split, 4)) for split in ("train", "reference")]
    assert sizes == [8, 4]


def test_a_source_needs_an_image_size_and_only_some_have_keys(tmp_path):
    spec = write_folder(tmp_path / "a", pets())
    with pytest.raises(DataError, match="needs an image_size"):
        open_dataset("tar:x")
    with pytest.raises(DataError, match="no keys or columns .* leave out image_key"):
        open_dataset(spec, image_size=4, image_key="png")
    with pytest.raises(DataError, match="bundled has 1 channel.*, not 3"):
        open_dataset("bundled", channels=3)
    assert open_dataset("bundled", channels=1, bad_images="skip").image_shape == (1, 28, 28)


# ------------------------------------------------------------------------------------------------------------ tar
def test_the_index_is_made_once_and_again_when_a_shard_changes(tmp_path, cache, monkeypatch):
    from rowdit.data import tar_shards

    walked = []
    original = tar_shards.index_shards
    monkeypatch.setattr(tar_shards, "index_shards", lambda *a: walked.append(1) or original(*a))
    spec = write_tar(tmp_path / "t", pets())
    for _ in range(3):
        everything(open_dataset(spec, image_size=4))
    assert len(walked) == 1
    write_tar(tmp_path / "t", pets(9))
    assert len(open_dataset(spec, image_size=4)) == 9 and len(walked) == 2
    kept = sorted((cache / "rowdit" / "index").glob("*.safetensors"))
    kept[0].write_bytes(b"cut off")
    kept[1].write_bytes(b"cut off")
    assert len(open_dataset(spec, image_size=4)) == 9 and len(walked) == 3


def test_good_images_cost_no_look_at_their_names(tmp_path, monkeypatch):
    samples = pets()
    samples[3] = Sample(samples[3].name, b"x", 0)
    dataset = opened("tar", tmp_path, samples, bad_images="replace")
    everything(dataset)
    looked = []
    monkeypatch.setattr(type(dataset), "_name", lambda self, row: looked.append(row) or "")
    everything(dataset)
    assert set(looked) <= {3}


@pytest.mark.parametrize("source", ["tar", "parquet"])
def test_bad_images_are_looked_for_once(tmp_path, source, monkeypatch):
    from rowdit.data import encoded as module

    decoded = []
    original = module.read_image
    monkeypatch.setattr(module, "read_image", lambda *a, **k: decoded.append(1) or original(*a, **k))
    samples = pets()
    samples[3] = Sample(samples[3].name, b"x", 0)
    spec = WRITERS[source](tmp_path / source, samples)
    first, second = (open_dataset(spec, image_size=4, bad_images="skip") for _ in range(2))
    assert len(decoded) == 10 and len(first) == len(second) == 9
    assert first.bad_files == second.bad_files and first.fingerprint == second.fingerprint
    open_dataset(spec, image_size=5, bad_images="skip")  # decoded in another way, it may be bad in another way
    assert len(decoded) == 20
    WRITERS[source](tmp_path / source, pets())
    assert len(open_dataset(spec, image_size=4, bad_images="skip")) == 10


def test_labels_in_json_and_keys(tmp_path, cache):
    spec = write_tar(tmp_path / "a", pets(), label="label")
    assert open_dataset(spec, image_size=4).labels.tolist() == [0] * 5 + [1] * 5
    spec = write_tar(tmp_path / "b", pets(), label="kind")
    with pytest.raises(DataError, match=r"000: its \.json has None as label, not a number; name .* by label_key"):
        open_dataset(spec, image_size=4)
    assert open_dataset(spec, image_size=4, label_key="kind").labels.tolist() == [0] * 5 + [1] * 5
    spec = write_tar(tmp_path / "c", pets(), label="a/b")
    assert open_dataset(spec, image_size=4, label_key="a/b").labels.tolist() == [0] * 5 + [1] * 5
    assert list((cache / "rowdit" / "index").glob("tar1-*.safetensors"))


def tar_of(path: Path, members: dict[str, bytes]) -> str:
    import tarfile

    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return f"tar:{path}"


def test_long_names_folders_and_other_members(tmp_path):
    deep = "deeply/" + "n" * 150 + "/x.y"  # of pax headers; the key ends at the first dot of the last part
    spec = tar_of(
        tmp_path / "a.tar",
        {"LICENSE": b"", ".hidden.png": b"", f"{deep}.png": b"broken", "deeply/other.cls": b"0"},
    )
    with pytest.raises(DataError, match="has no label|has no image"):
        open_dataset(spec, image_size=4)
    folder = "deeply/" + "n" * 150
    spec = tar_of(
        tmp_path / "b.tar",
        {"LICENSE": b"", f"{folder}/x.PNG": b"broken", f"{folder}/x.txt": b"", f"{folder}/x.cls": b" 1 "},
    )
    dataset = open_dataset(spec, image_size=4)
    assert dataset.labels.tolist() == [1]
    with pytest.raises(BadImageError, match="b.tar: deeply/n{150}/x.PNG: not an image"):
        dataset.fetch(np.array([0]))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.png": b"", "a.jpg": b"", "a.cls": b"0"}, "sample a has 2 images; say which by image_key"),
        ({"a.txt": b"", "a.cls": b"0"}, "sample a has no image .*it has cls, txt"),
        ({"a.png": b""}, "sample a has no label"),
        ({"a.png": b"", "a.cls": b"cat"}, "its .cls holds b'cat', not a number"),
        ({"a.png": b"", "a.json": b"["}, "its .json can't be read"),
        ({"a.png": b"", "a.cls": b"0", "a.PNG": b""}, "a.PNG comes twice"),
    ],
)
def test_samples_that_arent_one(tmp_path, members, message):
    with pytest.raises(DataError, match=message):
        open_dataset(tar_of(tmp_path / "x.tar", members), image_size=4)


@pytest.mark.parametrize("num_bytes", [2000, 4096, 7 * 512, 512 * 6 + 100])
def test_a_tar_that_is_cut_off_is_never_taken_for_a_shorter_one(tmp_path, num_bytes):
    write_tar(tmp_path / "t", pets(4), per_shard=10)
    path = tmp_path / "t" / "000.tar"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(DataError, match="000.tar (is cut off|has no end mark|is damaged)"):
        open_dataset(f"tar:{path}", image_size=4)


def test_a_damaged_header_is_found(tmp_path):
    write_tar(tmp_path / "t", pets(4), per_shard=10)
    path = tmp_path / "t" / "000.tar"
    data = bytearray(path.read_bytes())
    data[2048 + 10] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        open_dataset(f"tar:{path}", image_size=4)


def test_a_compressed_tar_is_refused(tmp_path):
    import gzip

    write_tar(tmp_path / "t", pets(4), per_shard=10)
    path = tmp_path / "x.tar"
    path.write_bytes(gzip.compress((tmp_path / "t" / "000.tar").read_bytes()))
    with pytest.raises(DataError, match="isn't a plain tar file .*unpacked first"):
        open_dataset(f"tar:{path}", image_size=4)


def test_braces_patterns_and_what_is_missing(tmp_path):
    write_tar(tmp_path / "t", pets(8))
    for pattern in ("{000..003}.tar", "*.tar", "{000,001,002,003}.tar"):
        assert len(open_dataset(f"tar:{tmp_path / 't' / pattern}", image_size=4)) == 8
    assert len(open_dataset(f"tar:{tmp_path / 't' / '{001..002}.tar'}", image_size=4)) == 4
    with pytest.raises(DataError, match=r"t/004.tar doesn't exist, and 1 more"):
        open_dataset(f"tar:{tmp_path / 't' / '{000..005}.tar'}", image_size=4)
    with pytest.raises(DataError, match="no file with the extension .parquet"):
        open_dataset(f"parquet:{tmp_path / 't'}", image_size=4)
    WRITERS["tar"](tmp_path / "s" / "train", pets(4))
    with pytest.raises(DataError, match="none whose name begins with reference, val.*a pattern that both have"):
        open_dataset(f"tar:{tmp_path / 's'}", "reference", 4)


# -------------------------------------------------------------------------------------------------------- parquet
def test_large_parquet_files_are_read_by_windows_of_row_groups(tmp_path, monkeypatch):
    samples = [Sample(f"{i}", grey(i), i % 2) for i in range(60)]
    spec = write_parquet(tmp_path / "p", samples, per_group=5, per_file=20)
    dataset = ParquetImages(sorted((tmp_path / "p").iterdir()), 4, channels=1, window=2)
    reads = []
    original = dataset._read_group
    monkeypatch.setattr(dataset, "_read_group", lambda group: reads.append(group) or original(group))
    seen = []
    for step in range(6):
        batch = batch_at(dataset, seed=0, images_seen=10 * step, batch_size=10)
        values = ((batch.images[:, 0, 0, 0] + 1) * 127.5).round().int().tolist()
        assert len({value // 5 for value in values}) == 2  # two row groups a window
        seen += values
    assert sorted(seen) == list(range(60))
    assert sorted(reads) == list(range(12))  # each once an epoch
    assert "-window2" in dataset.fingerprint
    assert open_dataset(spec, image_size=4).blocks is None  # few bytes: a uniform permutation


def test_windows_are_of_the_samples_that_are_left(tmp_path):
    samples = [Sample(f"{i}", b"" if i % 7 == 0 or 10 <= i < 15 else grey(i), i % 2) for i in range(60)]
    spec = write_parquet(tmp_path / "p", samples, per_group=5, per_file=20)
    for split, expected in (("train", 54), ("reference", 6)):
        whole = open_dataset(spec, split, 4, window=1, bad_images="replace")
        assert len(whole) == expected == whole.blocks.starts[-1]
    kept = open_dataset(spec, "train", 4, channels=1, window=1, bad_images="skip")
    order = batch_at(kept, seed=0, images_seen=0, batch_size=len(kept))
    values = ((order.images[:, 0, 0, 0] + 1) * 127.5).round().int().tolist()
    assert len(set(values)) == len(values) == len(kept)
    groups = [value // 5 for value in values]
    assert len(set(groups)) == sum(a != b for a, b in zip(groups, groups[1:], strict=False)) + 1  # one run a group


def test_columns_names_and_structs(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "p").mkdir()
    info = {"info": {"features": {"kind": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    table = pyarrow.table(
        {
            "kind": [1, 0],
            "species": ["dog", "cat"],
            "photo": [{"bytes": grey(10), "path": "a"}, {"bytes": None, "path": "b"}],
        }
    ).replace_schema_metadata({"huggingface": json.dumps(info)})
    parquet.write_table(table, tmp_path / "p" / "x.parquet")
    spec = f"parquet:{tmp_path / 'p'}"
    with pytest.raises(
        DataError, match=r"no column could be meant; name one by image_key\. It has kind \(int64\), spec"
    ):
        open_dataset(spec, image_size=4)
    with pytest.raises(DataError, match="has no column 'foto'"):
        open_dataset(spec, image_size=4, image_key="foto")
    with pytest.raises(DataError, match="must be integers or the classes' names"):
        open_dataset(spec, image_size=4, image_key="photo", label_key="photo")
    numbered = open_dataset(spec, image_size=4, image_key="photo", label_key="kind")
    assert numbered.class_names == ("cat", "dog") and numbered.labels.tolist() == [1, 0]
    named = open_dataset(spec, image_size=4, image_key="photo", label_key="species")
    assert named.class_names == ("cat", "dog") and named.labels.tolist() == [1, 0]
    turned = open_dataset(spec, image_size=4, image_key="photo", label_key="species", class_names=("dog", "cat"))
    assert turned.labels.tolist() == [0, 1]
    with pytest.raises(DataError, match="'cat', which is not one of the classes dog"):
        open_dataset(spec, image_size=4, image_key="photo", label_key="species", class_names=("dog",))
    with pytest.raises(BadImageError, match="x.parquet: row 1: the row has no image"):
        numbered.fetch(np.array([1]))


def test_parquet_that_isnt(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "x.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match="isn't a Parquet file that can be read"):
        open_dataset(f"parquet:{tmp_path / 'x.parquet'}", image_size=4)


def test_a_folder_of_images_through_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    spec = write_folder(tmp_path / "images" / "train", pets())
    write_folder(tmp_path / "images" / "test", pets(4))
    ours = open_dataset(f"hf:{tmp_path / 'images'}", image_size=4)
    theirs = open_dataset(spec, image_size=4)
    assert ours.class_names == theirs.class_names == ("cat", "dog")
    for a, b in zip(everything(ours), everything(theirs), strict=True):
        assert (a == b).all()
    assert len(open_dataset(f"hf:{tmp_path / 'images'}", "reference", 4)) == 4


def test_a_hub_name_that_cant_be_opened_is_one_line(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty can't be opened .*; name a folder, or a dataset on the hub"):
        open_dataset(f"hf:{tmp_path / 'empty'}", image_size=4)


# ---------------------------------------------------------------------------------------------------------- the verb
@pytest.mark.parametrize("num_workers", [0, 1])
def test_data_check_counts_and_lists_bad_images(tmp_path, capsys, num_workers):
    samples = pets(24)
    samples[3] = Sample(samples[3].name, b"x", 0)
    spec = write_tar(tmp_path / "t", samples)
    arguments = ["check", spec, "--image-size", "4", "--num-workers", str(num_workers)]
    assert data_command.run(arguments) == 1
    shown = capsys.readouterr().out
    assert "train: 21 usable images in 2 classes" in shown and "reference: 2 usable images" in shown
    assert "      10  0" in shown and "      11  1" in shown
    assert "bad: 001.tar: 003.png: not an image" in shown
    assert data_command.run(["check", write_tar(tmp_path / "good", pets(24)), "--image-size", "4"]) == 0
    assert data_command.run([*arguments, "--num-classes", "1"]) == 2
    assert "label 1" in capsys.readouterr().err
    assert data_command.run(["chek"]) == 2
