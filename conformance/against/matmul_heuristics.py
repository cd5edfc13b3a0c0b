#!/usr/bin/env python3
"""Rank the products of a GPT-2 step by NVIDIA's model of GEMM times, without a GPU.

    pip install nvidia-matmul-heuristics
    python3 matmul_heuristics.py [H100_SXM]

Each product is row-major, `[m, k] x [k, n]`, bf16 with sums in f32. Times are of the model's fastest kernel, relative
to 8192^3; they rank shapes, and are not those of cuBLASLt.
"""
import sys

from nvMatmulHeuristics import (
    NvMatmulHeuristicsInterfaceEx as Model,
    NvMatmulHeuristicsFlags as Flags,
    NvMatmulHeuristicsMatmulLayout as Layout,
    NvMatmulHeuristicsNvidiaGpu as Gpu,
    NvMatmulHeuristicsTarget as Target,
)

ROWS, WIDTH, WORDS, LAYERS = 16 * 1024, 768, 50256, 12
CHUNK = 4096

# (name, m, n, k, calls a step, layout): forward NT (weights are [n, k]), of the input NN, of the weight TN.
PRODUCTS = [("8192 cubed", 8192, 8192, 8192, 0, Layout.NN_ROW_MAJOR)]
for name, out, into in [("qkv", 3 * WIDTH, WIDTH), ("merged heads", WIDTH, WIDTH),
                        ("first of the MLP", 4 * WIDTH, WIDTH), ("second of the MLP", WIDTH, 4 * WIDTH)]:
    PRODUCTS += [(name, ROWS, out, into, LAYERS, Layout.NT_ROW_MAJOR),
                 (f"{name}: input's gradient", ROWS, into, out, LAYERS, Layout.NN_ROW_MAJOR),
                 (f"{name}: weight's gradient", out, into, ROWS, LAYERS, Layout.TN_ROW_MAJOR)]
for rows in (1024, CHUNK, 8192, ROWS):
    calls = ROWS // rows
    PRODUCTS += [(f"logits, {rows} rows", rows, WORDS, WIDTH, calls, Layout.NT_ROW_MAJOR),
                 (f"logits, {rows} rows: input's gradient", rows, WIDTH, WORDS, calls, Layout.NN_ROW_MAJOR),
                 (f"logits, {rows} rows: weight's gradient", WORDS, WIDTH, rows, calls, Layout.TN_ROW_MAJOR)]


def main():
    gpu = Gpu[sys.argv[1] if len(sys.argv) > 1 else "H100_SXM"]
    model = Model(Target.GENERIC, flags=Flags.PERF_MODEL_BASED_AUTO_TUNING, gpu=gpu)
    print(f"{gpu.name}; bf16\n| product | m, n, k | TFLOP/s of the model | over 8192 cubed | tile, split of k |\n|---|---|---|---|---|")
    best, sums = None, {}
    for name, m, n, k, calls, layout in PRODUCTS:
        problem = model.makeNvMatmulHeuristicsProblem(m, n, k, layout)
        found = sorted(model.get(problem, 8, precision="TST"), key=lambda f: f["runtime"])
        rate = 2 * m * n * k / found[0]["runtime"] / 1e12
        best = best or rate
        of = name.split(":")[0] if name.startswith("logits") else "blocks"
        sums[of] = sums.get(of, 0) + calls * found[0]["runtime"] * 1e3
        kernel = found[0]["kernel"]
        tile = f"{kernel.cta_tile_m}x{kernel.cta_tile_n}x{kernel.cta_tile_k}, {kernel.split_k}"
        print(f"| {name} | {m}, {n}, {k} | {rate:.0f} | {rate / best:.2f} | {tile} |")
    print("\nmilliseconds a step: " + ", ".join(f"{of} {ms:.2f}" for of, ms in sums.items()))


main()
