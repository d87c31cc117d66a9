"""Image data sets from their standard files and from folders, and the errors for invalid ones."""

import gzip
import os
import struct
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from fs_lowrank.data import build_data, load_raw
from fs_lowrank.data import image_files as module
from fs_lowrank.errors import UserError

DRAW = np.random.default_rng(0)


def load(name, root, home=None, args=()):
    with mock.patch.dict(os.environ, {"FS_LOWRANK_HOME": str(home)} if home else {}):
        return load_raw(SimpleNamespace(type=str(name), root=str(root), args=list(args)))


def idx(path, array, pack=lambda raw: raw):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(pack(header + array.astype(np.uint8).tobytes()))


def mnist(folder, pack=lambda raw: raw, suffix="", form="{}-{}-idx{}-ubyte"):
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 12), ("t10k", 5)):
        idx(folder / (form.format(split, "images", 3) + suffix), np.full((count, 28, 28), count), pack)
        idx(folder / (form.format(split, "labels", 1) + suffix), np.arange(count) % 10, pack)
    return folder


@pytest.mark.parametrize(
    "where, pack, suffix, form",
    [
        ("", bytes, "", "{}-{}-idx{}-ubyte"),
        ("mnist", gzip.compress, ".gz", "{}-{}-idx{}-ubyte"),
        ("mnist", bytes, ".gz", "{}-{}-idx{}-ubyte"),  # a browser may unpack a file and leave its name
        ("MNIST/raw", bytes, "", "{}-{}.idx{}-ubyte"),
    ],
)
def test_mnist_in_each_supported_folder(tmp_path, where, pack, suffix, form):
    mnist(tmp_path / where, pack, suffix, form)
    raw = load("mnist", tmp_path)
    assert raw.images.shape == (17, 1, 28, 28) and raw.images.dtype == np.uint8
    assert raw.train["label"].tolist() == [*range(10), 0, 1] and raw.test["label"].tolist() == [0, 1, 2, 3, 4]
    assert set(raw.images[raw.test["image"]].ravel()) == {5} and raw.task == "image_classification"
    assert raw.num_labels == 10 and raw.source.startswith("MNIST") and raw.validation is None


def test_fashion_mnist_from_the_systems_package(tmp_path, monkeypatch):
    monkeypatch.setitem(module.IMAGE_SETS["fashion_mnist"], "more", [mnist(tmp_path / "system")])
    raw = load("fashion_mnist", tmp_path / "nowhere", tmp_path)
    assert raw.label_names[1] == "Trouser" and len(raw.train) == 12
    # The name that FederatedScope uses.
    assert load("FashionMNIST@torchvision", tmp_path / "nowhere", tmp_path).fingerprint == raw.fingerprint


def test_missing_or_truncated_mnist(tmp_path):
    with pytest.raises(UserError, match="no folder has train-images-idx3-ubyte, .*fs-lowrank fetch mnist"):
        load("mnist", tmp_path, tmp_path)
    folder = mnist(tmp_path)
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match="no folder has train-images.*, t10k-labels-idx1-ubyte; looked in: "):
        load("mnist", tmp_path, tmp_path)
    mnist(tmp_path)
    idx(folder / "train-labels-idx1-ubyte", np.arange(11) % 10)
    with pytest.raises(UserError, match="train-labels-idx1-ubyte: 11 labels up to 9 came; expected 12 of 0 … 9"):
        load("mnist", tmp_path, tmp_path)
    idx(folder / "train-labels-idx1-ubyte", np.arange(12))
    with pytest.raises(UserError, match="train-labels-idx1-ubyte: 12 labels up to 11 came; expected 12 of 0 … 9"):
        load("mnist", tmp_path, tmp_path)


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda raw: raw[:-10], "reading it as a file of mnist raises ValueError: cannot reshape"),
        (lambda raw: raw + b"x", "reading it as a file of mnist raises ValueError: cannot reshape"),
        (lambda raw: raw[:7], "reading it as a file of mnist raises ValueError: "),
        (lambda raw: b"PK\3\4" + raw[8:], "reading it as a file of mnist raises ValueError: "),
    ],
)
def test_a_broken_idx_file_says_what_is_wrong(tmp_path, damage, said):
    path = mnist(tmp_path) / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=f"{path}: {said}"):
        load("mnist", tmp_path, tmp_path)


