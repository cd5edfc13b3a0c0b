#!/usr/bin/env python3
"""Makes the GGUF files of the folder `gguf` by llama.cpp's own writer, from the models that `make.py` made.

    python3 -m venv V && V/bin/pip install gguf==0.19.0 sentencepiece
    V/bin/python models/references/make_gguf.py
"""

import json
import os
import struct
import sys

import gguf
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
KINDS = {"F32": np.float32, "U8": np.uint8}
F32, F16 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16


def tensors(path):
    """The tensors of a safetensors file."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = file.read()
    header.pop("__metadata__", None)
    def of(t):
        stored = data[t["data_offsets"][0]:t["data_offsets"][1]]
        if t["dtype"] == "BF16":
            wide = np.frombuffer(stored, np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).reshape(t["shape"])
        return np.frombuffer(stored, KINDS[t["dtype"]]).reshape(t["shape"])
    return {name: of(t) for name, t in header.items()}


def interleaved(x, heads):
    """The halves of each head interleaved: what llama.cpp's converter does to queries and keys."""
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def llama3_factors(config):
    rope = config["rope_parameters"]
    frequencies = rope["rope_theta"] ** -(np.arange(0, config["head_dim"], 2) / config["head_dim"])
    context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for f in frequencies:
        length = 2 * np.pi / f
        if length < context / high:
            factors.append(1.0)
        elif length > context / low:
            factors.append(rope["factor"])
        else:
            smooth = (context / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def head(writer, file_type, vocab, context, width, layers, hidden, heads, kv_heads):
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    writer.add_vocab_size(vocab)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer, name, x, kind):
    x = np.ascontiguousarray(x)
    writer.add_tensor(name, x.astype(np.float16) if kind == F16 and x.ndim == 2 else x.astype(np.float32))


