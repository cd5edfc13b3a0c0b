//! The gradients of attention: weights are computed again from the scores and their logsumexp. Keys and queries have a
//! pass each, so that every sum has one owner and one order. So has a learned argument that varies along both.
//!
//! They run where the decomposition would bind more scores than a kernel can. Others are decomposed: on a software
//! driver the matrix products of the decomposition take 0.35 of the time.

use numcore::{
    Result, Support,
    fused::{Attention, AttentionGrad, ScoredAttention},
};
use smallvec::SmallVec;

use super::{
    AttentionCall, AttentionText, BLOCK, KernelShape, OWN, SHARE, SIDE, ScorePrograms, each, learned::ArgSums,
};
use crate::fused::FusedCall;

/// The widest head: an invocation holds a part of a row of each gradient.
const WIDEST: usize = 128;

/// From the upstream gradient, `o`, `lse`, and the inputs of forward. The programs are those of the passes over queries
/// and over keys, and of arguments whose gradients are not sums over either. The decomposition has so many scores of a
/// head at a time, of numbers of queries and keys.
pub(in super::super) fn backward(
    call: &FusedCall<'_, '_>,
    op: &Attention,
    programs: [Option<ScorePrograms>; 2],
    of_scores: SmallVec<[(usize, ScorePrograms); 1]>,
    at_a_time: impl FnOnce(usize, usize) -> usize,
) -> Result<Support> {
    let (of_forward, ins) = call.ins.split_at(AttentionGrad::QUERIES);
    let [of_queries, of_keys] = programs.map(|programs| AttentionCall::new(call, op, programs, ins, of_forward));
    let (Some(by_queries), Some(by_keys)) = (of_queries?, of_keys?) else { return Ok(Support::Decompose) };
    let this = &by_queries;
    let &AttentionCall { depth, value_depth, .. } = this;
    let blocks = [
        ("qs", BLOCK * (depth + 1)),
        ("gs", BLOCK * (value_depth + 1)),
        ("ks", BLOCK * (depth + 1)),
        ("vs", BLOCK * (value_depth + 1)),
        ("ss", BLOCK * SIDE),
        ("ps", BLOCK * SIDE),
        ("bases", BLOCK),
    ];
    let width = depth + value_depth;
    let shape = |kind, rows, steps, each| KernelShape {
        op: "attention_grad",
        kind,
        batch: this.batch,
        rows,
        steps: (steps, each),
        blocks: &blocks,
    };
    let sharing = this.heads / this.key_heads;
    let of_queries = shape(
        "attention_grad_queries",
        (this.queries, this.heads),
        this.keys.div_ceil(BLOCK),
        width + width / SHARE + BLOCK + 2,
    );
    let of_keys = shape(
        "attention_grad_keys",
        (this.keys, this.key_heads),
        this.queries.div_ceil(BLOCK) * sharing,
        width + (width + value_depth) / SHARE + BLOCK + 3,
    );
    let scores = 4 * (this.batch * this.heads * at_a_time(this.queries, this.keys)) as u64;
    let fits = scores > call.wgpu.queue.device.limits.max_storage_buffer_binding_size
        && depth.max(value_depth) <= WIDEST
        && this.fits(&of_queries, 2)
        && by_keys.fits(&of_keys, 3);
    let of_each = |(arg, programs): (usize, ScorePrograms)| {
        let out = call.outs[ScoredAttention::ARGS + arg];
        let dims = out.layout.dims();
        let before = |axis: usize| (axis + dims.len()).checked_sub(ScoredAttention::AXES).map_or(1, |axis| dims[axis]);
        let (batch, heads) = (before(0), before(1));
        let steps = this.batch / batch * (this.heads / heads);
        let rows = (this.queries, heads * this.keys.div_ceil(BLOCK));
        let each = shape("attention_grad_arg", rows, steps, width + (2 * width + value_depth) / SHARE + 4);
        let by_scores = AttentionCall::new(call, op, Some(programs), ins, of_forward)?;
        Ok(by_scores.map(|by_scores| (by_scores, KernelShape { batch, ..each }, out)))
    };
    let of_scores = of_scores.into_iter().map(of_each).collect::<Result<Option<SmallVec<[_; 1]>>>>()?;
    let of_scores = of_scores.filter(|all| all.iter().all(|(by_scores, kernel, _)| by_scores.fits(kernel, 1)));
    let Some(of_scores) = of_scores.filter(|_| fits) else { return Ok(Support::Decompose) };
    let (Some(sums), Some(sums_by_keys)) = (ArgSums::new(this, false)?, ArgSums::new(&by_keys, true)?) else {
        return Ok(Support::Decompose);
    };
    this.launch(&of_queries, &sums.after(&call.outs[..1]), queries)?;
    by_keys.launch(&of_keys, &sums_by_keys.after(&call.outs[1..3]), keys)?;
    sums.add_up(call)?;
    sums_by_keys.add_up(call)?;
    for (by_scores, kernel, out) in of_scores {
        by_scores.launch(&kernel, &[out], argument)?;
    }
    Ok(Support::Done)
}

