"""Cases of forward mode and of single examples in the layout of conformance/goldens, with the values of torch.func: `func`, whose cases are
ops, and `func_models`, whose cases are models.

    python3 torch_func.py conformance/goldens

Needs torch and safetensors. Values are `f64`. Of an op: the tangents `toutN` along `tinN`, the Hessian-vector product `hvpN` of the sum of all
outputs times `goutN`, and `jac`, the Jacobian of the first output with respect to the first input with a gradient. Of a model, whose parameters
are `init/NAME`: the tangent `tout` of its output along `tinit/NAME`, gradients `vjp/NAME` of the output times `gout`, and of the mean loss the
product `hvp/NAME`; `each/NAME` are the gradients of the loss of each example.
"""

import json, os, sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_cases import OPS, SINGLE, Draw

TOL = 1e-10
# Tensors of a case have at most this many elements, its Jacobian too.
MOST = 120


class Small(Draw):
    def size(self, most=7):
        return self.random.randint(1, min(most, 3))


def op_case(name, seed):
    """The entry of a case and its tensors; none if it is too large or has nothing to differentiate."""
    d = Small(seed)
    d.dtype = torch.float64
    ins, attrs, grads, call = OPS[name][3](d)
    if not grads or max(x.numel() for x in ins) > MOST or min(x.numel() for x in ins) == 0:
        return None
    grads = [i for i in grads if ins[i].is_floating_point()]

    def f(*floats):
        given = list(ins)
        for i, x in zip(grads, floats):
            given[i] = x
        outs = call(*given)
        return outs if isinstance(outs, list) else [outs]

    inner = [ins[i] for i in grads]
    outs = f(*inner)
    if max(out.numel() for out in outs) > MOST or min(out.numel() for out in outs) == 0:
        return None
    real = [k for k, out in enumerate(outs) if out.is_floating_point()]
    seeds = [d.values(list(outs[k].shape)) for k in real]
    along = tuple(d.values(list(x.shape)) for x in inner)
    floats = lambda *xs: tuple(out for out in f(*xs) if out.is_floating_point())
    total = lambda *xs: sum((out * seed).sum() for out, seed in zip(floats(*xs), seeds))
    every = tuple(range(len(inner)))
    tangents = jvp(floats, tuple(inner), along)[1]
    gradients = vjp(floats, *inner)[1](tuple(seeds))
    products = jvp(grad(total, every), tuple(inner), along)[1]
    tensors = {f"in{i}": x for i, x in enumerate(ins)} | {f"out{k}": out for k, out in enumerate(outs)}
    for k, seed, tangent in zip(real, seeds, tangents):
        tensors |= {f"gout{k}": seed, f"tout{k}": tangent}
    for i, direction, gradient, product in zip(grads, along, gradients, products):
        tensors |= {f"tin{i}": direction, f"gin{i}": gradient, f"hvp{i}": product}
    if inner[0].numel() * outs[0].numel() <= MOST and real[0] == 0 and inner[0].dim() + outs[0].dim() <= 6:
        tensors["jac"] = jacrev(lambda x: f(x, *inner[1:])[0])(inner[0])
    entry = {"op": name, "attrs": attrs, "inputs": len(ins), "outputs": len(outs), "grads": grads, "tol": TOL}
    return entry, tensors


def ops():
    cases, tensors = [], {}
    for name in sorted(OPS):
        if torch.float64 not in OPS[name][0] or name in SINGLE:
            continue
        for seed in range(1, 40):
            try:
                found = op_case(name, seed)
            except (NotImplementedError, RuntimeError) as error:
                print(f"{name}: {str(error).splitlines()[0]}")
                break
            if found:
                entry = {"id": f"func.{len(cases):03}.{name}"} | found[0]
                cases.append(entry)
                tensors |= {f"{entry['id']}/{key}": x for key, x in found[1].items()}
                break
    return cases, tensors


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


class Last(nn.Module):
    def forward(self, x):
        return x[:, -1]


