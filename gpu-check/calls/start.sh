# Unpacks the program with compiled kernels and keeps the GPU open: every call sources this file, with the seconds it may take.
# Results go to $OUT, or to `out` beside the scripts.
set -o pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${OUT:-$here/out}
export XDG_CACHE_HOME=${TMPDIR:-/tmp}/weftgrad-gpu-check PYTHONUNBUFFERED=1
check=$XDG_CACHE_HOME/gpu-check
mkdir -p "$out" "$XDG_CACHE_HOME"
tar -C "$XDG_CACHE_HOME" -xJf "$here/gpu-check.tar.xz" || exit
nvidia-smi > "$out/smi.txt" 2>&1
# The driver may close a GPU that no process uses, and each item would open it anew.
python3 -c "import torch, time; torch.zeros(1, device='cuda'); time.sleep($1)" > /dev/null 2>&1 &
holder=$!
failed=0
trap 'kill $holder 2> /dev/null; exit $failed' EXIT

# The checks of some parts, with a report and a log of their own.
run() {
    name=$1
    shift
    "$check" "$@" --out "$out/$name.json" 2>&1 | tee "$out/$name.log" || failed=1
}
