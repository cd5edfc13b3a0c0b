#!/usr/bin/env bash
# All cases beside PyTorch, and the same machine through WebGPU. About nine and a half minutes.
source "$(dirname "$0")/start.sh" 570
run 4-bench --parts copies,bench,captured --minutes 3.5
run 4-torch --parts torch --minutes 2.5
# Vulkan's loader travels along, the driver is the machine's.
export LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
icd=/usr/local/nvidia/share/vulkan/icd.d/nvidia_icd.json
[ -e "$icd" ] && export VK_DRIVER_FILES=$icd
run 4-wgpu --device wgpu --parts ladder,parity,suite --minutes 2.5
run 4-wgpu-gpt --device wgpu --parts bench --only gpt --only mlp --minutes 0.7