class Lstm(nn.LSTM):
    """By its cells: torch.func has no batches of PyTorch's own loop."""

    def forward(self, x):
        for layer in range(self.num_layers):
            of = lambda name: getattr(self, f"{name}_l{layer}")
            h = c = x.new_zeros(x.shape[0], self.hidden_size)
            states = []
            for token in x.unbind(1):
                gates = F.linear(token, of("weight_ih"), of("bias_ih")) + F.linear(h, of("weight_hh"), of("bias_hh"))
                i, f, g, o = gates.chunk(4, -1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                states.append(h)
            x = torch.stack(states, 1)
        return x


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.ln1(x)).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2)) / (c // self.heads) ** 0.5
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
        found = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        x = x + self.proj(found.transpose(1, 2).reshape(b, t, c))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class Gpt(nn.Module):
    def __init__(self, vocab, ctx, layers, heads, d):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(ctx, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.lnf, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.lnf(x))


def layers(text, *modules):
    return {"layers": text}, nn.Sequential(*modules)


def models(rand, index):
    """Names, attributes and modules, inputs and targets."""
    classes = lambda n: index([3], n)
    yield "mlp", *layers("linear tanh linear gelu linear", nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 3)), rand([3, 4]), classes(3)
    conv = lambda i, o: nn.Conv2d(i, o, 3, padding=1)
    yield "cnn", *layers(
        "conv(2,4,3,pad1) groupnorm2 silu avgpool2 conv(4,2,3,pad1) flatten layernorm linear",
        conv(2, 4), nn.GroupNorm(2, 4), nn.SiLU(), nn.AvgPool2d(2), conv(4, 2), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 3),
    ), rand([3, 2, 4, 4]), classes(3)
    gpt = {"vocab": 7, "ctx": 5, "layers": 2, "heads": 2, "d": 4}
    yield "gpt", gpt, Gpt(**gpt), index([3, 5], 7), index([3, 5], 7)
    yield "lstm", *layers("lstm2 last linear", Lstm(3, 4, 2, batch_first=True), Last(), nn.Linear(4, 2)), rand([3, 4, 3]), classes(2)
    yield "autoencoder", *layers(
        "conv(1,3,2,stride2) tanh convt(3,1,2,stride2) sigmoid",
        nn.Conv2d(1, 3, 2, 2), nn.Tanh(), nn.ConvTranspose2d(3, 1, 2, 2), nn.Sigmoid(),
    ), rand([3, 1, 4, 4]), rand([3, 1, 4, 4]).abs() / 2
    yield "classifier", *layers(
        "embedding rmsnorm mean linear relu linear", nn.Embedding(6, 4), nn.RMSNorm(4, eps=1e-6), Mean(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3),
    ), index([3, 4], 6), classes(3)


def losses(out, target):
    """The loss of each example, `[B]`."""
    if target.is_floating_point():
        return F.mse_loss(out, target, reduction="none").flatten(1).mean(1)
    rows = F.cross_entropy(out.flatten(0, -2), target.flatten(), reduction="none")
    return rows.view(target.shape).flatten(1).mean(1) if target.dim() > 1 else rows


def model_cases():
    source = torch.Generator().manual_seed(3)
    rand = lambda shape: torch.randn(shape, generator=source, dtype=torch.float64)
    index = lambda shape, n: torch.randint(0, n, shape, generator=source)
    cases, tensors = [], {}
    for name, attrs, model, x, y in models(rand, index):
        parameters = {key: rand(list(p.shape)) * 0.5 for key, p in model.named_parameters()}
        along = {key: rand(list(p.shape)) for key, p in parameters.items()}
        run = lambda p: functional_call(model, p, (x,))
        mean = lambda p: losses(run(p), y).mean()
        alone = lambda p, x, y: losses(functional_call(model, p, (x[None],)), y[None])[0]
        out, tangent = jvp(run, (parameters,), (along,))
        seed = rand(list(out.shape))
        of = {
            "init": parameters,
            "tinit": along,
            "vjp": vjp(run, parameters)[1](seed)[0],
            "hvp": jvp(grad(mean), (parameters,), (along,))[1],
            "each": vmap(grad(alone), (None, 0, 0))(parameters, x, y),
        }
        id = f"func_models.{len(cases):03}.{name}"
        cases.append({"id": id, "op": name, "attrs": attrs, "tol": TOL})
        tensors |= {f"{id}/{kind}/{key}": value for kind, values in of.items() for key, value in values.items()}
        tensors |= {f"{id}/{key}": value for key, value in [("x", x), ("y", y), ("out", out), ("tout", tangent), ("gout", seed)]}
    return cases, tensors


def main():
    torch.set_default_dtype(torch.float64)
    for group, make in [("func", ops), ("func_models", model_cases)]:
        with sdpa_kernel(SDPBackend.MATH):
            cases, tensors = make()
        save_file({key: x.detach().contiguous().clone() for key, x in tensors.items()}, os.path.join(sys.argv[1], f"{group}.safetensors"))
        with open(os.path.join(sys.argv[1], f"{group}.json"), "w") as file:
            json.dump({"group": group, "torch": torch.__version__, "cases": cases}, file)
        print(f"{group}: {len(cases)} cases, torch {torch.__version__}")


if __name__ == "__main__":
    main()
