"""The requests of `bench/src/bin/pretrained`, answered by transformers and peft: worker.py FOLDER THREADS."""

import gc
import os
import resource
import sys
import time

FOLDER, THREADS = sys.argv[1], int(sys.argv[2])
os.environ["OMP_NUM_THREADS"] = str(THREADS)
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import peft
import torch
import transformers

torch.set_num_threads(THREADS)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
now = time.perf_counter_ns
kept = {}


def load():
    kept.clear()
    gc.collect()
    start = now()
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    spent = now() - start
    kept["model"] = model.eval()
    return spent, sum(p.numel() for p in model.parameters())


def tokens(count, vocab):
    return torch.tensor([(i * 7919 + 13) % vocab for i in range(count)])


def decode(prompt, new):
    if "model" not in kept:
        load()
    model = kept["model"]
    ids = tokens(prompt, model.config.vocab_size)[None]
    with torch.inference_mode():
        start = now()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        spent = (now() - start) // new
    return spent, ",".join(map(str, out[0, prompt:].tolist()))


def lora(rows, count):
    if "lora" not in kept:
        kept.clear()
        gc.collect()
        model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(model, os.path.join(FOLDER, "adapter"), is_trainable=True).train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        kept["lora"] = model, torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0, fused=True)
    model, optimizer = kept["lora"]
    text = tokens(rows * (count + 1), model.config.vocab_size).view(rows, count + 1)
    start = now()
    logits = model(input_ids=text[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), text[:, 1:].reshape(-1))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    loss = loss.item()
    return now() - start, loss


def read(count):
    if "numbers" not in kept:
        kept["numbers"] = torch.ones(count)
    start = now()
    total = kept["numbers"].sum().item()
    return now() - start, total


def rss():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0


print("ready", flush=True)
for line in sys.stdin:
    name, *numbers = line.split()
    try:
        print(*globals()[name](*map(int, numbers)), flush=True)
    except Exception as e:
        print("nan", repr(e).replace("\n", " "), flush=True)
