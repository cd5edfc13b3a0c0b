#!/bin/sh
# Runs every kernel on the CPU against a reference: ./check.sh [test ..], by default all. Needs g++ (or $CXX) with C++17.
# Exits non-zero if one does not compile or a value is wrong.
set -eu
cd "$(dirname "$0")"
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
# Errors that are fatal on a GPU: misaligned vectors, shifts and indices out of range, overflow of signed integers.
flags="-std=c++17 -O1 -Wall -Wextra -Wno-unknown-pragmas -Wno-unused-parameter -fno-strict-aliasing
    -fsanitize=alignment,bounds,shift,signed-integer-overflow -fno-sanitize-recover=all"
# One process per CPU.
printf '%s\n' ${*:-attention lines index cross_entropy norm conv softmax linear4bit} |
    xargs -P "$(nproc)" -I NAME sh -c "${CXX:-g++} $(echo $flags) -o '$build/NAME' NAME.cpp && '$build/NAME'"
