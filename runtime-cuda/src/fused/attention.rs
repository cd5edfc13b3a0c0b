//! Scaled dot-product attention in blocks (Dao 2023), and its gradients.

use bytemuck::{NoUninit, Zeroable};
use numcore::{
    DType, Result, Support,
    fused::{Attention, AttentionGrad},
};

use super::{FusedCall, scores::ScorePlan};
use crate::{
    handwritten::{DefineValue, HandwrittenKernel, KernelLaunch, element},
    operand::Operand,
    pointwise::to_dense,
};

/// Head dimensions with a kernel.
const HEAD_DIMS: [usize; 5] = [32, 64, 80, 96, 128];
/// Queries, or keys, of a block.
const ROWS: usize = 64;

/// Rows that `attention` holds in shared memory: those of its queries, and of two steps of keys and values (`KEYS`).
fn forward_rows(dtype: DType) -> usize {
    ROWS + 4 * if dtype.is_half() { 64 } else { 32 }
}

/// Rows that either gradient holds: two operands' of its block, and of two steps of the others (`BLOCK`).
fn gradient_rows(dtype: DType, head_dim: usize) -> usize {
    let step = match dtype.is_half() {
        true if head_dim <= 64 => 64,
        true => 32,
        false => 16,
    };
    2 * ROWS + 4 * step
}

/// `struct Heads`: strides of `[B, H, rows, HEAD_DIM]`.
#[derive(Clone, Copy, NoUninit, Zeroable)]
#[repr(C)]
struct Heads {
    batch: i64,
    head: i64,
    row: i64,
}

/// `struct Mask`: strides of a mask seen as `[B, H, T, S]`.
#[derive(Clone, Copy, NoUninit, Zeroable)]
#[repr(C)]
struct Mask {
    batch: i64,
    head: i64,
    query: i64,
    key: i64,
}

/// The kernels' `struct Sizes`.
#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct AttentionSizes {
    batches: i32,
    heads: i32,
    group: i32,
    queries: i32,
    keys: i32,
}

// As `tile.cuh` asserts.
const _: () = assert!(size_of::<Heads>() == 24 && size_of::<Mask>() == 32 && size_of::<AttentionSizes>() == 20);

impl Heads {
    fn of(x: &Operand) -> Heads {
        let s = x.layout.strides();
        Heads { batch: s[0] as i64, head: s[1] as i64, row: s[2] as i64 }
    }
}

/// Operands of one call as the kernels take them.
struct AttentionPlan {
    sizes: AttentionSizes,
    /// The mask's address and strides.
    mask: (u64, Mask),
    head_dim: usize,
    dtype: DType,
    causal: bool,
    scale: f32,
    /// True if four warps multiply together, where the GPU can.
    warpgroups: bool,
    program: Option<ScorePlan>,
}

impl AttentionPlan {
    /// The sizes of a call; `None` where no kernel supports it.
    fn new(
        call: &FusedCall<'_>,
        op: &Attention,
        q: &Operand,
        k: &Operand,
        v: &Operand,
        mask: Option<&Operand>,
        program: Option<ScorePlan>,
    ) -> Option<AttentionPlan> {
        let (qs, ks) = (q.dims(), k.dims());
        let (head_dim, dtype) = (qs[3], q.dtype);
        let rows = forward_rows(dtype).max(gradient_rows(dtype, head_dim));
        let shared = rows * (head_dim * dtype.size() + 16);
        // Blocks that no query sees are found from the first query and key on; a program's parameter has the rest.
        let at_start = op.offset(qs[2], ks[2]) == 0;
        let fits = op.is_plain()
            && (at_start || program.is_some())
            && HEAD_DIMS.contains(&head_dim)
            && v.dims()[3] == head_dim
            && dtype != DType::F64
            && shared <= call.cuda.queue.engine.driver.about().shared
            && [qs[2], ks[2], qs[0] * qs[1] * qs[2].max(1)].iter().all(|&n| n < i32::MAX as usize);
        if !fits {
            return None;
        }
        let mask = match mask {
            None => (0, Mask::zeroed()),
            Some(m) => {
                let to = numcore::Shape::new(&[qs[0], qs[1], qs[2], ks[2]]).ok()?;
                let seen = m.layout.broadcast_to(to).ok()?;
                let s = seen.strides();
                let strides = Mask { batch: s[0] as i64, head: s[1] as i64, query: s[2] as i64, key: s[3] as i64 };
                (m.address, strides)
            }
        };
        let [batches, heads, queries, keys] = [qs[0], qs[1], qs[2], ks[2]].map(|n| n as i32);
        let sizes = AttentionSizes { batches, heads, group: heads / ks[1].max(1) as i32, queries, keys };
        let causal = op.causal && at_start;
        let warpgroups = call.cuda.products.warpgroups && dtype.is_half() && head_dim.is_multiple_of(64);
        Some(AttentionPlan { sizes, mask, head_dim, dtype, causal, scale: op.scale as f32, warpgroups, program })
    }

