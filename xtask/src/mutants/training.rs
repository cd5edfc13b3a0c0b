//! The changes of the training loop, its data and timelines that a test must notice.

use super::{
    Mutant,
    list::{DATA, POLICIES, PUSHED},
};

const RULE_SUMS: &[&str] = &["test", "-p", "weftgrad-optim", "--test", "all", "--", "sums::", "lbfgs"];
const ADAPTED: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "numbers_that_rules_adapt"];
const SYNCED: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "sync_batch_norm"];
const LOST: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "elastic"];
const LONG_SAVES: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "checkpoint_background"];
const MASKED: &[&str] = &["test", "-p", "weftgrad-train", "--test", "all", "--", "policies::a_share"];
const EVALUATED: &[&str] = &["test", "-p", "weftgrad-train", "--test", "all", "--", "evaluation"];
const OTHER_BEST: &[&str] = &["test", "-p", "weftgrad-train", "--test", "all", "--", "remembered"];
const MESSAGES: &[&str] = &["test", "-p", "weftgrad-adaptive", "--lib"];
const ROWS: &[&str] = &["test", "-p", "weftgrad-models", "--test", "all", "--", "rows_without_their"];
const COMPRESSED: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "pipeline_compression"];
const METRICS: &[&str] = &["test", "-p", "weftgrad-watch", "--lib", "--test", "all", "--", "metric"];

const REPLAYS: &[&str] = &["test", "-p", "weftgrad-train", "--test", "all", "--", "replays"];
const SCREEN: &[&str] = &["test", "-p", "weftgrad-watch", "--features", "terminal", "--lib", "--", "screen"];

#[rustfmt::skip]
const LOOP: &[&str] = &[
    "test", "-p", "weftgrad-train", "--test", "all", "--", "order", "intervals", "a_run_begins_where",
    "averaging::it_is", "averaging::the_best",
];
const PARQUET: &[&str] =
    &["test", "-p", "weftgrad-data", "--features", "parquet", "--test", "all", "--", "parquet_files"];
const ARROW: &[&str] = &["test", "-p", "weftgrad-data", "--features", "arrow", "--test", "all", "--", "arrow_files"];
const AUGMENTED: &[&str] = &["test", "-p", "weftgrad-data", "--features", "image", "--test", "all", "--", "augment"];
const AUDIO: &[&str] = &["test", "-p", "weftgrad-data", "--features", "audio", "--test", "all", "--", "wav"];
const TIMELINES: &[&str] = &["test", "-p", "weftgrad-watch", "--test", "all", "--", "recorder"];

const STAGED_UNUSED: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "pipeline_unused"];
const CUT_TOKENS: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "capacities_count_parts"];
const SHARED_HEADS: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "tensor_decisions"];
const CUT_WHOLE: &[&str] = &["test", "-p", "weftgrad-distributed", "--test", "all", "--", "whole_rules_cut"];
const ROUNDED: &[&str] = &["test", "-p", "weftgrad-optim", "--test", "all", "--", "bf16_state"];
const COMPARED: &[&str] =
    &["test", "-p", "weftgrad-planner", "--test", "all", "--", "compared::", "mixed::canonical", "mean_of_means"];
const SEARCHED: &[&str] =
    &["test", "-p", "weftgrad-planner", "--test", "all", "--", "planner_search", "planner_estimates"];
const PEAKS: &[&str] = &["test", "-p", "weftgrad-planner", "--test", "all", "--", "peaks::"];
const CLIPPED: &[&str] = &["test", "-p", "weftgrad-train", "--test", "all", "--", "qk_clip"];

