"""Layers and the CTC loss with PyTorch's values and gradients: python3 torch_layers.py > nn/tests/all/reference_layers.json. Needs torch.

Element i of input k is sin(1.3 i + 0.7 k + 0.5). Input 0 is the layer's input, and input k + 1 its parameter k. A layer's
output is summed with the weights of input 9. Numbers are f64, to 13 digits.
"""

import json, torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

torch.set_default_dtype(torch.float64)


def made(k, *shape):
    n = torch.arange(torch.tensor(shape).prod().item())
    return torch.sin(1.3 * n + 0.7 * k + 0.5).reshape(shape).requires_grad_()


def fill(parameters):
    with torch.no_grad():
        for k, p in enumerate(parameters):
            p.copy_(made(k + 1, *p.shape))


out = {}


def case(name, inputs, y, parameters=()):
    loss = (y * made(9, *y.shape).detach()).sum()
    grads = torch.autograd.grad(loss, [*inputs, *parameters])
    short = lambda x: [float(f"{v:.13g}") for v in x.flatten().tolist()]
    out[name] = {"out": short(y), "gradients": [short(g) for g in grads]}


def layer(name, layer, x, f=None, order=None):
    p = order or list(layer.parameters())
    fill(p)
    case(name, [x] if x.requires_grad else [], (f or layer)(x), p)


image = made(0, 2, 3, 4, 5)
layer("instance_norm", nn.InstanceNorm2d(3), image)
layer("instance_norm_affine", nn.InstanceNorm2d(3, affine=True), image)
layer("batch_norm_plain", nn.BatchNorm2d(3, affine=False), image)
classes = torch.tensor([2, 0])
table = made(1, 4, 6)
g = table[classes]
case("conditional", [image], nn.BatchNorm2d(3, affine=False)(image) * g[:, :3, None, None] + g[:, 3:, None, None], [table])

index, offsets = torch.tensor([1, 4, 2, 2, 0, 3, 1]), torch.tensor([0, 3, 3, 4])
weights = made(2, 7).detach()
for mode in ["sum", "mean", "max"]:
    t = made(1, 5, 3)
    case(f"bag_{mode}", [], F.embedding_bag(index, t, offsets, mode=mode), [t])
    case(f"bag_{mode}_padded", [], F.embedding_bag(index, t, offsets, mode=mode, padding_idx=2), [t])
t, w = made(1, 5, 3), made(0, 7)
case("bag_weighted", [w], F.embedding_bag(index, t, offsets, mode="sum", per_sample_weights=w), [t])
x, z, b = made(0, 2, 5, 3), made(5, 2, 5, 4), nn.Bilinear(3, 4, 2)
fill(b.parameters())
case("bilinear", [x, z], b(x, z), list(b.parameters()))
p = [made(1, 2, 3, 1, 1), made(2, 2), made(3, 3, 2, 1, 1), made(4, 3)]
m = image.mean((2, 3), keepdim=True)
case("squeeze_excitation", [image], image * F.conv2d(F.conv2d(m, p[0], p[1]).relu(), p[2], p[3]).sigmoid(), p)

for name, inner, x in [("linear", nn.Linear(3, 4), made(0, 5, 3)), ("conv", nn.Conv2d(3, 2, 3), image)]:
    n = weight_norm(inner)
    w = n.parametrizations.weight
    layer(f"weight_norm_{name}", n, x, order=[w.original1, n.bias, w.original0])
for name, inner, x in [
    ("linear", nn.Linear(3, 4), made(0, 5, 3)),
    ("conv", nn.Conv2d(3, 2, 3), image),
    ("transposed", nn.ConvTranspose2d(3, 2, 3), image),
]:
    n = spectral_norm(inner, n_power_iterations=2)
    w = n.parametrizations.weight
    fill([w.original, n.bias])
    with torch.no_grad():
        for k, b in [(5, "_u"), (6, "_v")]:
            getattr(w[0], b).copy_(F.normalize(made(k, *getattr(w[0], b).shape), dim=0))
    case(f"spectral_norm_{name}", [x], n(x), [w.original, n.bias])
    n.eval()
    case(f"spectral_norm_{name}_in_use", [x], n(x), [w.original, n.bias])

for name, kind in [("rnn", nn.RNN), ("lstm", nn.LSTM), ("gru", nn.GRU)]:
    n, x = kind(3, 2, num_layers=2, bidirectional=True, batch_first=True), made(0, 3, 4, 3)
    fill(n.parameters())
    y, state = n(pack_padded_sequence(x, [2, 4, 1], batch_first=True, enforce_sorted=False))
    y, _ = pad_packed_sequence(y, batch_first=True)
    state = state if isinstance(state, tuple) else (state,)
    case(f"{name}_lengths", [x], torch.cat([y.flatten()] + [s.flatten() for s in state]), list(n.parameters()))

logits, labels = made(0, 4, 7, 5), [[1, 2, 2], [3], [], [4, 1, 4, 4]]
steps, flat = [7, 3, 5, 6], torch.tensor([l for ls in labels for l in ls])
for reduction in ["none", "sum", "mean"]:
    for blank in [0, 2]:
        ls = [[(l if l != blank else 0) for l in one] for one in labels]
        loss = F.ctc_loss(
            logits.log_softmax(-1).transpose(0, 1), torch.tensor([l for one in ls for l in one]), steps, [len(one) for one in ls], blank=blank, reduction=reduction
        )
        case(f"ctc_{reduction}_{blank}", [logits], loss)
short = F.ctc_loss(logits.log_softmax(-1).transpose(0, 1), flat, [7, 3, 5, 4], [3, 1, 0, 4], reduction="none", zero_infinity=True)
case("ctc_short", [logits], short)
print(json.dumps(out, indent=0))
