"""Random cases in the layout of conformance/goldens, with PyTorch's values: ops, shapes, types, attributes, repeated axes, special values,
gradients and second gradients.

    python3 torch_cases.py OUT --seed 1 --count 2000 [--ops add,conv2d]
    cargo run --release --bin golden -- OUT --views

Needs torch and safetensors. A case with `expand` has inputs that are repeated along axes of size 1; `vN` is what the gradient of input N is
multiplied by, and `gginN` the gradient of the sum of these products.
"""

import argparse, json, math, os, random

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

torch.set_num_threads(1)

FLOATS = [torch.float32, torch.float64]
HALVES = [torch.float16, torch.bfloat16]
INTEGERS = [torch.int32, torch.int64, torch.uint8]
SPECIAL = [math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, -1.0, 1e-40, 1e-6, 60000.0, 1e30, -1e30, 0.5, 1.5, -2.5, 88.8, -104.0]
# Bounds and kinks of functions, drawn with their gradients, and equal values with them: of these functions, and of those of one variable.
EDGES = [0.0, 1.0, -1.0, 3.0, -3.0, 6.0, 0.5, -0.5]
EDGED = {"clamp", "maximum", "minimum", "amax", "amin"}
# Halves: what PyTorch computes in f64 from the same inputs, rounded once; in halves it rounds in between.
# Where PyTorch itself is off: constants of `celu` and `hardsigmoid` are rounded to f32 in the gradients of f64, and the gradient of `batch_norm`
# is wrong where statistics are repeated.
SINGLE = ["celu", "hardsigmoid"]
UNREPEATED = ["sort", "topk", "argmax", "argmin", "max_pool2d", "batch_norm_eval", "layer_norm", "rms_norm", "group_norm", "var", "std"]
TOL = {torch.float32: 2e-5, torch.float64: 1e-11, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Draw:
    """What a case is made of, drawn from one seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.special = False
        self.edges = False
        self.dtype = torch.float32

    def size(self, most=7):
        return self.random.choice([1, 2, 3, 4, 5, 7, 8, 17, 33]) if self.random.random() < 0.15 else self.random.randint(1, most)

    def shape(self, least=0, most=4):
        shape = [self.size() for _ in range(self.random.randint(least, most))]
        if shape and self.random.random() < 0.03:
            shape[self.random.randrange(len(shape))] = 0
        return shape

    def values(self, shape, low=-2.0, high=2.0):
        """Values in a range; integers, for integer types."""
        if self.dtype in INTEGERS:
            return torch.randint(0 if self.dtype == torch.uint8 else -5, 6, shape, generator=self.torch).to(self.dtype)
        x = torch.rand(shape, generator=self.torch, dtype=torch.float64) * (high - low) + low
        if self.special and x.numel():
            chosen = torch.rand(shape, generator=self.torch) < 0.4
            specials = torch.tensor([self.random.choice(SPECIAL) for _ in range(x.numel())], dtype=torch.float64).reshape(shape)
            x = torch.where(chosen, specials, x)
        edges = [edge for edge in EDGES if (low, high) == (-2.0, 2.0) or low <= edge <= high]
        if self.edges and edges and x.numel():
            chosen = torch.rand(shape, generator=self.torch) < 0.4
            x = torch.where(chosen, torch.tensor([self.random.choice(edges) for _ in range(x.numel())], dtype=torch.float64).reshape(shape), x)
        return x.to(self.dtype)

    def index(self, shape, below):
        return torch.randint(0, max(below, 1), shape, generator=self.torch)

    def broadcast(self, shape):
        """A shape that broadcasts to this one."""
        own = [1 if self.random.random() < 0.3 else n for n in shape]
        return own[self.random.randint(0, len(own)) if self.random.random() < 0.3 else 0:]

    def axis(self, rank):
        return self.random.randint(-rank, rank - 1)

    def axes(self, rank):
        return sorted(self.random.sample(range(rank), self.random.randint(1, rank)))

    def flag(self):
        return self.random.random() < 0.5

    def among(self, *choices):
        return self.random.choice(choices)


# An op: which types it takes, and a function that draws (inputs, attributes, inputs with a gradient, the call).
OPS = {}


def op(name, dtypes=FLOATS + HALVES, special=False, second=True):
    def register(draw):
        OPS[name] = (dtypes, special, second, draw)
        return draw

    return register


def pointwise(name, call, low=-2.0, high=2.0, special=True, dtypes=FLOATS + HALVES):
    def draw(d):
        return [d.values(d.shape(), low, high)], {}, [0], call

    OPS[name] = (dtypes, special, True, draw)
    EDGED.add(name)


for name, call in [
    ("neg", torch.neg), ("abs", torch.abs), ("exp", torch.exp), ("expm1", torch.expm1), ("exp2", torch.exp2), ("sin", torch.sin),
    ("cos", torch.cos), ("tanh", torch.tanh), ("sigmoid", torch.sigmoid), ("relu", torch.relu), ("silu", F.silu), ("gelu", F.gelu),
    ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")), ("softplus", F.softplus), ("softsign", F.softsign), ("erf", torch.erf),
    ("square", torch.square), ("selu", F.selu), ("logsigmoid", F.logsigmoid), ("atan", torch.atan), ("sinh", torch.sinh),
    ("cosh", torch.cosh), ("mish", F.mish), ("hardswish", F.hardswish), ("hardsigmoid", F.hardsigmoid), ("relu6", F.relu6), ("hardtanh", F.hardtanh),
    ("tanhshrink", F.tanhshrink),
]:
    # Vectors of PyTorch's overflow where the values themselves do not; its softsign has no limit at infinities.
    pointwise(name, call, special=name not in ("gelu", "sinh", "cosh", "softsign"))
# PyTorch has no second gradient of it at 0.
EDGED.discard("selu")
pointwise("tan", torch.tan, -1.2, 1.2, dtypes=FLOATS)
for name, call in [("log", torch.log), ("log2", torch.log2), ("log10", torch.log10), ("sqrt", torch.sqrt), ("rsqrt", torch.rsqrt)]:
    pointwise(name, call, 0.1, 3.0)
pointwise("log1p", torch.log1p, -0.8, 3.0)
pointwise("recip", torch.reciprocal, 0.2, 3.0)
pointwise("asin", torch.asin, -0.9, 0.9)
pointwise("acos", torch.acos, -0.9, 0.9)
for name, call in [("floor", torch.floor), ("ceil", torch.ceil), ("round", torch.round), ("trunc", torch.trunc), ("sign", torch.sign)]:
    def constant(d, call=call, name=name):
        d.special = d.special and name != "sign"
        return [d.values(d.shape(), -5, 5)], {}, [], call

    OPS[name] = (FLOATS + HALVES, True, False, constant)


def binary(name, call, low=-2.0, high=2.0, grads=True, special=True, dtypes=FLOATS + HALVES, attrs=None):
    def draw(d):
        shape = d.shape()
        shapes = [shape, d.broadcast(shape)]
        d.random.shuffle(shapes)
        more = attrs(d) if attrs and d.dtype not in INTEGERS else {}
        return [d.values(s, low, high) for s in shapes], more, [0, 1] if grads else [], lambda a, b: call(a, b, **more)

    OPS[name] = (dtypes, special, True, draw)


# A multiple of the largest half overflows here, where a product and a difference are two operations.
alpha = lambda d: {"alpha": d.among(2.0, -0.5)} if d.random.random() < 0.3 and not d.special else {}
binary("add", torch.add, dtypes=FLOATS + HALVES + INTEGERS, attrs=alpha)
binary("sub", torch.sub, dtypes=FLOATS + HALVES + [torch.int32, torch.int64], attrs=alpha)
binary("mul", torch.mul, dtypes=FLOATS + HALVES + INTEGERS)
binary("div", torch.div, 0.3, 2.0)
binary("maximum", torch.maximum, dtypes=FLOATS + HALVES + INTEGERS)
binary("minimum", torch.minimum, dtypes=FLOATS + HALVES + INTEGERS)
binary("pow", torch.pow, 0.3, 2.0)
binary("atan2", torch.atan2)
for name in ["eq", "ne", "lt", "le", "gt", "ge"]:
    binary(name, getattr(torch, name), grads=False, dtypes=FLOATS + HALVES + INTEGERS)


@op("pow_scalar")
def _(d):
    exponent = d.among(2.0, 3.0, 0.5, -1.0, 1.0, 0.0)
    return [d.values(d.shape(), 0.2, 2)], {"exponent": exponent}, [0], lambda x: x**exponent


@op("clamp", dtypes=FLOATS + HALVES)
def _(d):
    low, high = sorted([d.among(*EDGES) if d.edges else d.random.uniform(-1, 1) for _ in range(2)])
    attrs = {"min": low, "max": high}
    attrs = {key: attrs[key] for key in d.among(["min"], ["max"], ["min", "max"])}
    return [d.values(d.shape())], attrs, [0], lambda x: x.clamp(**attrs)


@op("where", special=True)
def _(d):
    shape = d.shape()
    condition = d.index(d.broadcast(shape), 2).bool()
    return [condition, d.values(shape), d.values(d.broadcast(shape))], {}, [1, 2], torch.where


@op("lerp")
def _(d):
    shape = d.shape()
    return [d.values(shape) for _ in range(3)], {}, [0, 1, 2], torch.lerp


for name in ["elu", "celu", "leaky_relu"]:
    def activation(d, name=name):
        key = "negative_slope" if name == "leaky_relu" else "alpha"
        attrs = {key: d.random.uniform(0.1, 2)}
        return [d.values(d.shape())], attrs, [0], lambda x: getattr(F, name)(x, **attrs)

    OPS[name] = (FLOATS + HALVES, False, True, activation)


def reduction(name, call, dtypes=FLOATS, special=False):
    def draw(d):
        shape = d.shape(1)
        if name in ("amax", "amin", "logsumexp", "mean"):
            shape = [max(n, 1) for n in shape]
        dims, keep = d.axes(len(shape)), d.flag()
        return [d.values(shape)], {"dims": dims, "keepdim": keep}, [] if d.dtype in INTEGERS else [0], lambda x: call(x, dims, keep)

    OPS[name] = (dtypes, special, True, draw)


reduction("sum", lambda x, dims, keep: x.sum(dims, keepdim=keep), FLOATS + [torch.int64])
reduction("mean", lambda x, dims, keep: x.mean(dims, keepdim=keep))
reduction("amax", lambda x, dims, keep: x.amax(dims, keepdim=keep), FLOATS + HALVES, special=True)
reduction("amin", lambda x, dims, keep: x.amin(dims, keepdim=keep), FLOATS + HALVES, special=True)
reduction("logsumexp", lambda x, dims, keep: x.logsumexp(dims, keepdim=keep))


@op("prod", dtypes=FLOATS)
def _(d):
    shape = d.shape(1, 3)
    dim, keep = d.axis(len(shape)), d.flag()
    return [d.values(shape, 0.5, 1.5)], {"dims": [dim], "keepdim": keep}, [0], lambda x: x.prod(dim, keepdim=keep)


for name in ["var", "std"]:
    def spread(d, name=name):
        # Of two elements the deviation has a second gradient of 0, and PyTorch's is what rounding leaves.
        shape = [n + 2 for n in d.shape(1)]
        dims, correction, keep = d.axes(len(shape)), d.among(0, 1), d.flag()
        call = lambda x: getattr(x, name)(dims, correction=correction, keepdim=keep)
        return [d.values(shape)], {"dims": dims, "correction": correction, "keepdim": keep}, [0], call

    OPS[name] = (FLOATS, False, True, spread)

for name in ["softmax", "log_softmax", "cumsum", "cumprod"]:
    def along(d, name=name):
        shape = d.shape(1)
        dim = d.axis(len(shape))
        x = d.values(shape, 0.5, 1.5) if name == "cumprod" else d.values(shape, -5, 5)
        return [x], {"dim": dim}, [0], lambda x: getattr(torch, name)(x, dim)

    OPS[name] = (FLOATS + (HALVES if "softmax" in name else []), False, True, along)


@op("norm", dtypes=FLOATS)
def _(d):
    shape = [max(n, 1) for n in d.shape(1)]
    dims, p = d.axes(len(shape)), d.among(1.0, 2.0, 3.0)
    return [d.values(shape, 0.1, 2)], {"dims": dims, "p": p}, [0], lambda x: torch.linalg.vector_norm(x, p, dims)


def distinct(d, shape):
    """No ties: where equal elements go is not said."""
    count = math.prod(shape)
    order = torch.randperm(count, generator=d.torch).reshape(shape)
    return order.to(d.dtype) if d.dtype in INTEGERS else (order.to(torch.float64) / 8).to(d.dtype)


@op("sort", dtypes=FLOATS + [torch.int64])
def _(d):
    shape = d.shape(1, 3)
    dim, descending = d.axis(len(shape)), d.flag()
    x = distinct(d, shape)
    return [x], {"dim": dim, "descending": descending}, [0] if x.is_floating_point() else [], lambda x: list(x.sort(dim, descending=descending))


@op("topk", dtypes=FLOATS)
def _(d):
    shape = [max(n, 1) for n in d.shape(1, 3)]
    dim, largest = d.axis(len(shape)), d.flag()
    k = d.random.randint(1, shape[dim])
    return [distinct(d, shape)], {"dim": dim, "k": k, "largest": largest}, [0], lambda x: list(x.topk(k, dim, largest=largest))


for name in ["argmax", "argmin"]:
    def position(d, name=name):
        shape = [max(n, 1) for n in d.shape(1, 3)]
        dim, keep = d.axis(len(shape)), d.flag()
        return [distinct(d, shape)], {"dim": dim, "keepdim": keep}, [], lambda x: getattr(x, name)(dim, keepdim=keep)

    OPS[name] = (FLOATS + [torch.int64], False, False, position)


@op("permute", dtypes=FLOATS + INTEGERS)
def _(d):
    shape = d.shape(1)
    dims = list(range(len(shape)))
    d.random.shuffle(dims)
    return [d.values(shape)], {"dims": dims}, [0], lambda x: x.permute(dims).contiguous()


@op("narrow")
def _(d):
    shape = [max(n, 1) for n in d.shape(1)]
    dim = d.random.randrange(len(shape))
    start = d.random.randrange(shape[dim])
    length = d.random.randint(1, shape[dim] - start)
    return [d.values(shape)], {"dim": dim, "start": start, "len": length}, [0], lambda x: x.narrow(dim, start, length)


@op("slice_step")
def _(d):
    shape = [max(n, 1) for n in d.shape(1)]
    dim, step = d.random.randrange(len(shape)), d.random.randint(1, 3)
    start = d.random.randrange(shape[dim])
    index = [slice(None)] * dim + [slice(start, None, step)]
    return [d.values(shape)], {"dim": dim, "start": start, "step": step}, [0], lambda x: x[tuple(index)]


@op("cat", dtypes=FLOATS + HALVES + INTEGERS)
def _(d):
    shape = d.shape(1)
    dim = d.random.randrange(len(shape))
    xs = [d.values(shape[:dim] + [d.random.randint(0, 4)] + shape[dim + 1:]) for _ in range(d.random.randint(1, 4))]
    return xs, {"dim": dim}, list(range(len(xs))), lambda *xs: torch.cat(xs, dim)


@op("stack")
def _(d):
    shape = d.shape(0, 3)
    dim, count = d.random.randint(0, len(shape)), d.random.randint(1, 3)
    return [d.values(shape) for _ in range(count)], {"dim": dim}, list(range(count)), lambda *xs: torch.stack(xs, dim)


@op("flip", dtypes=FLOATS + HALVES + INTEGERS)
def _(d):
    shape = d.shape(1)
    dims = d.axes(len(shape))
    return [d.values(shape)], {"dims": dims}, [0], lambda x: x.flip(dims)


@op("roll")
def _(d):
    shape = d.shape(1)
    dim, shift = d.random.randrange(len(shape)), d.random.randint(-9, 9)
    return [d.values(shape)], {"dim": dim, "shift": shift}, [0], lambda x: x.roll(shift, dim)


@op("pad")
def _(d):
    shape = d.shape(1)
    pad = [[d.random.randint(0, 3), d.random.randint(0, 3)] for _ in shape]
    value = d.among(0.0, -1.5)
    flat = [n for pair in reversed(pad) for n in pair]
    return [d.values(shape)], {"pad": pad, "value": value}, [0], lambda x: F.pad(x, flat, value=value)


for name in ["tril", "triu"]:
    def triangle(d, name=name):
        shape, k = d.shape(2), d.random.randint(-4, 4)
        return [d.values(shape)], {"k": k}, [0], lambda x: getattr(x, name)(k)

    OPS[name] = (FLOATS + INTEGERS, False, True, triangle)


@op("unfold", dtypes=FLOATS)
def _(d):
    shape = [n + 2 for n in d.shape(1, 3)]
    dim = d.random.randrange(len(shape))
    size, step = d.random.randint(1, shape[dim]), d.random.randint(1, 3)
    return [d.values(shape)], {"dim": dim, "size": size, "step": step}, [0], lambda x: x.unfold(dim, size, step)


@op("index_select")
def _(d):
    shape = [max(n, 1) for n in d.shape(1, 3)]
    dim = d.random.randrange(len(shape))
    index = d.index([d.size()], shape[dim])
    return [d.values(shape), index], {"dim": dim}, [0], lambda x, i: x.index_select(dim, i)


@op("gather", dtypes=FLOATS)
def _(d):
    shape = [max(n, 1) for n in d.shape(1, 3)]
    dim = d.random.randrange(len(shape))
    index = d.index(shape[:dim] + [d.size()] + shape[dim + 1:], shape[dim])
    return [d.values(shape), index], {"dim": dim}, [0], lambda x, i: x.gather(dim, i)


@op("scatter_add", dtypes=FLOATS)
def _(d):
    shape = [max(n, 1) for n in d.shape(1, 3)]
    dim = d.random.randrange(len(shape))
    source = shape[:dim] + [d.size()] + shape[dim + 1:]
    return [d.values(shape), d.index(source, shape[dim]), d.values(source)], {"dim": dim}, [0, 2], lambda x, i, y: x.scatter_add(dim, i, y)


@op("index_add", dtypes=FLOATS)
def _(d):
    shape = [max(n, 1) for n in d.shape(1, 3)]
    dim, count = d.random.randrange(len(shape)), d.size()
    source = shape[:dim] + [count] + shape[dim + 1:]
    return [d.values(shape), d.index([count], shape[dim]), d.values(source)], {"dim": dim}, [0, 2], lambda x, i, y: x.index_add(dim, i, y)


@op("embedding")
def _(d):
    table = [d.size(), d.size()]
    return [d.values(table), d.index(d.shape(1, 2), table[0])], {}, [0], lambda w, i: F.embedding(i, w)


@op("masked_fill", special=True)
def _(d):
    shape = d.shape()
    return [d.values(shape), d.index(d.broadcast(shape), 2).bool()], {"value": -1.5}, [0], lambda x, m: x.masked_fill(m, -1.5)


@op("matmul", dtypes=FLOATS)
def _(d):
    m, k, n = d.size(), d.size(), d.size()
    lead = d.shape(0, 2)
    a, b = d.broadcast(lead) + [m, k], d.broadcast(lead) + [k, n]
    if d.random.random() < 0.15:
        a = [k]
    if d.random.random() < 0.15:
        b = [k]
    return [d.values(a), d.values(b)], {}, [0, 1], torch.matmul


@op("linear", dtypes=FLOATS)
def _(d):
    inputs, outputs = d.size(), d.size()
    x = d.shape(0, 3) + [inputs]
    ins = [d.values(x), d.values([outputs, inputs])] + ([d.values([outputs])] if d.flag() else [])
    return ins, {}, list(range(len(ins))), F.linear


@op("einsum", dtypes=FLOATS)
def _(d):
    sizes = {letter: d.size() for letter in "abcde"}
    equation = d.among("ab,bc->ac", "abc,acd->abd", "abc,adc->abd", "ab,cb->ca", "abcd,abed->abce", "ab,ab->a", "ab,cd->abcd", "aab->ab", "abc->ca", "ab,bc,cd->ad")
    ins = [d.values([sizes[letter] for letter in term]) for term in equation.split("->")[0].split(",")]
    return ins, {"equation": equation}, list(range(len(ins))), lambda *xs: torch.einsum(equation, *xs)


@op("layer_norm", dtypes=FLOATS)
def _(d):
    n = d.size() + 1
    ins = [d.values(d.shape(1, 3) + [n]), d.values([n]), d.values([n])]
    return ins, {"eps": 1e-5}, [0, 1, 2], lambda x, w, b: F.layer_norm(x, [n], w, b, 1e-5)


@op("rms_norm", dtypes=FLOATS)
def _(d):
    n = d.size() + 1
    return [d.values(d.shape(1, 3) + [n]), d.values([n])], {"eps": 1e-6}, [0, 1], lambda x, w: F.rms_norm(x, [n], w, 1e-6)


@op("group_norm", dtypes=FLOATS)
def _(d):
    groups = d.random.randint(1, 4)
    channels = groups * d.random.randint(1, 3)
    ins = [d.values([d.size(), channels, d.size(), d.size() + 1]), d.values([channels]), d.values([channels])]
    return ins, {"groups": groups, "eps": 1e-5}, [0, 1, 2], lambda x, w, b: F.group_norm(x, groups, w, b, 1e-5)


@op("batch_norm_eval", dtypes=FLOATS)
def _(d):
    c = d.size()
    ins = [d.values([d.size(), c, d.size()]), d.values([c]), d.values([c], 0.5, 2), d.values([c]), d.values([c])]
    return ins, {"eps": 1e-5}, [0, 3, 4], lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b, False, 0.1, 1e-5)


@op("attention", dtypes=FLOATS, second=False)
def _(d):
    heads, share, dim, causal = d.random.randint(1, 3), d.random.randint(1, 2), d.among(1, 2, 8, 16, 20), d.flag()
    t = d.size(20)
    q, kv = [d.size(3), heads * share, t, dim], [0, heads, t if causal else d.size(20), dim]
    kv[0] = q[0]
    call = lambda q, k, v: F.scaled_dot_product_attention(
        q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1), is_causal=causal)
    return [d.values(q), d.values(kv), d.values(kv)], {"causal": causal}, [0, 1, 2], call


def convolution(axes):
    def draw(d):
        groups = d.among(1, 1, 2, 3)
        inputs, outputs = groups * d.random.randint(1, 3), groups * d.random.randint(1, 3)
        attrs = {"stride": d.random.randint(1, 3), "padding": d.random.randint(0, 2), "dilation": d.random.randint(1, 2), "groups": groups}
        kernel = [d.random.randint(1, 3) for _ in range(axes)]
        x = [d.size(3), inputs] + [d.size(9) + attrs["dilation"] * (k - 1) for k in kernel]
        ins = [d.values(x), d.values([outputs, inputs // groups] + kernel)] + ([d.values([outputs])] if d.flag() else [])
        call = F.conv1d if axes == 1 else F.conv2d
        return ins, attrs, list(range(len(ins))), lambda x, w, b=None: call(x, w, b, **attrs)

    return draw


OPS["conv1d"] = (FLOATS, False, True, convolution(1))
OPS["conv2d"] = (FLOATS, False, True, convolution(2))


@op("conv_transpose2d", dtypes=FLOATS)
def _(d):
    stride = d.random.randint(1, 3)
    attrs = {"stride": stride, "padding": d.random.randint(0, 1), "output_padding": d.random.randint(0, stride - 1)}
    inputs, outputs = d.random.randint(1, 3), d.random.randint(1, 3)
    ins = [d.values([d.size(3), inputs, d.size(5) + 1, d.size(5) + 1]), d.values([inputs, outputs, 3, 2]), d.values([outputs])]
    return ins, attrs, [0, 1, 2], lambda x, w, b: F.conv_transpose2d(x, w, b, **attrs)


for name in ["max_pool2d", "avg_pool2d"]:
    def pooling(d, name=name):
        kernel, stride = d.random.randint(1, 3), d.random.randint(1, 3)
        padding = d.random.randint(0, kernel // 2)
        shape = [d.size(2), d.size(3), d.size(9) + 2, d.size(9) + 2]
        call = lambda x: getattr(F, name)(x, kernel, stride, padding)
        return [distinct(d, shape)], {"kernel": kernel, "stride": stride, "padding": padding}, [0], call

    OPS[name] = (FLOATS, False, True, pooling)


@op("adaptive_avg_pool2d", dtypes=FLOATS)
def _(d):
    size = [d.random.randint(1, 4), d.random.randint(1, 4)]
    return [d.values([d.size(2), d.size(3), d.size(9), d.size(9)])], {"size": size}, [0], lambda x: F.adaptive_avg_pool2d(x, size)


@op("cross_entropy", dtypes=FLOATS)
def _(d):
    rows, classes = d.size(), d.size() + 1
    attrs = {"reduction": d.among("mean", "sum", "none"), "label_smoothing": d.among(0.0, 0.1), "ignore_index": d.among(-100, 0)}
    target = d.index([rows], classes)
    target[0] = classes - 1
    return [d.values([rows, classes], -4, 4), target], attrs, [0], lambda x, y: F.cross_entropy(x, y, **attrs)


@op("linear_cross_entropy", dtypes=FLOATS)
def _(d):
    features, classes = d.size(), d.size() + 1
    rows = [max(n, 1) for n in d.shape(1, 3)]
    attrs = {"reduction": d.among("mean", "sum", "none"), "label_smoothing": d.among(0.0, 0.1), "ignore_index": d.among(-100, 0)}
    target = d.index(rows, classes)
    target.view(-1)[0] = classes - 1
    bias = [d.values([classes])] if d.flag() else []
    ins = [d.values(rows + [features]), d.values([classes, features])] + bias + [target]

    def call(x, w, *rest):
        losses = F.cross_entropy(F.linear(x, w, *rest[:-1]).flatten(0, -2), rest[-1].flatten(), **attrs)
        return losses.view(rest[-1].shape) if attrs["reduction"] == "none" else losses

    # Few rows at a time here, which PyTorch does not ask about.
    return ins, attrs | {"chunk": d.random.randint(1, 5)}, list(range(len(ins) - 1)), call


for name, call, low, high in [("mse", F.mse_loss, -2, 2), ("l1", F.l1_loss, -2, 2), ("bce_with_logits", F.binary_cross_entropy_with_logits, 0.1, 0.9)]:
    def loss(d, call=call, low=low, high=high):
        shape, attrs = [max(n, 1) for n in d.shape(1, 3)], {"reduction": d.among("mean", "sum", "none")}
        return [d.values(shape), d.values(shape, low, high)], attrs, [0], lambda x, y: call(x, y, **attrs)

    OPS[name] = (FLOATS, False, True, loss)
for name, call, key in [("smooth_l1", F.smooth_l1_loss, "beta"), ("huber", F.huber_loss, "delta")]:
    def bent(d, call=call, key=key):
        shape, attrs = [max(n, 1) for n in d.shape(1, 3)], {key: d.random.uniform(0.2, 1.5), "reduction": d.among("mean", "sum")}
        return [d.values(shape), d.values(shape)], attrs, [0, 1], lambda x, y: call(x, y, **attrs)

    OPS[name] = (FLOATS, False, True, bent)


def repeated(d, ins):
    """Makes some floating inputs repeat one element along an axis; gives their shapes."""
    expand = {}
    for i, x in enumerate(ins):
        wide = [axis for axis, n in enumerate(x.shape) if n > 1]
        if x.is_floating_point() and wide and d.random.random() < 0.2:
            expand[str(i)] = list(x.shape)
            ins[i] = x.narrow(d.random.choice(wide), 0, 1).contiguous()
    return expand


def case(name, seed):
    """The entry of one case, and its tensors."""
    dtypes, special, second, draw = OPS[name]
    d = Draw(seed)
    d.dtype = d.random.choice([dtype for dtype in dtypes if dtype != torch.float64 or name not in SINGLE])
    floats = d.dtype not in INTEGERS
    d.special = special and floats and d.random.random() < 0.25
    d.edges = name in EDGED and floats and not d.special and d.random.random() < 0.4
    ins, attrs, grads, call = draw(d)
    grads = grads if floats and not d.special else []
    # Gradients of halves are rounded before those of one repeated element are added up.
    expand = {} if name in UNREPEATED or d.dtype in HALVES else repeated(d, ins)
    wide = lambda x: x.double() if x.dtype in HALVES else x.clone()
    rounded = lambda x: x.detach().to(d.dtype) if x.dtype == torch.float64 else x.detach()
    leaves = [wide(x).requires_grad_(i in grads) for i, x in enumerate(ins)]
    seen = [x.expand(expand[str(i)]) if str(i) in expand else x for i, x in enumerate(leaves)]
    outs = call(*seen)
    outs = outs if isinstance(outs, list) else [outs]
    tensors = {f"in{i}": x for i, x in enumerate(ins)} | {f"out{k}": rounded(out) for k, out in enumerate(outs)}
    if grads and all(outs[0].shape[axis] > 0 for axis in range(outs[0].dim())):
        differentiable = [(k, out) for k, out in enumerate(outs) if out.requires_grad]
        seeds = [d.values(list(out.shape)) for _, out in differentiable]
        inner = [leaves[i] for i in grads]
        twice = second and d.dtype in FLOATS and d.random.random() < 0.6
        found = torch.autograd.grad([out for _, out in differentiable], inner, [wide(seed) for seed in seeds], create_graph=twice, allow_unused=True)
        tensors |= {f"gout{k}": seed for (k, _), seed in zip(differentiable, seeds)}
        grads = [i for i, gradient in zip(grads, found) if gradient is not None]
        found = [gradient for gradient in found if gradient is not None]
        tensors |= {f"gin{i}": rounded(gradient) for i, gradient in zip(grads, found)}
        if twice and any(gradient.requires_grad for gradient in found):
            weights = [d.values(list(gradient.shape)) for gradient in found]
            total = sum((gradient * weight).sum() for gradient, weight in zip(found, weights))
            try:
                again = torch.autograd.grad(total, [leaves[i] for i in grads], allow_unused=True)
            except RuntimeError as error:
                # PyTorch has no second gradient of a few ops.
                if "not implemented" not in str(error):
                    raise
                weights, again = [], []
            tensors |= {f"v{i}": weight for i, weight in zip(grads, weights)}
            tensors |= {f"ggin{i}": torch.zeros_like(leaves[i]) if g is None else g for i, g in zip(grads, again)}
    else:
        grads = []
    tol = TOL.get(d.dtype, 0.0) * (20 if name.endswith("_norm") else 1) * (20 if any(key.startswith("ggin") for key in tensors) else 1)
    entry = {"id": f"{seed}.{name}", "op": name, "attrs": attrs, "inputs": len(ins), "outputs": len(outs), "grads": grads, "tol": tol}
    return entry | ({"expand": expand} if expand else {}), tensors


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("out")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--count", type=int, default=2000)
    options.add_argument("--ops", help="of these ops alone")
    options = options.parse_args()
    names = options.ops.split(",") if options.ops else sorted(OPS)
    cases, tensors = [], {}
    for k in range(options.count):
        entry, own = case(names[k % len(names)], options.seed * 1_000_000 + k)
        cases.append(entry)
        tensors |= {f"{entry['id']}/{name}": x.contiguous().clone() for name, x in own.items()}
    os.makedirs(options.out, exist_ok=True)
    save_file(tensors, os.path.join(options.out, "random.safetensors"))
    with open(os.path.join(options.out, "random.json"), "w") as file:
        json.dump({"group": "random", "torch": torch.__version__, "seed": options.seed, "cases": cases}, file)
    print(f"{len(cases)} cases of {len(names)} ops, torch {torch.__version__}")


if __name__ == "__main__":
    main()
