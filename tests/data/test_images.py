"""Images in batches, and the steps of a transform."""

import numpy as np
import pytest
import torch

from fs_lowrank.data.images import STEPS, ImageExamples, Pipeline
from fs_lowrank.errors import UserError

NORMALIZE = ["Normalize", {"mean": [0.5], "std": [0.25]}]


def examples(count=6, channels=1, side=8, steps=(NORMALIZE,)):
    images = np.random.default_rng(0).integers(0, 256, (count, channels, side, side)).astype(np.uint8)
    return ImageExamples(images, np.arange(count), np.arange(count) % 3, Pipeline(list(steps)))


def test_a_batch_is_normalised_floats():
    data = examples()
    batch = data.batch([4, 1])
    assert batch["pixel_values"].dtype == torch.float32 and batch["labels"].tolist() == [1, 1]
    np.testing.assert_allclose(batch["pixel_values"].numpy(), (data.images[[4, 1]] / 255 - 0.5) / 0.25, atol=1e-6)
    assert len(data) == 6 and data.shape == (1, 8, 8) and data.lengths.tolist() == [1] * 6


def test_a_selection_shares_the_images():
    data = examples()
    part = data.select([5, 0, 3]).select([2, 0])
    assert part.images is data.images and part.rows.tolist() == [3, 5] and part.labels.tolist() == [0, 2]
    assert torch.equal(part.batch([1])["pixel_values"], data.batch([5])["pixel_values"])
    assert part.fingerprint() == data.select([3, 5]).fingerprint() != data.select([5, 3]).fingerprint()


def test_image_fingerprint_depends_only_on_the_contents():
    first, again, other = examples(), examples(), examples()
    other.images[2, 0, 3, 3] ^= 1
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    assert first.select([0]).fingerprint() != ImageExamples(first.images, [0], [1], first.pipeline).fingerprint()


AUGMENT = [["RandomHorizontalFlip"], ["RandomCrop", {"size": 8, "padding": 2}], ["ToTensor"]]


