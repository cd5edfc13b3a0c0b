#!/usr/bin/env python3
"""Makes the reference files of this folder: random tiny models by transformers, what they compute, and adapters by peft.

    python3 -m venv V && V/bin/pip install torch transformers peft sentence-transformers
    V/bin/python models/references/make.py [NAME ..]

A folder holds config.json and the weights as transformers saves them, `reference.json` (versions, prompts, greedy text) and
`reference.safetensors` (inputs, logits, the gradient of the mean cross-entropy by transformers' names).
"""

import json
import os
import shutil
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = os.path.dirname(os.path.abspath(__file__))
VOCAB = 43
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 32.0, "beta_slow": 1.0}
SIZES = dict(vocab_size=VOCAB, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2)


def llama(**more):
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**{**SIZES, "head_dim": 6, **more})


def deepseek(**more):
    return transformers.DeepseekV3ForCausalLM, transformers.DeepseekV3Config(
        **{**SIZES, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "moe_intermediate_size": 5,
           "n_routed_experts": 6, "kv_lora_rank": 7, "qk_rope_head_dim": 4, "qk_nope_head_dim": 3, "v_head_dim": 5,
           "first_k_dense_replace": 1, "rms_norm_eps": 1e-3, **more})


DECODERS = {
    "gpt2": lambda: (transformers.GPT2LMHeadModel, transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=12, n_layer=2, n_head=4, n_positions=64, n_inner=28, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
    "llama": lambda: llama(rope_parameters=LLAMA3),
    "llama_yarn": lambda: llama(rope_parameters=YARN, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "mistral": lambda: (transformers.MistralForCausalLM, transformers.MistralConfig(
        **{**SIZES, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 4}, sliding_window=5)),
    "qwen2": lambda: (transformers.Qwen2ForCausalLM, transformers.Qwen2Config(
        **{**SIZES, "num_attention_heads": 2, "num_key_value_heads": 1}, use_sliding_window=True, sliding_window=4, max_window_layers=1, tie_word_embeddings=True)),
    "qwen3": lambda: (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**SIZES, head_dim=6)),
    "mixtral": lambda: (transformers.MixtralForCausalLM, transformers.MixtralConfig(
        **{**SIZES, "num_attention_heads": 2, "num_key_value_heads": 1}, num_local_experts=3, num_experts_per_tok=2, sliding_window=6)),
    "qwen2_moe": lambda: (transformers.Qwen2MoeForCausalLM, transformers.Qwen2MoeConfig(
        **{**SIZES, "num_hidden_layers": 3, "num_attention_heads": 2}, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=7,
        shared_expert_intermediate_size=10, mlp_only_layers=[1], use_sliding_window=True, sliding_window=4, max_window_layers=1)),
    "qwen3_moe": lambda: (transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(
        **SIZES, head_dim=6, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=5, norm_topk_prob=True,
        decoder_sparse_step=2)),
    "olmo2": lambda: (transformers.Olmo2ForCausalLM, transformers.Olmo2Config(
        **SIZES, head_dim=6, attention_bias=True, pad_token_id=3)),
    "phi3": lambda: (transformers.Phi3ForCausalLM, transformers.Phi3Config(
        **SIZES, head_dim=6, sliding_window=5, pad_token_id=None)),
    # Texts up to 12 tokens have the short factors, and longer ones the long.
    "phi3_long": lambda: (transformers.Phi3ForCausalLM, transformers.Phi3Config(
        **{**SIZES, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}, pad_token_id=None,
        original_max_position_embeddings=12, rope_parameters={
            "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.1, 1.3],
            "long_factor": [1.5, 2.5, 4.0]})),
    "smollm3": lambda: (transformers.SmolLM3ForCausalLM, transformers.SmolLM3Config(
        **{**SIZES, "num_hidden_layers": 3}, head_dim=6, no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=4,
        mlp_bias=True, pad_token_id=None)),
    "gemma2": lambda: (transformers.Gemma2ForCausalLM, transformers.Gemma2Config(
        **{**SIZES, "num_hidden_layers": 3}, head_dim=6, query_pre_attn_scalar=7, sliding_window=4, attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0)),
    "gemma3": lambda: (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 3}, head_dim=6, query_pre_attn_scalar=5, sliding_window=4, sliding_window_pattern=3,
        attention_bias=True, tie_word_embeddings=False, rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}})),
    "gpt_oss": lambda: (transformers.GptOssForCausalLM, transformers.GptOssConfig(
        **{**SIZES, "intermediate_size": 7}, head_dim=6, num_local_experts=5, num_experts_per_tok=2, sliding_window=4,
        swiglu_limit=0.8, swiglu_alpha=1.3, rope_parameters={**YARN, "truncate": False})),
    "deepseek_v3": lambda: deepseek(q_lora_rank=6, n_group=3, topk_group=2, num_experts_per_tok=3, routed_scaling_factor=1.7,
                                    n_shared_experts=2, rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.6}),
    "deepseek_v3_plain": lambda: deepseek(q_lora_rank=None, n_group=1, topk_group=1, num_experts_per_tok=2,
                                          norm_topk_prob=False, attention_bias=True, rope_interleave=False),
}


