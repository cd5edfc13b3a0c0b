//! Attention forward, with an online softmax: a workgroup has a block of queries and walks the keys.

use numcore::{Result, Support, fused::Attention};

use super::{AttentionCall, AttentionText, BLOCK, KernelShape, OWN, SHARE, SIDE, ScorePrograms, each};
use crate::fused::FusedCall;

pub(in super::super) fn forward(
    call: &FusedCall<'_, '_>,
    op: &Attention,
    programs: Option<ScorePrograms>,
) -> Result<Support> {
    let Some(this) = AttentionCall::new(call, op, programs, &call.ins, &[])? else { return Ok(Support::Decompose) };
    let AttentionCall { depth, value_depth, .. } = this;
    let values = value_depth.next_multiple_of(SHARE);
    let kernel = KernelShape {
        op: "attention",
        kind: "attention",
        batch: this.batch,
        rows: (this.queries, this.heads),
        steps: (this.keys.div_ceil(BLOCK), depth + (depth + value_depth) / SHARE + 2 * BLOCK),
        blocks: &[
            ("qs", BLOCK * (depth + 1)),
            ("ks", BLOCK * (depth + 1)),
            ("vs", BLOCK * values),
            ("ss", BLOCK * SIDE),
            ("ps", BLOCK * SIDE),
        ],
    };
    if value_depth > 256 || !this.fits(&kernel, call.outs.len()) {
        return Ok(Support::Decompose);
    }
    this.launch(&kernel, &call.outs, body)?;
    Ok(Support::Done)
}

fn body(text: &AttentionText<'_, '_>) -> String {
    let AttentionText { call, queries, keys, sharing, heads, ahead, .. } = text;
    let AttentionCall { depth, value_depth, .. } = **call;
    let (width, values) = (depth + 1, value_depth.next_multiple_of(SHARE));
    let slices = values / SHARE;
    let dots = each(OWN, |j| format!("x{j} += x * ks[(part + {}u) * {width}u + i];\n", j * SHARE));
    let scores = each(OWN, |j| {
        let key = format!("let key = s0 + part + {}u;\n", j * SHARE);
        text.score(j, &key, "", "") + &format!("ss[row * {SIDE}u + part + {}u] = x{j};\n", j * SHARE)
    });
    let probabilities = each(OWN, |j| format!("ps[row * {SIDE}u + part + {}u] = wg_exp(x{j} - level);\n", j * SHARE));
    let weigh = each(slices, |i| format!("y{i} += p * vs[j * {values}u + part + {}u];\n", i * SHARE));
    let [out, lse] = [0, 1].map(|k| &text.outs[k]);
    let [of_out, of_lse] = [0, 1].map(|k| text.sites[call.views.len() + k]);
    let store = each(slices, |i| {
        let store = of_out.store("at", &format!("select(y{i} / total, 0f, total == 0f)"));
        let column = format!("part + {}u", i * SHARE);
        format!("if ({column} < {value_depth}u) {{\nlet at = {out} + line * {value_depth}u + {column};\n{store}}}\n")
    });
    let last = match call.op.causal {
        true => format!("u32(clamp(i32(first) + {BLOCK} + i32({ahead}), 0, i32({keys})))"),
        false => keys.clone(),
    };
    format!(
        "let q_head = pair % {heads};\nlet k_head = q_head / {sharing};\n{starts}let time = first + row;\n{read_q}\
         var most = wg_bits(0xff800000u);\nvar level = 0f;\nvar total = 0f;\n{declare}\
         for (var s0 = 0u; s0 < {last}; s0 += {BLOCK}u) {{\nworkgroupBarrier();\n{read_k}{read_v}workgroupBarrier();\n{zero}\
         for (var i = 0u; i < {depth}u; i++) {{\nlet x = qs[row * {width}u + i];\n{dots}}}\n{scores}workgroupBarrier();\n\
         var top = most;\nfor (var j = 0u; j < {BLOCK}u; j++) {{ top = wg_max(top, ss[row * {SIDE}u + j]); }}\n\
         level = select(top, 0f, wg_infinite(top));\nlet fade = wg_exp(most - level);\nmost = top;\n\
         total *= fade;\n{fade}{probabilities}workgroupBarrier();\n\
         for (var j = 0u; j < {BLOCK}u; j++) {{\nlet p = ps[row * {SIDE}u + j];\ntotal += p;\n{weigh}}}\n}}\n\
         if (time < {queries}) {{\nlet line = pair * {queries} + time;\n{store}\
         if (part == 0u) {{\nlet at = {lse} + line;\n{store_lse}}}\n}}\n",
        starts = text.starts(0..call.views.len()),
        read_q = text.tile(Attention::QUERIES, ("qs", depth, width), "first", queries),
        read_k = text.tile(Attention::KEYS, ("ks", depth, width), "s0", keys),
        read_v = text.tile(Attention::VALUES, ("vs", value_depth, values), "s0", keys),
        declare = each(slices, |i| format!("var y{i} = 0f;\n")),
        zero = each(OWN, |j| format!("var x{j} = 0f;\n")),
        fade = each(slices, |i| format!("y{i} *= fade;\n")),
        store_lse = of_lse.store("at", "wg_log(total) + level"),
    )
}
