#!/usr/bin/env bash
# How fast is it: GPT-2 and PyTorch's, on one card in one call, then shapes. About nine minutes.
source "$(dirname "$0")/start.sh" 550
run 2-gpt2 --parts bench,captured,choices,profile --only 'gpt2 16 1024' --minutes 2.5
# PyTorch finds its own libraries: a toolkit's cuDNN would choose another attention.
torch() {
    env -u LD_LIBRARY_PATH python3 "$here/torch_times.py" --out "$out/$1.json" --seconds "$2" "${@:3}" 2>&1 | tee "$out/$1.log" || failed=1
}
torch 2-torch 130 'gpt2 16 1024'
TORCH_CUDNN_SDPA_DEPRIORITIZED=1 torch 2-torch-flash 60 'gpt2 16 1024' 'attnbf16fb 16 12 1024 64'
# Products with the sum of a bias's gradient are in the profile, those without among these.
run 2-shapes --parts bench --only bf16 --minutes 2