    /// A kernel that holds so many rows in shared memory, without scores if there are none.
    fn kernel(&self, file: &'static str, entry: &'static str, rows: usize) -> HandwrittenKernel {
        let defines = [
            ("T", DefineValue::from(element(self.dtype))),
            ("HEAD_DIM", self.head_dim.into()),
            ("WARPGROUP", usize::from(self.warpgroups).into()),
        ];
        let kernel = HandwrittenKernel::new(file, entry, &defines);
        let program = self.program.as_ref().filter(|_| rows > 0).map(|program| program.spec.clone());
        kernel.with_shared(rows * (self.head_dim * self.dtype.size() + 16)).with_scores(program)
    }

    /// Lanes that share a row of `attention_dots`, 16 bytes each.
    fn lanes(&self) -> usize {
        (self.head_dim * self.dtype.size() / 16).next_power_of_two()
    }

    /// What all kernels but one take at the end.
    fn finish<'a>(&self, launch: KernelLaunch<'a>) -> KernelLaunch<'a> {
        let launch = launch.arg(self.mask.1).arg(self.sizes).arg(i32::from(self.causal)).arg(self.scale);
        self.program.iter().fold(launch, |launch, program| launch.structure(&program.parameter))
    }

    fn blocks(&self, rows: i32, heads: usize) -> [usize; 3] {
        [(rows as usize).div_ceil(ROWS) * heads * self.sizes.batches as usize, 1, 1]
    }
}

/// Whether rows are contiguous and begin at multiples of 16 bytes.
fn is_aligned(x: &Operand) -> bool {
    let strides = x.layout.strides();
    let whole = |s: isize| (s.unsigned_abs() * x.dtype.size()).is_multiple_of(16);
    let steps = strides[..3].iter().zip(x.dims()).all(|(s, d)| *d == 1 || whole(*s));
    strides[3] == 1 && x.address.is_multiple_of(16) && steps
}

/// Input `i` with contiguous rows that begin at multiples of 16 bytes; copied where they do not.
fn aligned(call: &mut FusedCall<'_>, i: usize) -> Result<Operand> {
    let x = call.ins[i];
    if !is_aligned(&x) {
        let (memory, copy) = to_dense(call.cuda, &x, x.dtype)?;
        call.kept.push(memory);
        call.ins[i] = copy;
    }
    Ok(call.ins[i])
}

/// Attention, and attention by a program of scores.
pub(super) fn forward(call: &mut FusedCall<'_>, op: &Attention, program: Option<ScorePlan>) -> Result<Support> {
    let [q, k, v] = [Attention::QUERIES, Attention::KEYS, Attention::VALUES].map(|i| call.ins[i]);
    if k.dims()[2] == 0 {
        return Ok(Support::Decompose);
    }
    let mask = op.masked.then(|| call.ins[Attention::MASK]);
    let Some(plan) = AttentionPlan::new(call, op, &q, &k, &v, mask.as_ref(), program) else {
        return Ok(Support::Decompose);
    };
    let (o, lse) = (call.outs[Attention::OUTPUT], call.outs[Attention::LSE]);
    if !is_aligned(&o) {
        return Ok(Support::Decompose);
    }
    if o.numel() == 0 {
        return Ok(Support::Done);
    }
    let [q, k, v] = [aligned(call, 0)?, aligned(call, 1)?, aligned(call, 2)?];
    let kernel = plan.kernel("attention.cu", "attention", forward_rows(plan.dtype));
    let launch = KernelLaunch::new(call.cuda, "attention", &kernel)?.arg(o.address).arg(lse.address);
    let launch = launch.arg(q.address).arg(k.address).arg(v.address).arg(plan.mask.0);
    let launch = launch.arg(Heads::of(&o)).arg(Heads::of(&q)).arg(Heads::of(&k)).arg(Heads::of(&v));
    let blocks = plan.blocks(plan.sizes.queries, plan.sizes.heads as usize);
    // SAFETY: the contract of `numcore::Runtime`; rows begin where the kernel reads 16 bytes at a time.
    unsafe { plan.finish(launch).run(blocks, [128, 1])? };
    Ok(Support::Done)
}

