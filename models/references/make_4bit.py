#!/usr/bin/env python3
"""Makes the folders of models whose linear layers bitsandbytes stores in four bits: with double quantisation, and without.

    python3 -m venv V && V/bin/pip install torch transformers peft bitsandbytes
    V/bin/python models/references/make_4bit.py

A folder holds config.json and the weights as transformers saves them, an adapter by peft in `adapter`, and `reference.safetensors`: the weights
of the second layer before (`plain/…`), inputs, logits without and with the adapter, the gradient of the adapter.
"""

import json
import os
import shutil

import bitsandbytes
import peft
import torch
import transformers

from make import HERE, VOCAB, finish, fresh, randomize


def make(name, double, dtype):
    # Rows are whole blocks: its kernels for CPUs give others wrong values.
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=64, mlp_bias=True)
    config._attn_implementation = "eager"
    plain = transformers.LlamaForCausalLM(config).to(dtype).eval()
    randomize(plain)
    scratch = os.path.join(HERE, "scratch")
    plain.save_pretrained(scratch)
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype=torch.float32)
    model = transformers.LlamaForCausalLM.from_pretrained(
        scratch, quantization_config=how, dtype=dtype, device_map={"": "cpu"}, attn_implementation="eager").eval()
    shutil.rmtree(scratch)
    for module in model.modules():
        # Its kernels of bf16 products round what is compared here.
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
    folder = fresh(name)
    model.save_pretrained(folder)
    generation = os.path.join(folder, "generation_config.json")
    os.path.exists(generation) and os.remove(generation)
    # What is not in four bits is computed in f32.
    for p in model.parameters():
        p.data = p.data.float() if p.dtype.is_floating_point else p.data
    ids = torch.randint(0, VOCAB, (2, 11))
    linear = [n for n, _ in plain.named_parameters() if n.startswith("model.layers.1") and n.endswith("proj.weight")]
    weights = dict(plain.named_parameters())
    tensors = {f"plain/{n}": weights[n] for n in linear} | {"ids": ids, "logits": model(ids).logits.float()}
    lora = peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"])
    wrapped = peft.get_peft_model(model, lora)
    with torch.no_grad():
        for n, p in wrapped.named_parameters():
            if "lora_" in n:
                p.data = 0.3 * torch.randn(p.shape)
    wrapped.save_pretrained(os.path.join(folder, "adapter"))
    os.remove(os.path.join(folder, "adapter", "README.md"))
    path = os.path.join(folder, "adapter", "adapter_config.json")
    settings = json.load(open(path))
    settings["base_model_name_or_path"] = name
    json.dump(settings, open(path, "w"), indent=1)
    logits = wrapped(input_ids=ids).logits.float()
    torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1)).backward()
    tensors |= {f"grad/{n.replace('.default', '')}": p.grad.float() for n, p in wrapped.named_parameters() if p.requires_grad}
    finish(folder, tensors | {"adapted": logits}, bitsandbytes=bitsandbytes.__version__)


if __name__ == "__main__":
    make("nf4_double", True, torch.float32)
    make("nf4_plain", False, torch.bfloat16)
