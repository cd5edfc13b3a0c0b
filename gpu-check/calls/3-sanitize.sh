#!/usr/bin/env bash
# What emulators cannot show: races and unwritten memory, by compute-sanitizer. About nine minutes.
source "$(dirname "$0")/start.sh" 550
run 3-attention --parts sanitize --only ladder/attention --minutes 5
run 3-rows --parts sanitize --only ladder/norms --only ladder/cross-entropy --minutes 4