#[rustfmt::skip]
pub(super) const TRAINING: &[Mutant] = &[
    Mutant { file: "optim/src/stochastic_rounding.rs", from: "drawn.lt(chance)", to: "(drawn + drawn).lt(chance)", test: ROUNDED },
    Mutant { file: "optim/src/stochastic_rounding.rs", from: "gap.abs() + seed)", to: "gap.abs())", test: ROUNDED },
    Mutant { file: "optim/src/stochastic_rounding.rs", from: "1.25 / 256.0", to: "0.9 / 256.0", test: ROUNDED },
    Mutant { file: "train/src/callbacks/qk_clip.rs", from: "*one = one.max(scores.largest);", to: "*one = scores.largest;", test: CLIPPED },
    Mutant { file: "train/src/callbacks/qk_clip.rs", from: "if heads(&queries) != heads(&keys) {", to: "if false {", test: CLIPPED },
    Mutant { file: "nn/src/parallel/largest_scores.rs", from: "before.maximum(&largest)?", to: "largest", test: CLIPPED },
    Mutant { file: "distributed/src/ddp/data_parallel.rs", from: "mesh.is_of_stages() && options.unused", to: "false && options.unused", test: STAGED_UNUSED },
    Mutant { file: "distributed/src/zero/engine.rs", from: "of_stages && options.unused == Unused::Allow", to: "false", test: STAGED_UNUSED },
    Mutant { file: "distributed/src/strategy/tied.rs", from: "lent.iter_mut().filter(|lent| !lent.is_written()).try_for_each(GradLoan::zero)?;", to: "", test: STAGED_UNUSED },
    Mutant { file: "distributed/src/zero/gradients.rs", from: "self.used.fill(sum.is_written());", to: "", test: STAGED_UNUSED },
    Mutant { file: "nn/src/moe/capacity.rs", from: ".then(at.cmp(other))", to: ".then(at.0.cmp(&other.0))", test: CUT_TOKENS },
    Mutant { file: "nn/src/moe/layer.rs", from: "b * whole + position", to: "b * here + position", test: CUT_TOKENS },
    Mutant { file: "distributed/src/strategy/partial_gradients.rs", from: "*other == key)", to: "other.is_some())", test: SHARED_HEADS },
    Mutant { file: "optim/src/whole_update.rs", from: "        rows.sort_by_key(|(i, _)| leaves[*i].name());\n", to: "", test: RULE_SUMS },
    Mutant { file: "optim/src/one_of.rs", from: "usize::from(matches!(self, OneOf::Second(_)))", to: "usize::from(matches!(self, OneOf::First(_)))", test: RULE_SUMS },
    Mutant { file: "optim/src/lbfgs.rs", from: "if self.derived.products.len() == kept { kept } else { 0 }", to: "kept", test: RULE_SUMS },
    Mutant { file: "optim/src/line_search.rs", from: "if slope * (high.at - low.at) >= 0.0 { low } else { high }", to: "high", test: RULE_SUMS },
    Mutant { file: "distributed/src/train/checkpoint.rs", from: "all || groups.iter().any(|group| !group.adapted.is_empty())", to: "all", test: ADAPTED },
    Mutant { file: "optim/src/memory.rs", from: "        master.overwrite(i, &value)?;\n", to: "", test: CUT_WHOLE },
    Mutant { file: "optim/src/cut_params.rs", from: "min_by_key(|&rank| loads[rank])?", to: "min()?", test: CUT_WHOLE },
    Mutant { file: "optim/src/cut_params.rs", from: "rows.sort_by_key(|(to, _)| *to);", to: "", test: CUT_WHOLE },
    Mutant { file: "optim/src/cut_params.rs", from: "self.get(i).is_none_or(CutParam::is_here)", to: "self.get(i).is_none_or(|_| true)", test: CUT_WHOLE },
    Mutant { file: "distributed/src/ddp/checkpoint.rs", from: "(first || self.is_of_whole(state, leaf))", to: "first", test: CUT_WHOLE },
    Mutant { file: "distributed/src/zero/checkpoint.rs", from: "counts || self.is_of_whole", to: "counts && self.is_of_whole", test: CUT_WHOLE },
    Mutant { file: "train/src/resume.rs", from: "        state.progress.elapsed = self.elapsed;\n", to: "", test: LOOP },
    Mutant { file: "train/src/resume.rs", from: "elapsed: nanos(ELAPSED)?", to: "elapsed: nanos(CHECKED)?", test: LOOP },
    Mutant { file: "train/src/resume.rs", from: "nth(i))).collect()", to: "0 * nth(i))).collect()", test: LOOP },
    Mutant { file: "train/src/trainer/follow_up.rs", from: "        self.state.before = start;\n", to: "", test: LOOP },
    Mutant { file: "train/src/trainer/follow_up.rs", from: "u64::MAX if at.position == 0 =>", to: "u64::MAX if at.position == u64::MAX =>", test: LOOP },
    Mutant { file: "train/src/run.rs", from: "let now = Progress { elapsed: self.checked, ..self.progress };", to: "let now = self.progress;", test: LOOP },
    Mutant { file: "train/src/callbacks/evaluate.rs", from: "(self.ran_at, self.is_due) = (None, false);", to: "self.is_due = false;", test: LOOP },
    Mutant { file: "train/src/callbacks/evaluate.rs", from: "for_each(|(_, metric)| metric.reset());\n        let modes", to: "for_each(|_| ());\n        let modes", test: POLICIES },
    Mutant { file: "train/src/trainer/train_loop.rs", from: "if metrics.stepped() { 0 } else { self.skipped + 1 }", to: "self.skipped + u32::from(!metrics.stepped())", test: POLICIES },
    Mutant { file: "train/src/trainer/train_loop.rs", from: "epoch: before.epoch,", to: "epoch: progress.epoch,", test: LOOP },
    Mutant { file: "train/src/trainer/start.rs", from: "            trainer.resume = Resume::No;\n", to: "", test: LOOP },
    Mutant { file: "train/src/callbacks/non_finite.rs", from: " && norm.is_none_or(f64::is_finite)", to: "", test: POLICIES },
    Mutant { file: "train/src/callbacks/checkpoints.rs", from: "snapshot.filter(|_| self.on_failure)", to: "snapshot", test: POLICIES },
    Mutant { file: "train/src/callbacks/checkpoints.rs", from: "before_step.or(unfinished.as_deref())", to: "before_step.or(unfinished.as_deref().filter(|_| self.on_failure))", test: POLICIES },
    Mutant { file: "train/src/callbacks/weight_averaging.rs", from: "let decay = if self.warmup {", to: "let decay = if t < 0.0 {", test: LOOP },
    Mutant { file: "train/src/callbacks/weight_averaging.rs", from: "u64::from(self.evaluate))", to: "1)", test: LOOP },
    Mutant { file: "watch/src/recorder/timeline.rs", from: "by_rank(&all, |counter| counter.rank.unwrap_or(rank))", to: "by_rank(&all, |_: &TraceCounter| rank)", test: TIMELINES },
    Mutant { file: "watch/src/recorder/timeline.rs", from: "    counters.sort_by_key(|counter| counter.at);\n", to: "    counters.truncate(usize::MAX);\n", test: TIMELINES },
    Mutant { file: "watch/src/recorder/timeline.rs", from: "end <= span.start && end < span.end", to: "end <= span.start", test: TIMELINES },
    Mutant { file: "watch/src/recorder/chrome.rs", from: "span.kind != SpanKind::Collective && span.end >= at", to: "span.end >= at", test: TIMELINES },
    Mutant { file: "watch/src/recorder/chrome.rs", from: "nanoseconds % 1000)", to: "nanoseconds % 1)", test: TIMELINES },
    Mutant { file: "watch/src/screen/follow.rs", from: "self.charts.go_back(record.step);", to: "", test: SCREEN },
    Mutant { file: "watch/src/screen/follow.rs", from: "length < self.contents.bytes || ", to: "", test: SCREEN },
    Mutant { file: "watch/src/screen/curves.rs", from: "points.split(|point| !point.1.is_finite())", to: "points.split(|_| false)", test: SCREEN },
    Mutant { file: "train/src/callbacks/throughput.rs", from: "longest - rank.wait", to: "rank.wait", test: POLICIES },
    Mutant { file: "watch/src/recorder/svg.rs", from: ">= NARROWEST && depth <= DEEPEST", to: ">= NARROWEST", test: TIMELINES },
    Mutant { file: "distributed/src/train/push.rs", from: " && !self.has_unfrozen();", to: ";", test: PUSHED },
    Mutant { file: "distributed/src/zero/values.rs", from: "    pub(super) fn publish(&mut self) -> Result<()> {\n", to: "    pub(super) fn publish(&mut self) -> Result<()> {\n        self.leaves.iter().for_each(|leaf| leaf.touch());\n", test: PUSHED },
    Mutant { file: "data/src/sources/parquet.rs", from: "file.columns() != files[0].columns()", to: "false", test: PARQUET },
    Mutant { file: "data/src/sources/groups.rs", from: "row - self.start(self.files[file])]", to: "row]", test: PARQUET },
    Mutant { file: "data/src/sources/groups.rs", from: "partition_point(|&end| end <= row)", to: "partition_point(|&end| end < row)", test: PARQUET },
    Mutant { file: "data/src/sources/arrow.rs", from: "_ if column.is_null(row) => Cell::Null,", to: "", test: ARROW },
    Mutant { file: "data/src/sources/groups.rs", from: "first.push(rows.len());", to: "first.push(0);", test: ARROW },
    Mutant { file: "data/src/sources/row.rs", from: "name.match_indices('.').find_map(within)", to: "name.match_indices('.').next().and_then(within)", test: DATA },
    Mutant { file: "data/src/sources/row.rs", from: "(_, Some(x)) => Cell::Int(x.into())", to: "(_, Some(x)) => Cell::Int((x as i64).into())", test: DATA },
    Mutant { file: "data/src/sources/image/color.rs", from: "blurred.round_ties_even()", to: "blurred", test: AUGMENTED },
    Mutant { file: "data/src/sources/image/color.rs", from: "if step > 0 && x == 0 { 0 }", to: "if step > 255 { 0 }", test: AUGMENTED },
    Mutant { file: "data/src/sources/image/random.rs", from: "self.affine([cos, -sin, 0.0, sin, cos, 0.0], color)", to: "self.affine([cos, sin, 0.0, -sin, cos, 0.0], color)", test: AUGMENTED },
    Mutant { file: "data/src/sources/image/random.rs", from: "if w < width && h < height {", to: "if w < width {", test: AUGMENTED },
    Mutant { file: "data/src/sources/image/random.rs", from: "(2.0 * drawn[op] - 1.0)", to: "drawn[op]", test: AUGMENTED },
    Mutant { file: "data/src/mix.rs", from: "(top..bottom).contains(&(row % height))", to: "(top..bottom).contains(&row)", test: DATA },
    Mutant { file: "data/src/mix.rs", from: "(1.0 - cut) as f32", to: "weight as f32", test: DATA },
    Mutant { file: "data/src/random.rs", from: "log + small;", to: "log;", test: DATA },
    Mutant { file: "data/src/mel.rs", from: "if frequency < turn =>", to: "if frequency < 2.0 * turn =>", test: DATA },
    Mutant { file: "data/src/mel.rs", from: "2.0 / (to - from)", to: "1.0 / (to - from)", test: DATA },
    Mutant { file: "data/src/mel.rs", from: "amax_keepdim(&[-2, -1])", to: "amax_keepdim(&[-3, -2, -1])", test: DATA },
    Mutant { file: "data/src/sources/wav.rs", from: "values.iter().skip(c).step_by(channels)", to: "values.iter().skip(c).step_by(1)", test: AUDIO },
    Mutant { file: "data/src/columns.rs", from: "part(0.75) - part(0.25)", to: "part(0.75) - part(0.5)", test: DATA },
    Mutant { file: "data/src/columns.rs", from: "found.or(*fill)", to: "found.or(fill.or(Some(0.0)))", test: DATA },
    Mutant { file: "data/src/columns.rs", from: "|at| at as i64 + 1", to: "|at| at as i64", test: DATA },
    Mutant { file: "data/src/columns.rs", from: "scale > 0.0 && least < greatest", to: "true", test: DATA },
    Mutant { file: "data/src/columns.rs", from: "values.is_sorted().then_some(", to: "Some(", test: DATA },
    Mutant { file: "data/src/sources/csv.rs", from: "== name).count() == 1;", to: "== name).count() > 0;", test: DATA },
    Mutant { file: "data/src/sources/idx.rs", from: "size.checked_mul(n))", to: "Some(size.wrapping_mul(n)))", test: DATA },
    Mutant { file: "data/src/sources/npy.rs", from: "self.big_endian != cfg!", to: "self.big_endian == cfg!", test: DATA },
    Mutant { file: "data/src/sources/npy.rs", from: ".filter(|&width| width > 0)", to: "", test: DATA },
    Mutant { file: "data/src/sources/npy.rs", from: ".rev().fold(0, |place", to: ".fold(0, |place", test: DATA },
    Mutant { file: "data/src/sources/npy.rs", from: "saturating_add(1)", to: "saturating_add(0)", test: DATA },
    Mutant { file: "data/src/tokens/indexed.rs", from: "|count: u64, of: u64| count.checked_mul(of);", to: "|count: u64, of: u64| Some(count.wrapping_mul(of));", test: DATA },
    Mutant { file: "data/src/collate/pad.rs", from: "width.checked_mul(sequences.len())?", to: "width.wrapping_mul(sequences.len())", test: DATA },
    Mutant { file: "distributed/src/train/pipeline.rs", from: "k + 1 == runs && !waits", to: "k + 1 == runs", test: COMPRESSED },
    Mutant { file: "distributed/src/sync_batch_norm.rs", from: ".add(&between)?.sum(&[0])?", to: ".sum(&[0])?", test: SYNCED },
    Mutant { file: "distributed/src/sync_batch_norm.rs", from: "total.sub(1.0)?.maximum(1.0)?", to: "total.maximum(1.0)?", test: SYNCED },
    Mutant { file: "adaptive/src/elastic/restore.rs", from: "(message / comm.size()).max(1)", to: "message", test: MESSAGES },
    Mutant { file: "adaptive/src/elastic/store.rs", from: "|len: usize| (round * message).min(len)", to: "|len: usize| (round * message / 2).min(len)", test: LOST },
    Mutant { file: "adaptive/src/elastic/world.rs", from: "if !self.is_of_another(error) {\n                self.save", to: "if self.is_of_another(error) {\n                self.save", test: LOST },
    Mutant { file: "comm/src/agreement.rs", from: "    if comm.size() == 1 {\n        return all_ok(comm, op, work());", to: "    if comm.size() >= 1 {\n        return all_ok(comm, op, work());", test: LONG_SAVES },
    Mutant { file: "distributed/src/loss.rs", from: "        if self.weight > 0.0 {\n", to: "        if self.weight >= 0.0 {\n", test: MASKED },
    Mutant { file: "train/src/callbacks/checkpoints/begin.rs", from: "            self.best_value = None;\n", to: "", test: OTHER_BEST },
    Mutant { file: "train/src/callbacks/evaluate.rs", from: "self.loader.clone() } else { self.loader.clone().unpadded() }", to: "self.loader.clone() } else { self.loader.clone() }", test: EVALUATED },
    Mutant { file: "models/src/lora/adapter.rs", from: "if dims.len() == 2 && part.is_some() {", to: "if dims.is_empty() && part.is_some() {", test: ROWS },
    Mutant { file: "watch/src/metrics/accuracy.rs", from: "scores::place(row, target) < self.k", to: "scores::place(row, target) <= self.k", test: METRICS },
    Mutant { file: "watch/src/metrics/accuracy.rs", from: "(self.right + right, self.rows + rows)", to: "(right, self.rows + rows)", test: METRICS },
    Mutant { file: "watch/src/metrics/class_metric.rs", from: "fp: 1.0 - recall, fn_: recall", to: "fp: recall, fn_: 1.0 - recall", test: METRICS },
    Mutant { file: "watch/src/metrics/class_metric.rs", from: "classes.filter(occurs).map", to: "classes.map", test: METRICS },
    Mutant { file: "watch/src/metrics/regression.rs", from: "spread.value() - off.value() * off.value() / n", to: "spread.value()", test: METRICS },
    Mutant { file: "watch/src/metrics/texts.rs", from: "unmatched *= 2.0;", to: "", test: METRICS },
    Mutant { file: "watch/src/metrics/texts.rs", from: "diagonal + usize::from(a != b)", to: "diagonal + 2 * usize::from(a != b)", test: METRICS },
    Mutant { file: "watch/src/metrics/detection.rs", from: "filter(|&k| !taken[k])", to: "filter(|&k| taken[k] || !taken[k])", test: METRICS },
    Mutant { file: "watch/src/metrics/detection.rs", from: ".then((a.image, a.place).cmp(&(b.image, b.place)))", to: "", test: METRICS },
    Mutant { file: "watch/src/metrics/calibration.rs", from: ".min(last)", to: ".min(last + 1)", test: METRICS },
    Mutant { file: "watch/src/metrics/area_under_curve.rs", from: "positive * (2 * before + n + 1)", to: "positive * (2 * before + n)", test: METRICS },
    Mutant { file: "watch/src/metrics/mean.rs", from: "self.sum.value() / weight)", to: "self.sum.value())", test: METRICS },
    Mutant { file: "train/src/trainer/replayed.rs", from: "if line.shares != shares {", to: "if false {", test: REPLAYS },
    Mutant { file: "train/src/trainer/replayed.rs", from: "if known != hash => {", to: "if known == hash => {", test: REPLAYS },
    Mutant { file: "train/src/trainer/step_log.rs", from: "Some(leg.time_before(*taken))", to: "None", test: REPLAYS },
    Mutant { file: "train/src/trainer/saving.rs", from: "map(|(before, _)| before)", to: "map(|(_, after)| after)", test: REPLAYS },
    Mutant { file: "train/src/trainer/start.rs", from: "trainer.length = leg.until;", to: "", test: REPLAYS },
    Mutant { file: "train/src/replay/route.rs", from: "(*place, *at) == (world.after, step)", to: "*at == step", test: REPLAYS },
    Mutant { file: "train/src/replay/route.rs", from: "filter(|(of, _)| *of == world)", to: "filter(|_| true)", test: REPLAYS },
    Mutant { file: "train/src/replay/log.rs", from: "if world == Some(of) {", to: "if world.is_some() {", test: REPLAYS },
    Mutant { file: "train/src/replay/report.rs", from: ".nth(self.before)", to: ".next()", test: REPLAYS },
    Mutant { file: "train/src/trainer/start.rs", from: "state.saves &= replay.is_none();", to: "", test: REPLAYS },
    Mutant { file: "train/src/trainer/saving.rs", from: "self.log_back();", to: "", test: REPLAYS },
    Mutant { file: "planner/src/verify/observed.rs", from: "each_pass || matches!(gradient, LeafGrad::Own(_))", to: "each_pass", test: COMPARED },
    Mutant { file: "planner/src/verify/mod.rs", from: "has(Feature::Canonical) && !mixes", to: "has(Feature::Canonical)", test: COMPARED },
    Mutant { file: "planner/src/verify/compare.rs", from: "&& is_above(relative(&weights[..1], &weights[1..], 0.0), 1e-9)", to: "", test: COMPARED },
    Mutant { file: "planner/src/verify/gradients.rs", from: ".chain(&none)", to: "", test: COMPARED },
    Mutant { file: "planner/src/verify/record.rs", from: "with_frozen || p.requires_grad()", to: "!with_frozen || p.requires_grad()", test: COMPARED },
    Mutant { file: "planner/src/search.rs", from: "number >= 2 * keep && found.best.len() >= keep", to: "number >= 2 * keep", test: SEARCHED },
    Mutant { file: "planner/src/simulate.rs", from: "Costs { comm: 0, ..ticks.clone() }", to: "ticks.clone()", test: SEARCHED },
    Mutant { file: "planner/src/costs/mod.rs", from: "map(of).fold(received, ", to: "map(of).fold(0, ", test: PEAKS },
];
