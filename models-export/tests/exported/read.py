#!/usr/bin/env python3
"""Reads what `cargo run -p weftgrad-models-export --example exported -- FOLDER` writes, by the packages of those formats.

GGUF: names by the package's own table, values of transformers' files in the order of llama.cpp's converter, keys of config.json.
ONNX: the checker, and the logits that transformers computed; for recorded modules, the values that they computed.
"""

import json
import os
import struct
import sys

import gguf
import numpy as np
import onnx
import onnxruntime

FOLDER = sys.argv[1]
REFERENCES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "models", "references")
ARCHITECTURES = {"gpt2": "GPT2", "llama": "LLAMA", "llama_yarn": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
STEPS = {"f32": 0.0, "f16": 2.0 ** -11, "bf16": 2.0 ** -8}


def tensors(*path):
    with open(os.path.join(REFERENCES, *path), "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = file.read()
    header.pop("__metadata__", None)
    kinds = {"F32": np.float32, "F64": np.float64, "I64": np.int64, "BOOL": np.bool_}
    return {name: np.frombuffer(data[t["data_offsets"][0]:t["data_offsets"][1]], kinds[t["dtype"]]).reshape(t["shape"])
            for name, t in header.items()}


def weights(name):
    files = [f for f in os.listdir(os.path.join(REFERENCES, name)) if f.startswith("model") and f.endswith(".safetensors")]
    return {k: v for f in files for k, v in tensors(name, f).items()}


def check_gguf(name, kind):
    reader = gguf.GGUFReader(os.path.join(FOLDER, f"{name}-{kind}.gguf"))
    config = json.load(open(os.path.join(REFERENCES, name, "config.json")))
    architecture = getattr(gguf.MODEL_ARCH, ARCHITECTURES[name])
    value = lambda key: reader.get_field(key).contents()
    prefix = value("general.architecture")
    assert prefix == gguf.MODEL_ARCH_NAMES[architecture], prefix
    get = lambda *names: next(config[n] for n in names if n in config)
    heads = get("num_attention_heads", "n_head")
    kv_heads = config.get("num_key_value_heads", heads)
    for key, due in [("block_count", get("num_hidden_layers", "n_layer")), ("embedding_length", get("hidden_size", "n_embd")),
                     ("attention.head_count", heads), ("attention.head_count_kv", kv_heads), ("vocab_size", config["vocab_size"])]:
        assert value(f"{prefix}.{key}") == due, key
    if "rope_parameters" in config:
        rope = config["rope_parameters"]
        assert np.isclose(value(f"{prefix}.rope.freq_base"), rope["rope_theta"])
        if rope["rope_type"] == "yarn":
            assert value(f"{prefix}.rope.scaling.type") == "yarn" and value(f"{prefix}.rope.scaling.factor") == rope["factor"]
    names = gguf.get_tensor_name_map(architecture, get("num_hidden_layers", "n_layer"))
    found = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    found.pop("rope_freqs.weight", None)
    for theirs, x in weights(name).items():
        at = names.get_name(theirs, [".weight", ".bias"])
        if prefix == "gpt2" and x.ndim == 2 and theirs.split(".")[-2].startswith("c_"):
            x = x.T
        for part, count in [("q_proj", heads), ("k_proj", kv_heads)]:
            if prefix == "llama" and part in theirs:
                x = x.reshape(count, 2, x.shape[0] // count // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        got = found.pop(at)
        assert got.shape == x.shape, (theirs, got.shape, x.shape)
        step = 0.0 if x.ndim == 1 or at == "position_embd.weight" else STEPS[kind]
        assert np.all(np.abs(got - x) <= step * np.abs(x) + (1e-7 if step else 0)), theirs
    assert not found, list(found)


def check_onnx(name):
    path = os.path.join(FOLDER, f"{name}.onnx")
    onnx.checker.check_model(path, full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    due = tensors(name, "reference.safetensors")
    key, at = ("pixel_values", "pixels") if name == "vit" else ("input_ids", "ids")
    run = lambda x: session.run(["logits"], {key: x})[0]
    off = np.max(np.abs(run(due[at]) - due["logits"]) / np.maximum(1, np.abs(due["logits"])))
    assert off < 2e-5, (name, off)
    # Any batch, and any number of tokens.
    one = run(due[at][1:]) if name == "vit" else run(due[at][1:, :7])
    part = due["logits"][1:] if name == "vit" else due["logits"][1:, :7]
    assert np.allclose(one, part, atol=1e-4, rtol=1e-4), name
    return off


def check_recorded(name):
    path = os.path.join(FOLDER, "recorded", name)
    onnx.checker.check_model(f"{path}.onnx", full_check=True)
    session = onnxruntime.InferenceSession(f"{path}.onnx", providers=["CPUExecutionProvider"])
    values = tensors(f"{path}.safetensors")
    due = values.pop("y")
    off = np.max(np.abs(session.run(["y"], values)[0] - due) / np.maximum(1, np.abs(due)))
    assert off < 2e-5, (name, off)
    return off


for name in ARCHITECTURES:
    for kind in STEPS:
        check_gguf(name, kind)
    print(f"{name}: GGUF read, logits of ONNX off by {check_onnx(name):.1e}")
print(f"vit: logits of ONNX off by {check_onnx('vit'):.1e}")
for file in sorted(os.listdir(os.path.join(FOLDER, "recorded"))):
    if file.endswith(".onnx"):
        print(f"{file[:-5]}: recorded, off by {check_recorded(file[:-5]):.1e}")