def randomize(model):
    """Values large enough that a wrong formula shows, also in norms and biases."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                norm = "weight" in name and ("norm" in name.lower() or "ln_" in name)
                # Gemma adds 1 to its weights.
                norm = norm and not model.config.model_type.startswith("gemma")
                p.copy_((1.0 if norm else 0.0) + 0.2 * torch.randn_like(p))
            else:
                p.copy_(0.35 * torch.randn_like(p))
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.copy_(0.2 * torch.randn_like(b))


def fresh(name):
    folder = os.path.join(HERE, name)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    return folder


def finish(folder, tensors, **facts):
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    tensors = {k: v.detach().clone().contiguous() for k, v in tensors.items()}
    if tensors:
        save_file(tensors, os.path.join(folder, "reference.safetensors"), metadata=versions)
    with open(os.path.join(folder, "reference.json"), "w") as out:
        json.dump({"made_by": versions, **facts}, out, indent=1)
        out.write("\n")


def greedy(model, prompts, new):
    """Greedy text of a batch, padded on the left."""
    if model.config.model_type == "phi3" and model.config.rope_parameters["rope_type"] == "longrope":
        # One by one: the longest text of a batch would choose the factors of all.
        return [model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)), max_new_tokens=new, do_sample=False,
                               eos_token_id=None, pad_token_id=0, use_cache=False)[0, len(p):].tolist() for p in prompts]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[:, width:].tolist()


def decoder(name):
    torch.manual_seed(sum(map(ord, name)))
    kind, config = DECODERS[name]()
    config._attn_implementation = config._experts_implementation = "eager"
    model = kind(config).eval()
    randomize(model)
    folder = fresh(name)
    model.save_pretrained(folder, max_shard_size="8KB" if name == "qwen3" else "1GB")
    os.path.exists(os.path.join(folder, "generation_config.json")) and os.remove(os.path.join(folder, "generation_config.json"))
    ids = torch.randint(0, VOCAB, (2, 23))
    logits = model(ids).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1)).backward()
    more = {}
    if hasattr(config, "router_aux_loss_coef"):
        more["balance_loss"] = model(ids, output_router_logits=True).aux_loss
    if name == "phi3_long":
        more["short_logits"] = model(ids[:, :12]).logits
    # Files of Mixtral have other names than the model; experts, which files have one by one, are those of the model here.
    files = lambda n: n.replace(".mlp.gate.", ".block_sparse_moe.gate.") if name == "mixtral" else n
    grads = {f"grad/{files(n)}": p.grad for n, p in model.named_parameters()}
    prompts = [ids[0, :9].tolist(), ids[1, :4].tolist(), ids[1, :15].tolist()]
    finish(folder, {"ids": ids, "logits": logits, **more, **grads}, prompts=prompts, greedy=greedy(model, prompts, 12))
    return model, ids


def mtp():
    """DeepSeek-V3 with two layers of multi-token prediction, which transformers leaves out: by the formulas of its report
    (section 2.2), of transformers' own layers, with norms, projection and names of weights as in its published files."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm
    torch.manual_seed(31)
    kind, config = deepseek(q_lora_rank=None, n_group=1, topk_group=1, num_experts_per_tok=2, num_mtp_layers=2, num_hidden_layers=2,
                            n_shared_experts=2)
    config._attn_implementation = config._experts_implementation = "eager"
    model, width = kind(config).eval(), config.hidden_size

    class Layer(torch.nn.Module):
        def __init__(self, number):
            super().__init__()
            self.enorm, self.hnorm = DeepseekV3RMSNorm(width, config.rms_norm_eps), DeepseekV3RMSNorm(width, config.rms_norm_eps)
            self.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
            self.layer = DeepseekV3DecoderLayer(config, number)
            self.shared_head = torch.nn.Module()
            self.shared_head.norm = DeepseekV3RMSNorm(width, config.rms_norm_eps)

        def forward(self, states, embedded, **more):
            x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(states)], -1))
            return self.shared_head.norm(self.layer(x, **more))

    layers = torch.nn.ModuleList([Layer(2), Layer(3)]).eval()
    layers.config = config
    randomize(model)
    randomize(layers)
    name_of = lambda n: f"model.layers.{2 + int(n.split('.')[0])}." + n.split(".", 1)[1].removeprefix("layer.")
    folder = fresh("deepseek_v3_mtp")
    model.save_pretrained(folder)
    os.path.exists(os.path.join(folder, "generation_config.json")) and os.remove(os.path.join(folder, "generation_config.json"))
    state = load_file(os.path.join(folder, "model.safetensors"))
    for name, value in layers.state_dict().items():
        name, half = name_of(name), value.shape[1] // 2 if value.dim() == 3 else 0
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(value):
                of = name.removesuffix("gate_up_proj") + str(expert)
                state[f"{of}.gate_proj.weight"], state[f"{of}.up_proj.weight"] = both[:half].clone(), both[half:].clone()
        elif name.endswith("experts.down_proj"):
            of = name.removesuffix("down_proj")
            state.update({f"{of}{expert}.down_proj.weight": each.clone() for expert, each in enumerate(value)})
        else:
            state[name] = value.clone()
    for number in [2, 3]:
        state[f"model.layers.{number}.embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
        state[f"model.layers.{number}.shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    save_file(state, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})

    ids = torch.randint(0, VOCAB, (2, 13))
    out = model(ids, output_hidden_states=True)
    # The last of them is normalized.
    states, length = out.hidden_states[-1], ids.shape[1]
    assert torch.equal(model.lm_head(states), out.logits)
    positions = torch.arange(length)[None]
    rotary = model.model.rotary_emb(states, position_ids=positions)
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    ce = lambda logits, targets: torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))
    losses, tensors = [ce(out.logits[:, :-1], ids[:, 1:])], {}
    for k, layer in enumerate(layers, 1):
        further = torch.cat([ids[:, k:], torch.zeros(2, k, dtype=torch.long)], 1)
        states = layer(states, model.model.embed_tokens(further), attention_mask=mask, position_ids=positions,
                       position_embeddings=rotary)
        logits = model.lm_head(states)
        tensors[f"logits{k}"] = logits
        losses.append(ce(logits[:, :-1 - k], ids[:, 1 + k:]))
    (losses[0] + 0.3 * (losses[1] + losses[2]) / 2).backward()
    grads = {f"grad/{n}": p.grad for n, p in model.named_parameters()}
    grads.update({f"grad/{name_of(n)}": p.grad for n, p in layers.named_parameters()})
    finish(folder, {"ids": ids, "logits": out.logits, "losses": torch.stack(losses), **tensors, **grads})


