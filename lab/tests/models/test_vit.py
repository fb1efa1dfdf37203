"""The vision transformer: its size, its patches, and its initialisation."""

import torch

from egop_lab.models.vit import VisionTransformer, initialize_

SIZES = {"classes": 3, "side": 16, "patch": 8, "layers": 1, "width": 8, "heads": 2, "hidden": 12}


def test_the_full_size_has_so_many_parameters():
    with torch.device("meta"):
        model = VisionTransformer(10)
    block = 4 * 384**2 + 3 * 384 * 1024 + 2 * 384
    assert sum(each.numel() for each in model.parameters()) == 6 * block + 192 * 384 + 144 * 384 + 384 + 3840


def test_every_patch_is_one_square_of_the_image():
    model = VisionTransformer(**SIZES)
    seen = []
    model.patches.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    image = torch.arange(3 * 16 * 16.0).view(1, 3, 16, 16)
    model(image.contiguous(memory_format=torch.channels_last))
    assert seen[0].shape == (1, 4, 192)
    assert seen[0][0, 1].view(3, 8, 8).equal(image[0, :, :8, 8:])


def test_a_generator_decides_all_parameters():
    models = [initialize_(VisionTransformer(**SIZES), torch.Generator().manual_seed(3)) for _ in range(2)]
    assert all(one.equal(other) for one, other in zip(*(model.parameters() for model in models), strict=True))
    assert not models[0].patches.weight.equal(VisionTransformer(**SIZES).patches.weight)
