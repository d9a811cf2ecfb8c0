"""Images in folders, tables, arrays and Parquet: the same examples; what cannot be read is reported by its row."""

import gzip
import io
import json
import random
import struct

import numpy as np
import pytest

from allyouneed.config import parse
from allyouneed.data.batches.encoding import Dropped
from allyouneed.data.batches.media import MediaEncoding
from allyouneed.data.files.images import CaptionedImages, ImageFiles
from allyouneed.data.files.media import label_names
from allyouneed.data.files.readers import Report
from allyouneed.data.media.image import Pixels
from allyouneed.errors import UserError
from toy_images import labelled_pictures

pillow = pytest.importorskip("PIL.Image")
READER = Pixels(size=(12, 12))


@pytest.fixture
def pictures():
    return labelled_pictures(6, random.Random(3))


def png(pixels):
    out = io.BytesIO()
    pillow.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def write(form, folder, pixels, labels):
    """The images in this form; the path that a recipe names."""
    if form == "folders":
        for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
            (folder / label).mkdir(exist_ok=True)
            (folder / label / f"{number}.png").write_bytes(png(image))
        return folder
    if form in ("tsv", "csv", "jsonl", "metadata"):
        for number, image in enumerate(pixels):
            (folder / f"{number}.png").write_bytes(png(image))
        rows = [(f"{number}.png", label) for number, label in enumerate(labels)]
        lines = {
            "tsv": [f"{path}\t{label}" for path, label in rows],
            "csv": ["path,label", *(f"{path},{label}" for path, label in rows)],
            "jsonl": [json.dumps({"image": path, "label": label}) for path, label in rows],
            "metadata": ["file_name,label", *(f"{path},{label}" for path, label in rows)],
        }[form]
        path = folder / ("metadata.csv" if form == "metadata" else f"train.{form}")
        path.write_text("\n".join(lines) + "\n")
        return folder if form == "metadata" else path
    classes = sorted(set(labels))
    numbers = np.array([classes.index(label) for label in labels], np.uint8)
    if form == "npz":
        np.savez(folder / "train.npz", x=pixels, y=np.array(labels))
        return folder / "train.npz"
    if form == "npz of files":
        parts = [png(image) for image in pixels]
        offsets = np.cumsum([0, *map(len, parts)])
        joined = np.frombuffer(b"".join(parts), np.uint8)
        np.savez(folder / "train.npz", jpeg=joined, offsets=offsets, label=numbers, classes=np.array(classes))
        return folder / "train.npz"
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    table = pyarrow.table({"image": [{"bytes": png(image), "path": None} for image in pixels], "label": numbers})
    features = {"info": {"features": {"label": {"names": classes}}}}
    parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}), folder / "a.parquet")
    return folder


@pytest.mark.parametrize("form", ["folders", "tsv", "csv", "jsonl", "metadata", "npz", "npz of files", "parquet"])
def test_every_form_has_the_same_images_and_labels(form, pictures, tmp_path):
    pixels, labels = pictures
    entry, report = ImageFiles(path=write(form, tmp_path, pixels, labels)), Report()
    examples = list(entry.read(report))
    assert (report.read, report.dropped) == (6, 0)
    encoding = MediaEncoding(READER, label_names([entry]))
    rows = {(sorted(set(labels))[row[1][0]], bytes(row[0])) for row in encoding.encode(examples)}
    assert rows == {(label, image.tobytes()) for image, label in zip(pixels, labels, strict=True)}


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_of_mnist_are_read_with_the_labels_beside_them(packed, tmp_path):
    pixels = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3)
    end, write_file = (".gz", gzip.compress) if packed else ("", bytes)
    for name, values in (("images-idx3", pixels), ("labels-idx1", np.array([7, 10], np.uint8))):
        content = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()
        (tmp_path / f"train-{name}-ubyte{end}").write_bytes(write_file(content))
    entry = ImageFiles(path=tmp_path / f"train-images-idx3-ubyte{end}")
    found = list(entry.read(Report()))
    assert [one.label for one in found] == ["7", "10"] == label_names([entry])
    assert np.array_equal(found[1].content, pixels[1])
    assert len(entry.files()) == 2, "both are part of the fingerprint"


def test_npy_has_its_labels_beside_it_or_where_the_recipe_says(pictures, tmp_path):
    pixels, labels = pictures
    np.save(tmp_path / "images.npy", pixels)
    with pytest.raises(UserError, match=r"no labels \(labels\.npy is missing\); set labels: FILE"):
        list(ImageFiles(path=tmp_path / "images.npy").read(Report()))
    np.save(tmp_path / "classes.npy", np.array(labels))
    entry = ImageFiles(path=tmp_path / "images.npy", labels=tmp_path / "classes.npy")
    assert [one.label for one in entry.read(Report())] == labels


