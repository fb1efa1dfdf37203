"""Image folders: found and read, cropped at random and ten times."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from egop_lab.data import images
from egop_lab.data.missing import MissingDataError

CPU = torch.device("cpu")


def write_folder(folder, per_class=(6, 4), classes=("cat", "dog"), size=(20, 16), ending=".png"):
    """Write a folder of images in which every class has its own colour; ``size`` is (width, height)."""
    numbers = np.random.default_rng(0)
    for split, count in zip(("train", "val"), per_class, strict=True):
        for label, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = numbers.integers(0, 80, (size[1], size[0], 3)) + 150 * np.eye(3, dtype=int)[label % 3]
                Image.fromarray(pixels.astype(np.uint8)).save(folder / split / name / f"{index}{ending}")
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "data")


def load(folder, **options):
    return images.load(str(folder), **{"side": 12, "crop": 8, "device": CPU, **options})


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_files_are_found_with_labels_in_the_order_of_the_class_names(folder):
    (folder / "train" / "cat" / "notes.txt").write_text("not an image")
    train, validation = images.find(str(folder))
    assert (len(train.paths), len(validation.paths)) == (12, 8)
    assert [path.parent.name for path in train.paths] == ["cat"] * 6 + ["dog"] * 6
    assert train.labels == (0,) * 6 + (1,) * 6


def test_a_data_folder_may_hold_the_images_in_a_folder_of_their_own(tmp_path):
    write_folder(tmp_path / "imagenette")
    assert len(images.find(str(tmp_path))[0].paths) == 12


@pytest.mark.parametrize("place", [None, "nowhere", "empty"])
def test_missing_images_are_one_line_that_says_what_to_do(tmp_path, place):
    if place == "empty":
        for split in ("train", "val"):
            (tmp_path / place / split / "cat").mkdir(parents=True)
    with pytest.raises(MissingDataError, match=r"--data DIR") as error:
        images.find(place and str(tmp_path / place))
    assert "\n" not in str(error.value)
    assert "train/CLASS/*.jpg" in str(error.value)


def test_a_damaged_image_is_named(folder):
    (folder / "train" / "dog" / "3.png").write_bytes(b"no image")
    with pytest.raises(MissingDataError, match=r"dog/3\.png"):
        load(folder)


def test_held_images_are_central_squares_of_the_wanted_side(tmp_path):
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "val" / "a").mkdir(parents=True)
    pixels = np.zeros((10, 30, 3), dtype=np.uint8)
    pixels[:, 10:20] = 200  # the middle third is bright
    for split in ("train", "val"):
        Image.fromarray(pixels).save(tmp_path / split / "a" / "0.png")
    data = load(tmp_path, side=10)
    assert data.train[0].shape == (1, 3, 10, 10)
    assert data.train[0].dtype == torch.uint8
    assert data.train[0].float().mean() == 200


def test_jpeg_files_are_read(tmp_path):
    data = load(write_folder(tmp_path, ending=".jpg"))
    assert data.counts == {"train": 12, "validation": 8, "classes": 2}


def test_a_limit_takes_images_of_all_classes(folder):
    data = load(folder, limits=(4, 2))
    assert data.train[1].tolist() == [0, 0, 1, 1]
    assert data.held_out[1].tolist() == [0, 1]


def test_ten_crops_are_those_of_a_plain_loop():
    given = torch.randint(256, (3, 3, 9, 13), dtype=torch.uint8, generator=generator())
    found = images.make_views(given, 4, ten=True)
    assert found.shape == (3, 10, 3, 4, 4)
    for number, image in enumerate(given):
        expected = []
        for mirrored in (False, True):
            for top, left in [(0, 0), (0, 9), (5, 0), (5, 9), (2, 4)]:
                crop = torch.empty(3, 4, 4, dtype=torch.uint8)
                for channel in range(3):
                    for row in range(4):
                        for column in range(4):
                            from_left = 3 - column if mirrored else column
                            crop[channel, row, column] = image[channel, top + row, left + from_left]
                expected.append(crop)
        assert torch.equal(found[number], torch.stack(expected))


def test_a_single_view_is_the_centre():
    given = torch.arange(2 * 3 * 6 * 6).reshape(2, 3, 6, 6)
    assert torch.equal(images.make_views(given, 4, ten=False)[:, 0], given[..., 1:5, 1:5])
    with pytest.raises(ValueError, match="8 pixels does not fit into images of 6 x 6"):
        images.make_views(given, 8, ten=False)


def test_random_boxes_lie_inside_and_have_the_usual_areas_and_shapes():
    left, top, width, height = images.crop_boxes(5000, 30, 40, generator()).unbind(1)
    tolerance = 1e-4
    assert left.min() >= 0
    assert top.min() >= 0
    assert (left + width).max() <= 40 + tolerance
    assert (top + height).max() <= 30 + tolerance
    shares = width * height / 1200
    assert 0.08 - tolerance <= shares.min() < 0.1
    assert 0.8 < shares.max() <= 1 + tolerance
    ratios = width / height
    assert 0.75 - tolerance <= ratios.min() < 0.8
    assert 1.28 < ratios.max() <= 4 / 3 + tolerance


def test_a_box_that_never_fits_is_the_largest_of_a_permitted_shape():
    boxes = images.crop_boxes(50, 10, 1000, generator())  # 8 % of the area are higher than the image at these shapes
    assert torch.allclose(boxes[:, 2:], torch.tensor([40 / 3, 10.0]))


def test_random_crops_repeat_by_their_generator():
    given = torch.randint(256, (16, 3, 20, 20), dtype=torch.uint8, generator=generator())
    one, same, other = (images.random_crops(given, 8, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_random_crop_samples_its_box_and_mirrors_about_half(monkeypatch):
    monkeypatch.setattr(images, "crop_boxes", lambda count, *_: torch.tensor([[2.0, 4.0, 8.0, 8.0]]).repeat(count, 1))
    given = torch.randint(256, (1, 3, 16, 16), dtype=torch.uint8, generator=generator()).repeat(400, 1, 1, 1)
    found = images.random_crops(given, 8, generator())
    plain = given[0, :, 4:12, 2:10].float()
    straight = (found - plain).abs().amax((1, 2, 3)) < 1e-2
    mirrored = (found - plain.flip(-1)).abs().amax((1, 2, 3)) < 1e-2
    assert (straight ^ mirrored).all()
    assert 150 < straight.sum() < 250


def test_normalised_pixels_have_imagenets_scale():
    grey = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    found = images.normalize(grey)[0, :, 0, 0]
    expected = torch.tensor([(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225])
    torch.testing.assert_close(found, expected)


def test_training_batches_repeat_by_seed_and_change_from_pass_to_pass(folder):
    data = load(folder)
    one, same, other = (data.training(5, seed) for seed in (3, 3, 4))
    first, again = list(one), list(one)
    assert len(one) == len(first) == 2  # of 12 images; the two that are left over wait for another pass
    assert first[0][0].shape == (5, 3, 8, 8)
    assert first[0][0].dtype == torch.float32
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, same, strict=True))
    assert not torch.equal(first[0][0], again[0][0])
    assert not torch.equal(first[0][0], next(iter(other))[0])


def test_crops_keep_their_labels(folder):
    for crops, labels in load(folder).training(4, 0):
        assert torch.equal(crops.mean((2, 3))[:, :2].argmax(1), labels)  # the class's colour


@pytest.mark.parametrize("ten", [False, True])
def test_every_image_is_evaluated_once(tmp_path, ten):
    batches = list(load(write_folder(tmp_path)).validation(ten=ten))
    assert torch.cat([views for views, _ in batches]).shape == (8, 10 if ten else 1, 3, 8, 8)
    assert torch.cat([labels for _, labels in batches]).tolist() == [0] * 4 + [1] * 4
