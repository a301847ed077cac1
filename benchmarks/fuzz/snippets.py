"""The source text that random programs are made of.

In a snippet, `<<a|b|c>>` stands for one of its alternatives, `#` for a number of its own, and `x`
is the tensor that passes through the model: of shape (rows, 8) if its kind is "v", (rows, length, 8)
if "s", (rows, 4, 4, 4) if "i"; rows of 5 tokens have the kind "t". `d` is the model's dtype.
"""

# ruff: noqa: E501 (a line of source text is not broken)

from __future__ import annotations

from typing import NamedTuple

PRELUDE = """
import copy, math, types, collections
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.nn.utils import parametrizations
from support.python_state_programs import Holder, Slotted, Trainer


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx.factor + 0.01 * x, None


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return torch.round(x * 4) / 4

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        return grad if grad is None else grad * (ctx.saved_tensors[0].abs() < 2)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.mul_(0.5)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        high = torch.maximum(x, y)
        mask = x >= y
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(mask)
        return high, mask

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        (mask,) = ctx.saved_tensors
        return torch.where(mask, grad, 0), torch.where(mask, torch.zeros_like(grad), grad)


def halve(p):
    p.grad.mul_(0.5)


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.calls = []

    def forward(self, x, *, scale=1.0):
        return self.inner(x) * scale
"""


class Part(NamedTuple):
    """Lines of `__init__` and of `forward`, from a tensor of one kind to one of another."""

    kinds: str
    to: str  # "" if the kind stays
    init: str
    forward: str


def _same(kinds: str, *forwards: str) -> list[Part]:
    return [Part(kinds, "", "", forward) for forward in forwards]


ANY = "vsi"
ROWS = "vs"  # with 8 features in the last dimension

