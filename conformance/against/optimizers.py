"""Optimizers by their authors' code: python3 optimizers.py > optim/tests/data/authors.json. Needs torch,
schedulefree, prodigyopt, bitsandbytes, pytorch_optimizer.

Parameter i starts from values(n, i), and its gradient at step t is values(n, 1000 t + i) of optim/tests/common. All
numbers are f64. `after` has the parameters after 12 steps; `average` the weights to evaluate with; `adapted` what the
rule has made of its own hyper-parameters. Parameters from the third on may have a group with other attributes.
"""

import contextlib, json, sys, torch, schedulefree, prodigyopt, bitsandbytes, pytorch_optimizer
from bitsandbytes.backends.cpu import ops as cpu_ops
from bitsandbytes.functional import create_dynamic_map

torch.set_default_dtype(torch.float64)
SHAPES = [[5, 3], [7, 4], [2, 2], [3]]


def values(shape, k):
    n = torch.Size(shape).numel()
    return ((torch.arange(n) * 37 + k * 101 + 13) % 257 / 128.5 - 1.0).reshape(shape)


def short(x):
    return [float(f"{v:.12g}") for v in x.flatten().tolist()]


def case(op, attrs, make, evaluates=False, shapes=SHAPES, steps=12):
    params = [torch.nn.Parameter(values(s, i)) for i, s in enumerate(shapes)]
    optimizer = make(params)
    if evaluates:
        optimizer.train()
    for t in range(steps):
        for i, p in enumerate(params):
            p.grad = values(p.shape, 1000 * t + i)
        optimizer.step()
    out = {"op": op, "attrs": attrs, "shapes": shapes, "after": [short(p.data) for p in params]}
    if evaluates:
        optimizer.eval()
        out["average"] = [short(p.data) for p in params]
    return out


free_adamw, free_sgd = schedulefree.AdamWScheduleFree, schedulefree.SGDScheduleFree
cases = []
for op, rule, attrs in [
    ("schedule_free_adamw", free_adamw, {"lr": 0.03, "betas": [0.8, 0.9], "weight_decay": 0.1, "warmup_steps": 5}),
    ("schedule_free_adamw", free_adamw, {"lr": 0.03, "eps": 0.01, "warmup_steps": 40}),
    ("schedule_free_sgd", free_sgd, {"lr": 0.3, "momentum": 0.7, "weight_decay": 0.1, "warmup_steps": 1}),
    ("schedule_free_sgd", free_sgd, {"lr": 0.3}),
]:
    cases.append(case(op, attrs, lambda p: rule(p, **attrs, foreach=False), evaluates=True))

# SOAP's bases are unique only where Gram matrices have full rank from the first gradient on: matrices are square.
single, torch.float32 = torch.float32, torch.float64  # its factorizations would be rounded to float32
for attrs in [{"lr": 0.03, "betas": [0.8, 0.9], "weight_decay": 0.1, "precondition_frequency": 3},
              {"lr": 0.03, "eps": 0.01, "precondition_frequency": 1},
              {"lr": 0.03, "betas": [0.8, 0.3], "precondition_frequency": 2}]:
    # The order of eigenvalues changes in the last case.
    shapes = [[5, 5], [3, 3]] if attrs.get("betas") == [0.8, 0.3] else [[4, 4], [2, 2], [3]]
    cases.append(case("soap", attrs, lambda p: pytorch_optimizer.SOAP(p, **attrs), shapes=shapes))
torch.float32 = single
for attrs in [{"lr": 0.1}, {"lr": 0.05, "eps": 0.01, "weight_decay": 0.1}]:
    named = {"matrix_eps": attrs.get("eps", 1e-4), "weight_decouple": True}
    given = {k: v for k, v in attrs.items() if k != "eps"} | named
    cases.append(case("shampoo", attrs, lambda p: pytorch_optimizer.Shampoo(p, **given), shapes=SHAPES[:3]))


for attrs, other in [({"d0": 0.01, "d_coef": 0.1}, {}),
                     ({"d0": 1e-3, "lr": 0.5, "betas": [0.8, 0.9], "weight_decay": 0.1, "use_bias_correction": True,
                       "safeguard_warmup": True, "d_coef": 2.0}, {"weight_decay": 0.0}),
                     ({"d0": 0.02, "betas": [0.0, 0.95], "beta3": 0.7, "eps": 0.1, "weight_decay": 0.2, "decouple": False,
                       "growth_rate": 1.1}, {"eps": 0.01}),
                     ({"d0": 0.02, "d_coef": 0.05, "weight_decay": 0.1}, {"lr": 0.0, "weight_decay": 0.0})]:
    rules = []

    def prodigy(p):
        with contextlib.redirect_stdout(sys.stderr):
            rules.append(prodigyopt.Prodigy([{"params": p[:2]}, {"params": p[2:], **other}], **attrs))
        return rules[0]

    cases.append(case("prodigy", attrs, prodigy) | {"other": other})
    cases[-1]["adapted"] = {k: short(torch.tensor(rules[0].param_groups[0][k]))[0] for k in ["d", "d_max", "d_numerator"]}


