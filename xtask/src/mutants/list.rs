//! The changes that a test must notice.

use super::Mutant;

const COMM: &[&str] = &["test", "-p", "weftgrad-comm", "--lib", "--test", "all"];
pub(super) const DATA: &[&str] = &["test", "-p", "weftgrad-data", "--lib", "--test", "all"];
const TOKENIZER: &[&str] = &["test", "-p", "weftgrad-data", "--features", "text", "--test", "all", "--", "tokenizers"];
#[rustfmt::skip]
const CONFIGS: &[&str] = &[
    "test", "-p", "weftgrad-models", "--lib", "--test", "all", "--", "configurations", "in_transformers",
    "something_else",
];
const CHATS: &[&str] = &["test", "-p", "weftgrad-models", "--features", "text", "--test", "all", "--", "chats"];
const ZERO: &[&str] = &["test", "-p", "weftgrad-distributed", "--lib", "--test", "all", "--", "zero"];
const BUCKETS: &[&str] =
    &["test", "-p", "weftgrad-distributed", "--lib", "--test", "all", "--", "bucket", "data_parallel", "canonical"];
const SINKS: &[&str] = &["test", "-p", "weftgrad-watch", "--test", "all", "--", "sinks"];
#[rustfmt::skip]
const ELASTIC: &[&str] = &[
    "test", "-p", "weftgrad-distributed", "-p", "weftgrad-adaptive", "--lib", "--test", "all", "--", "elastic",
    "copies",
];
const SAVES: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "checkpoint", "hyper_parameters"];
const LOCAL: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "local_updates"];
const POWER: &[&str] =
    &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "powersgd::a_step_that_is_left_out"];
const DRAWN: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "ways_that_once_failed"];
const AVERAGES: &[&str] = &["test", "-p", "weftgrad-train", "--test", "all", "--", "averaging"];
const TENSOR: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "tensor_decisions"];
#[rustfmt::skip]
const VOCABULARY: &[&str] = &[
    "test", "-p", "weftgrad-distributed", "--test", "all", "--", "vocabularies_of_any_size", "rows_of_a_table",
];
const PROCESS: &[&str] = &["test", "-p", "weftgrad-engine-process", "--lib", "--test", "collectives"];
const JOBS: &[&str] = &["test", "-p", "weftgrad-engine-process", "--test", "jobs"];
const BALANCE: &[&str] =
    &["test", "-p", "weftgrad-distributed", "-p", "weftgrad-adaptive", "--lib", "--test", "all", "--", "balance"];
const TANGENTS: &[&str] = &["test", "-p", "weftgrad-conformance", "--test", "cpu", "--", "tangents"];
const AGREEMENTS: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "agreements"];
const EXPERTS: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "expert_decisions", "ways"];
const FROZEN: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "frozen_parameters"];
const LOCAL_LOOP: &[&str] = &["test", "-p", "weftgrad-train", "--test", "all", "--", "local_updates"];
pub(super) const PUSHED: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "pushed"];
#[rustfmt::skip]
const SETS: &[&str] = &[
    "test", "-p", "weftgrad-distributed", "--lib", "--test", "all", "--", "pipeline", "expert", "hyper",
    "reduce_timing", "ways", "what_follows",
];
const COMBINED: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "combinations"];
const WRAPPED: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "wrapped"];
const PIPED: &[&str] =
    &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "a_replica_without", "each_micro_batch"];
const LAYERS: &[&str] = &["test", "-p", "weftgrad-nn", "--test", "all", "--", "batch_norm"];
const DOORS: &[&str] = &["test", "-p", "weftgrad-train", "--test", "all", "--", "doors"];
const CHOICES: &[&str] = &["test", "-p", "weftgrad-train", "--test", "all", "--", "choices::where_devices"];
const WAYS: &[&str] = &["test", "-p", "weftgrad-runtime-cpu", "--lib", "--", "ways", "stream"];
const FLOAT8: &[&str] = &["test", "-p", "weftgrad-runtime-cpu", "--test", "all", "--", "float8"];
const SCALED: &[&str] = &["test", "-p", "weftgrad-nn", "--test", "all", "--", "block_scaled"];
const GEMM: &[&str] = &["test", "-p", "weftgrad-runtime-cpu", "--lib", "--", "widen"];
const CHECKPOINTS: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "checkpoint_kills"];
const BATCH_NORM: &[&str] = &["test", "-p", "weftgrad-train", "--test", "all", "--", "buffers"];
const UNEVEN: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "data_parallel_unused"];
pub(super) const POLICIES: &[&str] =
    &["test", "-p", "weftgrad-train", "--test", "all", "--", "remembered", "policies", "failures", "evaluation"];
const SEQUENCES: &[&str] = &["test", "-p", "weftgrad-models", "--test", "all", "--", "tensor_sequence"];
const STAGES: &[&str] = &["test", "-p", "weftgrad-models", "--test", "all", "--", "stages"];
const MTP: &[&str] = &["test", "-p", "weftgrad-models", "--test", "all", "--", "mtp"];
const FOLDED: &[&str] =
    &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "what_follows", "ways::every_schedule"];
#[rustfmt::skip]
const MODELS: &[&str] = &[
    "test", "-p", "weftgrad-models", "--lib", "--test", "all", "--", "generat", "stop", "process", "lora", "adapter",
    "trained_whole", "padding",
];
const NUMERICS: &[&str] = &["test", "-p", "weftgrad-conformance", "--test", "cpu", "--", "numerics", "errors"];
const NN: &[&str] = &["test", "-p", "weftgrad-nn", "--test", "all", "--", "safetensors", "losses", "an_op_names"];
const OPTIM: &[&str] = &["test", "-p", "weftgrad-optim", "--test", "all", "--", "frozen"];
const COMPOSED: &[&str] =
    &["test", "-p", "weftgrad-conformance", "--test", "composed", "--", "interpolate", "grid_sample"];
const IMAGES: &[&str] = &["test", "-p", "weftgrad-data", "--features", "image", "--test", "all", "--", "images"];
const ENDS: &[&str] = &["test", "-p", "weftgrad-autograd", "--test", "all", "--", "ends"];
const STEPS: &[&str] = &[
    "test",
    "-p",
    "weftgrad-distributed",
    "--lib",
    "--test",
    "all",
    "--",
    "accumulated_runs",
    "buffer_sync",
    "unequal_sums",
    "sums::",
];
const FAILED: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "failed_steps::a_load"];
const CONTEXT: &[&str] =
    &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "draw_alike_after", "weighs_what_one_rank_says"];
const MASKS: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "pipeline_masks"];
const FOURIER: &[&str] = &["test", "-p", "weftgrad-conformance", "--test", "composed", "--", "what_is_no_transform"];
const RESUMED: &[&str] = &["test", "-p", "weftgrad-train", "--test", "all", "--", "without_a_checkpoint"];
const REPORTS: &[&str] = &["test", "-p", "weftgrad-watch", "--test", "all", "--", "report"];