def test_random_steps_use_only_the_generator():
    data = examples(40, steps=AUGMENT)
    first, again, other = (data.batch(range(40), np.random.default_rng(s))["pixel_values"] for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    plain = data.batch(range(40))["pixel_values"]
    np.testing.assert_allclose(plain.numpy(), data.images / 255, atol=1e-6)  # cropped from the middle
    assert not torch.equal(first, plain)


def test_flips_and_crops_by_hand():
    image = np.arange(16, dtype=np.uint8).reshape(1, 1, 4, 4)
    flipped = Pipeline([["RandomHorizontalFlip", {"p": 1}]])(torch.from_numpy(image), np.random.default_rng(0))
    np.testing.assert_allclose(flipped.numpy() * 255, image[..., ::-1])
    upside = Pipeline([["RandomVerticalFlip", {"p": 1.0}]])(torch.from_numpy(image), np.random.default_rng(0))
    np.testing.assert_allclose(upside.numpy() * 255, image[:, :, ::-1])
    none = Pipeline([["RandomHorizontalFlip", {"p": 0}]])(torch.from_numpy(image), np.random.default_rng(0))
    np.testing.assert_allclose(none.numpy() * 255, image)
    many = torch.from_numpy(np.repeat(image, 300, 0))
    crops = (Pipeline([["RandomCrop", {"size": [3, 4], "padding": 1}]])(many, np.random.default_rng(0)) * 255).round()
    padded = np.pad(image[0, 0], 1)
    windows = {padded[t : t + 3, s : s + 4].tobytes() for t in range(4) for s in range(3)}
    seen = {c[0].numpy().astype(np.uint8).tobytes() for c in crops}
    assert crops.shape == (300, 1, 3, 4) and seen == windows


def test_half_of_the_images_flip():
    many = torch.from_numpy(np.repeat(np.arange(4, dtype=np.uint8).reshape(1, 1, 1, 4), 2000, 0))
    out = Pipeline([["RandomHorizontalFlip"]])(many, np.random.default_rng(0))
    assert 0.45 < float((out[:, 0, 0, 0] > 0).float().mean()) < 0.55


@pytest.mark.parametrize(
    "steps, shape",
    [
        ([["Resize", {"size": 4}]], (1, 4, 6)),
        ([["Resize", {"size": [5, 7]}]], (1, 5, 7)),
        ([["CenterCrop", {"size": 4}]], (1, 4, 4)),
        ([["Pad", {"padding": 2}]], (1, 12, 16)),
        ([["Pad", {"padding": 2, "padding_mode": "reflect"}], "ToTensor"], (1, 12, 16)),
        ([["Grayscale", {"num_output_channels": 3}], ["Normalize", {"mean": [0, 0, 0], "std": [1, 1, 1]}]], (3, 8, 12)),
    ],
)
def test_other_steps(steps, shape):
    out = Pipeline(steps)(torch.randint(0, 256, (2, 1, 8, 12), dtype=torch.uint8))
    assert out.shape == (2, *shape) and 0 <= out.min() <= out.max() <= 1 and out.dtype == torch.float32


@pytest.mark.parametrize("height, width", [(10, 45), (45, 10), (29, 31), (7, 7)])
def test_the_longer_side_is_rounded_down_as_torchvision_does(height, width):
    out = Pipeline([["Resize", {"size": 28}]])(torch.zeros(1, 1, height, width, dtype=torch.uint8))
    short, long = sorted((height, width))
    assert sorted(out.shape[2:]) == [28, 28 * long // short] and (out.shape[2] > 28) == (height > width)


def test_gray_of_colours():
    red = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    red[:, 0] = 200
    assert (Pipeline([["Grayscale"]])(red) * 255).round().unique().tolist() == [60]


@pytest.mark.parametrize(
    "steps, message",
    [
        ([["RandomCrop", {"siz": 8}]], "unknown key 'data.transform.0.1.siz'; did you mean 'size'"),
        ([["RandomCrop"]], "data.transform.0.1.size is missing"),
        ([["RandomCrop", {"size": "8"}]], "size = '8': expected a size"),
        ([["RandomCrop", {"size": 8, "padding": -1}]], "padding = -1"),
        ([["RandomHorizontalFlip", {"p": 1.5}]], "p = 1.5: expected a number, at least 0 and at most 1"),
        ([["Normalize", {"mean": [0.5], "std": [0]}]], "std = .0.: expected a number for each channel, above 0"),
        ([["Pad", {"padding": 1, "padding_mode": "wrap"}]], "padding_mode = 'wrap'"),
        ([["Grayscale", {"num_output_channels": 2}]], "num_output_channels = 2"),
        ([{"RandomCrop": 8}], "data.transform.0 = .'RandomCrop': 8.: expected .NAME. or"),
        ([["ToTensor", {}, 3]], "expected .NAME. or"),
        ([["ToTensor", {"x": 1}]], "unknown key 'data.transform.0.1.x'; it takes none"),
    ],
)
def test_wrong_steps(steps, message):
    with pytest.raises(UserError, match=message):
        Pipeline(steps)


@pytest.mark.parametrize(
    "steps, message",
    [
        ([["RandomCrop", {"size": 9}]], "data.transform: RandomCrop: maximum size for tensor"),
        ([["CenterCrop", {"size": 20}]], "cannot cut 20 × 20"),
        (
            [["Pad", {"padding": 8, "padding_mode": "reflect"}]],
            "Pad: .*Padding size should be less",
        ),
        (
            [["Normalize", {"mean": [0, 0, 0], "std": [1, 1, 1]}]],
            "mean and std have 3 and 3 numbers, the images 1",
        ),
    ],
)
def test_steps_that_do_not_suit_the_images(steps, message):
    with pytest.raises(UserError, match=message):
        examples(steps=steps).batch([0], np.random.default_rng(0))


def test_every_step_is_covered_here():
    text = open(__file__, encoding="utf-8").read()
    assert all(f'"{name}"' in text for name in STEPS)