def mxfp4():
    """GPT-OSS with experts in MXFP4, and a weight with every scale."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    torch.manual_seed(29)
    config = transformers.GptOssConfig(
        **{**SIZES, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
           "num_key_value_heads": 1}, head_dim=6, num_local_experts=3, num_experts_per_tok=2, tie_word_embeddings=True)
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.GptOssForCausalLM(config).eval()
    randomize(model)
    model = model.to(torch.bfloat16)
    state, tensors = model.state_dict(), {}
    state.pop("lm_head.weight")
    for name, rows, columns in [("gate_up_proj", 64, 64), ("down_proj", 64, 32)]:
        at = f"model.layers.0.mlp.experts.{name}"
        blocks = torch.randint(0, 256, (3, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 127, (3, rows, columns // 32), dtype=torch.uint8)
        tensors[name] = convert_moe_packed_tensors(blocks, scales)
        model.get_parameter(at).data = tensors[name]
        del state[at]
        state[f"{at}_blocks"], state[f"{at}_scales"] = blocks, scales
    every = torch.arange(256, dtype=torch.uint8)[:192].reshape(3, 64, 1) + 64 * (torch.arange(64, dtype=torch.uint8) % 2)[None, :, None]
    tensors["every_scale"], tensors["every"] = every, convert_moe_packed_tensors(blocks, every)
    folder = fresh("mxfp4")
    save_file(state, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    config.architectures = ["GptOssForCausalLM"]
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config.save_pretrained(folder)
    given = transformers.Mxfp4Config(dequantize=True)
    again = transformers.GptOssForCausalLM.from_pretrained(
        folder, quantization_config=given, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager")
    assert torch.equal(again.get_parameter(at), tensors["down_proj"].float())
    ids = torch.randint(0, VOCAB, (2, 9))
    finish(folder, {"ids": ids, "logits": again.double().eval()(ids).logits, **tensors})


def router():
    """DeepSeek-V3's router of states and weights in bf16, which it computes in f32."""
    torch.manual_seed(23)
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(os.path.join(HERE, "deepseek_v3"))
    gate = model.model.layers[1].mlp.gate
    gate.weight.data = gate.weight.data.to(torch.bfloat16)
    states = (2 * torch.randn(60, 12)).to(torch.bfloat16)
    logits, weights, experts = gate(states)
    order = experts.argsort(-1)
    finish(fresh("router"), {"states": states, "logits": logits, "experts": experts.gather(1, order),
                             "weights": weights.gather(1, order)})


def adapter(name, base, **options):
    """An adapter by peft of the model in `base`: its files, the logits with it, and the merged weights."""
    import peft

    kind, config = DECODERS[base]()
    model = kind.from_pretrained(os.path.join(HERE, base), attn_implementation="eager").eval()
    torch.manual_seed(3)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **options)
    wrapped = peft.get_peft_model(model, lora)
    with torch.no_grad():
        for n, p in wrapped.named_parameters():
            if "lora_A" in n or "lora_B" in n:
                p.copy_(0.3 * torch.randn_like(p))
            elif "magnitude" in n:
                p.copy_(p * (1 + 0.1 * torch.randn_like(p)))
    folder = fresh(name)
    wrapped.save_pretrained(folder)
    for extra in ["README.md"]:
        os.path.exists(os.path.join(folder, extra)) and os.remove(os.path.join(folder, extra))
    path = os.path.join(folder, "adapter_config.json")
    settings = json.load(open(path))
    settings["base_model_name_or_path"] = base
    json.dump(settings, open(path, "w"), indent=1)
    ids = torch.randint(0, VOCAB, (2, 11))
    wrapped.eval()
    logits = wrapped(input_ids=ids).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1)).backward()
    grads = {f"grad/{n.replace('.default', '')}": p.grad for n, p in wrapped.named_parameters() if p.requires_grad}
    merged = wrapped.merge_and_unload()
    finish(folder, {"ids": ids, "logits": logits, "merged_logits": merged(ids).logits, **grads}, peft=peft.__version__, base=base)