PARTS = [
    # layers
    Part(ROWS, "", "self.l# = nn.Linear(8, 8, bias=<<True|True|False>>)", "x = self.l#(x)"),
    Part(ROWS, "", "self.l# = nn.Linear(8, 8)", "x = F.<<relu|gelu|silu|elu|mish>>(self.l#(x))"),
    Part(
        ROWS,
        "",
        "self.l# = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))",
        "x = x + self.l#(x)",
    ),
    Part(
        ROWS,
        "",
        "self.l# = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.3))",
        "x = self.l#(x)",
    ),
    Part(ROWS, "", "self.n# = nn.<<LayerNorm|RMSNorm>>(8)", "x = self.n#(x)"),
    Part(
        "v", "", "self.n# = nn.BatchNorm1d(8<<|, affine=False|, momentum=0.3>>)", "x = self.n#(x)"
    ),
    Part("v", "", "self.n# = nn.GroupNorm(<<2|4>>, 8)", "x = self.n#(x)"),
    Part(
        "s",
        "",
        "self.n# = nn.<<BatchNorm1d(8)|GroupNorm(2, 8)|InstanceNorm1d(8, affine=True)>>",
        "x = self.n#(x.transpose(1, 2)).transpose(1, 2)",
    ),
    Part("s", "", "self.c# = nn.Conv1d(8, 8, 3, padding=1)", "x = self.c#(x.mT).mT"),
    Part(
        "s",
        "",
        "self.r# = nn.<<LSTM|GRU|RNN>>(8, 8, batch_first=<<True|False>>)",
        "x, h# = self.r#(x)",
    ),
    Part(
        "s",
        "",
        "self.r# = nn.<<LSTM|GRU>>(8, 4, bidirectional=True, num_layers=<<1|2>>, batch_first=True)",
        "x = self.r#(x)[0]",
    ),
    Part(
        "s",
        "",
        "self.a# = nn.MultiheadAttention(8, 2, batch_first=True, dropout=<<0.0|0.2>>)",
        "x = self.a#(x, x, x, need_weights=<<True|False>>)[0]",
    ),
    Part(
        "s",
        "",
        "self.e# = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)",
        "x = self.e#(x)",
    ),
    Part(
        "s",
        "",
        "self.q# = nn.Linear(8, 24)",
        "q#, k#, v# = self.q#(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)\n"
        "x = F.scaled_dot_product_attention(q#, k#, v#, is_causal=<<True|False>>"
        "<<|, dropout_p=0.2>>).transpose(1, 2).flatten(2)",
    ),
    Part(
        "i",
        "",
        "self.c# = nn.Conv2d(4, 4, 3, padding=1<<|, groups=2|, padding_mode='reflect'>>)",
        "x = <<|F.relu>>(self.c#(x))",
    ),
    Part("i", "", "self.c# = nn.ConvTranspose2d(4, 4, 3, padding=1)", "x = self.c#(x)"),
    Part(
        "i",
        "",
        "self.n# = nn.<<BatchNorm2d(4)|GroupNorm(2, 4)|InstanceNorm2d(4)>>",
        "x = self.n#(x)",
    ),
    Part(
        "i",
        "",
        "self.n# = nn.BatchNorm2d(4)",
        "x = self.n#(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)",
    ),
    Part(
        "i",
        "",
        "self.n# = nn.LayerNorm(4)",
        "x = self.n#(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)",
    ),
    Part(ROWS, "", "self.b# = nn.Bilinear(8, 8, 8)", "x = self.b#(x, x.flip(-1))"),
    Part(ROWS, "", "self.p# = nn.PReLU()", "x = self.p#(x)"),
    Part(
        ANY,
        "",
        "self.p# = nn.<<Dropout(0.3)|Dropout(0.5, inplace=True)|AlphaDropout(0.2)|Dropout1d(0.2)|"
        "RReLU()|Softplus()|Hardswish()|LogSigmoid()|Softsign()>>",
        "x = self.p#(x.clone())",
    ),
    # parameters of all sorts
    Part(ROWS, "", "self.w# = nn.Parameter(torch.randn(8, 8).t())", "x = x @ self.w#"),
    Part(ROWS, "", "self.w# = nn.Parameter(torch.randn(1).expand(8).clone())", "x = x * self.w#"),
    Part(ANY, "", "self.w# = nn.Parameter(torch.tensor(0.7))", "x = x * self.w#"),
    Part(ROWS, "", "self.w# = nn.Parameter(torch.randn(0, 8))", "x = x + self.w#.sum(0)"),
    Part(ROWS, "", "self.w# = nn.Parameter(torch.randn(16, 8)[::2])", "x = F.linear(x, self.w#)"),
    Part(
        ROWS,
        "",
        "self.w# = nn.Parameter(torch.randn(8, dtype=torch.complex64))",
        "z# = x.float() * self.w#\nx = <<torch.view_as_real(z#).sum(-1)|z#.abs()|z#.conj().real|z#.imag|z#.angle()>>.to(d)",
    ),
    Part(ROWS, "", "self.u# = nn.Parameter(torch.randn(8))", "x = x + 1"),  # gets no gradient
    Part(
        ROWS,
        "",
        "self.l# = nn.Linear(8, 8); self.m# = nn.Linear(8, 8); self.m#.weight = self.l#.weight",
        "x = self.m#(torch.tanh(self.l#(x)))",
    ),
    Part(ROWS, "", "self.l# = nn.Linear(8, 8).requires_grad_(False)", "x = x + self.l#(x)"),
    Part(
        ROWS,
        "",
        "self.l# = nn.Linear(8, 8)",
        "x = F.linear(self.l#(x).sigmoid(), self.l#.weight.t())",
    ),
    Part(
        ROWS, "", "self.l# = nn.Linear(8, 8)", "for _ in range(<<2|3>>): x = torch.tanh(self.l#(x))"
    ),
    Part(
        ROWS,
        "",
        "self.l# = parametrizations.<<weight_norm|spectral_norm>>(nn.Linear(8, 8))",
        "x = self.l#(x)",
    ),
    Part(
        ROWS,
        "",
        "self.ps# = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(3)])",
        "for p in self.ps#: x = x * p.<<tanh|sigmoid|abs>>()",
    ),
    # buffers
    Part(
        ANY,
        "",
        "self.register_buffer('f#', torch.zeros(()))",
        "with torch.no_grad(): self.f#.mul_(0.9).add_(x.detach().float().<<mean|sum|var>>())\nx = x + self.f#.to(d)",
    ),
    Part(
        ANY,
        "",
        "self.register_buffer('f#', torch.zeros(()), persistent=False)",
        "self.f# = 0.9 * self.f# + 0.1 * x.detach().float().mean()\nx = x * (1 + self.f#).to(d)",
    ),
    Part(
        ANY,
        "",
        "self.register_buffer('f#', torch.zeros((), dtype=torch.long))",
        "self.f# += 1\nx = x / (1 + self.f#).to(d)",
    ),
    Part(
        ROWS,
        "",
        "self.w# = nn.Parameter(torch.randn(8)); self.register_buffer('f#', self.w#.detach())",
        "x = x * self.w# + self.f#",
    ),
    Part(
        ROWS,
        "",
        "self.register_buffer('f#', torch.zeros(4, 8)); self.g# = self.f#[1]",
        "self.f#[<<1|2>>].add_(x.detach().reshape(-1, 8).float().sum(0))\nx = x + self.g#.to(d)",
    ),
    Part(
        ROWS,
        "",
        "self.register_buffer('f#', None)",
        "x = x if self.f# is None else x + self.f#\n"
        "self.f# = x.detach().reshape(-1, 8).float().mean(0).to(d)",
    ),
    # in place, on views
    *_same(
        ANY,
        "x = x.clone()\nx[:, ::2].<<mul_(0.5)|tanh_()|neg_()|add_(1)|zero_()|relu_()>>",
        "x = x * 1.5\nx.select(1, 0).<<sigmoid_()|fill_(0.3)|exp_()|mul_(x.select(1, 1))>>",
        "x = x + 0\nx.view(-1)[::3] <<+=|*=|-=>> 0.7",
        "x = x.clone()\ny# = x.narrow(1, 1, 2)\ny#.copy_(x.narrow(1, 2, 2)<<.clone()|>> * 2)\nx = x + 1",
        "x = x.clone()\nx[x.detach() > 0.5] = 0.1",
        "x = x.clone()\nx.transpose(0, 1)[0] = x[:, 1] * 0.5",
        "x = x.clone()\nx[:, 1:3], y# = x[:, 2:4].tanh(), x[:, :1]\nx = x * y#.sum()",
        "x = x.clone().masked_fill_(x < 0, 0.25)",
        "x = x.clone()\nx.flatten(1).T[0].mul_(<<2|0.5>>)",
        "y# = torch.empty_like(x)\ny#.copy_(x)\nx = y#.add_(x, alpha=0.5)",
        "y# = torch.zeros(len(x) + 2, *x.shape[1:], dtype=x.dtype)\ny#[1:-1] = x\nx = y#[2:] + y#[:-2] + x",
        "y# = x.detach().clone()\ny#[:, 0] = 3\nx = x * y#",
        "x = x.contiguous()\nx = x.as_strided(x.shape, x.stride()).clone() * 2",
        "x = F.<<relu|leaky_relu|elu|hardtanh>>(x * 2, inplace=True)",
        "x = InPlace.apply(x * 1.0)",
        "x = x.clone()\nInPlace.apply(x[:, 1])\nx = x * 2",
        "x = x + 0\nx.unbind(1)\nx.unsqueeze(0).squeeze(0).mul_(0.5)",
        "x = torch.stack([x, x * 2]).<<sum(0)|amax(0)|unbind(0)[1]|mean(0)|prod(0)>>",
        "x = x.clone()\nfor j in range(2): x[:, j].add_(x[:, j + 1].detach())",
    ),
    # custom functions and hooks on tensors
    *_same(
        ANY,
        "x = Scale.apply(x, <<0.5|2.0>>)",
        "x = Rounded.apply(x)",
        "x, m# = Two.apply(x, x.flip(0))\nx = torch.where(m#, x, x * 0.5)",
        "x = x * 1.0\nif x.requires_grad: x.register_hook(lambda g: g * <<0.5|2>>)",
        "x = x * 1.0\nif x.requires_grad: x.register_hook(lambda g: g.clamp(-0.1, 0.1))",
        "x = x * 1.0\nif x.requires_grad: x.register_hook(lambda g: None)",
        "x = x * 1.0\nif x.requires_grad: x.register_hook(lambda g: torch.where(g > 0, g, g * 0.1))",
        "x = x * 1.0\nif x.requires_grad: x.retain_grad()",
        "with torch.no_grad(): y# = x.<<mean|amax|sum>>()\nx = x - y#",
        "x = x - x.detach().mean() + <<0.1|x.detach()>>",
        "with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t): x = x.tanh() * x",
    ),
    # arithmetic with odd strides and shapes
    *_same(
        ANY,
        "x = x.<<tanh|sigmoid|exp|abs|sin|erf|square|sign|ceil|relu|atan|log1p|neg|expm1|logit>>().clamp(-3, 3)",
        "x = x.unsqueeze(0).expand(<<1|2|3>>, *x.shape).<<mean|sum>>(0)",
        "x = x + x.mean(<<0|1|-1>>, keepdim=True)",
        "x = x.<<softmax|log_softmax|cumsum|logcumsumexp>>(<<0|1|-1>>)",
        "x = torch.cat([x, x[:0]])",
        "x = torch.cat([x[:, 3:3], x], 1) + x[:0].sum()",
        "x = torch.cat(<<x.chunk(2, 1)[::-1]|[x[:, 1:], x[:, :1]]|x.split(1, 1)>>, 1)",
        "x = x.roll(1, <<0|1>>).flip(<<0|1>>)",
        "x = x.<<sort|sort>>(<<1|-1>>).values",
        "x = x * x.max(<<1|-1>>, keepdim=True).values",
        "x = x / (x.<<norm|std|var>>() + 1)",
        "x = x.gather(1, torch.zeros_like(x, dtype=torch.long)) + x",
        "x = torch.where(x > 0, x, <<0.1 * x|0.0|x.exp()>>)",
        "x = x.lerp(x.flip(0), 0.3)",
        "x = torch.<<minimum|maximum|fmod|atan2|hypot>>(x, x.roll(1, 0) + 0.01)",
        "x = x.addcmul(x, x, value=0.1)",
        "x = x.cumprod(1).clamp(-5, 5)",
        "x = x.index_select(0, torch.arange(len(x)).flip(0))",
        "x = x.scatter_add(1, torch.zeros_like(x, dtype=torch.long), x) * 0.5",
        "x = x.to(<<torch.float64|torch.bfloat16|torch.float32>>).tanh().to(d)",
        "x = x.transpose(0, 1).contiguous().transpose(0, 1)",
        "x = x.transpose(-1, -2 if x.dim() > 2 else 0).clone().transpose(-1, -2 if x.dim() > 2 else 0)",
        "x = x + torch.<<rand|randn>>_like(x) * 0.1",
        "x = x * torch.bernoulli(torch.full_like(x, 0.7))",
        "x = F.dropout(x, 0.3, training=self.training<<|, inplace=False>>)",
        "x = x * torch.randint(0, 2, x.shape).to(d)",
        "x = x[torch.randperm(len(x))]",
        "x = x + torch.arange(x.shape[-1]).to(d) / len(x)",
        "x = x * self.cfg.scale",
        "x = x.nan_to_num().clamp(max=x.detach().abs() + 0.1)",
        "x = torch.fft.<<ifft(torch.fft.fft(x.float())).real|irfft(torch.fft.rfft(x.float()), x.shape[-1])>>.to(d)",
        "z# = torch.complex(x.float(), x.float().flip(0))\nx = <<(z# * z#.conj()).real|(z# * 1j).imag|z#.mH.mH.real|torch.view_as_real(z#)[..., 1]>>.to(d) if x.dim() > 1 else x",
        "x = x.movedim(0, -1).mul(2).movedim(-1, 0)",
        "if self.training: x = x * 0.9",
        "if len(x) % 2: x = x * 0.9",
        "if x.is_contiguous(): x = x * 0.8",
        "x = x.view(-1).reshape(x.shape) if x.is_contiguous() else x.reshape(-1).view(x.shape)",
        "with torch.autocast('cpu', torch.<<bfloat16|float16>>): x = (x @ x.mT @ x)\nx = x.to(d) * 0.1",
        "with torch.autocast('cpu', torch.bfloat16): x = F.linear(x, torch.eye(x.shape[-1]))\nx = x.to(d)",
    ),
    *_same(
        ROWS,
        "x = torch.einsum('...i,...j->...j', x, x) * 0.1",
        "x = x.unflatten(-1, (2, 4)).transpose(-1, -2).flatten(-2)",
        "x = F.<<layer_norm(x, (8,))|normalize(x, dim=-1)|glu(torch.cat([x, x], -1))|rms_norm(x, (8,))>>",
        "x = x.unfold(-1, 4, 2).mean(-1).repeat(*[1] * (x.dim() - 1), 3)[..., :8]",
        "x = x.topk(8).values + x.kthvalue(3, -1, keepdim=True).values",
        "x = F.pad(x, (1, 1))[..., 2:] + x",
        "x = torch.cdist(x, x).mean(-1, keepdim=True) + x",
        "x = x.repeat_interleave(2, -1)[..., ::2]",
    ),
    *_same(
        "i",
        "x = x.to(memory_format=torch.channels_last)",
        "x = F.<<max_pool2d|avg_pool2d>>(x, 3, 1, 1)",
        "x = F.interpolate(F.max_pool2d(x, 2), size=4, mode='<<nearest|bilinear>>')",
        "x = F.pad(x, (1, 1, 1, 1), mode='<<reflect|replicate|circular|constant>>')[:, :, 1:-1, 1:-1]",
        "x = F.pixel_shuffle(F.pixel_unshuffle(x, 2), 2)",
        "x = F.fold(F.unfold(x, 2, stride=2), 4, 2, stride=2)",
        "x = F.channel_shuffle(x, 2)",
        "x = F.grid_sample(x, torch.zeros(len(x), 4, 4, 2, dtype=d) + 0.3, align_corners=False)",
    ),
    # checkpoints, hooks of modules
    Part(
        ROWS,
        "",
        "self.l# = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))",
        "x = checkpoint(self.l#, x, use_reentrant=<<False|False|True>>)",
    ),
    Part(
        "i",
        "",
        "self.l# = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())",
        "x = checkpoint(self.l#, x, use_reentrant=False)",
    ),
    Part(
        ROWS,
        "",
        "self.l# = Wrapped(nn.Linear(8, 8)); self.l#.register_forward_hook(lambda m, a, out: out * 0.5)",
        "x = self.l#(x, scale=<<1.0|0.5>>)",
    ),
    Part(
        ROWS,
        "",
        "self.l# = nn.Linear(8, 8); self.l#.register_forward_pre_hook(lambda m, a: (a[0] * 2,))",
        "x = self.l#(x)",
    ),
    Part(
        ROWS,
        "",
        "self.l# = nn.Linear(8, 8); self.l#.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,) if gi[0] is not None else None)",
        "x = self.l#(x)",
    ),
    Part(
        ROWS,
        "",
        "self.l# = nn.Linear(8, 8); self.l#.register_full_backward_pre_hook(lambda m, go: (go[0] * 2,))",
        "x = self.l#(x)",
    ),
    Part(
        ROWS,
        "",
        "self.l# = Wrapped(nn.Linear(8, 8)); self.l#.register_forward_hook(lambda m, a, out: m.calls.append(out.detach().mean()))",
        "x = self.l#(x)",
    ),
    Part(
        ROWS,
        "",
        "self.l# = nn.Linear(8, 8); self.l#.weight.register_hook(lambda g: g * <<0.1|2>>)",
        "x = self.l#(x)",
    ),
    Part(
        ROWS,
        "",
        "self.l# = nn.Linear(8, 8); self.l#.weight.register_post_accumulate_grad_hook(halve)",
        "x = self.l#(x)",
    ),
    # other kinds
    Part("s", "v", "", "x = x.mean(1)"),
    Part("s", "v", "", "x = x[:, <<-1|0>>]"),
    Part("s", "v", "self.r# = nn.<<GRU|RNN>>(8, 8, batch_first=True)", "x = self.r#(x)[1][0]"),
    Part(
        "s",
        "v",
        "self.r# = nn.LSTMCell(8, 8)",
        "h# = c# = torch.zeros(len(x), 8, dtype=x.dtype)\n"
        "for x# in x.unbind(1): h#, c# = self.r#(x#, (h#, c#))\nx = h#",
    ),
    Part(
        "s",
        "v",
        "self.w# = nn.Parameter(torch.randn(8))",
        "x = (torch.softmax(x @ self.w#, 1).unsqueeze(1) @ x).squeeze(1)",
    ),
    Part("v", "s", "", "x = x.unsqueeze(1).expand(-1, 5, -1)"),
    Part("v", "s", "self.l# = nn.Linear(8, 24)", "x = self.l#(x).view(-1, 3, 8)"),
    Part("v", "s", "self.l# = nn.Linear(8, 24)", "x = self.l#(x).view(-1, 8, 3).mT"),
    Part("v", "i", "self.l# = nn.Linear(8, 64)", "x = self.l#(x).view(-1, 4, 4, 4)"),
    Part("v", "i", "", "x = x.repeat(1, 8).unflatten(1, (4, 4, 4))"),
    Part("i", "v", "self.l# = nn.Linear(64, 8)", "x = self.l#(x.flatten(1))"),
    Part(
        "i", "v", "self.l# = nn.Linear(4, 8)", "x = self.l#(F.adaptive_avg_pool2d(x, 1).flatten(1))"
    ),
    Part("i", "s", "self.l# = nn.Linear(4, 8)", "x = self.l#(x.flatten(2).transpose(1, 2))"),
]

