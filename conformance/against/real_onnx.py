#!/usr/bin/env python3
"""Compares embeddings of an ONNX file, which models/examples/real_onnx.rs wrote, with sentence-transformers'.

    PYTHONPATH=target/real-models-1 python3 conformance/against/real_onnx.py OUT
"""

import json
import os
import sys

import numpy
import onnxruntime
from safetensors.numpy import load_file
from transformers import AutoTokenizer

# The longest text of the model's folder, as in the example, and the rows of a batch.
LONGEST, ROWS = 256, 50

out = sys.argv[1]
with open(os.path.join(out, "facts.json")) as file:
    texts = json.load(file)["minilm"]["texts"][-200:]
due = load_file(os.path.join(out, "minilm.safetensors"))["embeddings"][-200:]
tokenizer = AutoTokenizer.from_pretrained(os.path.join(out, "minilm"))
session = onnxruntime.InferenceSession(os.path.join(out, "minilm.onnx"), providers=["CPUExecutionProvider"])
apart = 0.0
for first in range(0, len(texts), ROWS):
    rows = tokenizer(texts[first:first + ROWS], truncation=True, max_length=LONGEST, padding="max_length", return_tensors="np")
    tokens, mask = [rows[key].astype(numpy.int64) for key in ("input_ids", "attention_mask")]
    embeddings = session.run(None, {"tokens": tokens, "mask": mask})[0]
    apart = max(apart, float(numpy.abs(embeddings - due[first:first + ROWS]).max()))
print(f"{len(texts)} embeddings of onnxruntime are within 1e-5 of sentence-transformers': {apart:.1e}")
sys.exit(not apart <= 1e-5)