def classifier_adapter(name, base, kind, inputs, **options):
    """An adapter by peft of a classifier, with its head, which is trained whole: its files, and the logits with it."""
    import peft
    from safetensors.torch import load_file

    model = kind.from_pretrained(os.path.join(HERE, base), attn_implementation="eager").eval()
    torch.manual_seed(4)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=6, **options)).eval()
    with torch.no_grad():
        for n, p in wrapped.named_parameters():
            p.requires_grad and p.copy_(0.3 * torch.randn_like(p))
    folder = fresh(name)
    wrapped.save_pretrained(folder)
    os.path.exists(os.path.join(folder, "README.md")) and os.remove(os.path.join(folder, "README.md"))
    path = os.path.join(folder, "adapter_config.json")
    settings = json.load(open(path))
    settings["base_model_name_or_path"] = base
    json.dump(settings, open(path, "w"), indent=1)
    given = load_file(os.path.join(HERE, base, "reference.safetensors"))
    finish(folder, {"logits": wrapped(**{theirs: given[ours] for theirs, ours in inputs.items()}).logits},
           peft=peft.__version__, base=base)


def classifier_adapters():
    bert = dict(input_ids="ids", attention_mask="mask", token_type_ids="types")
    classifier_adapter("lora_bert", "bert_classifier", transformers.BertForSequenceClassification, bert,
                       task_type="SEQ_CLS", target_modules=["query", "value"])
    # Of the task that has no class in peft.
    classifier_adapter("lora_vit", "vit", transformers.ViTForImageClassification, dict(pixel_values="pixels"),
                       target_modules=["q_proj", "o_proj", "fc2"], modules_to_save=["classifier"])


ADAPTERS = {
    "lora_llama": ("llama", dict(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"],
                                 rank_pattern={"down_proj": 2}, alpha_pattern={"layers.1.self_attn.q_proj": 5})),
    "lora_gpt2": ("gpt2", dict(r=2, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, use_rslora=True)),
    "dora_qwen3": ("qwen3", dict(r=2, lora_alpha=4, target_modules="all-linear", use_dora=True)),
}


def sampling():
    """Scores after transformers' processors, for several options."""
    from transformers.generation.logits_process import (
        LogitsProcessorList, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper,
        TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper)
    kinds = dict(repetition_penalty=RepetitionPenaltyLogitsProcessor, temperature=TemperatureLogitsWarper,
                 top_k=TopKLogitsWarper, top_p=TopPLogitsWarper, min_p=MinPLogitsWarper, typical_p=TypicalLogitsWarper)
    cases = [dict(temperature=0.7), dict(top_k=5), dict(top_p=0.8), dict(min_p=0.2), dict(typical_p=0.6),
             dict(repetition_penalty=1.7), dict(top_p=0.0), dict(top_k=1), dict(typical_p=0.05),
             dict(repetition_penalty=0.8, temperature=1.5, top_k=20, top_p=0.9, min_p=0.02, typical_p=0.95)]
    torch.manual_seed(8)
    scores, text = 2.5 * torch.randn(4, VOCAB), torch.randint(0, VOCAB, (4, 9))
    tensors = {"scores": scores, "text": text}
    for i, case in enumerate(cases):
        chain = LogitsProcessorList(kind(case[name]) for name, kind in kinds.items() if name in case)
        tensors[f"processed/{i}"] = chain(text, scores.clone())
    finish(fresh("sampling"), tensors, cases=cases)


CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}"
    "{% if tools %}{{ '<tools>' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '\\n</tools>\\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message['content'].strip() + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
LLAMA3_CHAT = """{{- bos_token }}
{%- set loop_messages = messages %}
{%- for message in loop_messages %}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
MISTRAL_CHAT = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- set ns = namespace(turns=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {%- if message["role"] == "user" %}
        {%- if loop.first and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"].rstrip().replace("bad", "good") + eos_token }}
    {%- else %}
        {%- continue %}
    {%- endif %}
{%- endfor %}
"""