EMBEDDINGS = [
    Part(
        "t",
        "s",
        "self.e# = nn.Embedding(10, 8<<|, padding_idx=0|, max_norm=1.0|, scale_grad_by_freq=True>>)",
        "x = self.e#(x)",
    ),
    Part("t", "v", "self.e# = nn.EmbeddingBag(10, 8, mode='<<mean|sum|max>>')", "x = self.e#(x)"),
    Part("t", "s", "self.w# = nn.Parameter(torch.randn(10, 8))", "x = self.w#[x]"),
    Part(
        "t",
        "s",
        "self.w# = nn.Parameter(torch.randn(10, 8))",
        "x = F.one_hot(x, 10).to(d) @ self.w#",
    ),
]

# How the model's result becomes a loss: `out` of kind "v", `y` (rows,) of labels 0 to 2.
LOSSES = [
    "loss = out.float().square().mean()",
    "loss = F.cross_entropy(out.float(), y)",
    "loss = F.cross_entropy(out, y<<|, label_smoothing=0.1|, reduction='sum'|, ignore_index=1>>)",
    "loss = F.<<mse_loss|l1_loss|smooth_l1_loss|huber_loss>>(out, torch.ones_like(out))",
    "loss = F.binary_cross_entropy_with_logits(out[:, 0], (y > 0).to(out.dtype))",
    "loss = -out.log_softmax(-1)[torch.arange(len(y)), y].mean()",
    "loss = F.nll_loss(out.log_softmax(-1), y)",
    "loss = (out.float() * torch.linspace(0, 1, 8)).sum() / 10",
    "loss = out.float().logsumexp(-1).mean() + 0.01 * sum(p.float().abs().square().sum() for p in model.parameters())",
    "loss = F.cosine_similarity(out, out.roll(1, -1)).mean()",
    "loss = F.kl_div(out.log_softmax(-1), torch.softmax(out.detach().flip(0), -1), reduction='batchmean')",
    "loss = out.float().std() + out.float().amax() + out.float().median()",
    "loss = (out[y > 0].float().square().sum() + out.float().mean())",
]

