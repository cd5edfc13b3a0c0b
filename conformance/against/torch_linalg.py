"""Linear algebra with PyTorch's values and gradients: python3 torch_linalg.py > linalg/tests/all/reference.json. Needs torch.

Element i of input k is sin(1.3 i + 0.7 k + 0.5), matrices of rank 3 have 2 added on the diagonal. Signs of vectors are free, so
their squares are compared. An output is summed with the weights of input 9. Numbers are f64, to 13 digits.
"""

import json, torch
from torch import linalg as L

torch.set_default_dtype(torch.float64)


def made(k, *shape):
    n = torch.arange(torch.tensor(shape).prod().item(), dtype=torch.float64)
    x = torch.sin(1.3 * n + 0.7 * k + 0.5).reshape(shape)
    return (x + 2 * torch.eye(*shape[-2:]) if min(shape[-2:]) == 3 else x).requires_grad_()


def definite(x):
    return x @ x.mT + torch.eye(3)


a, b, wide, tall = made(0, 2, 3, 3), made(1, 2, 3, 2), made(0, 2, 3, 4), made(1, 2, 4, 3)
out = {}


def case(name, f, *inputs):
    y = f(*inputs)
    weights = torch.sin(1.3 * torch.arange(y.numel()) + 0.7 * 9 + 0.5).reshape(y.shape)
    g = torch.autograd.grad((y * weights).sum(), inputs)
    short = lambda x: [float(f"{v:.13g}") for v in x.flatten().tolist()]
    out[name] = {"out": short(y), "gradients": [short(x) for x in g]}


case("solve", L.solve, a, b)
case("solve_upper", lambda a, b: L.solve_triangular(a, b, upper=True), a, b)
case("solve_lower", lambda a, b: L.solve_triangular(a, b, upper=False), a, b)
case("solve_unit", lambda a, b: L.solve_triangular(a, b, upper=False, unitriangular=True), a, b)
case("inverse", L.inv, a)
case("det", L.det, a)
case("slogdet", lambda a: L.slogdet(a)[1], a)
case("cholesky", lambda a: L.cholesky(definite(a)), a)
for name, x in [("square", a), ("tall", tall)]:
    case(f"qr_q_{name}", lambda a: L.qr(a)[0] ** 2, x)
    case(f"qr_r_{name}", lambda a: L.qr(a)[1] ** 2, x)
for name, x in [("square", a), ("wide", wide), ("tall", tall)]:
    case(f"svd_u_{name}", lambda a: L.svd(a, full_matrices=False)[0] ** 2, x)
    case(f"svd_v_{name}", lambda a: L.svd(a, full_matrices=False)[2] ** 2, x)
    case(f"svdvals_{name}", L.svdvals, x)
    for norm in ["fro", "nuc", 1, 2, float("inf")]:
        case(f"norm_{norm}_{name}", lambda a: L.matrix_norm(a, norm), x)
case("eigvalsh", lambda a: L.eigvalsh(definite(a)), a)
case("eigh_vectors", lambda a: L.eigh(definite(a))[1] ** 2, a)
for p in [0.5, 1, 2, 3, float("inf"), float("-inf")]:
    case(f"vector_norm_{p}", lambda a: L.vector_norm(a, p, dim=(0, 2)), wide)
print(json.dumps(out, indent=0))