def chat():
    """Conversations by templates like those of Qwen, Llama 3 and Mistral: text, tokens, and what an assistant said."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    text = open(__file__).read().splitlines()
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=340, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    talk = [{"role": "user", "content": "Wie geht's? \U0001f600"}, {"role": "assistant", "content": " Fine,\nnot bad. "},
            {"role": "user", "content": "  x = \"1 < 2\"\n"}, {"role": "assistant", "content": "Yes"}]
    system = [{"role": "system", "content": "Be brief."}]
    tools = [{"type": "function", "function": {"name": "f", "description": "h\u00e9 \"q\" <b>", "a": [1, 2.5, True, None, {}]}}]
    cases = []
    for name, template in [("chatml", CHATML), ("llama3", LLAMA3_CHAT), ("mistral", MISTRAL_CHAT)]:
        for messages in [talk[:1], talk, system + talk[:3]]:
            for prompt in [False, True]:
                given = tools if name == "chatml" and len(messages) == 4 else None
                text = fast.apply_chat_template(messages, tools=given, chat_template=template,
                                                add_generation_prompt=prompt, tokenize=False)
                ids = tokenizer.encode(text, add_special_tokens=False).ids
                case = dict(template=name, messages=messages, tools=given, prompt=prompt, text=text, ids=ids)
                if name == "chatml" and not prompt:
                    out = fast.apply_chat_template(messages, tools=given, chat_template=template, tokenize=True,
                                                   return_dict=True, return_assistant_tokens_mask=True)
                    case["learned"] = out["assistant_masks"]
                    assert out["input_ids"] == ids
                cases.append(case)
    folder = fresh("chat")
    tokenizer.save(os.path.join(folder, "tokenizer.json"), pretty=False)
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as out:
        json.dump({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": CHATML}, out)
    finish(folder, {}, templates=dict(chatml=CHATML, llama3=LLAMA3_CHAT, mistral=MISTRAL_CHAT), cases=cases)


def bert():
    torch.manual_seed(5)
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=12, num_hidden_layers=2, num_attention_heads=4, intermediate_size=20,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3)
    config._attn_implementation = "eager"
    ids = torch.randint(3, VOCAB, (2, 13))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    ids[1, 9:] = 0
    types = (torch.arange(13) > 5).long()[None].expand(2, 13).contiguous()
    for name, kind in [("bert_mlm", transformers.BertForMaskedLM), ("bert_classifier", transformers.BertForSequenceClassification),
                       ("bert_tokens", transformers.BertForTokenClassification)]:
        model = kind(config).eval()
        randomize(model)
        folder = fresh(name)
        model.save_pretrained(folder)
        logits = model(input_ids=ids, attention_mask=mask, token_type_ids=types).logits
        target = {"bert_mlm": ids, "bert_tokens": ids % 3, "bert_classifier": torch.tensor([2, 0])}[name]
        torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1)).backward()
        grads = {f"grad/{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
        finish(folder, {"ids": ids, "mask": mask, "types": types, "target": target, "logits": logits, **grads})


def encoders():
    """RoBERTa and DistilBERT with every head; padding follows the text, and is within it too."""
    sizes = dict(vocab_size=VOCAB, max_position_embeddings=32, num_labels=3)
    big = dict(hidden_size=12, num_hidden_layers=2, num_attention_heads=4, intermediate_size=20, hidden_dropout_prob=0.0,
               attention_probs_dropout_prob=0.0)
    for name, kind, options in [
        ("roberta", "Roberta", dict(**big, type_vocab_size=1, pad_token_id=2, layer_norm_eps=1e-5, hidden_act="relu")),
        ("distilbert", "DistilBert", dict(dim=12, n_layers=2, n_heads=4, hidden_dim=20, dropout=0.0, attention_dropout=0.0)),
    ]:
        config = getattr(transformers, f"{kind}Config")(**sizes, **options)
        config._attn_implementation = "eager"
        torch.manual_seed(sum(map(ord, name)))
        ids = torch.randint(3, VOCAB, (2, 13))
        mask = torch.ones_like(ids)
        mask[1, 9:] = 0
        mask[0, 4] = 0
        ids[mask == 0] = config.pad_token_id
        for head, task in [("mlm", "MaskedLM"), ("classifier", "SequenceClassification"), ("tokens", "TokenClassification")]:
            model = getattr(transformers, f"{kind}For{task}")(config).eval()
            randomize(model)
            folder = fresh(f"{name}_{head}")
            model.save_pretrained(folder)
            logits = model(input_ids=ids, attention_mask=mask).logits
            target = {"mlm": ids, "tokens": ids % 3, "classifier": torch.tensor([2, 0])}[head]
            torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1)).backward()
            grads = {f"grad/{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
            finish(folder, {"ids": ids, "mask": mask, "target": target, "logits": logits, **grads})


def sentences():
    """Sentence embeddings of a tiny BERT by every way of pooling; needs sentence-transformers."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    torch.manual_seed(7)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "sea", "is", "wide", "and", "cold", "a", "mount", "##ain", "##s",
             "high", ".", ",", "?", "we", "climb", "##ed", "swim", "in", "no", "one"]
    tokenizer = Tokenizer(models.WordPiece({word: k for k, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    special = dict(unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", mask_token="[MASK]")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=12, num_hidden_layers=2, num_attention_heads=4, intermediate_size=20,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertModel(config).eval()
    randomize(model)
    folder, plain = fresh("sentences"), fresh("sentences_plain")
    model.save_pretrained(plain)
    fast.save_pretrained(plain)
    texts = ["The sea is wide and cold.", "", "no", "We climbed a mountain, and mountains is high? We swim in a cold sea, and we climbed.",
             "unknown words", "  The SEA "]
    tensors, width = {}, config.hidden_size
    for mode in ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]:
        parts = [Transformer(plain, max_seq_length=11), Pooling(width, pooling_mode=mode)]
        tensors[mode] = torch.tensor(SentenceTransformer(modules=parts, device="cpu").encode(texts))
    parts = [Transformer(plain, max_seq_length=11), Pooling(width, pooling_mode="mean"), Normalize()]
    whole = SentenceTransformer(modules=parts, device="cpu", prompts={"query": "we swim in: "}, default_prompt_name="query")
    tensors["whole"] = torch.tensor(whole.encode(texts))
    tensors["similarities"] = whole.similarity(tensors["whole"], tensors["whole"])
    whole.save(folder)
    shutil.rmtree(plain)
    for extra in ["README.md"]:
        os.path.exists(os.path.join(folder, extra)) and os.remove(os.path.join(folder, extra))
    finish(folder, tensors, texts=texts)


def vit():
    torch.manual_seed(6)
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=4, intermediate_size=20, image_size=12, patch_size=4,
        num_channels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3)
    config._attn_implementation = "eager"
    model = transformers.ViTForImageClassification(config).eval()
    randomize(model)
    folder = fresh("vit")
    model.save_pretrained(folder)
    pixels = torch.randn(2, 3, 12, 12)
    target = torch.tensor([1, 2])
    logits = model(pixel_values=pixels).logits
    torch.nn.functional.cross_entropy(logits, target).backward()
    # Files keep the names of older versions.
    old = [("vit.layers.", "vit.encoder.layer."), ("attention.o_proj", "attention.output.dense"),
           ("attention.q_proj", "attention.attention.query"), ("attention.k_proj", "attention.attention.key"),
           ("attention.v_proj", "attention.attention.value"), ("mlp.fc1", "intermediate.dense"), ("mlp.fc2", "output.dense")]

    def in_file(name):
        for new, before in old:
            name = name.replace(new, before)
        return name
    grads = {f"grad/{in_file(n)}": p.grad for n, p in model.named_parameters()}
    finish(folder, {"pixels": pixels, "target": target, "logits": logits, **grads})


def convolutions():
    """ResNet of both kinds of layers, in evaluation and in training, and ConvNeXt."""
    def resnet(**more):
        return transformers.ResNetForImageClassification, transformers.ResNetConfig(
            embedding_size=4, depths=[1, 2], hidden_sizes=[8, 12], num_labels=3, **more)

    for name, (kind, config) in {
        "resnet_basic": resnet(layer_type="basic", downsample_in_first_stage=True, hidden_act="silu"),
        "resnet_bottleneck": resnet(downsample_in_bottleneck=True),
        "resnet_50": resnet(),
        "convnext": (transformers.ConvNextForImageClassification, transformers.ConvNextConfig(
            patch_size=2, num_stages=2, depths=[1, 2], hidden_sizes=[4, 6], num_labels=3, layer_norm_eps=0.02,
            layer_scale_init_value=0.1, image_size=12)),
    }.items():
        torch.manual_seed(sum(map(ord, name)))
        model = kind(config).eval()
        randomize(model)
        with torch.no_grad():
            for n, p in model.named_parameters():
                if "normalization.weight" in n or "layer_scale" in n:
                    p.add_(1.0)
            for n, b in model.named_buffers():
                n.endswith("running_mean") and b.copy_(0.2 * torch.randn_like(b))
                n.endswith("running_var") and b.copy_(0.5 + torch.rand_like(b))
                n.endswith("num_batches_tracked") and b.fill_(7)
        folder = fresh(name)
        model.save_pretrained(folder)
        pixels, target = torch.randn(3, 3, 20, 12), torch.tensor([1, 2, 0])
        tensors = {"pixels": pixels, "target": target, "logits": model(pixels).logits}
        model.train()
        tensors["train_logits"] = model(pixels).logits
        torch.nn.functional.cross_entropy(tensors["train_logits"], target).backward()
        tensors.update({f"grad/{n}": p.grad for n, p in model.named_parameters()})
        tensors.update({f"after/{n}": b for n, b in model.named_buffers()})
        finish(folder, tensors)


def t5():
    """T5 with a tied head, T5 1.1 and mT5 with gates and a head of their own, and encoders alone."""
    sizes = dict(vocab_size=VOCAB, d_model=12, d_kv=4, d_ff=20, num_layers=2, num_decoder_layers=3, num_heads=2,
                 relative_attention_num_buckets=8, relative_attention_max_distance=12, layer_norm_epsilon=0.01, dropout_rate=0.0,
                 decoder_start_token_id=0)
    gated = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    for name, family, more in [("t5", "T5", {}), ("t5_gated", "T5", gated), ("mt5", "MT5", {})]:
        torch.manual_seed(sum(map(ord, name)))
        config = getattr(transformers, f"{family}Config")(**sizes, **more)
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
        if name != "t5":
            model.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCAB, 12))
        randomize(model)
        folder = fresh(name)
        model.save_pretrained(folder)
        os.path.exists(os.path.join(folder, "generation_config.json")) and os.remove(os.path.join(folder, "generation_config.json"))
        ids, target = torch.randint(3, VOCAB, (2, 17)), torch.randint(3, VOCAB, (2, 9))
        mask = torch.ones_like(ids)
        mask[1, 11:] = 0
        ids[mask == 0] = 0
        begun = torch.cat([torch.zeros(2, 1, dtype=torch.long), target[:, :-1]], 1)
        out = model(input_ids=ids, attention_mask=mask, decoder_input_ids=begun)
        torch.nn.functional.cross_entropy(out.logits.reshape(-1, VOCAB), target.reshape(-1)).backward()
        grads = {f"grad/{n}": p.grad for n, p in model.named_parameters()}
        # Its cache has no room for a decoder deeper than the encoder.
        text = model.generate(ids, attention_mask=mask, max_new_tokens=15, do_sample=False, eos_token_id=None, pad_token_id=0,
                              use_cache=False)
        finish(folder, {"ids": ids, "mask": mask, "begun": begun, "target": target, "logits": out.logits,
                        "states": out.encoder_last_hidden_state, **grads}, greedy=text[:, 1:].tolist())
    for name, family in [("t5_encoder", "T5"), ("mt5_encoder", "MT5")]:
        torch.manual_seed(sum(map(ord, name)))
        config = getattr(transformers, f"{family}Config")(**sizes)
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{family}EncoderModel")(config).eval()
        randomize(model)
        folder = fresh(name)
        model.save_pretrained(folder)
        ids = torch.randint(3, VOCAB, (2, 13))
        mask, target = torch.ones_like(ids), ids % 12
        mask[0, :2] = mask[1, 8:] = 0
        ids[mask == 0], target[mask == 0] = 0, -100
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
        torch.nn.functional.cross_entropy(states.reshape(-1, 12), target.reshape(-1)).backward()
        grads = {f"grad/{n}": p.grad for n, p in model.named_parameters()}
        finish(folder, {"ids": ids, "mask": mask, "target": target, "states": states * mask[..., None], **grads})


