"""Losses of preferences and of policies with PyTorch's values and gradients, by the formulas of TRL 0.24 (DPOTrainer, KTOTrainer,
ORPOTrainer, GRPOTrainer): python3 torch_preferences.py > nn/tests/all/losses_of_preferences.json. Needs torch.

Element i of input k is sin(1.3 i + 0.7 k + 0.5); log-probabilities are -1.5 - that. Numbers are f64.
"""

import json, torch, torch.nn.functional as F


def made(k, *shape):
    n = torch.arange(torch.tensor(shape).prod().item(), dtype=torch.float64)
    return (-1.5 - torch.sin(1.3 * n + 0.7 * k + 0.5)).reshape(shape).requires_grad_()


def dpo(c, r, c0, r0, beta, smoothing):
    logits = (c - r) - (c0 - r0)
    return (-F.logsigmoid(beta * logits) * (1 - smoothing) - F.logsigmoid(-beta * logits) * smoothing).mean()


def kto(x, x0, y, kl, beta, desirable, undesirable):
    kl = kl.detach().clamp(min=0)
    chosen, rejected = (x - x0)[y], (x - x0)[~y]
    losses = [1 - torch.sigmoid(beta * (chosen - kl)), 1 - torch.sigmoid(beta * (kl - rejected))]
    return torch.cat([desirable * losses[0], undesirable * losses[1]]).mean()


def orpo(c, r, beta):
    log_odds = (c - r) - (torch.log1p(-torch.exp(c)) - torch.log1p(-torch.exp(r)))
    return (-c - beta * F.logsigmoid(log_odds)).mean()


def tokens(new, old, a, low, high, kl=0.0, ref=None):
    ratio = torch.exp(new - old)
    loss = -torch.min(ratio * a, torch.clamp(ratio, 1 - low, 1 + high) * a)
    return loss if ref is None else loss + kl * (torch.exp(ref - new) - (ref - new) - 1)


def sequences(loss, m):
    return ((loss * m).sum(-1) / m.sum(-1).clamp(min=1.0)).mean()


c, r, c0, r0 = (made(k, 5) for k in range(4))
y = torch.tensor([True, False, True, True, False])
new, old, ref = (made(k, 3, 4) for k in range(3))
a, wide, m = (1.5 + made(5, 3, 1)).detach(), (1.5 + made(6, 3, 4)).detach(), (made(4, 3, 4) > -1.9).double()
m[2] = 0
rewards = torch.tensor([1.0, 0.0, 2.0, 4.0, 4.0, 4.0], dtype=torch.float64).reshape(2, 3)
cases = {
    "dpo": (lambda c, r, c0, r0: dpo(c, r, c0, r0, 0.1, 0.0), [c, r, c0, r0]),
    "dpo_smoothed": (lambda c, r, c0, r0: dpo(c, r, c0, r0, 0.7, 0.2), [c, r, c0, r0]),
    "ipo": (lambda c, r, c0, r0: (((c - r) - (c0 - r0) - 1 / (2 * 0.3)) ** 2).mean(), [c, r, c0, r0]),
    "kto": (lambda x, x0: kto(x, x0, y, torch.tensor(0.2, dtype=torch.float64), 0.3, 1.0, 1.2), [c, c0]),
    "kto_below": (lambda x, x0: kto(x, x0, y, torch.tensor(-0.2, dtype=torch.float64), 0.3, 0.9, 1.0), [c, c0]),
    "orpo": (lambda c, r: orpo(c, r, 0.4), [c, r]),
    "ppo": (lambda new: (tokens(new, old.detach(), wide, 0.2, 0.2) * m).sum() / m.sum(), [new]),
    "ppo_start": (lambda new: sequences(tokens(new, new.detach(), a, 0.2, 0.2), m), [new]),
    "grpo": (lambda new: sequences(tokens(new, old.detach(), a, 0.2, 0.28, 0.04, ref.detach()), m), [new]),
    "grpo_length": (lambda new: (tokens(new, old.detach(), a, 0.2, 0.2, 0.5, ref.detach()) * m).sum() / (3 * 7), [new]),
}
out = {}
for name, (f, inputs) in cases.items():
    loss = f(*inputs)
    out[name] = {"loss": loss.item(), "gradients": [g.flatten().tolist() for g in torch.autograd.grad(loss, inputs)]}
mean, std = rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True)
out["advantages"] = ((rewards - mean) / (std + 1e-4)).flatten().tolist()
print(json.dumps(out, indent=0))