/// Statements that leave in `ps` the parts of `Σ g·o` of a row of `gs`, of the query `time`. In `bases` they leave the
/// base of the exponents of its weights. A query that saw nothing has no weights.
fn relative(text: &AttentionText<'_, '_>) -> String {
    let AttentionText { call, queries, .. } = text;
    let value_depth = call.value_depth;
    let [o, lse] = [AttentionGrad::OUTPUT, AttentionGrad::LSE].map(|i| call.of_scores.end + i);
    format!(
        "var sum = 0f;\nvar base = 0f;\nif (time < {queries}) {{\n\
         for (var e = part; e < {value_depth}u; e += {SHARE}u) {{\n{}sum += gs[row * {}u + e] * of{o};\n}}\n{}base = of{lse};\n}}\n\
         ps[row * {SIDE}u + part] = sum;\n\
         if (part == 0u) {{ bases[row] = select(base, wg_bits(0x7f800000u), bitcast<u32>(base) == 0xff800000u); }}\n",
        text.load(o, "time", "e"),
        value_depth + 1,
        text.load(lse, "time", ""),
    )
}

/// The sum of the parts of a row.
fn whole(row: &str) -> String {
    (0..SHARE).map(|i| format!("ps[{row} * {SIDE}u + {i}u]")).collect::<Vec<_>>().join(" + ")
}

/// The gradient `d{j}` of a product `x{j}`, from the gradient of its weight. The weight `p{j}` remains too. Then `add`
/// runs.
fn gradient(text: &AttentionText<'_, '_>, j: usize, places: &str, add: &str) -> String {
    let slope = text.slope("slope");
    let seen = format!("p{j} = wg_exp(x{j} - base);\nlet slope = p{j} * (d{j} - dot);\nd{j} = {slope};\n{add}");
    format!("var p{j} = 0f;\n{}", text.score(j, places, &seen, &format!("d{j} = 0f;\n")))
}

/// Stores a row's slices of a gradient.
fn store(text: &AttentionText<'_, '_>, out: usize, (name, width): (&str, usize), line: &str, by: &str) -> String {
    let site = text.sites[text.call.views.len() + out];
    each(width.div_ceil(SHARE), |i| {
        let column = format!("part + {}u", i * SHARE);
        let at = format!("{} + ({line}) * {width}u + {column}", text.outs[out]);
        format!("if ({column} < {width}u) {{\nlet at = {at};\n{}}}\n", site.store("at", &format!("{name}{i}{by}")))
    })
}

/// Products of a row of one block with rows of others, over their columns.
fn products(name: &str, columns: usize, left: &str, right: &str) -> String {
    let width = columns + 1;
    let terms = each(OWN, |j| format!("{name}{j} += x * {right}[(part + {}u) * {width}u + i];\n", j * SHARE));
    format!("for (var i = 0u; i < {columns}u; i++) {{\nlet x = {left}[row * {width}u + i];\n{terms}}}\n")
}

/// Adds rows of a block, with weights `x`, to slices of a row. A row has one more column, of zeros.
fn weigh(name: &str, columns: usize, x: &str, from: &str) -> String {
    each(columns.div_ceil(SHARE), |i| {
        format!("{name}{i} += {x} * {from}[n * {}u + min(part + {}u, {columns}u)];\n", columns + 1, i * SHARE)
    })
}

fn zeros(name: &str, count: usize) -> String {
    each(count, |i| format!("var {name}{i} = 0f;\n"))
}