# Values of the batch that a step reads.
READS = [
    "scale = 2.0 if y.sum() > 3 else 0.5",
    "scale = float(y.max().item() + 1)",
    "scale = 1.0 + y[0].item()",
    "scale = 1.0 if bool((y == 0).any()) else 0.25",
    "scale = float(len(torch.unique(y)))",
    "scale = 1.0 + 0.1 * sum(y.tolist())",
    "scale = float((y > 0).nonzero().shape[0] + 1)",
    "scale = 1.0 / max(int(y.sum()), 1)",
]

# Lines after the backward pass.
AFTER_BACKWARD = [
    "nn.utils.clip_grad_norm_(model.parameters(), <<0.1|1.0>>)",
    "nn.utils.clip_grad_value_(model.parameters(), 0.01)",
    "for p in model.parameters():\n    if p.grad is not None: p.grad.<<mul_(0.5)|add_(p.detach(), alpha=0.01)|neg_()>>",
    "norm = torch.stack([p.grad.abs().float().sum() for p in model.parameters() if p.grad is not None]).sum()\nextra.append(norm)",
    "with torch.no_grad():\n    for p in model.parameters(): p.<<mul_(0.99)|sub_(0.001)>>",
    "grads = {n: p.grad for n, p in model.named_parameters()}\nextra.append([g for g in grads.values() if g is not None][:1])",
    "for p in model.parameters():\n    if p.grad is not None: p.grad = p.grad * 0.5",
]

