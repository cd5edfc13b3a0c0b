#!/usr/bin/env python3
"""Loading, decoding and LoRA beside transformers and peft on one machine: a random GPT-2 of 124 M parameters, both sides asked in turn.

    python3 -m venv V && V/bin/pip install torch transformers peft
    cargo build --release -p weftgrad-bench
    V/bin/python bench/pretrained/compare.py --bin target/release/pretrained [--threads 2] [--rounds 5] [--folder FOLDER]

Both sides read the same folder, continue the same tokens greedily and train the same adapter on the same texts; the program ends with an error
if what they compute differs. Ratios are transformers' time over ours, medians of the rounds' ratios. Nothing else should run.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile

PROMPT, NEW, ROWS, TOKENS = 16, 128, 4, 128
parser = argparse.ArgumentParser()
parser.add_argument("--bin", required=True)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--folder", default=os.path.join(tempfile.gettempdir(), "weftgrad-bench-gpt2"))
parser.add_argument("--layers", type=int, default=12)
args = parser.parse_args()
HERE = os.path.dirname(os.path.abspath(__file__))


def make():
    import peft
    import torch
    import transformers
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=args.layers, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    with torch.no_grad():
        # The continuation of a model drawn by the default is one token again and again.
        for p in model.parameters():
            p.mul_(3.0) if p.dim() == 2 else None
    model.save_pretrained(args.folder)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained(os.path.join(args.folder, "adapter"))
    path = os.path.join(args.folder, "generation_config.json")
    os.path.exists(path) and os.remove(path)


class Worker:
    def __init__(self, command, greets):
        environment = dict(os.environ, OMP_NUM_THREADS=str(args.threads), MKL_NUM_THREADS=str(args.threads))
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        greets and self.process.stdout.readline()

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        number, _, rest = self.process.stdout.readline().strip().partition(" ")
        if number in ("", "nan"):
            sys.exit(f"{line}: {rest or 'a worker ended'}")
        return float(number), rest

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def workers():
    theirs = Worker([sys.executable, os.path.join(HERE, "worker.py"), args.folder, str(args.threads)], True)
    return theirs, Worker([args.bin, args.folder, "--threads", str(args.threads)], False)


def rounds(line, same):
    """The times of both sides, after a round that warms up; what they computed is compared in each."""
    times = []
    for number in range(args.rounds + 1):
        (theirs, a), (ours, b) = transformers_side.ask(line), ours_side.ask(line)
        same(a, b) or sys.exit(f"{line}: transformers computes {a[:200]}, weftgrad {b[:200]}")
        number and times.append((theirs, ours))
    theirs, ours = (statistics.median(t) / 1e6 for t in zip(*times))
    ratio = statistics.median(a / b for a, b in times)
    print(f"{line:16s} {theirs:10.2f} ms {ours:10.2f} ms   x {ratio:.2f}", flush=True)
    return ours


os.path.exists(os.path.join(args.folder, "config.json")) or make()
processor = next((l.split(":", 1)[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), platform.processor())
print(f"{processor}, {os.cpu_count()} processors, {args.threads} threads; {platform.platform()}")
transformers_side, ours_side = workers()
near = lambda a, b: abs(float(a) - float(b)) <= 2e-3 * max(1.0, abs(float(a)))
equal = lambda a, b: a == b
print(f"{'':16s} {'transformers':>13s} {'weftgrad':>13s}")
parameters = int(ours_side.ask("load")[1])
rounds("load", lambda a, b: int(a) == int(b))
decode = rounds(f"decode {PROMPT} {NEW}", equal)
read = rounds(f"read {parameters}", near)
print(f"decoding reads {4 * parameters / decode / 1e6:.1f} GB/s of weights, {read / decode:.0%} of what a sum of as many numbers reads")
rounds(f"lora {ROWS} {TOKENS}", near)
transformers_side.end(), ours_side.end()
transformers_side, ours_side = workers()
for _ in range(3):
    transformers_side.ask(f"lora {ROWS} {TOKENS}"), ours_side.ask(f"lora {ROWS} {TOKENS}")
theirs, (ours, account) = transformers_side.ask("rss")[0], ours_side.ask("rss")
print(f"LoRA, peak resident MiB: transformers {theirs / 1024:.0f}, weftgrad {ours / 1024:.0f} (in its account {int(account) / 1024:.0f})")
ours_side.end()
ours_side = workers()[1]
for _ in range(3):
    spent = ours_side.ask(f"lora4bit {ROWS} {TOKENS}")[0]
ours, account = ours_side.ask("rss")
print(f"LoRA over four bits: {spent / 1e6:.0f} ms, peak resident MiB {ours / 1024:.0f} (in its account {int(account) / 1024:.0f})")
