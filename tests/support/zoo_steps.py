"""Models of the zoo in sizes for tests."""

from __future__ import annotations

from rekindle import models
from rekindle.measuring.bitwise_compare import Parts

# Small, but with batches so large that half of the plain peak is enough.
ZOO: dict[str, dict[str, int]] = {
    "mlp": {"batch": 2048, "features": 16, "hidden": 64, "layers": 8},
    "lstm": {"batch": 160, "sequence": 5, "hidden": 16, "vocab": 16},
    "resnet-tiny": {"batch": 16, "image": 32, "width": 4, "blocks": 3},
    "bert-tiny": {"batch": 16, "sequence": 16, "hidden": 16, "vocab": 32},
    "gpt2-tiny": {"batch": 16, "sequence": 16, "hidden": 16, "vocab": 16},
    "vit-tiny": {"batch": 16, "image": 16, "hidden": 16, "layers": 4},
}


def zoo_parts(name: str, precision: str) -> Parts:
    work = models.build(name, precision=precision, **ZOO[name])
    return work.train_step, work.model, work.optimizer, work.batch