@pytest.fixture
def small_cifar(monkeypatch):
    """CIFAR's files with few records each."""
    read = module._read_cifar
    monkeypatch.setitem(module._READERS, "cifar", lambda paths, about, count: read(paths, about, count // 1000))


def test_cifar10_binary(tmp_path, small_cifar):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for i, name in enumerate([*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]):
        rows = DRAW.integers(0, 256, (10, 3073)).astype(np.uint8)
        rows[:, 0], rows[:, 1] = np.arange(10), i
        rows.tofile(folder / name)
    raw = load("CIFAR10", tmp_path)
    assert raw.images.shape == (60, 3, 32, 32) and len(raw.train) == 50 and raw.label_names[3] == "cat"
    assert raw.images[:, 0, 0, 0].tolist() == [i for i in range(6) for _ in range(10)]
    (folder / "data_batch_3.bin").write_bytes(b"\0" * 30_729)
    with pytest.raises(UserError, match="data_batch_1.bin: reading it as a file of cifar10 raises ValueError: cannot"):
        load("cifar10", tmp_path)
    with pytest.raises(UserError, match="pickled, and pickles are not read"):
        load("cifar10", tmp_path / "else")


def test_cifar100_binary(tmp_path, small_cifar):
    for name, count in (("train.bin", 50), ("test.bin", 10)):
        rows = np.zeros((count, 3074), np.uint8)
        rows[:, 0], rows[:, 1] = np.arange(count) % 20, np.arange(count) % 100
        rows.tofile(tmp_path / name)
    raw = load("cifar100", tmp_path)
    assert raw.num_labels == 100 and raw.fields == ["coarse"] and raw.train["coarse"].tolist()[21] == 1
    assert raw.train["label"].tolist()[21] == 21 and raw.images.shape == (60, 3, 32, 32)
    (tmp_path / "fine_label_names.txt").write_text("\n".join(f"kind{i}" for i in range(100)))
    assert load("cifar100", tmp_path).label_names[7] == "kind7"
    (tmp_path / "fine_label_names.txt").write_bytes(b"kind0\nkind1\nki")
    with pytest.raises(UserError, match="fine_label_names.txt: expected the names of 100 classes; without"):
        load("cifar100", tmp_path)


def test_svhn(tmp_path):
    scipy_io = pytest.importorskip("scipy.io")
    for split, count in (("train", 12), ("test", 4)):
        pixels = np.zeros((32, 32, 3, count), np.uint8)
        pixels[:, :, 1] = np.arange(count)
        scipy_io.savemat(tmp_path / f"{split}_32x32.mat", {"X": pixels, "y": np.arange(1, count + 1)[:, None] % 10 + 1})
    raw = load("svhn", tmp_path)
    assert raw.images.shape == (16, 3, 32, 32) and raw.train["label"].tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3]
    assert raw.images[3, 1].max() == 3 and raw.images[3, 0].max() == 0
    (tmp_path / "test_32x32.mat").write_bytes(b"MATLAB no more")
    with pytest.raises(UserError, match="test_32x32.mat: reading it as a file of svhn"):
        load("svhn", tmp_path)


# -- folders -------------------------------------------------------------------------------------------


def picture(path, value, size=(6, 5), mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 9)).save(path)


@pytest.fixture
def folder(tmp_path):
    """train and test with two classes, seven images in all, and files that are not images."""
    root = tmp_path / "pictures"
    for i in range(3):
        picture(root / "train" / "cat" / f"{i}.png", 10 + i)
    picture(root / "train" / "dog" / "0.png", 20)
    picture(root / "train" / "dog" / "1.JPG", 21)
    picture(root / "test" / "dog" / "0.png", 30)
    picture(root / "test" / "cat" / "0.png", 31)
    (root / "train" / "dog" / "notes.txt").write_text("x")
    (root / "train" / "dog" / ".hidden.png").write_text("x")
    return root


