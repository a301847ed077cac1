"""Models that need nothing but torch: a perceptron, and a recurrent network unrolled by hand."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rekindle.models.workload import ModelParts


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of ``model(inputs)``; every image model of the zoo shares it."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def mlp(
    batch: int, *, features: int = 784, hidden: int = 512, layers: int = 4, classes: int = 10
) -> ModelParts:
    """A plain chain: the shape on which checkpointing has a textbook answer."""
    widths = [features] + [hidden] * layers
    blocks: list[nn.Module] = []
    for before, after in pairwise(widths):
        blocks += [nn.Linear(before, after), nn.ReLU()]
    model = nn.Sequential(*blocks, nn.Linear(widths[-1], classes))
    inputs = torch.randn(batch, features)
    targets = torch.randint(classes, (batch,))
    return ModelParts(model, (inputs, targets), classification_loss)


class LSTMCell(nn.Module):
    """One step of an LSTM in elementary operators.

    ``nn.LSTM`` hides the whole sequence behind one operator. Written out, every gate is a tensor of
    its own that a memory planner can place, drop or compute again.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.from_input = nn.Linear(inputs, 4 * hidden)
        self.from_hidden = nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.from_input(x) + self.from_hidden(h)
        input_gate, forget_gate, candidate, output_gate = gates.chunk(4, dim=1)
        kept = torch.sigmoid(forget_gate) * c
        c = kept + torch.sigmoid(input_gate) * torch.tanh(candidate)
        h = torch.sigmoid(output_gate) * torch.tanh(c)
        return h, c


class LSTMLanguageModel(nn.Module):
    """Embeds tokens, runs stacked cells over the sequence, and scores each next token in turn.

    All is unrolled, the decoder too: scores of the whole sequence at once would be the largest
    tensors of the step, and no plan could do without them.
    """

    def __init__(self, vocab: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.cells = nn.ModuleList(LSTMCell(hidden, hidden) for _ in range(layers))
        self.decoder = nn.Linear(hidden, vocab)

    def forward(self, tokens: Tensor) -> list[Tensor]:
        embedded = self.embedding(tokens)
        zeros = embedded.new_zeros(embedded.shape[0], embedded.shape[2])
        states = [(zeros, zeros) for _ in self.cells]
        scores = []
        for x in embedded.unbind(dim=1):
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(x, *states[layer])
                x = states[layer][0]
            scores.append(self.decoder(x))
        return scores


def next_token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean of the cross-entropies at every position of the sequence."""
    tokens, targets = batch
    scores = model(tokens)
    losses = [F.cross_entropy(s, t) for s, t in zip(scores, targets.unbind(dim=1), strict=True)]
    return torch.stack(losses).mean()


def lstm(
    batch: int, *, sequence: int = 32, hidden: int = 256, vocab: int = 1000, layers: int = 2
) -> ModelParts:
    """Next-token prediction; the graph grows with ``sequence``, the parameters do not."""
    model = LSTMLanguageModel(vocab, hidden, layers)
    text = torch.randint(vocab, (batch, sequence + 1))
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return ModelParts(model, (tokens, targets), next_token_loss)


class SteppedLSTM(LSTMLanguageModel):
    """The same network, with the loss of each position computed before the next position.

    No tensor is as long as the sequence; only the states are kept for every position.
    """

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        zeros = self.decoder.weight.new_zeros(tokens.shape[0], self.decoder.in_features)
        states = [(zeros, zeros) for _ in self.cells]
        total = zeros.new_zeros(())
        for token, target in zip(tokens.unbind(dim=1), targets.unbind(dim=1), strict=True):
            x = self.embedding(token)
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(x, *states[layer])
                x = states[layer][0]
            total = total + F.cross_entropy(self.decoder(x), target)
        return total / tokens.shape[1]


def stepped_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The same value as ``next_token_loss``, summed position by position."""
    assert isinstance(model, SteppedLSTM)
    return model.loss(*batch)


def lstm_stepped(
    length: int, batch: int, *, hidden: int = 256, vocab: int = 1000, layers: int = 2
) -> ModelParts:
    """Next-token prediction over ``length`` positions, with the loss computed position by position.

    In ``lstm``, the scores of all positions are live before the first loss: memory that grows with
    the sequence under every plan.
    """
    parts = lstm(batch, sequence=length, hidden=hidden, vocab=vocab, layers=layers)
    return ModelParts(SteppedLSTM(vocab, hidden, layers), parts.batch, stepped_loss)
