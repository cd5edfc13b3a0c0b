#!/bin/sh
# A command of a search: `train.sh --config FILE [fail|hang]` writes lr / steps as the loss into the folder `out`.
of() { sed -n "s/^$1 = \"\{0,1\}\([^\"]*\)\"\{0,1\}$/\1/p" "$2"; }
out=$(of out "$2")
case "$3" in
    fail) exit 3 ;;
    hang) touch "$out/hangs"; exec sleep 60 ;;
esac
loss=$(awk "BEGIN { print $(of lr "$2") / $(of steps "$2") }")
echo "{\"step\":$(of steps "$2"),\"epoch\":0,\"time\":1.0,\"values\":{\"loss\":$loss}}" >> "$out/metrics.jsonl"