/// From the upstream gradient, `o`, `lse`, `q`, `k`, `v`, and the mask or the arguments of the program (if given). The
/// programs are those of the passes over keys and over queries.
pub(super) fn backward(call: &mut FusedCall<'_>, op: &Attention, programs: Option<[ScorePlan; 2]>) -> Result<Support> {
    let [q, k, v] = [AttentionGrad::QUERIES, AttentionGrad::KEYS, AttentionGrad::VALUES].map(|i| call.ins[i]);
    // No query heads: the number of them per key head would be 0, by which the kernels divide.
    if k.dims()[2] == 0 || q.dims()[1] == 0 {
        return Ok(Support::Decompose);
    }
    let mask = op.masked.then(|| call.ins[AttentionGrad::MASK]);
    let [of_keys, of_queries] = programs.map_or([None, None], |programs| programs.map(Some));
    let Some(mut plan) = AttentionPlan::new(call, op, &q, &k, &v, mask.as_ref(), of_keys) else {
        return Ok(Support::Decompose);
    };
    if call.outs[..3].iter().any(|d| !is_aligned(d)) {
        return Ok(Support::Decompose);
    }
    let (g, o, lse) = (aligned(call, 0)?, aligned(call, 1)?, call.dense(2)?);
    let [q, k, v] = [aligned(call, 3)?, aligned(call, 4)?, aligned(call, 5)?];
    let [dq, dk, dv] = [call.outs[0], call.outs[1], call.outs[2]];
    let rows = q.dims()[..3].iter().product::<usize>();
    let dots = call.scratch(rows * size_of::<f32>())?;
    if rows > 0 {
        let kernel = plan.kernel("attention_grad.cu", "attention_dots", 0);
        let launch = KernelLaunch::new(call.cuda, "attention_grad", &kernel)?.arg(dots).arg(g.address).arg(o.address);
        let launch = launch.arg(Heads::of(&g)).arg(Heads::of(&o)).arg(plan.sizes);
        // SAFETY: as in `forward`.
        unsafe { launch.run([rows.div_ceil(128 / plan.lanes()), 1, 1], [32, 4])? };
    }
    let inputs = [g.address, q.address, k.address, v.address, plan.mask.0, lse, dots];
    if dk.numel() > 0 {
        let kernel = plan.kernel("attention_grad.cu", "attention_grad_keys", gradient_rows(plan.dtype, plan.head_dim));
        let launch = KernelLaunch::new(call.cuda, "attention_grad", &kernel)?.arg(dk.address).arg(dv.address);
        let launch = inputs.into_iter().fold(launch, KernelLaunch::arg).arg(Heads::of(&dk)).arg(Heads::of(&dv));
        let launch = launch.arg(Heads::of(&g)).arg(Heads::of(&q)).arg(Heads::of(&k)).arg(Heads::of(&v));
        let blocks = plan.blocks(plan.sizes.keys, k.dims()[1]);
        // SAFETY: as in `forward`.
        unsafe { plan.finish(launch).run(blocks, [128, 1])? };
    }
    plan.program = of_queries;
    if dq.numel() > 0 {
        let kernel =
            plan.kernel("attention_grad.cu", "attention_grad_queries", gradient_rows(plan.dtype, plan.head_dim));
        let launch = KernelLaunch::new(call.cuda, "attention_grad", &kernel)?.arg(dq.address);
        let launch = inputs
            .into_iter()
            .fold(launch, KernelLaunch::arg)
            .arg(Heads::of(&dq))
            .arg(Heads::of(&g))
            .arg(Heads::of(&q));
        let launch = launch.arg(Heads::of(&k)).arg(Heads::of(&v));
        let blocks = plan.blocks(plan.sizes.queries, plan.sizes.heads as usize);
        // SAFETY: as in `forward`.
        unsafe { plan.finish(launch).run(blocks, [128, 1])? };
    }
    Ok(Support::Done)
}