def test_a_folder_of_class_folders(folder, tmp_path):
    raw = load(folder, "", tmp_path / "home")
    assert raw.label_names == ["cat", "dog"] and raw.train["label"].tolist() == [0, 0, 0, 1, 1]
    assert raw.images.shape == (7, 1, 5, 6) and raw.test["label"].tolist() == [0, 1]
    assert raw.images[raw.test["image"], 0, 0, 0].tolist() == [31, 30] and raw.validation is None
    assert raw.skipped == {"not an image, by its name": 2}
    assert load("pictures", folder.parent, tmp_path / "home").fingerprint == raw.fingerprint
    assert load(folder / "train", "", tmp_path / "home").test is None, "only classes: all of it is for training"
    (folder / "test").rename(folder / "val")
    assert len(load(folder, "", tmp_path / "home").validation) == 2


def test_colours_and_sizes(folder, tmp_path):
    picture(folder / "train" / "cat" / "9.png", 50, mode="RGB")
    raw = load(folder, "", tmp_path)
    assert raw.images.shape == (8, 3, 5, 6) and raw.images[3, :, 0, 0].tolist() == [50, 0, 9]
    assert raw.images[0, :, 0, 0].tolist() == [10, 10, 10] and len(raw.mean) == 3
    assert load(folder, "", tmp_path, [{"channels": 1}]).images.shape == (8, 1, 5, 6)
    picture(folder / "train" / "cat" / "8.png", 60, size=(4, 4))
    with pytest.raises(UserError, match=r"8.png: is 4 × 4, 0.png is 5 × 6; .*data.args"):
        load(folder, "", tmp_path)
    assert load(folder, "", tmp_path, [{"size": 8}]).images.shape == (9, 3, 8, 8)
    assert load(folder, "", tmp_path, [{"size": [4, 7]}]).images.shape == (9, 3, 4, 7)


@pytest.mark.parametrize(
    "args, message",
    [
        ([{"siz": 3}], "unknown key 'data.args.0.siz'; did you mean 'size'"),
        ([{"size": 0}], "size = 0: expected pixels, or .height, width., at least 1"),
        ([{"channels": 2}], "channels = 2: expected one of 1, 3"),
    ],
)
def test_wrong_arguments(folder, tmp_path, args, message):
    with pytest.raises(UserError, match=message):
        load(folder, "", tmp_path, args)


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_images_of_32_bits_are_refused(folder, tmp_path, kind):
    Image.fromarray(np.ones((5, 6), kind)).save(folder / "train" / "cat" / "deep.tif")
    with pytest.raises(UserError, match="deep.tif: its pixels are numbers of 32 bits, of unknown range"):
        load(folder, "", tmp_path / "home")


@pytest.mark.parametrize("damage", ["cut", "bomb", "noise"])
def test_a_damaged_image_is_named(tmp_path, damage, monkeypatch):
    for kind in ("cat", "dog"):
        (tmp_path / kind).mkdir()
        picture(tmp_path / kind / "a.png", 7, (8, 8))
    path = tmp_path / "dog" / "a.png"
    raw = path.read_bytes()
    if damage == "bomb":
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 16)
    else:
        path.write_bytes(raw[:40] if damage == "cut" else raw[:30] + bytes(20) + raw[50:])
    with pytest.raises(UserError, match="a.png: reading it as an image raises") as caught:
        load(tmp_path, "", tmp_path / "home")
    assert "\n" not in str(caught.value)


def test_pictures_are_read_as_they_are_shown(folder, tmp_path):
    """With the orientation of the camera, also of gray values of 16 bits."""
    from PIL import ImageOps

    tag = Image.Exif()
    tag[0x0112] = 6
    for name, values in (("8.png", np.arange(30, dtype=np.uint8)), ("16.png", np.arange(30, dtype=np.uint16) * 2000)):
        Image.fromarray(values.reshape(6, 5)).save(folder / "train" / "cat" / name, exif=tag)
        shown = np.asarray(ImageOps.exif_transpose(Image.open(folder / "train" / "cat" / name)))
        shown = shown if name == "8.png" else shown >> 8
        found = load(folder, "", tmp_path / "home").images[:, 0]
        assert (found == shown).all(axis=(1, 2)).sum() == 1


