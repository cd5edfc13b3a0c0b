#!/usr/bin/env python3
"""Attention by programs of scores and masks beside PyTorch's compiled FlexAttention on a CPU, both sides asked in turn.

    python3 -m venv V && V/bin/pip install torch
    cargo build --release -p weftgrad-bench
    V/bin/python bench/attention/compare.py --bin target/release/weftgrad-bench [--threads 2] [--rounds 5] [--sizes "1 8 4096 64"] [CASE ...]

A case is one of weftgrad-bench's, without sizes: `attn` and `attnfull` are compared with SDPA, others with FlexAttention. With `fb` at its end
the gradients of queries, keys and values are computed too, by FlexAttention if it has them on CPUs. Ratios are PyTorch's time over ours,
medians of the rounds' ratios. Nothing else should run.
"""

import argparse
import os
import statistics
import subprocess
import time

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

NAMES = ["attn", "attnfull", "attnprogram", "attndocs", "attnalibi", "attncap"]
parser = argparse.ArgumentParser()
parser.add_argument("--bin", required=True)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--sizes", default="1 8 4096 64")
parser.add_argument("cases", nargs="*", default=[name + end for name in NAMES for end in ("", "fb")])
args = parser.parse_args()
torch.set_num_threads(args.threads)
B, H, T, D = map(int, args.sizes.split())
inputs = [torch.randn(B, H, T, D) for _ in range(3)]
leaves = [x.clone().requires_grad_() for x in inputs]
upstream = torch.randn(B, H, T, D)
compiled = torch.compile(flex_attention)


def flex(mask, score=None):
    blocks = create_block_mask(mask, None, None, T, T, device="cpu")
    return lambda q, k, v: compiled(q, k, v, score_mod=score, block_mask=blocks)


def causal(b, h, i, j):
    return i >= j


ATTENTION = {
    "attn": lambda: lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
    "attnfull": lambda: scaled_dot_product_attention,
    "attnprogram": lambda: flex(causal),
    "attndocs": lambda: flex(lambda b, h, i, j: i // (T // 8) == j // (T // 8)),
    "attnalibi": lambda: flex(causal, lambda s, b, h, i, j: s + (j - i) * 0.01),
    "attncap": lambda: flex(causal, lambda s, b, h, i, j: torch.tanh(s * 0.05) * 20.0),
}


def call(case):
    """PyTorch's call of a case, or the reason why there is none."""
    attend = ATTENTION[case.removesuffix("fb")]()

    def forward():
        with torch.no_grad():
            attend(*inputs)

    def both():
        for x in leaves:
            x.grad = None
        attend(*leaves).backward(upstream)

    run = both if case.endswith("fb") else forward
    torch.compiler.reset()
    try:
        for _ in range(3):
            run()
    except Exception as error:
        return str(error).strip().split('.')[0]
    return run


environment = dict(os.environ, OMP_NUM_THREADS=str(args.threads))
serve = [args.bin, "serve", "--threads", str(args.threads)]
process = subprocess.Popen(serve, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ask(case):
    process.stdin.write(f"{case} {args.sizes}\n")
    process.stdin.flush()
    return float(process.stdout.readline().split()[0]) / 1e6


def timed(run):
    start = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - start) / 1e6


def shown(times):
    return f"{statistics.median(times):.1f} ({min(times):.1f})"


print(f"PyTorch {torch.__version__}, {args.threads} threads, B H T D = {args.sizes}; medians, the fastest in parentheses, in ms")
print(f"{'':16s} {'weftgrad':>18s} {'PyTorch':>18s}  ratio")
for case in args.cases:
    theirs = call(case)
    ask(case)
    rounds = [(ask(case), timed(theirs) if callable(theirs) else None) for _ in range(args.rounds)]
    ours = shown([a for a, _ in rounds])
    if callable(theirs):
        ratio = statistics.median(b / a for a, b in rounds)
        print(f"{case:16s} {ours:>18s} {shown([b for _, b in rounds]):>18s}  x {ratio:.2f}", flush=True)
    else:
        print(f"{case:16s} {ours:>18s}  none: {theirs}", flush=True)
process.stdin.close()
process.wait()
