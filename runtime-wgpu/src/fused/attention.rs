//! Attention in blocks of queries and keys with an online softmax (Dao 2023). Scores exist one block at a time, so
//! memory is linear in the sequence length. A program of scores runs on each of them. The gradients are decomposed.

use numcore::{
    Result, Shape, Support,
    fused::{Attention, ScoredAttention},
};
use smallvec::{SmallVec, smallvec};

use super::{
    FusedCall,
    rows::{number, read},
    scores::ScoreProgram,
};
use crate::{
    Wgpu,
    access::{Params, Site, StorageForm, header, offset},
    bindings::{Bindings, OperandView},
    pipelines::PipelineKey,
    pointwise::STEPS,
    queue::Dispatch,
};

/// The number of queries of a workgroup, and of keys at a time.
const BLOCK: usize = 16;
/// The number of invocations that share a query.
const SHARE: usize = 4;
const GROUP: usize = BLOCK * SHARE;

/// The sizes of a call, and the sites of its operands.
struct AttentionKernel<'p> {
    depth: usize,
    value_depth: usize,
    causal: bool,
    /// The sites of `q`, `k`, `v`, operands of each score, then the outputs.
    sites: SmallVec<[Site; 8]>,
    /// The number of operands before the outputs.
    inputs: usize,
    /// The program of scores, whose arguments are the operands of a score. Without one, the operand is a mask.
    program: Option<ScoreProgram<'p>>,
}

/// Tells whether the blocks fit workgroup memory, and the loops stay within the iteration limit.
fn fits(call: &FusedCall<'_, '_>, depth: usize, value_depth: usize, keys: usize, steps: usize) -> bool {
    let room = call.wgpu.queue.device.limits.max_compute_workgroup_storage_size as usize;
    let of_scores = steps * BLOCK / SHARE;
    let turns = keys.div_ceil(BLOCK) * (depth + (depth + value_depth) / SHARE + 2 * BLOCK + of_scores);
    words(depth, value_depth).iter().sum::<usize>() * 4 <= room && turns <= 3 * STEPS && value_depth <= 256
}

/// The words of the blocks of queries, keys, values, scores and probabilities. Rows are padded, so that columns do not
/// fall into one bank.
fn words(depth: usize, value_depth: usize) -> [usize; 5] {
    let values = value_depth.next_multiple_of(SHARE);
    [BLOCK * (depth + 1), BLOCK * (depth + 1), BLOCK * values, BLOCK * (BLOCK + 1), BLOCK * (BLOCK + 1)]
}

