"""Losses of fixed inputs with PyTorch's values and gradients: python3 torch_losses.py > nn/tests/all/losses_of_pairs.json. Needs torch.

Element i of input k is sin(1.3 i + 0.7 k + 0.5); targets follow from it as named. Numbers are f64.
"""

import json, torch, torch.nn.functional as F


def made(k, *shape):
    n = torch.arange(torch.tensor(shape).prod().item(), dtype=torch.float64)
    return torch.sin(1.3 * n + 0.7 * k + 0.5).reshape(shape).requires_grad_()


def sign(x):
    return torch.where(x > 0, 1.0, -1.0).double()


def focal(x, y, gamma, alpha):
    p = x.sigmoid()
    loss = F.binary_cross_entropy_with_logits(x, y, reduction="none") * (1 - (p * y + (1 - p) * (1 - y))) ** gamma
    return loss if alpha is None else loss * (alpha * y + (1 - alpha) * (1 - y))


def dice(x, y):
    x, y = x.flatten(1), y.flatten(1)
    return (1 - (2 * (x * y).sum(1) + 0.5) / (x.sum(1) + y.sum(1) + 0.5)).mean()


def nce(q, k, t):
    return F.cross_entropy(F.normalize(q) @ F.normalize(k).T / t, torch.arange(len(q)))


a, b, c, row = made(0, 4, 3), made(1, 4, 3), made(2, 4, 3), made(3, 3)
y, s, sr = (b.detach() > 0).double(), sign(b.detach()), sign(made(4, 4).detach())
p, v = a.detach().abs() + 0.2, c.detach().abs() + 0.3
cases = {
    "weighted_bce": (lambda x: F.binary_cross_entropy_with_logits(x, y, weight=p, pos_weight=row.detach() + 2), [a]),
    "weighted_bce_sum": (lambda x: F.binary_cross_entropy_with_logits(x, y, weight=row.detach() + 2, reduction="sum"), [a]),
    "focal": (lambda x: focal(x, y, 2.0, 0.25).sum(), [a]),
    "focal_plain": (lambda x: focal(x, y, 1.5, None).mean(), [a]),
    "dice": (lambda x: dice(x.sigmoid(), y), [a]),
    "soft_margin": (lambda x: F.soft_margin_loss(x, s), [a]),
    "hinge_embedding": (lambda x: F.hinge_embedding_loss(x, s, margin=0.4), [a]),
    "poisson_nll": (lambda x: F.poisson_nll_loss(x, p), [a]),
    "gaussian_nll": (lambda x, v: F.gaussian_nll_loss(x, b.detach(), v.abs() + 0.3), [a, c]),
    "margin_ranking": (lambda x, z: F.margin_ranking_loss(x, z, s, margin=0.3), [a, c]),
    "cosine_embedding": (lambda x, z: F.cosine_embedding_loss(x, z, sr, margin=0.2, reduction="sum"), [a, b]),
    "triplet": (lambda x, z, w: F.triplet_margin_loss(x, z, w, eps=0.0), [a, b, c]),
    "triplet_swapped": (lambda x, z, w: F.triplet_margin_loss(x, z, w, margin=0.5, p=1.0, swap=True, eps=0.0, reduction="sum"), [a, b, c]),
    "info_nce": (lambda x, z: nce(x, z, 0.1), [a, b]),
    "soft_cross_entropy": (lambda x, z: F.cross_entropy(x, z.softmax(1)), [a, b]),
    "soft_cross_entropy_smoothed": (lambda x: F.cross_entropy(x, p, label_smoothing=0.2, reduction="sum"), [a]),
    "cosine_similarity": (lambda x, z: F.cosine_similarity(x, z, dim=0).sum(), [a, b]),
    "normalize": (lambda x: (F.normalize(x, dim=1) * b.detach()).sum(), [a]),
}
out = {}
for name, (f, inputs) in cases.items():
    loss = f(*inputs)
    out[name] = {"loss": loss.item(), "gradients": [g.flatten().tolist() for g in torch.autograd.grad(loss, inputs)]}
print(json.dumps(out, indent=0))