# What the step returns besides its loss.
RESULTS = [
    "extra.append(out)",
    "extra.append(out.detach()[:, ::2])",
    "extra.append({'y': y, 'n': len(y), 'text': 'a'})",
    "extra.append(next(iter(model.parameters())).detach())",
    "extra.append((loss * 2, loss.detach().clone()))",
    "extra.append(out.argmax(-1) == y)",
    "extra.append(next(iter(model.parameters())))",
    "extra.append(x)",
]

OPTIMIZERS = [
    "torch.optim.SGD(GROUPS, lr=0.05)",
    "torch.optim.SGD(GROUPS, lr=0.05, momentum=0.9<<|, nesterov=True|, dampening=0.1|, foreach=True|, foreach=False>>)",
    "torch.optim.SGD(GROUPS, lr=0.05, weight_decay=0.1, maximize=True)",
    "torch.optim.Adam(GROUPS, lr=0.01<<|, amsgrad=True|, foreach=True|, fused=True|, weight_decay=0.1|, maximize=True|, decoupled_weight_decay=True>>)",
    "torch.optim.AdamW(GROUPS, lr=0.01<<|, amsgrad=True|, foreach=True|, foreach=False>>)",
    "torch.optim.AdamW(GROUPS, lr=torch.tensor(0.01))",
    "torch.optim.AdamW(GROUPS, lr=0.01, fused=True)",
    "torch.optim.<<NAdam|RAdam|Adamax|Adadelta|Adagrad|ASGD|Rprop>>(GROUPS, lr=0.01<<||, foreach=True>>)",
    "torch.optim.RMSprop(GROUPS, lr=0.01<<|, momentum=0.9|, centered=True>>)",
    "torch.optim.Adafactor(GROUPS, lr=0.01)",
]