pub(super) fn forward(call: &FusedCall<'_, '_>, op: &Attention, program: Option<ScoreProgram<'_>>) -> Result<Support> {
    if op.window != [None, None] || op.softcap.is_some() {
        return Ok(Support::Decompose);
    }
    let (q, k, v) = (call.ins[Attention::QUERIES], call.ins[Attention::KEYS], call.ins[Attention::VALUES]);
    let &[b, h, t, d] = q.layout.dims() else { return Ok(Support::Decompose) };
    let (heads, keys, e) = (k.layout.dims()[1], k.layout.dims()[2], v.layout.dims()[3]);
    let mut views: SmallVec<[OperandView<'_>; 8]> = smallvec![q, k, v];
    let of_scores = match &program {
        Some(program) => program.args.iter().map(|i| call.ins[ScoredAttention::ARGS + i]).collect(),
        None => SmallVec::<[OperandView<'_>; 4]>::from(&call.ins[Attention::MASK..]),
    };
    for x in of_scores {
        views.push(x.seen(x.layout.broadcast_to(Shape::from([b, h, t, keys]))?));
    }
    let inputs = views.len();
    views.extend(call.outs.iter().copied());
    // Of the buffers that a kernel may bind, one is kept for reports.
    let buffers = call.wgpu.queue.device.limits.max_storage_buffers_per_shader_stage as usize - 1;
    let steps = program.as_ref().map_or(0, ScoreProgram::steps);
    if views.len() > buffers || !fits(call, d, e, keys, steps) {
        return Ok(Support::Decompose);
    }
    let (bindings, slots) = Bindings::of(&call.wgpu.queue.device, "attention", &views)?;
    let mut atomic: SmallVec<[bool; 8]> = smallvec![false; bindings.len()];
    for k in inputs..views.len() {
        atomic[slots[k]] |= StorageForm::of(views[k].dtype).per_word() > 1;
    }
    let site = |k: usize| Site { slot: slots[k], form: StorageForm::of(views[k].dtype), atomic: atomic[slots[k]] };
    let sites: SmallVec<[Site; 8]> = (0..views.len()).map(site).collect();
    let tiles = t.div_ceil(BLOCK);
    let sizes = [0, t, keys, h, h / heads, tiles, b * h * tiles];
    let mut params: SmallVec<[u32; 64]> = sizes.iter().map(|&n| n as u32).collect();
    params.extend([op.offset(t, keys) as u32, number(op.scale)]);
    for (k, view) in views.iter().enumerate() {
        params.push(bindings.base(slots[k], view));
        if k < inputs {
            params.extend(view.layout.strides().iter().map(|&s| s as u32));
        }
    }
    let mut details: SmallVec<[u32; 32]> =
        smallvec![d as u32, e as u32, u32::from(op.causal), inputs as u32, bindings.len() as u32];
    details.extend(sites.iter().map(|s| (s.slot as u32) << 8 | (s.form as u32) << 1 | u32::from(s.atomic)));
    if let Some(program) = &program {
        params.extend(program.params());
        details.extend(program.details());
    }
    let source = program.as_ref().map(|program| program.program.clone());
    let kernel = AttentionKernel { depth: d, value_depth: e, causal: op.causal, sites, inputs, program };
    let key = PipelineKey { kind: "attention", program: source, details };
    let header = header(&atomic, params.len());
    let launch = Dispatch { op: "attention", key, bindings, params: &params, groups: sizes[6] };
    call.wgpu.queue.launch(launch, || kernel.source(call.wgpu, &header))?;
    Ok(Support::Done)
}

impl AttentionKernel<'_> {
    fn source(&self, wgpu: &Wgpu, header: &str) -> Result<String> {
        let AttentionKernel { depth, value_depth, inputs, .. } = *self;
        let values = value_depth.next_multiple_of(SHARE);
        let mut params = Params::new();
        let [queries, keys, heads, sharing, tiles, count, ahead] = std::array::from_fn(|_| params.next());
        let scale = read(&mut params);
        let (mut starts, mut steps) = (String::new(), Vec::new());
        for k in 0..inputs {
            let (base, strides) = (params.next(), params.many(4));
            let head = if k == 1 || k == 2 { "k" } else { "q" };
            let at = offset(&base, &format!("h{k}_"), &strides[..2]);
            starts += &format!("let h{k}_0 = batch;\nlet h{k}_1 = {head}_head;\nlet from{k} = {at};\n");
            steps.push([strides[2].clone(), strides[3].clone()]);
        }
        let (out, lse) = (params.next(), params.next());
        let (function, positions) = match &self.program {
            Some(program) => program.text(wgpu, &mut params)?,
            None => (String::new(), Vec::new()),
        };
        let names = ["qs", "ks", "vs", "ss", "ps"];
        let shared: String = names
            .iter()
            .zip(words(depth, value_depth))
            .map(|(name, n)| format!("var<workgroup> {name}: array<f32, {n}>;\n"))
            .collect();
        let each = |n: usize, f: &dyn Fn(usize) -> String| -> String { (0..n).map(f).collect() };
        let slices = values / SHARE;
        let read_q = self.tile(0, "qs", depth, depth + 1, "first", &queries, &steps[0]);
        let read_k = self.tile(1, "ks", depth, depth + 1, "s0", &keys, &steps[1]);
        let read_v = self.tile(2, "vs", value_depth, values, "s0", &keys, &steps[2]);
        let own = BLOCK / SHARE;
        let dots = each(own, &|j| format!("x{j} += x * ks[(part + {}u) * {}u + i];\n", j * SHARE, depth + 1));
        let scores = each(own, &|j| self.score(j, [&queries, &keys, &ahead, &scale], &steps[3..], &positions));
        let probabilities =
            each(own, &|j| format!("ps[query * {0}u + part + {1}u] = wg_exp(x{j} - level);\n", BLOCK + 1, j * SHARE));
        let weigh = each(slices, &|i| format!("y{i} += p * vs[j * {values}u + part + {}u];\n", i * SHARE));
        let store = each(slices, &|i| {
            let store = self.sites[inputs].store("at", &format!("select(y{i} / total, 0f, total == 0f)"));
            let column = format!("part + {}u", i * SHARE);
            format!(
                "if ({column} < {value_depth}u) {{\nlet at = {out} + line * {value_depth}u + {column};\n{store}}}\n"
            )
        });
        let last = match self.causal {
            true => format!("u32(clamp(i32(first) + {BLOCK} + i32({ahead}), 0, i32({keys})))"),
            false => keys.clone(),
        };
        Ok(format!(
            "{header}{shared}{function}@compute @workgroup_size({GROUP})\n\
             fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, \
             @builtin(local_invocation_index) local: u32) {{\n\
             wg_zero = P[0].x;\nlet task = group.y * groups.x + group.x;\nif (task >= {count}) {{ return; }}\n\
             let pair = task / {tiles};\nlet first = (task % {tiles}) * {BLOCK}u;\n\
             let batch = pair / {heads};\nlet q_head = pair % {heads};\nlet k_head = q_head / {sharing};\n{starts}\
             let query = local / {SHARE}u;\nlet part = local % {SHARE}u;\nlet time = first + query;\n{read_q}\
             var most = wg_bits(0xff800000u);\nvar level = 0f;\nvar total = 0f;\n{declare}\
             for (var s0 = 0u; s0 < {last}; s0 += {BLOCK}u) {{\nworkgroupBarrier();\n{read_k}{read_v}workgroupBarrier();\n{zero}\
             for (var i = 0u; i < {depth}u; i++) {{\nlet x = qs[query * {width}u + i];\n{dots}}}\n{scores}workgroupBarrier();\n\
             var top = most;\nfor (var j = 0u; j < {BLOCK}u; j++) {{ top = wg_max(top, ss[query * {side}u + j]); }}\n\
             level = select(top, 0f, abs(top) == wg_bits(0x7f800000u));\nlet fade = wg_exp(most - level);\nmost = top;\n\
             total *= fade;\n{fade}{probabilities}workgroupBarrier();\n\
             for (var j = 0u; j < {BLOCK}u; j++) {{\nlet p = ps[query * {side}u + j];\ntotal += p;\n{weigh}}}\n}}\n\
             if (time < {queries}) {{\nlet line = pair * {queries} + time;\n{store}\
             if (part == 0u) {{\nlet at = {lse} + line;\n{store_lse}}}\n}}\n}}\n",
            declare = each(slices, &|i| format!("var y{i} = 0f;\n")),
            zero = each(own, &|j| format!("var x{j} = 0f;\n")),
            fade = each(slices, &|i| format!("y{i} *= fade;\n")),
            width = depth + 1,
            side = BLOCK + 1,
            store_lse = self.sites[inputs + 1].store("at", "wg_log(total) + level"),
        ))
    }

    /// Fills a block of rows of an operand, with zeros beyond its edge.
    #[expect(clippy::too_many_arguments, reason = "one block, described")]
    fn tile(
        &self,
        operand: usize,
        name: &str,
        columns: usize,
        width: usize,
        first: &str,
        most: &str,
        [down, along]: &[String; 2],
    ) -> String {
        format!(
            "for (var e = local; e < {}u; e += {GROUP}u) {{\nlet i = e / {width}u;\nlet j = e % {width}u;\nvar x = 0f;\n\
             if ({first} + i < {most} && j < {columns}u) {{\nlet at = from{operand} + ({first} + i) * {down} + j * {along};\n\
             x = {};\n}}\n{name}[e] = x;\n}}\n",
            BLOCK * width,
            self.sites[operand].load("at"),
        )
    }

    /// The score of an invocation's key `j`: scaled, then masked or changed by the program. Hidden keys have the score
    /// `−∞`.
    fn score(
        &self,
        j: usize,
        [queries, keys, ahead, scale]: [&str; 4],
        steps: &[[String; 2]],
        positions: &[String],
    ) -> String {
        let key = format!("s0 + part + {}u", j * SHARE);
        let mut of_score = String::new();
        for (i, [down, along]) in (3..).zip(steps) {
            of_score += &format!(
                "let at{i} = from{i} + time * {down} + key * {along};\nlet of{i} = {};\n",
                self.sites[i].load(&format!("at{i}"))
            );
        }
        let args = (3..self.inputs).map(|i| format!(", of{i}")).collect::<String>();
        of_score += &match &self.program {
            Some(_) => {
                let positions = positions.iter().map(|at| format!(", {at}")).collect::<String>();
                format!("x{j} = score_of(x{j}{positions}{args});\n")
            }
            None if self.inputs > 3 => format!("x{j} += of3;\n"),
            None => String::new(),
        };
        let hides = format!("key >= {keys}");
        let hides = match self.causal {
            true => format!("{hides} || i32(key) > i32(time) + i32({ahead})"),
            false => hides,
        };
        format!(
            "{{ let key = {key};\nx{j} *= {scale};\nif ({hides}) {{ x{j} = wg_bits(0xff800000u); }}\n\
             else if (time < {queries}) {{\n{of_score}}}\nss[query * {}u + part + {}u] = x{j}; }}\n",
            BLOCK + 1,
            j * SHARE
        )
    }
}