def test_unreadable_images_are_dropped_with_their_row(tmp_path, monkeypatch):
    good = png(np.zeros((4, 4, 3), np.uint8))
    bomb = png(np.zeros((300, 300, 3), np.uint8))
    contents = {"good": good, "cut": good[:40], "empty": b"", "text": b"<svg/>", "bomb": bomb, "wrong": good[:30] * 9}
    for name, content in contents.items():
        (tmp_path / f"{name}.png").write_bytes(content)
    names = [*contents, "missing"]
    (tmp_path / "a.tsv").write_text("".join(f"{name}.png\tx\n" for name in names))
    monkeypatch.setattr(pillow, "MAX_IMAGE_PIXELS", 10_000)
    examples = list(ImageFiles(path=tmp_path / "a.tsv").read(Report()))
    found = dict(zip(names, MediaEncoding(READER, ["x"]).encode(examples), strict=True))
    assert [name for name, row in found.items() if not isinstance(row, Dropped)] == ["good"]
    assert [example.line for example in examples] == list(range(1, 8))
    assert "exceeds limit" in found["bomb"].detail and "No such file" in found["missing"].detail


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_give_a_message_or_a_dropped_row_but_never_another_error(seed, pictures, tmp_path):
    """Bytes changed at random in images and in archives of them."""
    pixels, labels = pictures
    dice = random.Random(seed)
    source = write("npz of files", tmp_path, pixels, labels)
    whole, image = source.read_bytes(), png(pixels[0])
    encoding = MediaEncoding(READER, ["blue", "green", "red"])
    for number in range(50):
        changed = bytearray(image if number % 2 else whole)
        for _ in range(dice.randint(1, 8)):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        changed = bytes(changed[: dice.randint(1, len(changed))] if dice.random() < 0.3 else changed)
        path = tmp_path / "damaged.npz"
        if number % 2:
            (tmp_path / "x.png").write_bytes(changed)
            path = tmp_path / "damaged.tsv"
            path.write_text("x.png\tred\n")
        else:
            path.write_bytes(changed)
        try:
            list(encoding.encode(list(ImageFiles(path=path).read(Report()))))
        except UserError:
            continue


@pytest.mark.parametrize(
    ("write_it", "said"),
    [
        (lambda p: p.mkdir(), "no images; expected a folder of images for each class"),
        (lambda p: np.savez(p.open("wb"), a=np.zeros((2, 2, 2))), "not supported"),
        (lambda p: None, "no such file or folder"),
    ],
)
def test_what_is_no_set_of_images_is_named(write_it, said, tmp_path):
    write_it(tmp_path / "x.bin")
    with pytest.raises(UserError, match=said):
        list(ImageFiles(path=tmp_path / "x.bin").read(Report()))


def test_arrays_that_do_not_fit_are_named(tmp_path):
    path = tmp_path / "a.npz"
    for arrays, said in [
        ({"image": np.zeros((2, 4, 4), np.uint8), "label": np.zeros(3)}, "2 images but 3 labels"),
        ({"image": np.zeros((2, 4, 4)), "label": np.zeros(2)}, "pixels of type float64, expected uint8"),
        ({"a": np.zeros((2, 4, 4)), "label": np.zeros(2)}, r"which of a, label are the images\? Set keys"),
    ]:
        np.savez(path, **arrays)
        with pytest.raises(UserError, match=said):
            list(ImageFiles(path=path).read(Report()))
    assert len(list(parse(ImageFiles, {"path": path, "keys": ["a", "label"]}).files())) == 1


def test_a_column_without_classes_is_noticed(tmp_path):
    (tmp_path / "a.tsv").write_text("".join(f"{n}.png\tcaption {n}\n" for n in range(40)))
    with pytest.raises(UserError, match="40 different labels for 40 images"):
        label_names([ImageFiles(path=tmp_path / "a.tsv")])
    (tmp_path / "b.tsv").write_text("1.png\tx\n")
    with pytest.raises(UserError, match="only one class, 'x'"):
        label_names([ImageFiles(path=tmp_path / "b.tsv")])


def test_a_changed_image_changes_the_digest_of_a_folder(pictures, tmp_path):
    entry = ImageFiles(path=write("folders", tmp_path, *pictures))
    before = entry.named_inputs()
    assert before == ImageFiles(path=tmp_path).named_inputs() and before
    next(tmp_path.rglob("*.png")).write_bytes(b"another")
    assert entry.named_inputs() != before


def test_captions_lie_beside_their_images_or_in_a_table(pictures, tmp_path):
    (tmp_path / "a.png").write_bytes(png(pictures[0][0]))
    (tmp_path / "a.txt").write_text("a square\n")
    (tmp_path / "b.png").write_bytes(b"")
    report = Report()
    (found,) = CaptionedImages(path=tmp_path).read(report)
    assert found.texts == ("a square",) and found.content == tmp_path / "a.png"
    assert report.drops["without a text"].count == 1
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,another\n")
    (found,) = CaptionedImages(path=tmp_path).read(Report())
    assert found.texts == ("another",)