def nearest(x, code, absmax_out, codes_out, blocksize):
    """The nearest code, as on a GPU: bitsandbytes' table for CPUs is inexact within 1e-5 of the middle of two codes."""
    rows = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % blocksize)).reshape(-1, blocksize)
    most = rows.abs().amax(1, keepdim=True)
    codes = torch.bucketize(rows / most, (code[1:] + code[:-1]) / 2).flatten()[: x.numel()]
    absmax_out.copy_(most.flatten()), codes_out.copy_(codes.reshape(codes_out.shape))


cpu_ops._quant_blockwise_fp32_direct = nearest
maps = {name: create_dynamic_map(signed=name == "signed").tolist() for name in ["signed", "unsigned"]}
large, small = [torch.nn.Parameter(values(s, k).float()) for k, s in enumerate([[64, 70], [30]])]
eight = bitsandbytes.optim.AdamW8bit([large, small], lr=0.01, weight_decay=0.1)
for t in range(12):
    large.grad, small.grad = [values(p.shape, 1000 * t + k).float() for k, p in enumerate([large, small])]
    eight.step()
state = eight.state[large]
adamw_8bit = {k: state[k].flatten()[::7].tolist() for k in ["state1", "state2"]}
adamw_8bit |= {k: short(state[k]) for k in ["absmax1", "absmax2"]}
adamw_8bit |= {"large": short(large.data.flatten()[::7]), "small": short(small.data)}


def losses_of(function, options, shift):
    """The loss of each call of the closure."""
    a, b = [torch.nn.Parameter(values(s, k) + shift) for k, s in enumerate([[3], [2, 2]])]
    rule, losses = torch.optim.LBFGS([a, b], max_iter=1000, max_eval=10**6, **options), []

    def closure():
        rule.zero_grad()
        if function == "quadratic":
            weights = torch.tensor([[1.0, 10.0], [100.0, 3.0]])
            loss = (weights * (b - 0.5) ** 2).sum() + ((a - b.sum()) ** 2).sum()
        elif function == "quartic":
            loss = ((a - 1) ** 2).sum() + ((b * b - a.sum()) ** 2).sum() + 0.1 * (a**4).sum()
        elif function == "log":
            loss = torch.log(1 + 100 * (torch.cat([a, b.flatten()]) - 2) ** 2).sum()
        else:
            x = torch.cat([a, b.flatten()])
            loss = (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()
        losses.append(loss.item())
        loss.backward()
        return loss

    rule.step(closure)
    return losses


def lbfgs(function, options):
    """The losses before convergence, as long as parameters that differ in the last bits have the same."""
    losses, shifted = [losses_of(function, options, shift) for shift in [0.0, 1e-15]]
    apart = [abs(x - y) > 1e-9 * x or abs(x - losses[-1]) < 1e-6 * x for x, y in zip(losses, shifted)] + [True]
    named = {k: v for k, v in options.items() if k != "line_search_fn"} | {"strong_wolfe": "line_search_fn" in options}
    return {"function": function, "attrs": named, "losses": short(torch.tensor(losses[: apart.index(True)]))}


wolfe = {"line_search_fn": "strong_wolfe"}
lbfgs = [lbfgs(function, options) for function, options in [
    ("quadratic", {"history_size": 10, **wolfe}), ("quadratic", {"history_size": 2, **wolfe}),
    ("quartic", {"history_size": 10, **wolfe}), ("quartic", {"history_size": 3, "lr": 40.0, **wolfe}),
    ("quartic", {"history_size": 5, "lr": 1e-3, **wolfe}), ("rosenbrock", {"history_size": 10, **wolfe}),
    ("log", {"history_size": 10, "lr": 0.01, **wolfe}), ("log", {"history_size": 3, "lr": 40.0, **wolfe}),
    ("rosenbrock", {"history_size": 4, "lr": 0.3, **wolfe}), ("quadratic", {"history_size": 10}),
    ("quartic", {"history_size": 3, "lr": 0.3}), ("rosenbrock", {"history_size": 6, "lr": 0.2}),
]]
out = {"cases": cases, "dynamic_map": maps, "adamw_8bit": adamw_8bit, "lbfgs": lbfgs}
print(json.dumps(out, separators=(",", ":")).replace('{"op"', '\n{"op"').replace(',"dyn', ',\n"dyn').replace(',"adamw_8bit"', ',\n"adamw_8bit"').replace('{"function"', '\n{"function"'))
