#!/usr/bin/env bash
# Does it run: the ladder, then all that compares values. About five and a half minutes.
source "$(dirname "$0")/start.sh" 330
ldconfig -p | grep -E 'libcuda|nvrtc|cublasLt|nccl|cudnn|vulkan' > "$out/libraries.txt"
run 1-ladder --parts ladder --minutes 1.5
run 1-values --parts parity,losses,graph,nccl,memory,suite,goldens --minutes 3.7