GROUPS = [
    "list(model.parameters())",
    "list(model.parameters())",
    "[p for p in model.parameters() if p.requires_grad]",
    "[{'params': [p for p in model.parameters() if p.dim() < 2]}, {'params': [p for p in model.parameters() if p.dim() >= 2], 'lr': 0.002}]",
    "[{'params': [p], 'weight_decay': 0.01 * j} for j, p in enumerate(model.parameters())]",
    "list(model.parameters())[1:]",
]

# Between steps; `i` is the number of the last step.
CHANGES = [
    "next(iter(model.parameters())).requires_grad_(i % 2 == 1)",
    "list(model.parameters())[-1].requires_grad_(i % 2 == 1)",
    "model.train(i % 2 == 1)",
    "model.eval()",
    "optimizer.param_groups[0]['lr'] = optimizer.param_groups[0]['lr'] * 0.5",
    "optimizer.param_groups[-1]['weight_decay'] = 0.05",
    "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))",
    "model.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in model.state_dict().items()})",
    "model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=<<True|False>>)",
    "model.cfg.scale = 0.5 + i",
    "model.cfg.scale = [1.0, -0.0, 0.0][i]",
    "model.head = nn.Linear(8, 8).to(DTYPE)",
    "model.head.weight = nn.Parameter(torch.ones(8, 8, dtype=DTYPE) * 0.1)",
    "model.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(DTYPE)",
    "model.register_buffer('extra', torch.full((8,), 0.1 + i, dtype=DTYPE))",
    "model.extra = torch.full((8,), 0.1 + i, dtype=DTYPE)",
    "model.extra.<<add_(1)|zero_()>>",
    "model.zero_grad(set_to_none=<<True|False>>)",
    "for p in model.parameters(): p.grad = torch.ones_like(p)",
    "for p in model.parameters():\n    if p.grad is not None: p.grad.mul_(0.5)",
    "optimizer.state.clear()",
    "with torch.no_grad():\n    for p in model.parameters(): p.mul_(0.9)",
    "for p in model.parameters(): p.data = p.data * 0.9",
    "torch.manual_seed(i)",
    "model.head.register_forward_hook(lambda m, a, out: out * 0.5)",
    "model.head.weight.register_hook(lambda g: g * 0.5)",
    "model.drop.p = 0.1 + 0.2 * i",
    "model.norm.momentum = 0.2",
    "model.norm.eval()",
    "model.norm.running_mean.zero_()",
    "model.norm.reset_running_stats()",
    "model.head.bias = None",
    "copy.deepcopy(model); copy.deepcopy(optimizer)",
    "with torch.no_grad(): model(batch_of(0)[0])",
    "model.head.weight.data.copy_(torch.eye(8))",
    "model.use_head = not model.use_head",
    "model.head.weight.grad = None",
    "for s in optimizer.state.values():\n    for k, v in s.items():\n        if torch.is_tensor(v) and v.dim() > 0: v.mul_(0.5)",
    "torch.set_flush_denormal(False)",
    "model.order.append(model.order.pop(0))",
    "model.names['a'] = <<2.0|1.0>>",
    "list(model.parameters())[0].register_post_accumulate_grad_hook(halve)",
    "optimizer.add_param_group({'params': [nn.Parameter(torch.ones(2))]})",
    "optimizer.register_step_pre_hook(lambda o, a, k: None)",
]

