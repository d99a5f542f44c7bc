"""Expressions of a torch user: with a Ragged ``x`` they mean what they mean for each sequence.

``x`` and ``y`` are batches ``(B, *, F...)``, ``p`` positive and ``m`` a mask of them, ``i`` and
``k`` integers; ``h`` is a tensor ``(B, 1, F...)``, ``v`` one ``(F,)``, ``w`` one ``(F, 2)`` and
``lens`` the lengths. For each sequence they are tensors ``(1, L, F...)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

EACH = """
torch.relu(x); x.relu(); F.relu(x.detach(), inplace=True); x + y; x - 2; 2 - x; x * h; h * x; x / h; 2 / p
x.detach() // 2; x % 2
5 % p; 5 // p.detach(); x ** 2; 2 ** x; -x; abs(x); x > y; x <= 0; (x > 0) & m; ~m; x.exp(); torch.exp(x); p.log()
x.tanh()
torch.where(m, x, y); torch.where(m, x, 0.0); x.where(m, y); x.masked_fill(m, -1.0); x.clamp(-0.5, max=0.5)
x.clamp(min=h); torch.maximum(x, y); torch.max(x, y); torch.minimum(x, h); torch.lerp(x, y, 0.3); F.gelu(x)
F.softplus(x); F.leaky_relu(x, 0.2); x.sigmoid(); torch.addcmul(x, x, y, value=0.5); x.add(y, alpha=2); x.float()
x.double(); x.long(); x.bool(); x.isnan(); torch.zeros_like(x); torch.full_like(x, 2.0); x.nan_to_num(); x.pow(3)
x.sub(h); x.mul(torch.tensor(2.0)); x.logical_not(); x.round(); F.dropout(x, 0.5, False); x.clone()
x.detach() + 0 * x
True | m; True & m; True ^ m; 3 & i; 3 | i; 3 ^ i
x.square(); torch.logaddexp(x, y); x - x.mean(1, keepdim=True); h.expand_as(x) * x; x.contiguous(); x.type_as(x)
torch.isclose(x, y); x.eq(y); x.ne(0); x.sign(); x.atan2(y); x.bfloat16(); x.half(); x.int(); x.cpu()
torch.sigmoid(x); torch.isin(i, torch.tensor([1, 2])); torch.bucketize(x, torch.tensor([0.0, 1.0]).double())
torch.frexp(x); torch.searchsorted(torch.tensor([0.0, 1.0]).double(), x, right=True)
"""

REDUCTIONS = """
x.sum(1); x.sum(dim=1); torch.sum(x, 1); torch.sum(x, dim=1, keepdim=True); x.sum(-1); x.sum((1, -1)); m.sum(1)
x.mean(1); torch.mean(x, 1, True); x.mean(dim=-1); x.mean((1, -1), keepdim=True); x.mean(axis=1); x.amax(1); x.amin(1)
torch.amax(x, dim=1); x.amax((1, -1)); x.amax(-1); torch.amin(x, -1, True); x.max(1); torch.max(x, 1); x.max(-1)
x.max(1, keepdim=True); x.max(1).values; x.max(1)[0]; torch.min(x, dim=1); x.min(1)[1]; x.min(-1, True); x.prod(1)
torch.prod(x, 1, True); x.prod(-1); x.std(1); torch.std(x, 1, False); x.std(dim=1, correction=0); x.var(1); x.var(-1)
x.var(1, keepdim=True); torch.var(x, dim=(1, -1)); x.std(-1); x.norm(dim=1); torch.norm(x, dim=1); x.norm(p=1, dim=1)
x.norm(2, 1, True); x.norm(p=3, dim=1); torch.linalg.vector_norm(x, dim=1); x.norm(dim=-1); x.logsumexp(1)
torch.linalg.vector_norm(x, 3, -1); x.norm(p=float("inf"), dim=1)
torch.logsumexp(x, 1, True); x.logsumexp(-1); x.logsumexp((1, -1)); m.any(1); m.all(1); torch.any(m, 1)
torch.all(m, dim=1, keepdim=True); m.any(-1); m.all(-1); x.argmax(1); torch.argmax(x, dim=1); x.argmax(-1)
x.argmin(1)
x.argmax(1, keepdim=True); x.count_nonzero(1); torch.count_nonzero(x, dim=-1); x.nansum(1); x.nanmean(1); i.sum(1)
i.prod(1); i.amax(1); i.max(1); i.argmax(1); torch.std_mean(x, dim=1); torch.var_mean(x, -1)
i.sum(1, dtype=torch.float64)
x.float().mean(1); x.sum(-2); x.mean(-2); x.median(1); x.median(-1)[0]; x.nanmedian(1); x.kthvalue(1, 1); x.mode(-1)
x.quantile(0.3, 1); torch.quantile(x, 0.5, dim=1, keepdim=True); x.nanquantile(0.7, 1)
torch.linalg.norm(x, dim=1); torch.linalg.norm(x, 1, -1); torch.linalg.norm(x, 3, dim=1, keepdim=True)
torch.aminmax(x, dim=1); x.aminmax(dim=-1); x.aminmax(dim=1, keepdim=True); torch.linalg.norm(x, dim=(2, 3))
z.amax(1); z.max(1); z.amin(1); z.norm(dim=1); z.prod(1); z.std(1); z.logsumexp(1); z.argmin(1); z.var((1, -1))
"""

WHOLE = """
x.sum(); torch.sum(x); x.mean(); torch.mean(x); x.max(); torch.min(x); x.amax(); x.std(); x.var(correction=0)
x.prod()
x.norm(); torch.norm(x, 1); m.all(); m.any(); torch.all(m); (x > 0).float().mean(); x.count_nonzero()
x.logsumexp((0, 1))
x.sum((0, 1)); x.mean(dim=(0, 1)); x.amax((0, 1)); x.std((0, 1)); m.any((0, 1)); x.sum((0, 1), keepdim=True)
x.nansum()
x.mean((0, 1, -1)); x.norm(dim=(0, 1)); x.sum(dtype=torch.float32); (x - y).abs().mean(); x.square().mean().sqrt()
x.var((0, 1), keepdim=True); x.numel(); x.dim(); x.ndim; x.median(); x.masked_select(m); torch.masked_select(x, m)
x.mean(); torch.linalg.vector_norm(x); torch.count_nonzero(m); x.min(); x.quantile(0.3); torch.linalg.norm(x)
x.nelement(); torch.numel(x); x.is_floating_point(); i.is_complex(); i.is_signed(); x.is_conj(); x.is_neg()
x.is_inference(); m.is_contiguous(); x.is_pinned(); i.element_size(); x.get_device()
torch.quantile(x, torch.tensor([0.2, 0.7]).double()); torch.aminmax(x); torch.dist(x, y, 1); torch.dist(x, y)
"""

ALONG = """
x.softmax(1); torch.softmax(x, 1); F.softmax(x, dim=1); F.softmax(x, -1); x.log_softmax(1); F.log_softmax(x, dim=1)
torch.log_softmax(x, -1); nn.Softmax(dim=1)(x); F.softmin(x, 1); x.cumsum(1); torch.cumsum(x, dim=1); x.cumsum(-1)
i.cumsum(1); x.sort(1); torch.sort(x, dim=1, descending=True); x.sort(-1)[0]; x.sort(dim=1).values; x.argsort(1)
torch.argsort(x, -1); x.argsort(dim=1, descending=True); x.topk(1, dim=1); torch.topk(x, 2, 1)
x.topk(1, 1, largest=False)
x.topk(1)[0]; x.topk(1, -1); x.flip(1); torch.flip(x, (1,)); x.flip(-1); torch.flip(x, dims=(1, -1)); x.diff(dim=1)
torch.diff(x, dim=1); x.diff(2, 1); x.diff(); x.cummax(1); torch.cummin(x, dim=1); x.cumprod(1); x.logcumsumexp(1)
x.cummax(-1)[0]; F.normalize(x); F.normalize(x, dim=-1); F.cosine_similarity(x, y); F.cosine_similarity(x, y, dim=-1)
F.log_softmax(x, -1); F.glu(x, 1); x.roll(1, -1); i.sort(1); m.sort(1)
F.gumbel_softmax(x, hard=True, dim=1).sum(1)
torch.diff(x, dim=1, prepend=x[:, :1]); m.diff(dim=1); x.softmax(-1).log(); x.softmax(dim=1)
"""

INDEX = """
x[:, :2]; x[:, 1:]; x[:, :-1]; x[:, -2:]; x[:, ::2]; x[:, 1::3]; x[:, :0]; x[:, -1]; x[:, 0]; x[:, -2]; x[..., 0]
x[..., -1]
x[:, 1:2, 0]; x[:, -1, 0]; x[..., None]; x[:, :, 1:]; x[..., :1]; x[:]; x[:, :]; x[..., :]; x[:, 5:2]; x[:, -9:9]
x[:, [0, -1]]; x[:, torch.tensor([0, 0])]; x[torch.arange(len(lens)), lens - 1]; x[torch.arange(len(lens)), 0]
x[torch.arange(len(lens)), -1]; x[..., [0, 0]]; x[:, 1:][:, :-1]; torch.gather(x, 1, k); x.gather(1, k)
torch.take_along_dim(x, k, 1); x.gather(1, x.argsort(1)); torch.index_select(x, 1, torch.tensor([0, 0]))
x.index_select(-1, torch.tensor([0, 0])); x[:, 0, ..., 0]; x[:, -1][:, None] * x; x[:, np.array([0])]
x[:, 1:] - x[:, :-1]
x[list(range(len(lens))), 0]
x[:, :2**63 - 1]; x[:, -2**63:]; x[..., 0, None]; x.take_along_dim(x.argsort(1), 1); x[:, -3:-1]
"""

JOINS = """
torch.cat([x, y], 1); torch.cat([x, y], dim=1); torch.cat([x, y], -1)
torch.cat((x, y, x), 1)
torch.concat([x, y], 1); torch.cat([x, x[:, :1]], 1); torch.cat([x[:, 1:], x[:, :1]], 1); torch.stack([x, y], -1)
torch.stack([x, y], dim=2); x.unbind(-1); torch.unbind(x, -1); x.split(1, -1)[0]; torch.split(x, 2, dim=-1)[0]
x.chunk(2, -1)
x * y; x @ v; x @ w; torch.matmul(x, w); F.linear(x, w.mT)
torch.matmul(x, g) if x.dim() == 3 else x @ w
torch.bmm(x, g) if x.dim() == 3 else x * 1; x.unsqueeze(-1); torch.unsqueeze(x, 2); x.unsqueeze(-1).squeeze(-1)
x.flatten(2)
x.unflatten(-1, (1, -1)); torch.unflatten(x, -1, (-1, 1)); x.transpose(-1, -2)
x.permute(0, 1, 3, 2)
F.pad(x, (1, 0)); F.pad(x, (0, 2), value=3.0); F.pad(x, (0, 0, 1, 1)); F.pad(x, (1, 0, 0, 1)); x.movedim(-1, 2)
F.pad(x, (0, 0, -1, 0)); F.pad(x, (-1, 1)); F.layer_norm(x, x.shape[2:])
F.scaled_dot_product_attention(x, y, x) if x.dim() < 4 else x
F.scaled_dot_product_attention(x, y, x, is_causal=True) if x.dim() < 4 else x
F.scaled_dot_product_attention(x, x, x, scale=0.3) if x.dim() < 4 else x
torch.einsum("btf,fg->btg", x, w); torch.einsum("btf,bf->bt", x, h[:, 0]); torch.einsum("btf,btf->bt", x, y)
torch.einsum("btf,btg->bfg", x, y); torch.einsum("bt,bt->b", x, y); torch.einsum("bt,btf->bf", x[..., 0], x)
torch.equal(x, x); torch.equal(x, y); torch.allclose(x, x); torch.stack([x, y], -1).sum(-1); F.pairwise_distance(x, y)
torch.einsum("ijk,kl->ijl", x, w); torch.cat([x, x], 2); torch.concatenate([x, y], 1); F.embedding(k, w)
torch.tensor_split(x, 2, dim=-1); x.swapaxes(-1, -2); torch.swapdims(x, 2, 3); torch.moveaxis(x, -1, 2)
F.rms_norm(x, x.shape[2:]); F.bilinear(x, y, torch.ones(2, w.shape[0], w.shape[0]).double()); F.one_hot(i, 14)
F.dropout1d(x, 0.5, False); F.dropout2d(x, 0.5, False) if x.dim() == 4 else x
F.dropout3d(x, 0.5, False) if x.dim() == 5 else x; torch.feature_alpha_dropout(x, 0.5, False)
"""

LOSSES = """
F.cross_entropy(x, t); F.cross_entropy(x, t, weight=c); F.cross_entropy(x, t, ignore_index=1)
nn.CrossEntropyLoss()(x, t)
F.cross_entropy(x, t, label_smoothing=0.1); F.cross_entropy(x, t, reduction="sum")
nn.CrossEntropyLoss(weight=c)(x, t)
F.cross_entropy(x, t, reduction="none"); F.cross_entropy(x, q); F.cross_entropy(x, t, c, reduction="none")
F.nll_loss(torch.log_softmax(x, 2), t); nn.NLLLoss(ignore_index=0)(torch.log_softmax(x, 2), t)
F.nll_loss(torch.log_softmax(x, 2), t, c, reduction="none"); F.mse_loss(x, y); nn.MSELoss()(x, y)
F.mse_loss(x, y, reduction="sum")
F.mse_loss(x, y, reduction="none"); F.l1_loss(x, y); nn.L1Loss(reduction="none")(x, y)
F.smooth_l1_loss(x, y, beta=0.5)
nn.SmoothL1Loss()(x, y); F.huber_loss(x, y, delta=0.5); nn.HuberLoss(reduction="sum")(x, y)
F.huber_loss(x, y, reduction="none")
F.binary_cross_entropy(x.sigmoid(), m.double()); nn.BCELoss()(x.sigmoid(), m.double())
nn.BCEWithLogitsLoss()(x, m.double())
F.binary_cross_entropy_with_logits(x, m.double(), pos_weight=torch.tensor(2.0))
nn.BCELoss(reduction="none")(x.sigmoid(), m.double())
F.binary_cross_entropy_with_logits(x, m.double(), weight=p); F.kl_div(x, p, reduction="sum")
F.kl_div(x, p, reduction="none")
F.kl_div(x, y, log_target=True, reduction="mean"); F.poisson_nll_loss(x, p); nn.PoissonNLLLoss(full=True)(x, p)
F.poisson_nll_loss(x, p, reduction="none")
F.gaussian_nll_loss(x, y, p); nn.GaussianNLLLoss()(x, y, p); F.gaussian_nll_loss(x, y, p, full=True, reduction="none")
F.gaussian_nll_loss(x, y, 0.5); F.gaussian_nll_loss(x, y, p, reduction="sum")
F.soft_margin_loss(x, y.sign())
F.margin_ranking_loss(x, y, y.sign()); F.hinge_embedding_loss(x, y.sign()); F.cosine_embedding_loss(x, y, s)
F.multilabel_margin_loss(x, i % 3); F.multilabel_soft_margin_loss(x, m.double())
F.multilabel_soft_margin_loss(x, m.double(), reduction="none"); F.multi_margin_loss(x, t, reduction="none")
F.triplet_margin_loss(x, y, p); F.multi_margin_loss(x, t); (F.mse_loss(x, y, reduction="none") * m).sum() / m.sum()
"""


def expressions(text: str) -> list[str]:
    """Return the expressions of a table."""
    return [
        part.strip()
        for line in text.strip().splitlines()
        for part in line.split(";")
        if part.strip()
    ]


_FEATURES = """
F.dropout1d(x, 0.5, False); torch.feature_alpha_dropout(x, 0.5, False)
torch.tensor_split(x, 2, dim=-1); F.bilinear(x, y, torch.ones(2, w.shape[0], w.shape[0]).double())
x.unflatten(-1, (1, -1)); x.unbind(-1); x.sum(-2); x.mean(-2); x.roll(1, -1); x.chunk(2, -1); F.pairwise_distance(x, y)
torch.unflatten(x, -1, (-1, 1)); torch.unbind(x, -1); F.pad(x, (0, 0, 1, 1)); F.pad(x, (1, 0, 0, 1)); x @ v; x @ w
F.pad(x, (0, 0, -1, 0)); torch.matmul(x, g) if x.dim() == 3 else x @ w; torch.matmul(x, w); F.linear(x, w.mT)
F.scaled_dot_product_attention(x, y, x) if x.dim() < 4 else x
F.scaled_dot_product_attention(x, y, x, is_causal=True) if x.dim() < 4 else x
F.scaled_dot_product_attention(x, x, x, scale=0.3) if x.dim() < 4 else x
"""

# The number of feature dimensions that an expression needs to have a meaning.
FEATURES = dict.fromkeys(expressions(_FEATURES), 1) | {
    "x.transpose(-1, -2)": 2,
    "x.swapaxes(-1, -2)": 2,
    "torch.linalg.norm(x, dim=(2, 3))": 2,
}


BATCHES: dict[str, tuple[list[int], tuple[int, ...]]] = {
    "no features": ([3, 1, 4, 2], ()),
    "features": ([3, 1, 4, 2], (5,)),
    "two dims of features": ([2, 3], (2, 3)),
    "an empty sequence": ([2, 0, 3], (3,)),
    "an empty sequence without features": ([0, 2], ()),
    "no sequence": ([], (3,)),
    "one sequence": ([4], (3,)),
    "lengths of 1": ([1, 1, 1], (3,)),
    "lengths of 1 without features": ([1, 1, 1], ()),
    "as many sequences as features": ([2, 4, 3], (3,)),
    "as many elements as features": ([2, 1], (3,)),
    "strided": ([3, 2], (4,)),
}


def numbers_of(kind: str) -> dict[str, Tensor]:
    """Draw flat numbers ``(N, *features)`` and what else the expressions read."""
    lengths, features = BATCHES[kind]
    generator = torch.Generator().manual_seed(7)
    size = (sum(lengths), *features)
    draw = {name: torch.randn(size, generator=generator, dtype=torch.float64) for name in "xy"}
    if kind == "strided":
        draw["x"] = torch.randn(features[0], 2 * size[0], generator=generator, dtype=torch.float64)
        draw["x"] = draw["x"].mT[::2]
    draw["p"] = torch.rand(size, generator=generator, dtype=torch.float64) + 0.5
    draw["z"] = torch.randint(2, size, generator=generator).double()
    draw["m"] = draw["y"] > 0
    draw["i"] = (draw["p"] * 9).long()
    draw["k"] = torch.zeros(size, dtype=torch.int64)
    draw["t"] = torch.randint(3, size[:1] + size[2:], generator=generator)
    draw["s"] = torch.ones(size[:1], dtype=torch.int64)
    draw["q"] = torch.rand(size, generator=generator, dtype=torch.float64)
    return draw


def others_of(kind: str) -> dict[str, Any]:
    """Draw tensors that are no batches."""
    lengths, features = BATCHES[kind]
    generator = torch.Generator().manual_seed(8)
    count, last = len(lengths), features[-1] if features else 1
    return {
        "h": torch.rand((count, 1, *features), generator=generator, dtype=torch.float64) + 0.5,
        "g": torch.rand((count, last, 2), generator=generator, dtype=torch.float64),
        "v": torch.rand(last, generator=generator, dtype=torch.float64),
        "w": torch.rand((last, 2), generator=generator, dtype=torch.float64),
        "c": torch.rand(last, generator=generator, dtype=torch.float64),
        "lens": torch.tensor(lengths, dtype=torch.int64),
    }