def llama(out):
    config = json.load(open(os.path.join(HERE, "llama", "config.json")))
    weights = tensors(os.path.join(HERE, "llama", "model.safetensors"))
    writer = gguf.GGUFWriter(os.path.join(out, "llama-f16.gguf"), "llama")
    head(writer, 1, config["vocab_size"], config["max_position_embeddings"], config["hidden_size"], config["num_hidden_layers"],
         config["intermediate_size"], config["num_attention_heads"], config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    add(writer, "rope_freqs.weight", llama3_factors(config), F32)
    order = ["model.embed_tokens.weight"]
    for i in range(config["num_hidden_layers"]):
        parts = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                 "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        order += [f"model.layers.{i}.{part}.weight" for part in parts]
    for name in order + ["model.norm.weight", "lm_head.weight"]:
        x = weights[name]
        if "q_proj" in name:
            x = interleaved(x, config["num_attention_heads"])
        if "k_proj" in name:
            x = interleaved(x, config["num_key_value_heads"])
        add(writer, names.get_name(name, [".weight", ".bias"]), x, F16)
    finish(writer)


def family(out, name, arch, **changes):
    """A family's tiny model as llama.cpp's converter writes it: norms of Gemma with 1 added, and the rows of SmolLM 3's
    and Mixtral's queries and keys interleaved. SmolLM 3's last layer, which has no positions, is the first once more."""
    config = {**json.load(open(os.path.join(HERE, name, "config.json"))), **changes}
    weights = tensors(os.path.join(HERE, name, "model.safetensors"))
    layers = config["num_hidden_layers"]
    if name == "qwen3_moe":
        # Every layer has experts: the second is the first, too.
        weights = {n: x for n, x in weights.items() if "layers.0." not in n}
        weights |= {n.replace("layers.1.", "layers.0."): x for n, x in weights.items()}
    for part in ["gate_proj", "up_proj", "down_proj", "w1", "w3", "w2"]:
        for n in [n for n in weights if n.endswith(f".experts.0.{part}.weight")]:
            count = config["num_local_experts"]
            all_of = [weights.pop(n.replace("experts.0.", f"experts.{i}.")) for i in range(count)]
            weights[n.replace("experts.0.", "stacked.")] = np.stack(all_of)
    if name == "smollm3":
        weights |= {n.replace("layers.0.", f"layers.{layers}."): x for n, x in weights.items() if "layers.0." in n}
        layers += 1
    writer = gguf.GGUFWriter(os.path.join(out, f"{name}.gguf"), gguf.MODEL_ARCH_NAMES[arch])
    head(writer, 0, config["vocab_size"], config["max_position_embeddings"], config["hidden_size"], layers,
         config["intermediate_size"], config["num_attention_heads"], config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head_dim))
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.get("pad_token_id") is not None:
        writer.add_pad_token_id(config["pad_token_id"])
    if name.startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern(config.get("sliding_window_pattern", 2))
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if name == "qwen3_moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if arch == gguf.MODEL_ARCH.GPT_OSS:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if name.startswith("phi3"):
        writer.add_sliding_window(0)
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        first = config["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / first
        writer.add_rope_scaling_attn_factors(np.sqrt(1 + np.log(scale) / np.log(first)))
        add(writer, "rope_factors_long.weight", np.array(rope["long_factor"]), F32)
        add(writer, "rope_factors_short.weight", np.array(rope["short_factor"]), F32)
    names = gguf.get_tensor_name_map(arch, layers)
    for n, x in sorted(weights.items()):
        if ".experts." in n:
            experts(writer, n, x, weights, names)
            continue
        if n.endswith("sinks"):
            n += ".weight"
        if name.startswith("gemma") and n.endswith("norm.weight"):
            x = x + np.float32(1)
        n = n.replace(".stacked.", ".experts.")
        if name in ("smollm3", "mixtral") and ("q_proj" in n or "k_proj" in n):
            x = interleaved(x, config["num_attention_heads" if "q_proj" in n else "num_key_value_heads"])
        for theirs, ours in [("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")]:
            n = n.replace(f"block_sparse_moe.experts.{theirs}", f"mlp.experts.{ours}")
        add(writer, names.get_name(n, [".weight", ".bias"]), x, F32)
    finish(writer)


def experts(writer, name, x, weights, names):
    """Rows of the gate and the other ones, which take turns in folders, as two tensors; weights are transposed. Blocks in
    MXFP4 have their scale before them, and the first half of the elements in lower halves of bytes."""
    if name.endswith("_scales"):
        return
    kind = F32
    if name.endswith("_blocks"):
        low, high = x & 15, x >> 4
        both = np.stack([low, high], -1).reshape(*x.shape[:-1], 32)
        packed = both[..., :16] | both[..., 16:] << 4
        x = np.concatenate([weights[name.replace("_blocks", "_scales")][..., None], packed], -1).reshape(*x.shape[:2], -1)
        name, kind = name.removesuffix("_blocks"), gguf.GGMLQuantizationType.MXFP4
    elif not name.endswith("_bias"):
        x = x.swapaxes(1, 2)
    end = ".bias" if name.endswith("_bias") else ".weight"
    name = name.removesuffix("_bias")
    for part, rows in [("gate_proj", x[:, ::2]), ("up_proj", x[:, 1::2])] if "gate_up" in name else [("down_proj", x)]:
        to = names.get_name(name.rsplit(".", 1)[0] + "." + part + end, [".weight", ".bias"])
        rows = np.ascontiguousarray(rows)
        writer.add_tensor(to, rows if kind != F32 else rows.astype(np.float32), raw_dtype=None if kind == F32 else kind)


def families(out):
    arch = gguf.MODEL_ARCH
    for name, of in [("gemma2", arch.GEMMA2), ("gemma3", arch.GEMMA3), ("phi3", arch.PHI3), ("phi3_long", arch.PHI3),
                     ("olmo2", arch.OLMO2), ("smollm3", arch.SMOLLM3), ("gpt_oss", arch.GPT_OSS), ("mxfp4", arch.GPT_OSS),
                     ("qwen3_moe", arch.QWEN3MOE), ("mixtral", arch.LLAMA)]:
        family(out, name, of)


def tokenizer(out):
    """GPT-2 of one layer whose weights are all 0, with the tokenizer of the folder `chat` and five rows more than it has tokens."""
    folder = os.path.join(HERE, "chat")
    file = json.load(open(os.path.join(folder, "tokenizer.json")))
    settings = json.load(open(os.path.join(folder, "tokenizer_config.json")))
    special = {t["content"]: t["id"] for t in file["added_tokens"] if t["special"]}
    by_id = {id: text for text, id in file["model"]["vocab"].items()} | {id: text for text, id in special.items()}
    vocab, width = max(by_id) + 6, 4
    writer = gguf.GGUFWriter(os.path.join(out, "tokenizer.gguf"), "gpt2")
    writer.add_name("tiny")
    head(writer, 0, vocab, 8, width, 1, 8, 2, 2)
    writer.add_layer_norm_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id.get(id, f"[PAD{id}]") for id in range(vocab)])
    kind = lambda id: 5 if id not in by_id else 3 if id in special.values() else 1
    writer.add_token_types([kind(id) for id in range(vocab)])
    merges = [m if isinstance(m, str) else " ".join(m) for m in file["model"]["merges"]]
    writer.add_token_merges(merges)
    writer.add_bos_token_id(special[settings["bos_token"]])
    writer.add_eos_token_id(special[settings["eos_token"]["content"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template(settings["chat_template"])
    shapes = {"token_embd.weight": [vocab, width], "position_embd.weight": [8, width]}
    for name, outputs, inputs in [("attn_norm", width, None), ("attn_qkv", 3 * width, width), ("attn_output", width, width),
                                  ("ffn_norm", width, None), ("ffn_up", 8, width), ("ffn_down", width, 8)]:
        shapes[f"blk.0.{name}.weight"] = [outputs] if inputs is None else [outputs, inputs]
        shapes[f"blk.0.{name}.bias"] = [outputs]
    shapes |= {"output_norm.weight": [width], "output_norm.bias": [width]}
    for name, shape in shapes.items():
        add(writer, name, np.zeros(shape), F32)
    finish(writer)


def blocks(out):
    """A row and its blocks of Q8_0: random values, ties, zeros, a tiny scale."""
    x = np.random.default_rng(5).normal(size=(5, 64)).astype(np.float32)
    x[1, :32] = np.arange(32) - 16.0
    x[2, 32:] = 0
    x[3] *= 1e-6
    x[4, 3] = 127.0
    x[4, 4:9] = [0.5, -0.5, 1.5, -2.5, 126.5]
    packed = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0)
    x.tofile(os.path.join(out, "blocks.f32"))
    packed.tofile(os.path.join(out, "blocks.q8_0"))


def types(out):
    """Two rows of each quantised type with random bits and finite scales, and what gguf dequantises them to, in the order of the file."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(os.path.join(out, "types.gguf"), "llama")
    writer.add_custom_alignment(64)
    writer.add_array("odd.empty_texts", [])
    due = []
    # The bytes of each block that hold f16.
    for name, halves in {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "MXFP4": []}.items():
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        packed = rng.integers(0, 256, (2 * 256 // elements, size), dtype=np.uint8)
        for at in halves:
            packed[:, at:at + 2] = rng.normal(size=(len(packed), 1)).astype(np.float16).view(np.uint8)
        if name == "MXFP4":
            # Every kind of scale, from the smallest.
            packed[:, 0] = np.concatenate([[0, 1, 2, 254, 255], rng.integers(120, 134, len(packed) - 5)])
        packed = packed.reshape(2, -1)
        writer.add_tensor(name.lower(), packed, raw_dtype=kind)
        due.append(gguf.quants.dequantize(packed, kind))
    finish(writer)
    np.concatenate(due).astype(np.float32).tofile(os.path.join(out, "types.f32"))


TEXTS = ["", "hello", " the  cat sat", "The quick brown fox\njumps over 12 dogs.", "na\u00efve caf\u00e9 \u4f60\u597d \U0001f600", "tab\there", "the the the", "  two leading"]


def pieces(out):
    """A vocabulary of SentencePiece as llama.cpp's converter writes it, and the tokens of some texts by sentencepiece itself."""
    import sentencepiece as spm

    words = "the cat sat on the mat and the quick brown fox jumps over lazy dogs while hello world greets naive people there".split()
    rng = np.random.default_rng(3)
    lines = [" ".join(rng.choice(words, 8)) for _ in range(400)]
    model = os.path.join(out, "pieces")
    spm.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_prefix=model, vocab_size=330, model_type="bpe", byte_fallback=True,
                                   normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2)
    sp = spm.SentencePieceProcessor(model_file=model + ".model")
    os.remove(model + ".model")
    os.remove(model + ".vocab")
    count = sp.get_piece_size()
    kind = lambda i: 2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 5 if sp.is_unused(i) else 1
    writer = gguf.GGUFWriter(model + ".gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([sp.id_to_piece(i) for i in range(count)])
    writer.add_token_scores([sp.get_score(i) for i in range(count)])
    writer.add_token_types([kind(i) for i in range(count)])
    writer.add_bos_token_id(sp.bos_id())
    writer.add_eos_token_id(sp.eos_id())
    writer.add_unk_token_id(sp.unk_id())
    finish(writer)
    rows = [{"text": text, "tokens": sp.encode(text), "decoded": sp.decode(sp.encode(text))} for text in TEXTS]
    with open(model + ".json", "w") as file:
        json.dump({"bos": sp.bos_id(), "texts": rows}, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    out = os.path.join(HERE, "gguf")
    os.makedirs(out, exist_ok=True)
    # Parts may be named: `families`.
    for part in [llama, families, tokenizer, blocks, types, pieces]:
        len(sys.argv) > 1 and part.__name__ not in sys.argv or part(out)
