"""Image classifiers from torchvision, with random weights and random images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rekindle.models.workload import ModelParts, require
from rekindle.models.zoo.small import classification_loss


def _images(batch: int, image: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, image, image), torch.randint(classes, (batch,))


def resnet(depth: int, batch: int, *, image: int = 224, classes: int = 1000) -> ModelParts:
    """torchvision's own ``resnet<depth>``: 18, 34, 50, 101 or 152."""
    torchvision_models = require("torchvision.models")
    model = torchvision_models.get_model(f"resnet{depth}", weights=None, num_classes=classes)
    return ModelParts(model, _images(batch, image, classes), classification_loss)


def resnet_of_depth(depth: int, batch: int, *, image: int = 224, classes: int = 1000) -> ModelParts:
    """A ResNet with `depth` layers: three per block, and two besides the blocks.

    Like ResNet-50, 101 and 152, it grows almost only in its third stage.
    """
    blocks, stages = (depth - 2) // 3, require("torchvision.models.resnet")
    model = stages.ResNet(stages.Bottleneck, blocks_of_stages(blocks), num_classes=classes)
    return ModelParts(model, _images(batch, image, classes), classification_loss)


def blocks_of_stages(blocks: int) -> list[int]:
    """The number of blocks in each of the four stages of a ResNet.

    >>> blocks_of_stages(16), blocks_of_stages(33), blocks_of_stages(50), blocks_of_stages(333)
    ([3, 4, 6, 3], [3, 4, 23, 3], [3, 8, 36, 3], [3, 8, 319, 3])
    >>> blocks_of_stages(6)
    [1, 2, 2, 1]
    """
    if blocks >= 16:
        second = 8 if blocks >= 50 else 4
        return [3, second, blocks - 6 - second, 3]
    each, rest = divmod(blocks, 4)
    return [each + (rest > place) for place in (2, 1, 0, 3)]


def resnet_tiny(
    batch: int, *, image: int = 32, width: int = 16, blocks: int = 1, classes: int = 10
) -> ModelParts:
    """Three stages of torchvision's residual block: the same operators, a step in milliseconds.

    torchvision's ``ResNet`` fixes its widths at 64 to 512 channels, so the stages are put together
    here, after the narrow network that the ResNet paper trains on 32x32 images.
    """
    block_type = require("torchvision.models.resnet").BasicBlock
    stages: list[nn.Module] = []
    channels = width
    for stage in range(3):
        for index in range(blocks):
            shrink = stage > 0 and index == 0
            out = channels * 2 if shrink else channels
            shortcut = None
            if shrink:
                project = nn.Conv2d(channels, out, kernel_size=1, stride=2, bias=False)
                shortcut = nn.Sequential(project, nn.BatchNorm2d(out))
            stages.append(block_type(channels, out, 2 if shrink else 1, shortcut))
            channels = out
    model = nn.Sequential(
        nn.Conv2d(3, width, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, classes),
    )
    return ModelParts(model, _images(batch, image, classes), classification_loss)


def vit(
    batch: int,
    *,
    image: int = 224,
    patch: int = 16,
    layers: int = 12,
    heads: int = 12,
    hidden: int = 768,
    classes: int = 1000,
) -> ModelParts:
    """torchvision's vision transformer; at these defaults it is ``vit_b_16``."""
    model = require("torchvision.models.vision_transformer").VisionTransformer(
        image_size=image,
        patch_size=patch,
        num_layers=layers,
        num_heads=heads,
        hidden_dim=hidden,
        mlp_dim=4 * hidden,
        num_classes=classes,
    )
    return ModelParts(model, _images(batch, image, classes), classification_loss)