def test_12_bits_in_files_of_16_are_not_16_values(folder, tmp_path, caplog):
    deep = (np.arange(30, dtype=np.uint16) * 141).reshape(5, 6)  # up to 4089
    Image.fromarray(deep).save(folder / "train" / "cat" / "deep.png")
    Image.fromarray(deep // 2).save(folder / "test" / "cat" / "deep.tif")
    images = load(folder, "", tmp_path / "home").images[:, 0]
    for values in (deep // 16, deep // 2 // 16):  # one scale for all files
        assert (images == values).all(axis=(1, 2)).sum() == 1
    assert "gray values of 12 bits are read as their upper 8" in caplog.text


def test_what_of_a_file_is_not_read_is_said(folder, tmp_path, caplog):
    frames = [Image.fromarray(np.full((5, 6), value, np.uint8)) for value in (40, 90)]
    frames[0].save(folder / "train" / "cat" / "two.gif", save_all=True, append_images=frames[1:])
    picture(folder / "train" / "dog" / "clear.png", 50, mode="RGBA")
    load(folder, "", tmp_path / "home")
    assert "1 files have several frames, of which the first is read; 1 files have transparency" in caplog.text


def test_every_picture_that_is_left_out_is_counted(folder, tmp_path, caplog):
    picture(folder / "train" / "cat" / "more" / "0.png", 1)
    picture(folder / "train" / "loose.png", 2)
    picture(folder / "extra" / "cat" / "0.png", 3)
    (folder / "train" / "bird").mkdir()
    raw = load(folder, "", tmp_path / "home")
    assert raw.skipped == {"not an image, by its name": 2, "in no folder of a class": 3}
    assert "no image is in the folder of a class: bird; it is left out" in caplog.text
    assert raw.label_names == ["cat", "dog"] and len(raw.images) == 7


def test_invalid_folders(folder, tmp_path):
    picture(folder / "test" / "bird" / "0.png", 1)
    with pytest.raises(UserError, match="class 'bird' of test does not occur in training"):
        load(folder, "", tmp_path)
    picture(folder / "val" / "cat" / "0.png", 1)
    picture(folder / "validation" / "cat" / "0.png", 1)
    with pytest.raises(UserError, match="several folders of validation data, validation among them; keep one"):
        load(folder, "", tmp_path)
    (tmp_path / "one" / "only").mkdir(parents=True)
    with pytest.raises(UserError, match=r"folders with images: none; expected"):
        load(tmp_path / "one", "", tmp_path)
    with pytest.raises(UserError, match="unknown data.type 'cifr10'; did you mean 'cifar10'.*there is none at"):
        load("cifr10", tmp_path, tmp_path)


# -- in a run ------------------------------------------------------------------------------------------


def test_built_without_a_tokenizer(tiny_images, tmp_path, config):
    cfg = config(tiny_images, splits=(0.8, 0.1, 0.1), clients=4, splitter="lda", splitter_args=[{"alpha": 0.5}])
    cfg.data.transform = [["RandomCrop", {"size": 12}]]
    raw = load(tiny_images, "", tmp_path)
    built = build_data(cfg, raw=raw)
    assert built.task == "image_classification" and built.image_shape == (1, 12, 12) and built.num_labels == 3
    assert len(built.test) == len(built.validation) == 21 and sum(map(len, built.clients)) == 168
    assert all(c.images is raw.images for c in built.clients)
    assert built.fingerprint == build_data(cfg, raw=raw).fingerprint
    cfg.data.test_transform = [["Resize", {"size": [8, 8]}]]
    with pytest.raises(UserError, match=r"of test images give shape \(1, 8, 8\), those of training \(1, 12, 12\)"):
        build_data(cfg, raw=raw)


def test_default_normalisation(tmp_path, config):
    mnist(tmp_path)
    built = build_data(config("mnist", tmp_path, splits=(1, 0, 0), clients=2))
    np.testing.assert_allclose(built.test.batch([0])["pixel_values"].numpy(), (5 / 255 - 0.1307) / 0.3081, atol=1e-5)