/// Each is a place, what stands there once, what is put there instead, and the command that must fail then.
#[rustfmt::skip]
pub(super) const MUTANTS: &[Mutant] = &[
    Mutant { file: "comm/src/combine.rs", from: "if k == last { n } else { 1 }", to: "if k == 0 { n } else { 1 }", test: COMM },
    Mutant { file: "comm/src/combine.rs", from: "op == ReduceOp::Avg && divisor > 1", to: "op == ReduceOp::Avg && divisor > 2", test: COMM },
    Mutant { file: "comm/src/combine.rs", from: "!(started && i == 0)", to: "!started", test: COMM },
    Mutant { file: "comm/src/combine.rs", from: "(k > 0).then_some(Input::Own(0))", to: "(k > 1).then_some(Input::Own(0))", test: COMM },
    Mutant { file: "comm/src/threads/round.rs", from: "filter(|&m| k < self.pieces[m].len())", to: "filter(|&m| k + 1 < self.pieces[m].len())", test: COMM },
    Mutant { file: "comm/src/threads/round.rs", from: "if n == 1 && !given {", to: "if n == 1 {", test: COMM },
    Mutant { file: "comm/src/transfer_plan.rs", from: ".filter(|&r| r != self.rank)", to: ".filter(|&r| r + 1 != self.rank)", test: COMM },
    Mutant { file: "comm/src/transfer_plan.rs", from: "let at = |part: usize, k: usize| part * count + k;", to: "let at = |part: usize, k: usize| part + k;", test: COMM },
    Mutant { file: "comm/src/transfer_plan.rs", from: "parts[part].saturating_sub(k * self.chunk)", to: "parts[part]", test: COMM },
    Mutant { file: "comm/src/call.rs", from: "(&a.parts, &a.of) == (&b.parts, &b.of)", to: "(&a.parts,) == (&b.parts,)", test: COMM },
    Mutant { file: "comm/src/call.rs", from: "(a.what, a.dtype, a.in_place, a.header)", to: "(b.what, a.dtype, a.in_place, a.header)", test: COMM },
    Mutant { file: "comm/src/call.rs", from: "(a.what, a.dtype, a.in_place, a.header) == (b.what, b.dtype", to: "(a.what, b.dtype, a.in_place, a.header) == (b.what, b.dtype", test: COMM },
    Mutant { file: "comm/src/call.rs", from: "(places == Places::Any || a.at == b.at)", to: "(places != Places::Any || a.at == b.at)", test: COMM },
    Mutant { file: "comm/src/call.rs", from: "if op == ReduceOp::Avg && !dtype.is_float() {", to: "if op == ReduceOp::Avg && dtype.is_half() {", test: COMM },
    Mutant { file: "comm/src/fingerprint.rs", from: "(flags & 1 != 0, flags & 2 != 0)", to: "(flags & 2 != 0, flags & 1 != 0)", test: COMM },
    Mutant { file: "comm/src/fingerprint.rs", from: "named.then(|| Arc::from(of))", to: "Some(Arc::from(of))", test: COMM },
    Mutant { file: "data/src/loader/plan.rs", from: "if start.position > self.order.len() {", to: "if start.position > self.order.len() + 1 {", test: DATA },
    Mutant { file: "data/src/loader/plan.rs", from: "left / self.batch } else { left.div_ceil(self.batch) }", to: "left.div_ceil(self.batch) } else { left / self.batch }", test: DATA },
    Mutant { file: "data/src/loader/plan.rs", from: "        if k < first {", to: "        if k <= first {", test: DATA },
    Mutant { file: "data/src/loader/plan.rs", from: "position: position + k * self.batch", to: "position: k * self.batch", test: DATA },
    Mutant { file: "data/src/loader/plan.rs", from: "epoch: epoch + 1 + past / steps", to: "epoch: epoch + past / steps", test: DATA },
    Mutant { file: "data/src/loader/plan.rs", from: "take_while(|i| first + i * stride < total)", to: "take_while(|i| first + i * stride <= total)", test: DATA },
    Mutant { file: "data/src/loader/plan.rs", from: "u64::from(self.rank < more)", to: "u64::from(self.rank <= more)", test: DATA },
    Mutant { file: "data/src/loader/plan.rs", from: "sizes.iter().sum::<usize>() as u64 == rows", to: "true", test: DATA },
    Mutant { file: "data/src/loader/plan.rs", from: "self.rank * each + self.rank.min(more)", to: "self.rank * each", test: DATA },
    Mutant { file: "data/src/order/permutation.rs", from: "if sum >= self.base { sum - self.base }", to: "if sum > self.base { sum - self.base }", test: DATA },
    Mutant { file: "data/src/order/permutation.rs", from: "if number < u128::from(self.n) {", to: "if number <= u128::from(self.n) {", test: DATA },
    Mutant { file: "data/src/order/permutation.rs", from: "for round in (0..ROUNDS).rev() {", to: "for round in 0..ROUNDS {", test: DATA },
    Mutant { file: "data/src/order/mixture.rs", from: "source.start + source.len <= example", to: "source.start + source.len < example", test: DATA },
    Mutant { file: "data/src/order/mixture.rs", from: "round * u128::from(source.per_period) + u128::from(before)", to: "round * u128::from(source.per_period)", test: DATA },
    Mutant { file: "data/src/order/mixture.rs", from: "source.start + KeyedPermutation", to: "KeyedPermutation", test: DATA },
    Mutant { file: "data/src/pack/plan.rs", from: "last: end == len }", to: "last: end <= len }", test: DATA },
    Mutant { file: "data/src/pack/plan.rs", from: ".filter(|piece| piece.len > 0)", to: "", test: DATA },
    Mutant { file: "data/src/pack/plan.rs", from: "start_of(document).max(from), ends[document].min(to)", to: "start_of(document), ends[document].min(to)", test: DATA },
    Mutant { file: "data/src/pack/row.rs", from: "tokens.get(at + 1)", to: "tokens.get(at)", test: DATA },
    Mutant { file: "data/src/pack/row.rs", from: "segments.last().copied().unwrap_or(0) + 1", to: "segments.last().copied().unwrap_or(0)", test: DATA },
    Mutant { file: "data/src/tokens/windows.rs", from: "self.source.len() - self.context as u64 - 1", to: "self.source.len() - self.context as u64", test: DATA },
    Mutant { file: "data/src/tokens/windows.rs", from: "(index * self.stride) as u64", to: "index as u64", test: DATA },
    Mutant { file: "data/src/stream/shuffle.rs", from: "self.left.len() - *taken as usize", to: "*taken as usize", test: DATA },
    Mutant { file: "data/src/stream/shuffle.rs", from: "u64::from(self.taken > 0)", to: "0", test: DATA },
    Mutant { file: "data/src/stream/replay.rs", from: "while self.read < read {", to: "while self.read <= read {", test: DATA },
    Mutant { file: "data/src/sources/tokenizer.rs", from: "inner.with_padding(None).with_truncation(None)", to: "inner.with_truncation(None)", test: TOKENIZER },
    Mutant { file: "data/src/sources/tokenizer.rs", from: "last as usize + 1", to: "last as usize", test: TOKENIZER },
    Mutant { file: "data/src/sources/tokenizer.rs", from: "*dropout > 0.0", to: "*dropout > 1.0", test: TOKENIZER },
    Mutant { file: "data/src/sources/csv.rs", from: "(Some((at, _)), None) =>", to: "(Some((at, _)), _) =>", test: DATA },
    Mutant { file: "data/src/sources/safetensors.rs", from: "reader.names().map(column).collect::<Result<_>>().at_caller()?", to: "reader.names().flat_map(column).collect()", test: DATA },
    Mutant { file: "data/src/sources/image/mod.rs", from: ".filter(|_| !first.starts_with('.'))", to: "", test: IMAGES },
    Mutant { file: "data/src/sources/image/mod.rs", from: "ends_with(path, &NOT_READ)", to: "ends_with(path, &[])", test: IMAGES },
    Mutant { file: "data/src/files/gzip.rs", from: "next_member(ended.into_inner())?", to: "None", test: DATA },
    Mutant { file: "data/src/files/gzip.rs", from: "file.consume(zeros);", to: "return Ok(None);", test: DATA },
    Mutant { file: "data/src/files/records.rs", from: "b'\\n' | b'\\r'", to: "b'\\n'", test: DATA },
    Mutant { file: "data/src/files/records.rs", from: "if start == MARK {", to: "if start.is_empty() {", test: DATA },
    Mutant { file: "data/src/stream/replay.rs", from: "is_return && from.fill_buf()?.first() == Some(&b'\\n')", to: "is_return", test: DATA },
    Mutant { file: "data/src/sources/tar.rs", from: "archive.set_ignore_zeros(true);", to: "", test: DATA },
    Mutant { file: "data/src/sources/tar.rs", from: "examples.extend(open);", to: "drop(open);", test: DATA },
    Mutant { file: "distributed/src/buckets/plan.rs", from: "if bucket.bytes >= bucket.limit {", to: "if bucket.bytes > bucket.limit {", test: BUCKETS },
    Mutant { file: "distributed/src/buckets/plan.rs", from: "(all / 16).clamp(first, most)", to: "(all / 16).max(first)", test: BUCKETS },
    Mutant { file: "distributed/src/buckets/layout.rs", from: "first.range..last.range + 1", to: "first.range..last.range", test: BUCKETS },
    Mutant { file: "distributed/src/ddp/exchange.rs", from: "p.used = used || (every_pass && p.used);", to: "p.used = used;", test: BUCKETS },
    Mutant { file: "distributed/src/ddp/exchange.rs", from: "self.next = k + 1;", to: "self.next = k;", test: BUCKETS },
    Mutant { file: "adaptive/src/balance/ranges.rs", from: "count as f64 / total as f64", to: "count as f64", test: BALANCE },
    Mutant { file: "adaptive/src/balance/speed.rs", from: "} else if off.abs() <= self.options.noise {", to: "} else if off <= self.options.noise {", test: BALANCE },
    Mutant { file: "adaptive/src/balance/shares.rs", from: "speed.measure(seconds / examples as f64);", to: "speed.measure(*seconds);", test: BALANCE },
    Mutant { file: "distributed/src/zero/layout.rs", from: "start..start + self.shards[rank]", to: "start..start", test: ZERO },
    Mutant { file: "distributed/src/zero/layout.rs", from: "(own[rank], loads[rank])", to: "own[rank]", test: ZERO },
    Mutant { file: "distributed/src/zero/build.rs", from: "if options.units.is_tied(&name) {", to: "if false {", test: ZERO },
    Mutant { file: "distributed/src/zero/unit.rs", from: "self.leaves.iter().try_for_each(|leaf| optimizer.may_cut(&leaf.name(), &leaf.spec()).map(|_| ()))?;", to: "", test: ZERO },
    Mutant { file: "distributed/src/zero/gradients.rs", from: "(shards || self.layout.cuts())", to: "shards", test: ZERO },
    Mutant { file: "distributed/src/zero/checkpoint.rs", from: "!self.layout.cuts() && spec.shape != leaf.spec().shape", to: "false", test: ZERO },
    Mutant { file: "optim/src/shard.rs", from: "if C::PER_PARAMETER || !phase.changes() { i } else { 0 }", to: "0", test: ZERO },
    Mutant { file: "optim/src/shard.rs", from: "(state_names(group(i)) == *names).then", to: "true.then", test: ZERO },
    Mutant { file: "optim/src/memory.rs", from: "                *read = Some(new);\n", to: "", test: ZERO },
    Mutant { file: "distributed/src/zero/layout.rs", from: "span.start.max(start)..span.end.min(end)", to: "span.start.max(start)..end", test: ZERO },
    Mutant { file: "distributed/src/zero/layout.rs", from: "elements.start - start..elements.end - start", to: "elements.start..elements.end", test: ZERO },
    Mutant { file: "distributed/src/zero/options.rs", from: "elements <= self.whole_up_to", to: "elements < self.whole_up_to", test: ZERO },
    Mutant { file: "distributed/src/zero/order.rs", from: "if self.backward { at.checked_sub(1) } else { Some(at + 1) }", to: "Some(at + 1)", test: ZERO },
    Mutant { file: "distributed/src/checkpoint/folder.rs", from: "[ORPHANED, UNFINISHED, REMOVED].iter()", to: "[ORPHANED, UNFINISHED].iter()", test: CHECKPOINTS },
    Mutant { file: "distributed/src/loss.rs", from: "false => Var::new(Tensor::zeros(sum.runtime(), sum.spec().shape, sum.spec().dtype)?)", to: "false => sum.detach()", test: UNEVEN },
    Mutant { file: "distributed/src/train/step.rs", from: "let mut hook = self.hook(loss.counts);", to: "let mut hook = self.hook(true);", test: UNEVEN },
    Mutant { file: "distributed/src/train/updates.rs", from: "            self.torn = Some(Torn::Update);\n", to: "", test: POLICIES },
    Mutant { file: "train/src/trainer/saving.rs", from: "        self.pending.clear();\n", to: "", test: POLICIES },
    Mutant { file: "train/src/trainer/saving.rs", from: "max_by_key(|(step, _)| *step)", to: "last()", test: POLICIES },
    Mutant { file: "train/src/trainer/start.rs", from: "        check_folders(&saved_in(&self.callbacks))", to: "        Ok(())", test: POLICIES },
    Mutant { file: "train/src/callbacks/monitor.rs", from: "if self.maximize { \"max\" } else { \"min\" }, self.name)", to: "if self.maximize { \"max\" } else { \"max\" }, self.name)", test: POLICIES },
    Mutant { file: "train/src/callbacks/checkpoints.rs", from: "if self.is_due || self.is_best_missing(run)? {", to: "if self.is_due {", test: POLICIES },
    Mutant { file: "train/src/run.rs", from: ".filter(|_| self.to_come.is_empty())", to: ".filter(|_| false)", test: POLICIES },
    Mutant { file: "watch/src/sink/tensorboard/mod.rs", from: "std::mem::take(&mut self.resumes)", to: "self.resumes && record.step == 0", test: SINKS },
    Mutant { file: "comm/src/difference.rs", from: "line.chars().skip(from).take(SHOWN)", to: "line.chars().take(SHOWN)", test: COMM },
    Mutant { file: "numcore/src/float8.rs", from: " - 1 + ((a >> (23 - FRACTION)) & 1)", to: "", test: FLOAT8 },
    Mutant { file: "numcore/src/float8.rs", from: "normal.min(Self::OVERFLOW)", to: "normal.min(0x7f)", test: FLOAT8 },
    Mutant { file: "numcore/src/fused/block_scaled.rs", from: "x.flatten(0, -2)?, [SIDE, 1]", to: "x.flatten(0, -2)?, [1, SIDE]", test: SCALED },
    Mutant { file: "nn/src/layers/batch_norm.rs", from: "let count = counted_rows(rows);", to: "let count = rows;", test: BATCH_NORM },
    Mutant { file: "nn/src/counted_rows.rs", from: "n / rows * count,", to: "n,", test: BATCH_NORM },
    Mutant { file: "train/src/trainer/start.rs", from: "state.is_elastic || !state.saves", to: "!state.is_elastic", test: POLICIES },
    Mutant { file: "train/src/callbacks/evaluate.rs", from: "if batch.count == 0 {", to: "if batch.rows == 0 {", test: POLICIES },
    Mutant { file: "data/src/loader/mod.rs", from: "if self.last == Last::Pad { Last::Keep } else { self.last }", to: "self.last", test: POLICIES },
    Mutant { file: "models/src/generate/processors.rs", from: "*score * penalty } else { *score / penalty }", to: "*score / penalty } else { *score / penalty }", test: MODELS },
    Mutant { file: "models/src/generate/processors.rs", from: "drop_where(scores, |score, _| score < least)", to: "drop_where(scores, |score, _| score <= least)", test: MODELS },
    Mutant { file: "models/src/generate/processors.rs", from: "if sum > 1.0 - p {", to: "if sum > p {", test: MODELS },
    Mutant { file: "models/src/generate/stop.rs", from: "new.len().saturating_sub(longest + 4)", to: "new.len()", test: MODELS },
    Mutant { file: "models/src/config/rope.rs", from: "_ if !self.partial =>", to: "_ if self.partial =>", test: CONFIGS },
    Mutant { file: "models/src/config/decoder/read.rs", from: ".filter(|_| !fields.has(\"num_key_value_heads\"))", to: "", test: CONFIGS },
    Mutant { file: "models/src/config/windows.rs", from: "!alternates(family) && windows.iter()", to: "alternates(family) && windows.iter()", test: CONFIGS },
    Mutant { file: "nn/src/layers/grouped_query.rs", from: "placed.exchange(Exchange::Copy, &squares)?.div((all * placed.replicas()) as f64)?", to: "squares.div((all * placed.replicas()) as f64)?", test: SEQUENCES },
    Mutant { file: "models/src/config/family.rs", from: "head_dim: Some(128)", to: "head_dim: None", test: CONFIGS },
    Mutant { file: "models/src/lora/config.rs", from: "alpha / if self.use_rslora { rank.sqrt() } else { rank }", to: "alpha / if self.use_rslora { rank } else { rank.sqrt() }", test: MODELS },
    Mutant { file: "models/src/lora/adapter.rs", from: "placed.style() == TensorStyle::Row", to: "placed.style() != TensorStyle::Row", test: MODELS },
    Mutant { file: "models/src/lora/adapter.rs", from: "dims.len() == 2 && part.is_some()", to: "dims.len() == 1 && part.is_some()", test: MODELS },
    Mutant { file: "nn/src/moe/layer.rs", from: "shared.forward(x)?;", to: "shared.forward(&tokens)?.reshape(shape)?;", test: MODELS },
    Mutant { file: "models/src/lora/config.rs", from: "&& !self.saves(layer)", to: "", test: MODELS },
    Mutant { file: "models/src/lora/config.rs", from: "Some(\"SEQ_CLS\" | \"TOKEN_CLS\")", to: "Some(\"TOKEN_CLS\")", test: MODELS },
    Mutant { file: "models/src/lora/mod.rs", from: "saved.iter().for_each(|saved| saved.parameter.set_requires_grad(true));", to: "", test: MODELS },
    Mutant { file: "models/src/lora/mod.rs", from: "names.tied.contains(&&*saved.ours)", to: "names.tied.is_empty()", test: MODELS },
    Mutant { file: "models/src/lora/files.rs", from: "vec![name, before]", to: "vec![name]", test: MODELS },
    Mutant { file: "models/src/lora/config.rs", from: "|| **value == Value::Bool(false) && is_in(OFF)", to: "|| **value == Value::Bool(false)", test: MODELS },
    Mutant { file: "models/src/generate/options.rs", from: "Self::read(&fields)", to: "Ok(GenerationOptions::default())", test: MODELS },
    Mutant { file: "models/src/config/fields.rs", from: " && !is_generation_field(name)", to: "", test: MODELS },
    Mutant { file: "models/src/decoder/mod.rs", from: "if let Some(row) = config.padding {", to: "if let Some(row) = config.padding.filter(|_| false) {", test: MODELS },
    Mutant { file: "models/src/decoder/mod.rs", from: "self.sequence_parts().unwrap_or(1) * context.ranks()", to: "self.sequence_parts().unwrap_or(1)", test: STAGES },
    Mutant { file: "models/src/decoder/mod.rs", from: "self.sequence_parts().unwrap_or(1) * context.ranks()", to: "context.ranks()", test: SEQUENCES },
    Mutant { file: "models/src/decoder/stages.rs", from: "chain(&inputs[1..])", to: "chain(&inputs[1..1])", test: STAGES },
    Mutant { file: "models/src/decoder/stages.rs", from: "table.duplicate().map(Embedding::of)", to: "Ok::<_, Error>(Embedding::of(table))", test: MTP },
    Mutant { file: "models/src/decoder/stages.rs", from: "&& !config.tied;", to: "|| config.tied;", test: MTP },
    Mutant { file: "models/src/decoder/mtp.rs", from: "depths.last().map_or(states, |depth| &depth.states)", to: "states", test: MTP },
    Mutant { file: "models/src/decoder/mtp.rs", from: "segments.eq(&shifted(segments, depth, 0)?)?", to: "segments.eq(segments)?", test: MTP },
    Mutant { file: "models/src/config/options.rs", from: "fields.weights().is_none_or(has)", to: "fields.weights().is_none()", test: MTP },
    Mutant { file: "models/src/decoder/mod.rs", from: "        self.parts.is_whole()", to: "        true", test: STAGES },
    Mutant { file: "nn/src/layers/language_model.rs", from: "Embedding::of(table.weight.duplicate()?)", to: "Embedding::of(table.weight.clone())", test: FOLDED },
    Mutant { file: "nn/src/layers/language_model.rs", from: "if k + 1 == stages { head.take() }", to: "if k == 0 { head.take() }", test: STAGES },
    Mutant { file: "nn/src/layers/language_model.rs", from: "if one { self.project(x) }", to: "if one { self.projected(x) }", test: VOCABULARY },
    Mutant { file: "nn/src/parallel/loss.rs", from: "if shape[0] == 0 {", to: "if shape.numel() == 0 {", test: VOCABULARY },
    Mutant { file: "nn/src/parallel/loss.rs", from: "f64::NEG_INFINITY)?", to: "0.0)?", test: VOCABULARY },
    Mutant { file: "nn/src/layers/numbered.rs", from: "first: self.first + start", to: "first: self.first", test: STAGES },
    Mutant { file: "distributed/src/strategy/tied.rs", from: "filter(|of| of.len() > 1)", to: "filter(|of| of.len() > 2)", test: STAGES },
    Mutant { file: "models/src/chat/source.rs", from: "text.operands.push(std::mem::take(&mut text.operand));", to: "text.operand.push('~');", test: CHATS },
    Mutant { file: "models/src/chat/template.rs", from: "variables.contains_key(\"tools\").then(", to: "(!variables.is_empty()).then(", test: CHATS },
    Mutant { file: "models/src/chat/template.rs", from: "(older.is_file() && config.get(\"added_tokens_decoder\").is_none())", to: "older.is_file()", test: CHATS },
    Mutant { file: "models/src/chat/template.rs", from: "messages.into_iter().map(with_thoughts).collect()", to: "messages", test: CHATS },
    Mutant { file: "models/src/chat/python.rs", from: "ValueKind::Seq | ValueKind::Iterable | ValueKind::Map)", to: "ValueKind::Map)", test: CHATS },
    Mutant { file: "models/src/chat/python.rs", from: "(-4..16)", to: "(-5..16)", test: CHATS },
    Mutant { file: "models/src/chat/python.rs", from: "escapes == Some(true)", to: "escapes == Some(false)", test: CHATS },
    Mutant { file: "distributed/src/train/updates.rs", from: "self.scaler.is_some() || self.config.skip_non_finite", to: "self.scaler.is_some()", test: POWER },
    Mutant { file: "distributed/src/train/updates.rs", from: "skippable: self.may_skip() || weight == 0.0", to: "skippable: weight == 0.0", test: POWER },
    Mutant { file: "distributed/src/train/updates.rs", from: "skippable: self.may_skip() || weight == 0.0", to: "skippable: self.may_skip()", test: DRAWN },
    Mutant { file: "distributed/src/pipeline/run/boundary.rs", from: " && !boundary.is_frozen()", to: "", test: DRAWN },
    Mutant { file: "distributed/src/train/builder.rs", from: "make.experts && mesh.plan().size(Axis::Expert) > 1", to: "make.experts", test: DRAWN },
    Mutant { file: "train/src/run.rs", from: "self.features().union(self.state.at_end)", to: "self.features().and(feature)", test: AVERAGES },
    Mutant { file: "distributed/src/ddp/partial.rs", from: "Unused::Allow => self.tensor.used_anywhere(&own)?,", to: "Unused::Allow => vec![true; own.len()],", test: TENSOR },
    Mutant { file: "distributed/src/zero/checkpoint.rs", from: "self.groups.replicas.is_some() || self.tensor.is_cut()", to: "self.groups.replicas.is_some()", test: TENSOR },
    Mutant { file: "distributed/src/strategy/set.rs", from: "share_groups(self.parts_mut(), groups, |part, own| part.set_hyper_parameters(own))", to: "share_groups(self.parts_mut().take(1), groups, |part, own| part.set_hyper_parameters(own))", test: SAVES },
    Mutant { file: "adaptive/src/local_updates/fragment.rs", from: "(self.weight, self.rate) = (0.0, rate);", to: "self.rate = rate;", test: LOCAL },
    Mutant { file: "adaptive/src/local_updates/step.rs", from: "if metrics.stepped() {", to: "if metrics.learning_rate() >= 0.0 {", test: LOCAL },
    Mutant { file: "adaptive/src/local_updates/step.rs", from: "self.fragments[k].begin(&self.comm, share, rate)?", to: "self.fragments[k].begin(&self.comm, share, self.rate)?", test: LOCAL },
    Mutant { file: "distributed/src/checkpoint/writer.rs", from: "let own = all_ok_after(comm, \"save\", || written(&at))?;", to: "let own = all_ok(comm, \"save\", written(&at))?;", test: SAVES },
    Mutant { file: "distributed/src/checkpoint/reader.rs", from: "let own = all_ok(comm, \"load\", if comm.rank() == 0 { self.latest() } else { Ok(None) })?;", to: "let own = self.latest()?;", test: SAVES },
    Mutant { file: "adaptive/src/elastic/store.rs", from: "(at_home(other), held[other],", to: "(0 * at_home(other), held[other],", test: ELASTIC },
    Mutant { file: "adaptive/src/elastic/run.rs", from: "self.world.save_orphaned();", to: "", test: ELASTIC },
    Mutant { file: "engine-process/src/rendezvous.rs", from: "self.run.committed = true;", to: "self.run.committed = false;", test: PROCESS },
    Mutant { file: "engine-process/src/progress/mod.rs", from: "self.gone[from] = true;\n                self.recovery_lost();", to: "self.gone[from] = true;", test: PROCESS },
    Mutant { file: "engine-process/src/tags.rs", from: "if end >= self.limit {", to: "if end >= u32::MAX {", test: PROCESS },
    Mutant { file: "engine-process/src/tags.rs", from: "used.iter().chain(&self.lost[to])", to: "used.iter()", test: PROCESS },
    Mutant { file: "engine-process/src/progress/recover.rs", from: ".filter(|own| own.announced.as_ref() != Some(&lost))", to: "", test: PROCESS },
    Mutant { file: "engine-process/src/communicator.rs", from: "self.check(\"poll\")", to: "Ok(())", test: PROCESS },
    Mutant { file: "engine-process/src/inbox.rs", from: "if !others.is_empty() {", to: "if others.is_empty() {", test: PROCESS },
    Mutant { file: "engine-process/src/tcp/link.rs", from: "Ok(0) => return Err(LinkEnded::Dead),", to: "Ok(0) => return Ok(()),", test: JOBS },
    Mutant { file: "engine-process/src/tcp/link.rs", from: "if self.has_left { LinkEnded::Left }", to: "if !self.has_left { LinkEnded::Left }", test: JOBS },
    Mutant { file: "engine-process/src/tcp/outbox.rs", from: " || self.held.iter().any(|held| held.address() == (on, tag))", to: "", test: PROCESS },
    Mutant { file: "engine-process/src/tcp/rendezvous.rs", from: "if job != self.job {", to: "if false {", test: PROCESS },
    Mutant { file: "engine-process/src/tcp/secret.rs", from: "&self.nonce, &(self.job.len() as u16).to_le_bytes(), &self.job].concat()", to: "&self.nonce, &[0; 2]].concat()", test: PROCESS },
    Mutant { file: "engine-process/src/tcp/link.rs", from: "self.refuse_too_long(on, tag, done);", to: "", test: PROCESS },
    Mutant { file: "distributed/src/zero/engine.rs", from: "(self.idles || self.options.unused == Unused::Allow)", to: "(self.options.unused == Unused::Allow)", test: UNEVEN },
    Mutant { file: "engine-process/src/stream.rs", from: "if length > LARGEST as u64 {", to: "if length == 0 {", test: PROCESS },
    Mutant { file: "numcore/src/ops/moments.rs", from: "matches!(x.spec().dtype, DType::F32 | DType::BF16)", to: "matches!(x.spec().dtype, DType::BF16)", test: NUMERICS },
    Mutant { file: "numcore/src/safetensors.rs", from: "if stated > rest || stated > MAX_HEADER {", to: "if first == b'{' || stated > rest || stated > MAX_HEADER {", test: NN },
    Mutant { file: "numcore/src/ops/scan.rs", from: "&[&countable(x)?]", to: "&[x]", test: NUMERICS },
    Mutant { file: "numcore/src/ops/reductions.rs", from: "if axes.is_empty() {", to: "if false {", test: NUMERICS },
    Mutant { file: "numcore/src/shape.rs", from: "if axes.is_empty() {", to: "if false {", test: NUMERICS },
    Mutant { file: "numcore/src/ops/reductions.rs", from: "reduce(&countable(x)?, ReduceKind::Prod", to: "reduce(x, ReduceKind::Prod", test: NUMERICS },
    Mutant { file: "numcore/src/ops/moments.rs", from: "[far.select(m, 1.0)]", to: "[far.select(1.0, 1.0)]", test: ENDS },
    Mutant { file: "numcore/src/ops/moments.rs", from: "[zero.select(0.0, zero.select(1.0, x).sqrt())]", to: "[zero.select(x, zero.select(1.0, x).sqrt())]", test: ENDS },
    Mutant { file: "runtime-cpu/src/scan/running.rs", from: "type Running = f64;", to: "type Running = f32;", test: NUMERICS },
    Mutant { file: "runtime-cpu/src/scan/running.rs", from: "low: self.low + (", to: "low: 0.0 * (", test: NUMERICS },
    Mutant { file: "numcore/src/tensor/create.rs", from: "_ if at < high => at,", to: "_ if at <= high => at,", test: NUMERICS },
    Mutant { file: "numcore/src/tensor/create.rs", from: "_ if bits & 0x8000 != 0 => bits + 1,", to: "_ if bits & 0x8000 != 0 => bits - 1,", test: NUMERICS },
    Mutant { file: "numcore/src/ops/composed/taps.rs", from: "[w.abs().ne(w.abs()).select(0.0, x * w)]", to: "[x * w]", test: ENDS },
    Mutant { file: "numcore/src/ops/composed/taps.rs", from: "[w.abs().ne(w.abs()).select(0.0, x * w)]", to: "[(w.abs().ne(w.abs()) | w.eq(0.0)).select(0.0, x * w)]", test: COMPOSED },
    Mutant { file: "numcore/src/ops/composed/grid_sample.rs", from: " || self.mode == Interpolation::Linear", to: "", test: COMPOSED },
    Mutant { file: "numcore/src/pointwise/expr.rs", from: "self.clamp(-1000.0, 1000.0)", to: "self", test: ENDS },
    Mutant { file: "numcore/src/pointwise/expr.rs", from: "let above = self.le(low).select(low, self);", to: "let above = self.lt(low).select(low, self);", test: ENDS },
    Mutant { file: "numcore/src/pointwise/derive.rs", from: "z.lt(0.5).select(u * s * s, u * (1.0 - y * y))", to: "u * (1.0 - y * y)", test: ENDS },
    Mutant { file: "numcore/src/pointwise/derive.rs", from: "Unary::Asin => u * ((1.0 - x) * (x + 1.0)).rsqrt()", to: "Unary::Asin => u * (1.0 - x * x).rsqrt()", test: ENDS },
    Mutant { file: "numcore/src/pointwise/derive.rs", from: "b.abs().lt(a.abs())", to: "a.abs().lt(b.abs())", test: ENDS },
    Mutant { file: "numcore/src/pointwise/expr.rs", from: "t + t.sqrt() * (self + 1.0).sqrt()", to: "t + (t * (self + 1.0)).sqrt()", test: ENDS },
    Mutant { file: "numcore/src/pointwise/expr.rs", from: "a.gt(1.0).select(self.sign() * (1.0 - rest), self * rest)", to: "self * rest", test: ENDS },
    Mutant { file: "nn/src/loss/mod.rs", from: "negative.select(-(y * x), (1.0 - y) * x)", to: "(1.0 - y) * x - negative.select(x, 0.0)", test: NN },
    Mutant { file: "nn/src/init/mod.rs", from: "self.named(\"bias\"", to: "self.named(\"weight\"", test: NN },
    Mutant { file: "nn/src/loss/mod.rs", from: "d * (d / beta) * 0.5", to: "d * d * 0.5 / beta", test: NN },
    Mutant { file: "nn/src/loss/mod.rs", from: "let zero = x.eq(0.0);", to: "let zero = x.le(0.0);", test: NN },
    Mutant { file: "optim/src/gradients.rs", from: "let refused = self.frozen.contains(&leaf.id());", to: "let refused = false;", test: OPTIM },
    Mutant { file: "distributed/src/train/push.rs", from: "        self.prepared = false;\n", to: "", test: PUSHED },
    Mutant { file: "distributed/src/train/push.rs", from: "before.len() + 1 == self.accumulation()", to: "before.len() == self.accumulation()", test: PUSHED },
    Mutant { file: "distributed/src/train/push.rs", from: "Some(&loss), last)?;", to: "None, last)?;", test: PUSHED },
    Mutant { file: "distributed/src/train/push.rs", from: "gradient.mul(scaler.factor())", to: "gradient.mul(1.0)", test: PUSHED },
    Mutant { file: "distributed/src/train/metrics.rs", from: "sums.iter().sum::<f64>() / weight", to: "sums[0] / weight", test: PUSHED },
    Mutant { file: "distributed/src/zero/sharded.rs", from: "own.rank == rank)", to: "own.rank != rank)", test: PUSHED },
    Mutant { file: "adaptive/src/balance/speed.rs", from: "(new / old - 1.0).abs() > self.dead_zone", to: "(new / old - 1.0) > self.dead_zone", test: BALANCE },
    Mutant { file: "train/src/trainer/train_loop.rs", from: "if ratios(shares) != ratios(&before) {", to: "if false {", test: CHOICES },
    Mutant { file: "train/src/trainer/setup.rs", from: "self.step.global_step() >= most", to: "self.step.global_step() > most", test: DOORS },
    Mutant { file: "runtime-cpu/src/gemm/widen.rs", from: "let to = to.offset(i, j);", to: "let to = to.offset(0, j);", test: GEMM },
    Mutant { file: "runtime-cpu/src/gemm/loops.rs", from: "widen(simd, a.offset(i, from)", to: "widen(simd, a.offset(0, from)", test: GEMM },
    Mutant { file: "runtime-cpu/src/gemm/pack_b.rs", from: "widen(simd, b.offset(0, j)", to: "widen(simd, b.offset(0, 0)", test: GEMM },
    Mutant { file: "runtime-cpu/src/pointwise/execute/ways.rs", from: "before == 0 || each < before", to: "each < before", test: WAYS },
    Mutant { file: "runtime-cpu/src/pointwise/execute/ways.rs", from: "launches >= ROUNDS * ways", to: "launches >= ways", test: WAYS },
    Mutant { file: "distributed/src/pipeline/run/passes.rs", from: "let mut counted = CountedHook { hook, observer: None, counts,", to: "let mut counted = CountedHook { hook, observer: None, counts: true,", test: PIPED },
    Mutant { file: "nn/src/layers/batch_norm.rs", from: "self.by_batch_statistics(&own)", to: "self.forward(&own)", test: LAYERS },
    Mutant { file: "distributed/src/unused.rs", from: "has_zero_weight && !used.any(|used| used)", to: "!used.any(|used| used)", test: UNEVEN },
    Mutant { file: "distributed/src/ddp/exchange.rs", from: "Unused::Error if self.idles() =>", to: "Unused::Error if self.has_passed && self.idles() =>", test: UNEVEN },
    Mutant { file: "distributed/src/zero/engine.rs", from: "self.units.iter_mut().for_each(Unit::mark_used);", to: "", test: UNEVEN },
    Mutant { file: "distributed/src/hooks.rs", from: "(false, false) => return Ok(()),", to: "(false, false) => grad,", test: UNEVEN },
    Mutant { file: "distributed/src/hooks.rs", from: "self.counts || self.shared.contains(&leaf.id())", to: "self.counts", test: EXPERTS },
    Mutant { file: "distributed/src/strategy/set.rs", from: "counts(leaf) && first(kind.stage(k), leaf)", to: "counts(leaf)", test: SETS },
    Mutant { file: "distributed/src/strategy/set.rs", from: "own &= part.is_finite()?;", to: "own = part.is_finite()?;", test: SETS },
    Mutant { file: "distributed/src/strategy/set.rs", from: "        self.sum_copies()\n", to: "        Ok(())\n", test: SETS },
    Mutant { file: "distributed/src/strategy/set.rs", from: "SetKind::Stages { numbers, .. } => numbers[k] == stage,", to: "SetKind::Stages { .. } => true,", test: SETS },
    Mutant { file: "distributed/src/strategy/set_checkpoint.rs", from: "part.saves && !copies.has(&own.name)", to: "part.saves", test: SETS },
    Mutant { file: "distributed/src/strategy/set_checkpoint.rs", from: "let own = copies.with_numbers(numbers);", to: "let own = numbers.clone();", test: SETS },
    Mutant { file: "distributed/src/strategy/set_checkpoint.rs", from: "                *name = copy.name.clone();\n", to: "", test: SETS },
    Mutant { file: "distributed/src/expert_parallel/strategy.rs", from: "saves: ranks.counts_examples,", to: "saves: true,", test: SETS },
    Mutant { file: "distributed/src/expert_parallel/strategy.rs", from: "weighed_over: means.then(|| mesh.axis(Axis::Expert).clone()),", to: "weighed_over: None,", test: SETS },
    Mutant { file: "distributed/src/train/pipeline.rs", from: "last && self.is_last", to: "last", test: SETS },
    Mutant { file: "distributed/src/train/step.rs", from: "if own == 0 && most > 0 {", to: "if own == 0 && most > 1 {", test: EXPERTS },
    Mutant { file: "distributed/src/zero/options.rs", from: "if self.is_tied(name) {", to: "if false {", test: SETS },
    Mutant { file: "distributed/src/combinations.rs", from: "is_none_or(|partner| !self.has(partner))", to: "is_none_or(|partner| self.has(partner))", test: COMBINED },
    Mutant { file: "distributed/src/combinations.rs", from: "        refused([Uneven, ReduceEachPass], EACH_PASS),\n", to: "", test: BALANCE },
    Mutant { file: "adaptive/src/balance/step.rs", from: "*of_share = f64::max(*of_share, computed);", to: "*of_share = 0.0;", test: WRAPPED },
    Mutant { file: "adaptive/src/balance/step.rs", from: "ranges[ranks.share.index].clone()", to: "ranges[ranks.everyone.rank() % ranges.len()].clone()", test: WRAPPED },
    Mutant { file: "adaptive/src/local_updates/step.rs", from: "inside.share.index == 0 && inside.losses", to: "inside.losses", test: LOCAL },
    Mutant { file: "adaptive/src/local_updates/step.rs", from: "            named.extend(stage.named_parameters());\n", to: "", test: WRAPPED },
    Mutant { file: "distributed/src/train/metrics.rs", from: "TrainingMetrics { weight, context_ranks: 1, ..self }", to: "TrainingMetrics { weight, ..self }", test: LOCAL_LOOP },
    Mutant { file: "distributed/src/pipeline/run/passes.rs", from: "expert_leaves(&**stage)", to: "HashSet::from([expert_leaves(&**stage).len()])", test: EXPERTS },
    Mutant { file: "distributed/src/pipeline/run/passes.rs", from: "count.saturating_sub(micro * own).min(own)", to: "count.min(own)", test: PIPED },
    Mutant { file: "distributed/src/train/updates.rs", from: "stepped: true,", to: "stepped: false,", test: LOCAL },
    Mutant { file: "distributed/src/ddp/unfreeze.rs", from: "self.begun = 0;", to: "self.begun = 3;", test: BUCKETS },
    Mutant { file: "distributed/src/zero/engine.rs", from: "self.sends.add(unit);", to: "", test: FROZEN },
    Mutant { file: "distributed/src/checkpoint/lock.rs", from: "is_mine && matches!(tried, Ok(None)) && begun.elapsed() < most", to: "is_mine && matches!(tried, Ok(None))", test: POLICIES },
    Mutant { file: "adaptive/src/elastic/store.rs", from: "at.0 != edge.0 && at.1 != edge.1", to: "at.0 != edge.0", test: ELASTIC },
    Mutant { file: "nn/src/moe/router.rs", from: ".of_first(counted)", to: ".of_first(x.dims()[0])", test: EXPERTS },
    Mutant { file: "nn/src/moe/routing.rs", from: "self.loads.of_counted(&self.logits)?", to: "self.logits", test: EXPERTS },
    Mutant { file: "train/src/callbacks/weight_averaging.rs", from: "Event::StepEnd(_) if run.has_stepped()", to: "Event::StepEnd(metrics) if metrics.stepped()", test: LOCAL_LOOP },
    Mutant { file: "comm/src/agreement.rs", from: "unwrap_or_else(|panic| resume_unwind(panic));", to: "unwrap_or(Ok(()));", test: AGREEMENTS },
    Mutant { file: "distributed/src/train/step.rs", from: "self.strategy.sync_buffers(self.updates.config.buffers)?;", to: "if metrics.stepped { self.strategy.sync_buffers(self.updates.config.buffers)?; }", test: STEPS },
    Mutant { file: "distributed/src/train/step.rs", from: "self.all(fits)?;", to: "fits?;", test: STEPS },
    Mutant { file: "distributed/src/train/run.rs", from: "without.is_empty() || without.len() == have.len()", to: "without.is_empty()", test: EXPERTS },
    Mutant { file: "distributed/src/train/updates.rs", from: "let totals = equal(everyone, totals)?;", to: "", test: STEPS },
    Mutant { file: "distributed/src/train/updates.rs", from: "let scale = equal(everyone, scale)?;", to: "", test: STEPS },
    Mutant { file: "distributed/src/train/updates.rs", from: "Ok(all_gather_bool(comm, own)?[0])", to: "{ let _ = all_gather_bool(comm, own)?; Ok(own) }", test: STEPS },
    Mutant { file: "distributed/src/train/checkpoint.rs", from: "random(share).or_else(|| random(0))", to: "random(share)", test: AGREEMENTS },
    Mutant { file: "distributed/src/train/push.rs", from: "self.hook(loss.counts).on_leaf", to: "self.hook(true).on_leaf", test: PUSHED },
    Mutant { file: "distributed/src/train/push.rs", from: "        self.begin_pass(&before, Some(&loss), last)?;", to: "        self.begin_pass(&[], Some(&loss), last)?;", test: PUSHED },
    Mutant { file: "optim/src/norms.rs", from: ".to_dtype(wide)?.reshape([rows.len(), count])?.sum(&[0])", to: ".reshape([rows.len(), count])?.sum(&[0])?.to_dtype(wide)", test: STEPS },
    Mutant { file: "distributed/src/strategy/set.rs", from: "        self.parts().try_for_each(|part| part.sync_buffers(how))", to: "        self.parts().take(1).try_for_each(|part| part.sync_buffers(how))", test: STEPS },
    Mutant { file: "distributed/src/strategy/set_checkpoint.rs", from: "self.parts_mut().for_each(|part| part.expect(numbers));", to: "self.parts_mut().take(1).for_each(|part| part.expect(numbers));", test: FROZEN },
    Mutant { file: "distributed/src/ddp/exchange.rs", from: "params.map(|p| p.leaf.requires_grad()).collect()", to: "params.map(|_| true).collect()", test: STEPS },
    Mutant { file: "distributed/src/zero/gradients.rs", from: "&|k| used[pieces[k].parameter]", to: "&|k| used[k]", test: ZERO },
    Mutant { file: "adaptive/src/local_updates/step.rs", from: "if keep == 0.0 && which.len()", to: "if which.len()", test: LOCAL },
    Mutant { file: "adaptive/src/local_updates/step.rs", from: "if which.contains(&0) {", to: "if which == [0] {", test: LOCAL },
    Mutant { file: "adaptive/src/local_updates/step.rs", from: "self.end(&in_flight, self.options.keep).map(drop)", to: "self.end(&in_flight, 0.0).map(drop)", test: LOCAL },
    Mutant { file: "adaptive/src/local_updates/checkpoint.rs", from: "fragment.weight = if as_saved { weight } else { 0.0 };", to: "fragment.weight = weight;", test: LOCAL },
    Mutant { file: "adaptive/src/local_updates/checkpoint.rs", from: "fragment.rate = f64::from_bits(number(&rate(k)));", to: "", test: LOCAL },
    Mutant { file: "adaptive/src/local_updates/step.rs", from: "abort_on_err(&self.comm, features.check(\"LocalSteps\").within(leaf.name()))?;", to: "features.check(\"LocalSteps\").within(leaf.name())?;", test: LOCAL },
    Mutant { file: "adaptive/src/balance/step.rs", from: "exchange = exchange.min(exchanged);", to: "exchange = exchanged;", test: BALANCE },
    Mutant { file: "adaptive/src/balance/step.rs", from: "input(own.start.saturating_sub(1))?", to: "input(own.start)?", test: BALANCE },
    Mutant { file: "adaptive/src/balance/step.rs", from: "                set_counted_rows(before);", to: "", test: BALANCE },
    Mutant { file: "adaptive/src/balance/balancer.rs", from: "            self.exact = wanted;\n            self.limit();", to: "            self.exact = wanted;", test: BALANCE },
    Mutant { file: "watch/src/sink/jsonl/read.rs", from: "(into.epoch, into.fraction, into.time) = (later.epoch, later.fraction, later.time);", to: "", test: SINKS },
    Mutant { file: "watch/src/sink/jsonl/summary.rs", from: "min: seen.min.min(x)", to: "min: if x < seen.min { x } else { seen.min }", test: SINKS },
    Mutant { file: "watch/src/report/samples.rs", from: ".skip(all.len().saturating_sub(SHOWN))", to: ".take(SHOWN)", test: REPORTS },
    Mutant { file: "distributed/src/train/checkpoint.rs", from: "        self.updates.torn = Some(Torn::Load);\n", to: "", test: FAILED },
    Mutant { file: "distributed/src/train/checkpoint.rs", from: "(number(\"trainer/steps\").unwrap_or(0), None)", to: "(number(\"trainer/steps\").unwrap_or(0), self.torn)", test: FAILED },
    Mutant { file: "distributed/src/train/push.rs", from: "self.updates.torn == Some(Torn::Load)", to: "false", test: FAILED },
    Mutant { file: "distributed/src/zero/engine.rs", from: "used_anywhere(self.tensor.everyone(), own)", to: "used_anywhere(&self.comm, own)", test: TENSOR },
    Mutant { file: "distributed/src/pipeline/run/passes.rs", from: "(stage * self.schedule().micro_batches() + micro)", to: "(stage + micro)", test: MASKS },
    Mutant { file: "distributed/src/pipeline/run/groups.rs", from: "losses.rank() / context_ranks", to: "losses.rank()", test: CONTEXT },
    Mutant { file: "distributed/src/strategy/tensor_axis.rs", from: "random_stream: share.index", to: "random_stream: losses.rank()", test: CONTEXT },
    Mutant { file: "distributed/src/train/metrics.rs", from: "self.weight.item()? / self.context_ranks as f64", to: "self.weight.item()?", test: CONTEXT },
    Mutant { file: "distributed/src/train/run.rs", from: "            set_counted_rows(None);\n", to: "", test: UNEVEN },
    Mutant { file: "comm/src/portable/errors.rs", from: "    15 DType { op, dtypes, why }\n", to: "", test: COMM },
    Mutant { file: "comm/src/portable/errors.rs", from: "    18 OutOfMemory { device, requested, report }\n", to: "", test: COMM },
    Mutant { file: "data/src/stream/loader.rs", from: "if rank >= ranks {", to: "if rank > ranks {", test: DATA },
    Mutant { file: "data/src/order/buckets.rs", from: "window == 0 || window > most", to: "window == 0", test: DATA },
    Mutant { file: "train/src/trainer/start.rs", from: "io::ErrorKind::NotFound", to: "io::ErrorKind::Other", test: RESUMED },
    Mutant { file: "numcore/src/ops/composed/fft/mod.rs", from: "|x, &a| complex(op, &x, None, a, norm, inverse)", to: "|x, &a| x.fft(None, a, norm)", test: FOURIER },
    Mutant { file: "numcore/src/pointwise/derive.rs", from: "_ => back(&b, here, y, t)[j],", to: "_ => back(&b, here, y, t)[0],", test: TANGENTS },
    Mutant { file: "numcore/src/ops/scan.rs", from: "(before(0.0)?.mul(*a)?.add(*x)?, ins[1])", to: "((*x).clone(), ins[1])", test: TANGENTS },
];
