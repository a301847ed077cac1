"""The colours and the order of roles and phases: the same on the page and in the figures.

The hues are those of Okabe and Ito, which are distinct for all kinds of colour vision. The order
puts memory that lasts the whole step at the bottom, and unlike colours next to each other.
"""

from __future__ import annotations

from rekindle.core.graph.graph import Phase, Role

LIBRARIES = "library workspace"
"""Memory that libraries keep allocated: no storage of the graph, so it has no role."""

_COLOURS = {  # from the bottom of the stack to its top
    Role.PARAM.value: "#0072b2",
    Role.OPT_STATE.value: "#56b4e9",
    Role.BUFFER.value: "#332288",
    Role.INPUT.value: "#999999",
    LIBRARIES: "#cfcfcf",
    Role.ACTIVATION.value: "#e69f00",
    Role.GRAD.value: "#009e73",
    Role.GRAD_MAP.value: "#cc79a7",
    Role.TEMP.value: "#d55e00",
    Role.OUTPUT.value: "#f0e442",
}
ORDER = tuple(_COLOURS)

PHASES = {
    Phase.FORWARD.value: "#4f8fc0",
    Phase.LOSS.value: "#8a6bb1",
    Phase.BACKWARD.value: "#d98b3a",
    Phase.OPTIMIZER.value: "#4f9e77",
}
PHASE_BANDS = {  # backgrounds, pale
    Phase.FORWARD.value: "#eef5fb",
    Phase.LOSS.value: "#d9c8e8",
    Phase.BACKWARD.value: "#fdf3e7",
    Phase.OPTIMIZER.value: "#e8f4ec",
}

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#332288", "#55606d")
"""Colours of lines in one figure."""
MARKERS = "osD^vPX*"
"""A marker for each, so that lines differ by more than colour."""

MEANINGS = {
    Role.PARAM.value: "the model's weights",
    Role.OPT_STATE.value: "what the optimizer keeps for each weight, such as momentum",
    Role.BUFFER.value: "what modules keep besides weights, such as running means",
    Role.INPUT.value: "the batch",
    LIBRARIES: "what CUDA libraries keep allocated",
    Role.ACTIVATION.value: "made in the forward pass and kept for the backward pass",
    Role.GRAD.value: "gradients of the weights, until the optimizer has used them",
    Role.GRAD_MAP.value: "gradients of activations, on their way back through the model",
    Role.TEMP.value: "short-lived results, and the scratch space of the op that runs",
    Role.OUTPUT.value: "what the step returns",
}


def colour(label: str) -> str:
    """The colour of a role, by its name."""
    return _COLOURS[label]
