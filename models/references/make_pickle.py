#!/usr/bin/env python3
"""Makes PyTorch's files of the folder `pickle` from the models that `make.py` made.

    python3 -m venv V && V/bin/pip install torch safetensors
    V/bin/python models/references/make_pickle.py

`gpt2.bin` is one file, with views, parameters, a storage that is shared and a tensor in Fortran's order. `llama-*.bin` are two files and their index.
"""

import json
import os
from collections import OrderedDict

import torch
from safetensors.torch import load_file

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.path.join(HERE, "pickle")


def gpt2():
    weights = load_file(os.path.join(HERE, "gpt2", "model.safetensors"))
    state = OrderedDict(weights)
    names = [name for name in state if name.endswith("c_attn.weight")]
    state[names[0]] = state[names[0]].t().contiguous().t()
    state[names[1]] = torch.nn.Parameter(state[names[1]])
    biases = [name for name in state if name.endswith("ln_1.bias")]
    pair = torch.stack([state[name] for name in biases])
    for name, row in zip(biases, pair):
        state[name] = row
    state["transformer.h.0.attn.bias"] = torch.tril(torch.ones(4, 4, dtype=torch.uint8)).view(1, 1, 4, 4)
    state["transformer.h.1.attn.masked_bias"] = torch.tensor(-1e4)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    state._metadata = OrderedDict({"": {"version": 1}})
    torch.save(state, os.path.join(OUT, "gpt2.bin"))


def llama():
    weights = load_file(os.path.join(HERE, "llama", "model.safetensors"))
    names = sorted(weights)
    halves = {"llama-1.bin": names[::2], "llama-2.bin": names[1::2]}
    for file, own in halves.items():
        torch.save({name: weights[name].to(torch.bfloat16) if "norm" in name else weights[name] for name in own}, os.path.join(OUT, file))
    places = {name: file for file, own in halves.items() for name in own}
    with open(os.path.join(OUT, "llama.index.json"), "w") as out:
        json.dump({"metadata": {}, "weight_map": places}, out, indent=1)
        out.write("\n")


class Evil:
    """A value whose unpickling calls a function."""

    def __reduce__(self):
        return os.system, ("true",)


if __name__ == "__main__":
    os.makedirs(OUT, exist_ok=True)
    gpt2()
    llama()
    torch.save({"weight": Evil()}, os.path.join(OUT, "evil.bin"))
    torch.save({"a": torch.ones(2)}, os.path.join(OUT, "before_1.6.bin"), _use_new_zipfile_serialization=False)
    torch.save({"epoch": 3, "state": {"a": torch.ones(2)}}, os.path.join(OUT, "checkpoint.bin"))
