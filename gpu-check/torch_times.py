#!/usr/bin/env python3
"""Times PyTorch, eager and compiled, on the cases of weftgrad-gpu-check, which runs it; writes JSON anew after every row.

    python3 torch_times.py [--out torch.json] [--device cuda] [--seconds S] "gemm 256 256 256" "softmax 256 256" ..
"""

import argparse
import json
import os
import signal
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

ROUNDS = 5
ENOUGH = 0.03
# Clocks of an idle GPU are low, and rise while it works.
WARM = 0.3
# In place of a mode of torch.compile: nothing is compiled, and the whole step is a CUDA graph.
CAPTURED = "captured"


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(self.norm1(x)).split(c, dim=2))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, vocab, context, layers, heads, width, tied):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x):
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.f1, self.f2 = nn.Linear(64 * 12 * 12, 128), nn.Linear(128, 10)

    def forward(self, x):
        h = F.max_pool2d(F.relu(self.c2(F.relu(self.c1(x)))), 2)
        return self.f2(F.relu(self.f1(h.flatten(1))))


class Cases:
    """Every method makes a function that does one unit of work on data it keeps."""

    def __init__(self, device, mode):
        self.device, self.mode = device, mode

    def normal(self, *shape, dtype=torch.float32):
        return torch.randn(*shape, device=self.device, dtype=dtype)

    def classes(self, limit, *shape):
        return torch.randint(limit, shape, device=self.device)

    def maybe_compiled(self, f):
        return f if self.mode in (None, CAPTURED) else torch.compile(f, mode=self.mode)

    def forward_backward(self, f, *leaves):
        f = self.maybe_compiled(f)
        g = torch.randn_like(f(*leaves))
        return lambda: torch.autograd.grad(f(*leaves), leaves, g)

    def step(self, model, loss_of):
        if self.mode == CAPTURED:
            return self.captured_step(model, loss_of)
        model = model.to(self.device)
        # With its loss: what follows the last layer is compiled with it.
        loss_of = self.maybe_compiled(loss_of)
        run = model
        fused = self.device != "cpu"
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-2, fused=fused)

        def step():
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(run)
            loss.backward()
            optimizer.step()
            return loss.item()

        for _ in range(3):
            step()
        return step

    def captured_step(self, model, loss_of):
        """The step, optimizer included, in a CUDA graph."""
        model = model.to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-2, fused=True, capturable=True)

        def work():
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            return loss

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = work()

        def step():
            graph.replay()
            return loss.item()

        return step

    def gpt_step(self, batch, dtype, **size):
        tokens = self.classes(size["vocab"], batch, size["context"] + 1)
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].reshape(-1)
        model = Gpt(**size).to(dtype)
        return self.step(model, lambda m: F.cross_entropy(m(x).float().flatten(0, 1), y))

    def build(self, name, n):
        gemms = {"gemm": torch.float32, "gemmbf16": torch.bfloat16, "gemmf16": torch.float16}
        plain = {"exp": torch.exp, "tanh": torch.tanh, "gelu": F.gelu}
        if name in gemms:
            a, b = self.normal(n[0], n[1], dtype=gemms[name]), self.normal(n[1], n[2], dtype=gemms[name])
            out = a @ b
            return lambda: torch.matmul(a, b, out=out)
        if name == "copy":
            x = self.normal(*n)
            out = torch.empty_like(x)
            return lambda: out.copy_(x)
        if name == "add":
            a, b = self.normal(*n), self.normal(*n)
            out = torch.empty_like(a)
            return lambda: torch.add(a, b, out=out)
        if name in plain:
            x, f = self.normal(*n), self.maybe_compiled(plain[name])
            return lambda: f(x)
        if name == "sum":
            x, f = self.normal(*n), self.maybe_compiled(torch.sum)
            return lambda: f(x)
        if name in ("gemmbf16nt", "gemmbf16tn"):
            a, b = (self.normal(n[0], n[1], dtype=torch.bfloat16), self.normal(n[1], n[2], dtype=torch.bfloat16))
            if name.endswith("tn"):
                a = a.t().contiguous().t()
            else:
                b = b.t().contiguous().t()
            out = a @ b
            return lambda: torch.matmul(a, b, out=out)
        if name in ("colsum", "colsumbf16"):
            x = self.normal(*n, dtype=torch.bfloat16 if "bf16" in name else torch.float32)
            f = self.maybe_compiled(lambda x: x.sum(0))
            return lambda: f(x)
        if name in ("linearbf16", "linearbf16fb"):
            shapes = [(n[0], n[1]), (n[2], n[1]), (n[2],), (n[0], n[2])]
            x, w, b, r = (self.normal(*s, dtype=torch.bfloat16).requires_grad_(name.endswith("fb")) for s in shapes)
            f = lambda x, w, b, r: F.linear(x, w, b) + r
            if name.endswith("fb"):
                return self.forward_backward(f, x, w, b, r)
            f = self.maybe_compiled(f)
            return lambda: f(x, w, b, r)
        if name == "softmaxbf16":
            x, f = self.normal(*n, dtype=torch.bfloat16), self.maybe_compiled(lambda x: F.softmax(x, -1))
            return lambda: f(x)
        if name == "layernormbf16fb":
            x = self.normal(*n, dtype=torch.bfloat16).requires_grad_()
            w, b = (t.to(torch.bfloat16).requires_grad_() for t in (x.new_ones(n[1]), x.new_zeros(n[1])))
            return self.forward_backward(lambda x, w, b: F.layer_norm(x, (n[1],), w, b), x, w, b)
        if name == "xentbf16fb":
            x, y = self.normal(*n, dtype=torch.bfloat16).requires_grad_(), self.classes(n[1], n[0])
            return self.forward_backward(lambda x: F.cross_entropy(x.float(), y), x)
        if name == "softmax":
            x, f = self.normal(*n), self.maybe_compiled(lambda x: F.softmax(x, -1))
            return lambda: f(x)
        if name in ("layernorm", "layernormfb"):
            x = self.normal(*n).requires_grad_(name.endswith("fb"))
            w, b = torch.ones(n[1], device=self.device), torch.zeros(n[1], device=self.device)
            if name.endswith("fb"):
                f = lambda x, w, b: F.layer_norm(x, (n[1],), w, b)
                return self.forward_backward(f, x, w.requires_grad_(), b.requires_grad_())
            f = self.maybe_compiled(lambda x: F.layer_norm(x, (n[1],), w, b))
            return lambda: f(x)
        if name == "rmsnormfb":
            x, w = self.normal(*n).requires_grad_(), torch.ones(n[1], device=self.device).requires_grad_()
            return self.forward_backward(lambda x, w: F.rms_norm(x, (n[1],), w), x, w)
        if name == "xentfb":
            x, y = self.normal(*n).requires_grad_(), self.classes(n[1], n[0])
            return self.forward_backward(lambda x: F.cross_entropy(x, y), x)
        if name == "emb":
            table, ids = self.normal(n[0], n[1]), self.classes(n[0], n[2])
            return lambda: F.embedding(ids, table)
        if name in ("attn", "attnfb", "attnbf16", "attnbf16fb"):
            dtype = torch.bfloat16 if "bf16" in name else torch.float32
            q, k, v = (self.normal(*n, dtype=dtype).requires_grad_(name.endswith("fb")) for _ in range(3))
            f = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
            if name.endswith("fb"):
                return self.forward_backward(f, q, k, v)
            return lambda: f(q, k, v)
        if name == "adamw":
            leaves = [nn.Parameter(self.normal(n[0] // 16)) for _ in range(16)]
            for p in leaves:
                p.grad = self.normal(n[0] // 16) * 1e-3
            optimizer = torch.optim.AdamW(leaves, lr=1e-3, weight_decay=1e-2, fused=self.device != "cpu")
            return optimizer.step
        if name == "tinyadd":
            a, b = self.normal(4).requires_grad_(), self.normal(4).requires_grad_()
            return lambda: [a + b for _ in range(1000)]
        if name == "chain":
            a, b = self.normal(4).requires_grad_(), self.normal(4)

            def chain():
                x = a
                for _ in range(1000):
                    x = x + b
                return torch.autograd.grad(x.sum(), a)

            return chain
        if name == "mlp":
            model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
            x, y = self.normal(128, 784), self.classes(10, 128)
            return self.step(model, lambda m: F.cross_entropy(m(x), y))
        if name == "cnn":
            x, y = self.normal(64, 1, 28, 28), self.classes(10, 64)
            return self.step(Cnn(), lambda m: F.cross_entropy(m(x), y))
        if name == "gpttinybf16":
            return self.gpt_step(2, torch.bfloat16, vocab=61, context=16, layers=2, heads=2, width=32, tied=False)
        if name in ("gpt", "gptbf16"):
            dtype = torch.bfloat16 if name == "gptbf16" else torch.float32
            return self.gpt_step(8, dtype, vocab=256, context=256, layers=6, heads=6, width=384, tied=False)
        if name == "gpt2":
            size = dict(vocab=50257, context=n[1], layers=12, heads=12, width=768, tied=True)
            return self.gpt_step(n[0], torch.bfloat16, **size)
        raise SystemExit(f"no case {name}")


# Nothing to compile: a library's call, or the optimizer's own kernel.
EAGER_ONLY = {"attnbf16", "copy", "add", "gemm", "gemmbf16", "gemmbf16nt", "gemmbf16tn", "gemmf16", "emb", "attn", "adamw", "tinyadd", "chain"}


def per_call(run, finish):
    """Seconds per call: repeated until enough time has passed for the clock, the device's queue included."""

    def timed(repeats):
        start = time.perf_counter()
        last = None
        for _ in range(repeats):
            last = run()
        finish()
        return time.perf_counter() - start, last

    once, _ = timed(1)
    repeats = max(1, int(ENOUGH / max(once, 1e-9)))
    total, last = timed(repeats)
    return total / repeats, last if isinstance(last, float) else None


# Ways to run a case, and the mode of torch.compile.
WAYS = {
    "eager": None,
    "compiled": "default",
    "compiled, CUDA graphs": "reduce-overhead",
    "captured": CAPTURED,
    "compiled, autotuned": "max-autotune-no-cudagraphs",
}


def plan_of(cases):
    """Rows in order: GPT-2 eager and compiled, every case eager, training steps as CUDA graphs, all compiled, which takes long, GPT-2 autotuned."""
    compiles = [c for c in cases if c.split()[0] not in EAGER_ONLY]
    first = [c for c in cases if c.split()[0] == "gpt2"][:1]
    plan = [(c, how) for c in first for how in ["eager", "compiled"]] + [(c, "eager") for c in cases]
    steps = first + [c for c in cases if c in ("gptbf16", "mlp")]
    plan += [(c, how) for c in steps for how in ["captured", "compiled, CUDA graphs"]] + [(c, "compiled") for c in compiles]
    plan += [(c, "compiled, autotuned") for c in first]
    return list(dict.fromkeys(plan))


def measure(case, how, device, finish):
    """A row: milliseconds per call, and the last loss."""
    words = case.split()
    run = Cases(device, WAYS[how]).build(words[0], [int(w) for w in words[1:]])
    begun = time.perf_counter()
    while time.perf_counter() - begun < WARM:
        per_call(run, finish)
    seconds, losses = zip(*(per_call(run, finish) for _ in range(ROUNDS)))
    times = sorted(s * 1e3 for s in seconds)
    return {"case": case, "how": how, "min_ms": times[0], "median_ms": statistics.median(times), "loss": losses[-1]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="torch.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after this time")
    parser.add_argument("cases", nargs="+")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    # The program that runs this ends it by a signal; a case that hangs must not outlive it.
    if args.seconds < float("inf"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, args.seconds)
    cuda = args.device.startswith("cuda")
    finish = torch.cuda.synchronize if cuda else lambda: None
    name = torch.cuda.get_device_name() if cuda else "cpu"
    machine = {"framework": "torch", "version": torch.__version__, "device": args.device, "name": name}
    machine |= {"cudnn": torch.backends.cudnn.version(), "cudnn attention": torch.backends.cuda.cudnn_sdp_enabled()}
    plan = plan_of(args.cases)
    rows = []
    for case, how in plan:
        if time.monotonic() > end:
            break
        try:
            row = measure(case, how, args.device, finish)
            print(f"{case:28} {how:9} {row['min_ms']:12.4f} {row['median_ms']:12.4f} ms", flush=True)
        except Exception as e:  # A case that fails must not end the others.
            row = {"case": case, "how": how, "failure": str(e)}
            print(f"{case:28} {how:9} failed: {e}", flush=True)
        rows.append(row)
        with open(args.out + ".part", "w") as file:
            json.dump({"machine": machine, "cases": rows}, file, indent=2)
        os.replace(args.out + ".part", args.out)
        torch._dynamo.reset()
        if cuda:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