/// The gradient of queries: a workgroup has a block of queries and walks the keys.
fn queries(text: &AttentionText<'_, '_>) -> String {
    let AttentionText { call, queries, keys, heads, sharing, ahead, scale, .. } = text;
    let AttentionCall { depth, value_depth, .. } = **call;
    let (width, values) = (depth + 1, value_depth + 1);
    let g = call.of_scores.end + AttentionGrad::GRAD;
    let last = match call.op.causal {
        true => format!("u32(clamp(i32(first) + {BLOCK} + i32({ahead}), 0, i32({keys})))"),
        false => keys.clone(),
    };
    let gradients = each(OWN, |j| {
        let key = format!("let key = s0 + part + {}u;\n", j * SHARE);
        gradient(text, j, &key, &text.add_to_sums()) + &format!("ss[row * {SIDE}u + part + {}u] = d{j};\n", j * SHARE)
    });
    format!(
        "let q_head = pair % {heads};\nlet k_head = q_head / {sharing};\n{starts}let time = first + row;\n{read_q}{read_g}\
         workgroupBarrier();\n{{\n{relative}}}\nworkgroupBarrier();\nlet dot = {dot};\nlet base = bases[row];\n{declare}\
         for (var s0 = 0u; s0 < {last}; s0 += {BLOCK}u) {{\nworkgroupBarrier();\n{read_k}{read_v}workgroupBarrier();\n\
         {zeros}{scores}{slopes}{gradients}workgroupBarrier();\n\
         for (var n = 0u; n < {BLOCK}u; n++) {{\nlet d = ss[row * {SIDE}u + n];\n{weigh}}}\n}}\n\
         if (time < {queries}) {{\n{store}}}\n",
        starts = text.starts(0..call.views.len()),
        read_q = text.tile(Attention::QUERIES, ("qs", depth, width), "first", queries),
        read_g = text.tile(g, ("gs", value_depth, values), "first", queries),
        read_k = text.tile(Attention::KEYS, ("ks", depth, width), "s0", keys),
        read_v = text.tile(Attention::VALUES, ("vs", value_depth, values), "s0", keys),
        relative = relative(text),
        dot = whole("row"),
        declare = zeros("y", depth.div_ceil(SHARE)) + &text.declare_sums(),
        zeros = zeros("x", OWN) + &zeros("d", OWN),
        scores = products("x", depth, "qs", "ks"),
        slopes = products("d", value_depth, "gs", "vs"),
        weigh = weigh("y", depth, "d", "ks"),
        store = store(text, 0, ("y", depth), &format!("pair * {queries} + time"), &format!(" * {scale}"))
            + &text.store_sums(1, &format!("(pair * {queries} + time) * {SHARE}u + part")),
    )
}

/// The gradients of keys and values: a workgroup has a block of keys and walks the queries of all heads that share it.
fn keys(text: &AttentionText<'_, '_>) -> String {
    let AttentionText { call, queries, keys, heads, sharing, ahead, scale, .. } = text;
    let AttentionCall { depth, value_depth, .. } = **call;
    let (width, values) = (depth + 1, value_depth + 1);
    let g = call.of_scores.end + AttentionGrad::GRAD;
    let start = match call.op.causal {
        true => format!("u32(max(i32(first) - i32({ahead}), 0)) / {BLOCK}u * {BLOCK}u"),
        false => "0u".into(),
    };
    let of_queries = (0..call.views.len()).filter(|&k| k != Attention::KEYS && k != Attention::VALUES);
    let gradients = each(OWN, |j| {
        let n = format!("part + {}u", j * SHARE);
        let places = format!("let time = t0 + {n};\nlet base = bases[{n}];\nlet dot = {};\n", whole(&format!("({n})")));
        gradient(text, j, &places, &text.add_to_sums())
    });
    let keep = each(OWN, |j| {
        let at = format!("row * {SIDE}u + part + {}u", j * SHARE);
        format!("ps[{at}] = p{j};\nss[{at}] = d{j};\n")
    });
    format!(
        "let k_head = pair % {heads};\n{starts}let key = first + row;\n{read_k}{read_v}{declare}\
         for (var q_head = k_head * {sharing}; q_head < (k_head + 1u) * {sharing}; q_head++) {{\n{starts_of_queries}{declare_sums}\
         for (var t0 = {start}; t0 < {queries}; t0 += {BLOCK}u) {{\nworkgroupBarrier();\n{read_q}{read_g}workgroupBarrier();\n\
         {{ let time = t0 + row;\n{relative}}}\nworkgroupBarrier();\n{zeros}{scores}{slopes}{gradients}workgroupBarrier();\n\
         {keep}workgroupBarrier();\n\
         for (var n = 0u; n < {BLOCK}u; n++) {{\nlet p = ps[row * {SIDE}u + n];\nlet d = ss[row * {SIDE}u + n];\n{weigh}}}\n}}\n\
         if (key < {keys}) {{\n{store_sums}}}\n}}\nif (key < {keys}) {{\n{store}}}\n",
        starts = text.starts([Attention::KEYS, Attention::VALUES]),
        starts_of_queries = text.starts(of_queries),
        read_q = text.tile(Attention::QUERIES, ("qs", depth, width), "t0", queries),
        read_g = text.tile(g, ("gs", value_depth, values), "t0", queries),
        read_k = text.tile(Attention::KEYS, ("ks", depth, width), "first", keys),
        read_v = text.tile(Attention::VALUES, ("vs", value_depth, values), "first", keys),
        relative = relative(text),
        declare = zeros("y", depth.div_ceil(SHARE)) + &zeros("z", value_depth.div_ceil(SHARE)),
        declare_sums = text.declare_sums(),
        store_sums =
            text.store_sums(2, &format!("((batch * {heads} * {sharing} + q_head) * {SHARE}u + part) * {keys} + key")),
        zeros = zeros("x", OWN) + &zeros("d", OWN),
        scores = products("x", depth, "ks", "qs"),
        slopes = products("d", value_depth, "vs", "gs"),
        weigh = weigh("y", depth, "d", "qs") + &weigh("z", value_depth, "p", "gs"),
        store = store(text, 0, ("y", depth), &format!("pair * {keys} + key"), &format!(" * {scale}"))
            + &store(text, 1, ("z", value_depth), &format!("pair * {keys} + key"), ""),
    )
}

