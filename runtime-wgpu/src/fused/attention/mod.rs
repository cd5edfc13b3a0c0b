//! Attention in blocks of queries and keys (Dao 2023). Scores exist one block at a time, forward and backward, so
//! memory is linear in the sequence length. A program of scores runs on each of them.

mod backward;
mod forward;
mod learned;
mod program;
#[cfg(test)]
mod tests;

use std::ops::Range;

use numcore::{
    Result, Shape,
    fused::{Attention, ScoredAttention},
};
use smallvec::{SmallVec, smallvec};

pub(super) use self::{backward::backward, forward::forward, learned::scored_backward, program::ScorePrograms};
use super::{
    FusedCall,
    rows::{number, read},
};
use crate::{
    Wgpu,
    access::{Params, Site, StorageForm, header, offset},
    bindings::{Bindings, OperandView},
    packing::PackedOperands,
    pipelines::PipelineKey,
    pointwise::STEPS,
    queue::{Dispatch, LARGEST},
};

/// The number of queries of a workgroup, and of keys at a time, or the other way round.
const BLOCK: usize = 16;
/// The number of invocations that share a row.
const SHARE: usize = 4;
const GROUP: usize = BLOCK * SHARE;
/// The rows, or columns, of a block of scores that an invocation has.
const OWN: usize = BLOCK / SHARE;
/// From one row of a block of scores to the next: padded, so that columns do not fall into one bank.
const SIDE: usize = BLOCK + 1;

/// The operands and options of a call.
struct AttentionCall<'c, 'a> {
    wgpu: &'c Wgpu,
    op: &'c Attention,
    programs: Option<ScorePrograms>,
    /// `q`, `k`, `v`, operands of each score, and others.
    views: SmallVec<[OperandView<'a>; 12]>,
    /// The operands of each score: arguments of programs, or without programs the mask, if there is one.
    of_scores: Range<usize>,
    batch: usize,
    heads: usize,
    key_heads: usize,
    queries: usize,
    keys: usize,
    depth: usize,
    value_depth: usize,
}

/// A kernel of a call: its name, the iterations of its loops for one step, and the words of its blocks.
struct KernelShape<'k> {
    op: &'static str,
    kind: &'static str,
    /// The examples, of which each has its workgroups.
    batch: usize,
    /// The rows that workgroups have blocks of, and the heads.
    rows: (usize, usize),
    /// The number of steps, and the iterations of loops in each.
    steps: (usize, usize),
    blocks: &'k [(&'static str, usize)],
}