def whisper():
    """Whisper on random spectrograms, and its greedy text after tokens that are given."""
    torch.manual_seed(11)
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=5, d_model=12, encoder_layers=2, decoder_layers=3, encoder_attention_heads=2,
        decoder_attention_heads=3, encoder_ffn_dim=20, decoder_ffn_dim=16, max_source_positions=9, max_target_positions=16,
        pad_token_id=2, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None)
    config._attn_implementation = "eager"
    model = transformers.WhisperForConditionalGeneration(config).eval()
    randomize(model)
    folder = fresh("whisper")
    model.save_pretrained(folder)
    os.path.exists(os.path.join(folder, "generation_config.json")) and os.remove(os.path.join(folder, "generation_config.json"))
    sounds, target = torch.randn(2, 5, 18), torch.randint(0, VOCAB, (2, 8))
    target[0, 3] = 2
    begun = torch.cat([torch.ones(2, 1, dtype=torch.long), target[:, :-1]], 1)
    out = model(input_features=sounds, decoder_input_ids=begun)
    torch.nn.functional.cross_entropy(out.logits.reshape(-1, VOCAB), target.reshape(-1)).backward()
    grads = {f"grad/{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    # Whisper's own `generate` adds rules for time stamps.
    text = torch.tensor([[1, 7, 5], [1, 7, 5]])
    with torch.no_grad():
        while text.shape[1] < 14:
            logits = model(input_features=sounds, decoder_input_ids=text).logits[:, -1]
            text = torch.cat([text, logits.argmax(-1, keepdim=True)], 1)
    finish(folder, {"sounds": sounds, "begun": begun, "target": target, "logits": out.logits,
                    "states": out.encoder_last_hidden_state, **grads}, greedy=text[:, 3:].tolist())


SPEECH = dict(eos_token_id=24, pad_token_id=24, decoder_start_token_id=25, lang_to_id={"<|en|>": 28, "<|de|>": 27, "<|fr|>": 30},
              task_to_id={"transcribe": 29, "translate": 26}, no_timestamps_token_id=31, is_multilingual=True, max_length=16,
              max_initial_timestamp_index=4, return_timestamps=False, suppress_tokens=[3, 9, 25, 26, 27, 28, 29, 30],
              begin_suppress_tokens=[7, 24], forced_decoder_ids=[[1, None], [2, 29]], alignment_heads=[[0, 0]])


def speech():
    """Whisper's prompts, greedy texts with and without time stamps, and scores after its processors."""
    from transformers.generation.logits_process import (
        LogitsProcessorList, SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(
        os.path.join(HERE, "whisper"), attn_implementation="eager").eval()
    folder = fresh("speech")
    model.generation_config = transformers.GenerationConfig(**SPEECH)
    model.generation_config.save_pretrained(folder)
    torch.manual_seed(0)
    sounds, cases = torch.randn(8, 5, 18), []
    for case in [dict(), dict(return_timestamps=True), dict(language="de"), dict(language="fr", task="translate", return_timestamps=True),
                 dict(task="translate"), dict(language="en", return_timestamps=True, repetition_penalty=1.8)]:
        out = model.generate(sounds, force_unique_generate_call=True, return_dict_in_generate=True, **case)
        assert model.generation_config.suppress_tokens
        rows = out["sequences"].tolist()
        until = lambda row: row[:row.index(24) + 1] if 24 in row else row
        cases.append({**case, "texts": [until(row) for row in rows]})
    languages = model.detect_language(sounds).tolist()
    scores = 2 * torch.randn(10, VOCAB)
    scores[5:, 32:] -= 2.0
    texts = [[], [33], [5], [33, 5], [5, 36], [33, 36], [33, 5, 36], [33, 5, 36, 36, 4], [36, 5, 6], [33, 5, 42]]
    tensors = {"sounds": sounds, "scores": scores}
    config = transformers.GenerationConfig(**SPEECH)
    chain = LogitsProcessorList([SuppressTokensAtBeginLogitsProcessor(SPEECH["begin_suppress_tokens"], 3),
                                 SuppressTokensLogitsProcessor(SPEECH["suppress_tokens"]),
                                 WhisperTimeStampLogitsProcessor(config, begin_index=3)])
    tensors["processed"] = torch.cat([chain(torch.tensor([[25, 26, 29] + text]), scores[i:i + 1])
                                      for i, text in enumerate(texts)])
    finish(folder, tensors, cases=cases, languages=languages, texts=texts)


def clip():
    """CLIP, whose texts end at a token, or at the largest."""
    for name, end in [("clip", 40), ("clip_old", 2)]:
        torch.manual_seed(sum(map(ord, name)))
        sizes = dict(intermediate_size=20, num_hidden_layers=2, num_attention_heads=2)
        config = transformers.CLIPConfig(
            text_config=dict(vocab_size=VOCAB, hidden_size=12, max_position_embeddings=11, eos_token_id=end, bos_token_id=0,
                             hidden_act="quick_gelu" if end == 40 else "gelu", **sizes),
            vision_config=dict(hidden_size=8, image_size=12, patch_size=4, layer_norm_eps=0.02, **sizes), projection_dim=6)
        config._attn_implementation = "eager"
        model = transformers.CLIPModel(config).eval()
        randomize(model)
        folder = fresh(name)
        model.save_pretrained(folder)
        ids, pixels = torch.randint(3, 40, (3, 9)), torch.randn(2, 3, 12, 12)
        for row, at in [(0, 8), (1, 4), (2, 6)]:
            ids[row, at:] = 40
        if end == 40:
            # A larger token does not end a text.
            ids[1, 2], ids[2, 7] = 42, 41
        out = model(input_ids=ids, pixel_values=pixels)
        torch.nn.functional.cross_entropy(out.logits_per_text, torch.tensor([1, 0, 1])).backward()
        grads = {f"grad/{n}": p.grad for n, p in model.named_parameters()}
        finish(folder, {"ids": ids, "pixels": pixels, "target": torch.tensor([1, 0, 1]), "logits": out.logits_per_text,
                        "texts": out.text_embeds, "images": out.image_embeds, **grads})


def clip_towers():
    """Lone towers of CLIP, with a projection and without, and texts of which one has no end."""
    sizes = dict(intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, projection_dim=6)
    text = dict(vocab_size=VOCAB, hidden_size=12, max_position_embeddings=11, bos_token_id=0, **sizes)
    image = transformers.CLIPVisionConfig(hidden_size=8, image_size=12, patch_size=6, layer_norm_eps=0.02, **sizes)
    for name, kind, config in [
        ("clip_text", transformers.CLIPTextModel, transformers.CLIPTextConfig(eos_token_id=2, hidden_act="gelu", **text)),
        ("clip_text_projected", transformers.CLIPTextModelWithProjection, transformers.CLIPTextConfig(eos_token_id=40, **text)),
        ("clip_image", transformers.CLIPVisionModel, image),
        ("clip_image_projected", transformers.CLIPVisionModelWithProjection, image),
    ]:
        torch.manual_seed(sum(map(ord, name)))
        config._attn_implementation = "eager"
        model = kind(config).eval()
        randomize(model)
        folder = fresh(name)
        model.save_pretrained(folder)
        given = torch.randint(3, 40, (2, 9)) if "text" in name else torch.randn(2, 3, 12, 12)
        if "text" in name:
            given[0, 5], given[1, 7] = 40, 42
        out = model(given)
        vectors = out[0] if "projected" in name else out.pooler_output
        target = torch.tensor([4, 1])
        torch.nn.functional.cross_entropy(vectors, target).backward()
        grads = {f"grad/{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
        finish(folder, {"given": given, "target": target, "states": out.last_hidden_state, "vectors": vectors, **grads})


def main(names):
    def wants(name):
        return not names or name in names
    for name in filter(wants, DECODERS):
        decoder(name)
    wants("router") and router()
    wants("mtp") and mtp()
    wants("mxfp4") and mxfp4()
    wants("sampling") and sampling()
    wants("chat") and chat()
    wants("bert") and bert()
    wants("encoders") and encoders()
    wants("vit") and vit()
    wants("convolutions") and convolutions()
    wants("t5") and t5()
    wants("whisper") and whisper()
    wants("speech") and speech()
    wants("clip") and clip()
    wants("clip_towers") and clip_towers()
    wants("sentences") and sentences()
    wants("classifier_adapters") and classifier_adapters()
    for name in filter(wants, ADAPTERS):
        base, options = ADAPTERS[name]
        adapter(name, base, **options)


if __name__ == "__main__":
    main(sys.argv[1:])