# The batch's tensors: `g` is a generator, `n` the number of rows.
BATCHES = {
    "v": [
        "x = torch.randn(n, 8, generator=g)",
        "x = torch.randn(8, n, generator=g).t()",
        "x = torch.randn(n, 16, generator=g)[:, ::2]",
        "x = torch.randn(n, 1, generator=g).expand(n, 8)",
        "x = torch.randn(1, 8, generator=g).expand(n, 8)",
        "x = torch.randn(n + 1, 9, generator=g)[1:, 1:]",
        "x = torch.randn(n, 8, generator=g).requires_grad_()",
        "x = torch.randn(2 * n * 8, generator=g).as_strided((n, 8), (8, 2))",
    ],
    "s": [
        "x = torch.randn(n, 5, 8, generator=g)",
        "x = torch.randn(5, n, 8, generator=g).transpose(0, 1)",
        "x = torch.randn(n, 8, 5, generator=g).mT",
        "x = torch.randn(n, 1, 8, generator=g).expand(n, 5, 8)",
        "x = torch.randn(n, 3 + i % 2, 8, generator=g)",
        "x = torch.randn(n, 10, 8, generator=g)[:, ::2]",
    ],
    "i": [
        "x = torch.randn(n, 4, 4, 4, generator=g)",
        "x = torch.randn(n, 4, 4, 4, generator=g).to(memory_format=torch.channels_last)",
        "x = torch.randn(n, 4, 8, 4, generator=g)[:, :, ::2]",
        "x = torch.randn(n, 4, 4, generator=g).unsqueeze(1).expand(n, 4, 4, 4)",
        "x = torch.randn(4, 4, 4, n, generator=g).permute(3, 0, 1, 2)",
    ],
    "t": [
        "x = torch.randint(0, 10, (n, 5), generator=g)",
        "x = torch.randint(0, 10, (5, n), generator=g).t()",
    ],
}

ROW_COUNTS = ["4", "4", "4", "3 + i % 2", "4 - 2 * (i == 1)", "1 + i", "6", "2", "4 * (i != 1)"]

# What a batch is, of x and y, and how the step takes it apart.
FORMS = [
    ("(x, y)", "x, y = batch"),
    ("(x, y)", "x, y = batch"),
    ("{'x': x, 'y': y}", "x, y = batch['x'], batch['y']"),
    ("[x, {'y': y, 'flag': True}]", "x, y = batch[0], batch[1]['y']"),
    ("(x, y, 0.5 + i % 2)", "x, y = batch[:2]"),
    ("collections.namedtuple('Batch', 'x y')(x, y)", "x, y = batch.x, batch.y"),
    ("(x, y, x)", "x, y, _ = batch"),
    ("(x, y, x.detach()[:1])", "x, y, _ = batch"),
]