/// The gradient of an argument that varies along queries and keys. A workgroup has a block of them and walks the heads
/// that share the argument's.
fn argument(text: &AttentionText<'_, '_>) -> String {
    let AttentionText { call, queries, keys, heads, sharing, batches, batch_step, all_heads, .. } = text;
    let AttentionCall { depth, value_depth, .. } = **call;
    let (width, values) = (depth + 1, value_depth + 1);
    let g = call.of_scores.end + AttentionGrad::GRAD;
    let keys_of = |j: usize| format!("let key = s0 + part + {}u;\n", j * SHARE);
    let gradients = each(OWN, |j| gradient(text, j, &keys_of(j), &format!("sum{j} += out1;\n")));
    let store = each(OWN, |j| {
        let site = text.sites[call.views.len()];
        let at = format!("{} + ((batch * head_step + head) * {queries} + time) * {keys} + key", text.outs[0]);
        format!(
            "{{\n{}if (key < {keys}) {{\nlet at = {at};\n{}}}\n}}\n",
            keys_of(j),
            site.store("at", &format!("sum{j}"))
        )
    });
    format!(
        "let blocks = ({keys} + {BLOCK}u - 1u) / {BLOCK}u;\nlet head = pair % {heads} / blocks;\n\
         let head_step = {heads} / blocks;\nlet s0 = pair % {heads} % blocks * {BLOCK}u;\nlet time = first + row;\n{declare}\
         for (var example = batch; example < {batches}; example += {batch_step}) {{\nlet batch = example;\n\
         for (var q_head = head; q_head < {all_heads}; q_head += head_step) {{\nlet k_head = q_head / {sharing};\n{starts}\
         workgroupBarrier();\n{read_q}{read_g}{read_k}{read_v}workgroupBarrier();\n{{\n{relative}}}\nworkgroupBarrier();\n\
         let dot = {dot};\nlet base = bases[row];\n{zeros}{scores}{slopes}{gradients}}}\n}}\n\
         if (time < {queries}) {{\n{store}}}\n",
        declare = zeros("sum", OWN),
        starts = text.starts(0..call.views.len()),
        read_q = text.tile(Attention::QUERIES, ("qs", depth, width), "first", queries),
        read_g = text.tile(g, ("gs", value_depth, values), "first", queries),
        read_k = text.tile(Attention::KEYS, ("ks", depth, width), "s0", keys),
        read_v = text.tile(Attention::VALUES, ("vs", value_depth, values), "s0", keys),
        relative = relative(text),
        dot = whole("row"),
        zeros = zeros("x", OWN) + &zeros("d", OWN),
        scores = products("x", depth, "qs", "ks"),
        slopes = products("d", value_depth, "gs", "vs"),
    )
}