impl<'c, 'a> AttentionCall<'c, 'a> {
    /// A call with the inputs of forward, and others; `None` if it has options that kernels do not have.
    fn new(
        call: &FusedCall<'c, 'a>,
        op: &'c Attention,
        programs: Option<ScorePrograms>,
        ins: &[OperandView<'a>],
        others: &[OperandView<'a>],
    ) -> Result<Option<Self>> {
        let [q, k, v] = [Attention::QUERIES, Attention::KEYS, Attention::VALUES].map(|i| ins[i]);
        let &[batch, heads, queries, depth] = q.layout.dims() else { return Ok(None) };
        let (key_heads, keys, value_depth) = (k.layout.dims()[1], k.layout.dims()[2], v.layout.dims()[3]);
        if !op.is_plain() {
            return Ok(None);
        }
        let mut views: SmallVec<[OperandView<'a>; 12]> = smallvec![q, k, v];
        let of_scores = match &programs {
            Some(programs) => programs.args.iter().map(|i| ins[ScoredAttention::ARGS + i]).collect(),
            None => SmallVec::<[OperandView<'a>; 4]>::from(&ins[Attention::MASK..]),
        };
        for x in of_scores {
            views.push(x.seen(x.layout.broadcast_to(Shape::from([batch, heads, queries, keys]))?));
        }
        let of_scores = Attention::MASK..views.len();
        views.extend_from_slice(others);
        let wgpu = call.wgpu;
        let sizes = AttentionCall {
            wgpu,
            op,
            programs,
            views,
            of_scores,
            batch,
            heads,
            key_heads,
            queries,
            keys,
            depth,
            value_depth,
        };
        Ok(Some(sizes))
    }

    /// Tells whether a kernel can bind its operands beside those that it writes, and its blocks fit workgroup memory.
    /// On a software driver its loops must stay within the iteration limit too. Operands in too many buffers are copied
    /// into one.
    fn fits(&self, kernel: &KernelShape<'_>, outs: usize) -> bool {
        let limits = &self.wgpu.queue.device.limits;
        let words = kernel.blocks.iter().map(|(_, words)| words).sum::<usize>();
        let of_scores = self.programs.iter().flat_map(ScorePrograms::functions).map(|f| f.steps() * OWN).sum::<usize>();
        let (steps, each) = kernel.steps;
        outs < Bindings::most(&self.wgpu.queue.device)
            && words * 4 <= limits.max_compute_workgroup_storage_size as usize
            && (!self.wgpu.queue.device.software || steps * (each + of_scores) <= 3 * STEPS)
    }

    /// The arguments whose gradients the kernel sums.
    fn learned(&self) -> &[usize] {
        self.programs.as_ref().map_or(&[], |programs| &programs.learned)
    }

    /// Launches a kernel, whose `main` has the text that `body` writes after the indices of its block. Work that one
    /// launch may not have is cut into launches of some workgroups each.
    fn launch(
        &self,
        kernel: &KernelShape<'_>,
        outs: &[OperandView<'_>],
        body: impl Fn(&AttentionText<'_, '_>) -> String,
    ) -> Result<()> {
        let packed = PackedOperands::of(self.wgpu, &self.views, Bindings::count(outs))?;
        let mut views = PackedOperands::bound(&packed, &self.views);
        views.extend_from_slice(outs);
        let inputs = self.views.len();
        let (bindings, slots) = Bindings::of(&self.wgpu.queue.device, kernel.op, &views)?;
        let mut atomic: SmallVec<[bool; 8]> = smallvec![false; bindings.len()];
        for k in inputs..views.len() {
            atomic[slots[k]] |= StorageForm::of(views[k].dtype).per_word() > 1;
        }
        let site = |k: usize| Site { slot: slots[k], form: StorageForm::of(views[k].dtype), atomic: atomic[slots[k]] };
        let sites: SmallVec<[Site; 12]> = (0..views.len()).map(site).collect();
        let (rows, heads) = kernel.rows;
        let tiles = rows.div_ceil(BLOCK);
        let groups = kernel.batch * heads * tiles;
        let ahead = self.op.offset(self.queries, self.keys) as u32;
        let sizes = [0, 0, 0, self.queries, self.keys, heads, self.heads / self.key_heads, tiles];
        let mut params: SmallVec<[u32; 64]> = sizes.iter().map(|&n| n as u32).collect();
        params.extend([self.batch, self.heads, kernel.batch].map(|n| n as u32));
        params.extend([ahead, number(self.op.scale)]);
        for (k, view) in views.iter().enumerate() {
            params.push(bindings.base(slots[k], view));
            if k < inputs {
                params.extend(view.layout.strides().iter().map(|&s| s as u32));
            }
        }
        let sizes = [self.depth, self.value_depth, usize::from(self.op.causal), self.of_scores.end, bindings.len()];
        let mut details: SmallVec<[u32; 32]> = sizes.iter().map(|&n| n as u32).collect();
        details.extend(sites.iter().map(|s| (s.slot as u32) << 8 | (s.form as u32) << 1 | u32::from(s.atomic)));
        for function in self.programs.iter().flat_map(ScorePrograms::functions) {
            params.extend(function.params());
            details.extend(function.details());
        }
        details.extend(self.learned().iter().map(|&arg| arg as u32));
        let program = self.programs.as_ref().map(|programs| programs.score.program.clone());
        let key = PipelineKey { kind: kernel.kind, program, details };
        let header = header(&atomic, params.len());
        // Two products a position, and five in the gradient's kernels together.
        let positions = (self.batch * heads * self.queries * self.keys) as u64;
        let work = 4 * positions * (self.depth + self.value_depth) as u64;
        let source = || {
            let shared = |(name, n): &(&str, usize)| format!("var<workgroup> {name}: array<f32, {n}>;\n");
            let shared = kernel.blocks.iter().map(shared).collect::<String>();
            let (text, functions) = AttentionText::new(self, &sites, outs.len())?;
            let AttentionText { heads, tiles, tasks: [start, end], .. } = &text;
            Ok(format!(
                "{header}{shared}{functions}@compute @workgroup_size({GROUP})\n\
                 fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, \
                 @builtin(local_invocation_index) local: u32) {{\n\
                 wg_zero = P[0].x;\nlet task = {start} + group.y * groups.x + group.x;\nif (task >= {end}) {{ return; }}\n\
                 let pair = task / {tiles};\nlet first = (task % {tiles}) * {BLOCK}u;\nlet batch = pair / {heads};\n\
                 let row = local / {SHARE}u;\nlet part = local % {SHARE}u;\n{}}}\n",
                body(&text)
            ))
        };
        let each = groups.div_ceil(work.div_ceil(LARGEST).max(1) as usize);
        for start in (0..groups).step_by(each.max(1)) {
            let end = groups.min(start + each);
            (params[1], params[2]) = (start as u32, end as u32);
            let work = work / groups as u64 * (end - start) as u64;
            let (key, bindings) = (key.clone(), bindings.clone());
            let launch = Dispatch { op: kernel.op, key, bindings, params: &params, groups: end - start, work };
            self.wgpu.queue.launch(launch, source)?;
        }
        Ok(())
    }
}

/// The names of a kernel's parameters, and the texts that are made of them.
struct AttentionText<'t, 'a> {
    call: &'t AttentionCall<'t, 'a>,
    sites: &'t [Site],
    queries: String,
    keys: String,
    /// The heads that workgroups have blocks of.
    heads: String,
    /// The query heads of a key head.
    sharing: String,
    tiles: String,
    /// The first block of the launch, and the one after its last.
    tasks: [String; 2],
    /// The examples and the query heads of the operands, and the examples that workgroups have blocks of.
    batches: String,
    all_heads: String,
    batch_step: String,
    /// The distance from a query's position to the last key that it sees, by the causal mask.
    ahead: String,
    scale: String,
    /// The base and the strides of each input.
    places: Vec<(String, Vec<String>)>,
    outs: Vec<String>,
    /// The positions that the functions of programs take.
    positions: Vec<String>,
}

impl<'t, 'a> AttentionText<'t, 'a> {
    /// The names, and the functions of programs.
    fn new(call: &'t AttentionCall<'_, 'a>, sites: &'t [Site], outs: usize) -> Result<(Self, String)> {
        let mut params = Params::new();
        let [start, end, queries, keys, heads, sharing, tiles, batches, all_heads, batch_step, ahead] =
            std::array::from_fn(|_| params.next());
        let scale = read(&mut params);
        let places = call.views.iter().map(|view| (params.next(), params.many(view.layout.rank()))).collect();
        let outs = params.many(outs);
        let (mut functions, mut positions) = (String::new(), Vec::new());
        for function in call.programs.iter().flat_map(ScorePrograms::functions) {
            let (text, at) = function.text(call.wgpu, &mut params)?;
            functions += &text;
            positions.push(at);
        }
        let text = AttentionText {
            call,
            sites,
            queries,
            keys,
            heads,
            sharing,
            tiles,
            tasks: [start, end],
            batches,
            all_heads,
            batch_step,
            ahead,
            scale,
            places,
            outs,
            positions,
        };
        Ok((text, functions))
    }

    /// Statements that declare where the head's rows of these inputs start, for `batch`, `q_head` and `k_head`.
    fn starts(&self, inputs: impl IntoIterator<Item = usize>) -> String {
        let start = |k: usize| {
            let (base, strides) = &self.places[k];
            let head = if k == Attention::KEYS || k == Attention::VALUES { "k_head" } else { "q_head" };
            let at = offset(base, &format!("h{k}_"), &strides[..2]);
            format!("let h{k}_0 = batch;\nlet h{k}_1 = {head};\nlet from{k} = {at};\n")
        };
        inputs.into_iter().map(start).collect()
    }

    /// The element of an input at a row of a head, and at a column if it has columns.
    fn load(&self, k: usize, row: &str, column: &str) -> String {
        let steps = &self.places[k].1[2..];
        let along = steps.get(1).map_or(String::new(), |step| format!(" + {column} * {step}"));
        let load = self.sites[k].load(&format!("at{k}"));
        format!("let at{k} = from{k} + {row} * {}{along};\nlet of{k} = {load};\n", steps[0])
    }

    /// Fills a block of rows of an operand, with zeros beyond its edge.
    fn tile(&self, k: usize, (name, columns, width): (&str, usize, usize), first: &str, most: &str) -> String {
        format!(
            "for (var e = local; e < {}u; e += {GROUP}u) {{\nlet i = e / {width}u;\nlet j = e % {width}u;\nvar x = 0f;\n\
             if ({first} + i < {most} && j < {columns}u) {{\n{}x = of{k};\n}}\n{name}[e] = x;\n}}\n",
            BLOCK * width,
            self.load(k, &format!("({first} + i)"), "j"),
        )
    }

    /// The product `x{j}` of an invocation's query and key, which `places` declares, as a score: scaled, then masked or
    /// changed by the program. Hidden keys have the score `−∞`. After it, `seen` or `hidden` runs.
    fn score(&self, j: usize, places: &str, seen: &str, hidden: &str) -> String {
        let AttentionText { call, queries, keys, ahead, scale, .. } = self;
        let loads = call.of_scores.clone().map(|k| self.load(k, "time", "key")).collect::<String>();
        let of_score = match &call.programs {
            Some(programs) => {
                let score = programs.score.call(&format!("x{j}"), &self.positions[0], |i| self.arg(i), None);
                format!("x{j} = {score};\n")
            }
            None if !call.of_scores.is_empty() => format!("x{j} += of{};\n", Attention::MASK),
            None => String::new(),
        };
        let mut hides = format!("key >= {keys} || time >= {queries}");
        if call.op.causal {
            hides += &format!(" || i32(key) > i32(time) + i32({ahead})");
        }
        format!(
            "{{ {places}x{j} *= {scale};\nif ({hides}) {{\nx{j} = wg_bits(0xff800000u);\n{hidden}}} else {{\n\
             let raw = x{j};\n{loads}{of_score}{seen}}}\n}}\n"
        )
    }

    /// The gradient of a product from `slope`, that of the score which became of it. It stands where a score is `seen`.
    fn slope(&self, slope: &str) -> String {
        let of = |programs: &ScorePrograms| {
            Some(programs.slope.as_ref()?.call("raw", &self.positions[1], |i| self.arg(i), Some(slope)))
        };
        self.call.programs.as_ref().and_then(of).unwrap_or_else(|| slope.into())
    }

    /// The name of an argument of the program.
    fn arg(&self, i: usize) -> String {
        let args = self.call.programs.iter().flat_map(|programs| &programs.args);
        format!("of{}", Attention::MASK + args.take_while(|&&other| other != i).count())
    }
}

/// The text of each number below `n`.
fn each(n: usize, f: impl Fn(usize) -> String) -> String {
    (0..n).map(f).collect()
}
