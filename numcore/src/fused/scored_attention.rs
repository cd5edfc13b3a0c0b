//! Attention whose scores pass through a program of positions and arguments (Dong et al., *FlexAttention*, 2024).

use std::{
    ops::{Range, RangeInclusive},
    sync::Arc,
};

use smallvec::{SmallVec, smallvec};

use super::{
    Attention, AttentionGrad, Fused, Softmax,
    attention::{HeadSizes, check_forward, raw_scores, weighted},
    score_operands::{adds_to_score, along, arg_along, positions, run},
};
use crate::{
    DType, Error, Result, Shape, Tensor,
    ops::{
        Apply, Backprop, Bits, JoinOps, Matmul, MatmulOps, Outs, PointwiseOps, Reduce, ReduceOps, Saves, Spec, Specs,
        ViewOps, cat,
    },
    pointwise::{Bounds, Inst, Program, Typed},
};

/// The largest number of queries of a causal call that is decomposed as a whole.
const WHOLE: usize = 512;
/// Queries whose visible keys are counted together.
const BLOCK: usize = 64;

/// [`Attention`] with a program of scores in place of a mask and a soft cap.
///
/// Inputs are `q: [B, H, T, D]`, `k: [B, K, S, D]`, `v: [B, K, S, E]`, and the program's arguments, which broadcast to
/// `[B, H, T, S]`. Outputs are those of [`Attention`]. Scores are `f32` at least: arguments that are combined with them
/// have that type.
#[derive(Clone, Debug)]
pub struct ScoredAttention {
    /// The factor of scores, and the causal mask if there is one; no other options.
    pub attention: Attention,
    /// The program of a score: of `q·kᵀ·scale`, the four positions `(batch, head, query, key)` as `i64`, and the
    /// arguments. A key whose score is `−∞` is hidden.
    pub program: Program,
    /// The positions of the first example, head, query and key.
    pub first: [usize; ScoredAttention::AXES],
}

impl ScoredAttention {
    /// The number of positions of a score.
    pub const AXES: usize = 4;
    /// Position of the first argument among the inputs.
    pub const ARGS: usize = 3;

    /// The input of the program that is argument `i`.
    pub const fn arg(i: usize) -> usize {
        1 + Self::AXES + i
    }

    /// The number of arguments.
    pub fn args(&self) -> usize {
        self.program.inputs().saturating_sub(Self::arg(0))
    }

    /// Tells whether the program adds a value to a score that does not depend on it, or hides the key. The gradient of
    /// the score is then that of the sum.
    pub fn adds(&self) -> bool {
        adds_to_score(&self.program)
    }

    /// Checks what a caller can set.
    fn check(&self) -> Result<()> {
        let Attention { masked, softcap, partial, .. } = self.attention;
        let of_position = |inst: &Inst| matches!(inst, Inst::Index | Inst::Random { .. });
        let why = if masked || softcap.is_some() || partial {
            "takes a scale and a causal mask; write a mask or a soft cap into the program"
        } else if self.program.inputs() < Self::arg(0)
            || self.program.outputs().len() != 1
            || self.program.scalars() > 0
        {
            "needs a program of a score, four positions, and arguments, that gives one value"
        } else if self.program.insts().iter().any(of_position) {
            "programs of scores have positions as operands, and no index and no random bits"
        } else {
            return Ok(());
        };
        Err(Error::argument(self.name(), why))
    }

    /// The number of scores of a head that blocks of 64 queries compute.
    pub(crate) fn computed(&self, queries: usize, keys: usize) -> u64 {
        if !self.attention.causal {
            return (queries * keys) as u64;
        }
        let offset = self.attention.offset(queries, keys);
        let seen = |end: usize| (end as isize + offset).clamp(0, keys as isize) as usize;
        let blocks = (0..queries).step_by(BLOCK).map(|start| start..queries.min(start + BLOCK));
        blocks.map(|rows| (rows.len() * seen(rows.end)) as u64).sum()
    }

    /// The dtypes of the program's inputs, for scores of this type.
    fn dtypes(&self, score: DType, args: &[Spec]) -> SmallVec<[DType; 8]> {
        let positions = [DType::I64; Self::AXES];
        [score].into_iter().chain(positions).chain(args.iter().map(|arg| arg.dtype)).collect()
    }

    /// The types of the values of `program`, for the inputs of a call. It is the program of scores, or that of their
    /// gradients ([`ScoredAttentionGrad::program`]). Positions and other whole numbers are `i32` where all of them fit.
    pub fn typed(&self, program: &Program, ins: &[Spec]) -> Result<Arc<Typed>> {
        let (q, score) = (ins[Attention::QUERIES], ins[Attention::QUERIES].dtype.compute());
        let mut dtypes = self.dtypes(score, &ins[Self::ARGS..]);
        dtypes.extend((self.program.inputs()..program.inputs()).map(|_| score));
        let typed = program.resolve(&dtypes, &[])?;
        let mut bounds: SmallVec<[Bounds; 8]> = smallvec![None; program.inputs()];
        let sizes = [q.shape[0], q.shape[1], q.shape[2], ins[Attention::KEYS].shape[2]];
        for (axis, (first, size)) in self.first.into_iter().zip(sizes).enumerate() {
            bounds[1 + axis] = Some((first as i64, (first + size.max(1) - 1) as i64));
        }
        Ok(program.in_32_bits(&typed, &bounds).map_or(typed, Arc::new))
    }

    /// The positions and arguments of all scores, as operands of the program.
    fn operands<T: Apply>(&self, ins: &[&T]) -> Result<Vec<T>> {
        let (q, keys) = (ins[Attention::QUERIES].spec().shape, ins[Attention::KEYS].spec().shape[2]);
        let mut operands = positions(ins[0], self.first, [q[0], q[1], q[2], keys])?;
        operands.extend(ins[Self::ARGS..].iter().map(|arg| (*arg).clone()));
        Ok(operands)
    }

    /// The value that the program adds to a score, which is its value at a score of 0.
    fn added<T: Apply>(&self, ins: &[&T]) -> Result<T> {
        let dtype = ins[0].spec().dtype;
        let zero = T::constant(Tensor::zeros(ins[0].runtime(), [1; 4], dtype)?);
        Ok(run(&self.program, &[&zero], &self.operands(ins)?)?.remove(0))
    }

    /// The options of the attention that has the added value as its mask.
    fn masked(&self) -> Attention {
        Attention { masked: true, ..self.attention.clone() }
    }

    /// The scores before the program, the operands of the program, and the scores that it gives.
    fn scores<T: Apply>(&self, ins: &[&T]) -> Result<(T, Vec<T>, T)> {
        let (q, k) = (ins[Attention::QUERIES], ins[Attention::KEYS]);
        let raw = raw_scores(q, k)?.mul(self.attention.scale)?;
        let operands = self.operands(ins)?;
        let scores = run(&self.program, &[&raw], &operands)?.remove(0).broadcast_to(raw.spec().shape)?;
        let scores = self.attention.hide(&scores, f64::NEG_INFINITY)?;
        Ok((raw, operands, scores))
    }

    /// The parts of a long causal call: the last query of each is at the last of its keys. A call that has no such
    /// parts is its only one.
    fn parts(&self, queries: usize, keys: usize) -> Vec<(Range<usize>, usize)> {
        if !self.attention.causal || queries <= WHOLE || queries > keys {
            return vec![(0..queries, keys)];
        }
        let size = queries.div_ceil(16).next_multiple_of(BLOCK);
        let before = self.attention.offset(queries, keys) as usize;
        let part = |start: usize| (start..queries.min(start + size), queries.min(start + size) + before);
        (0..queries).step_by(size).map(part).collect()
    }

    /// The most scores of a head that the decomposition has at a time.
    pub fn scores_at_a_time(&self, queries: usize, keys: usize) -> usize {
        self.parts(queries, keys).iter().map(|(queries, end)| queries.len() * end).max().unwrap_or(0)
    }

    /// The call of some queries and of the keys before `end`.
    fn part(&self, queries: &Range<usize>) -> ScoredAttention {
        let [batch, head, query, key] = self.first;
        let attention = Attention { lower_right: true, ..self.attention.clone() };
        ScoredAttention { attention, program: self.program.clone(), first: [batch, head, query + queries.start, key] }
    }
}

/// The operands of a part: queries, keys and values, and arguments.
fn cut<T: Apply>(ins: &[&T], queries: &Range<usize>, end: usize) -> Result<Vec<T>> {
    let of = |(i, x): (usize, &&T)| match i {
        Attention::QUERIES => along(*x, 2, queries),
        Attention::KEYS | Attention::VALUES => along(*x, 2, &(0..end)),
        _ => arg_along(*x, queries, &(0..end)),
    };
    ins.iter().enumerate().map(of).collect()
}

impl Fused for ScoredAttention {
    fn name(&self) -> &'static str {
        "scored_attention"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        let n = Self::ARGS + self.args();
        n..=n
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        self.check()?;
        let outs = self.attention.infer(&ins[..Self::ARGS])?;
        let (q, keys, args) = (ins[Attention::QUERIES].shape, ins[Attention::KEYS].shape[2], &ins[Self::ARGS..]);
        let scores = Shape::new(&[q[0], q[1], q[2], keys])?;
        if let Some(arg) = args.iter().find(|arg| arg.shape.broadcast(&scores) != Some(scores)) {
            let why = format!("an argument broadcasts to the scores {scores}");
            return Err(Error::shape(self.name(), &[arg.shape, scores], why));
        }
        let compute = ins[0].dtype.compute();
        let typed = self.program.resolve(&self.dtypes(compute, args), &[])?;
        let got = typed.dtypes[self.program.outputs()[0] as usize];
        if got != compute {
            let why = "the program of a score gives the type that scores are computed in";
            return Err(Error::dtype(self.name(), &[got, compute], why));
        }
        Ok(outs)
    }

    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        let (q, k, v) = (ins[Attention::QUERIES], ins[Attention::KEYS], ins[Attention::VALUES]);
        let parts = self.parts(q.spec().shape[2], k.spec().shape[2]);
        if parts.len() > 1 {
            let of = |(queries, end): &(Range<usize>, usize)| {
                T::apply(self.part(queries).into(), &cut(ins, queries, *end)?.iter().collect::<Vec<_>>())
            };
            let parts = parts.iter().map(of).collect::<Result<Vec<_>>>()?;
            let joined = |k: usize| cat(&parts.iter().map(|outs| &outs[k]).collect::<Vec<_>>(), 2);
            return [Attention::OUTPUT, Attention::LSE].into_iter().map(joined).collect();
        }
        if self.adds() {
            return T::apply(self.masked().into(), &[q, k, v, &self.added(ins)?]);
        }
        let (_, _, scores) = self.scores(ins)?;
        let o = weighted(&T::apply1(Softmax { log: false }, &[&scores])?, k, v)?;
        Ok(smallvec![o, scores.detach().logsumexp(&[-1])?])
    }

    fn output_order_of(&self, k: usize) -> Option<usize> {
        self.attention.output_order_of(k)
    }

    fn saves(&self, _: Bits) -> Option<Saves> {
        let inputs: SmallVec<[usize; 8]> = (0..Self::ARGS + self.args()).collect();
        Some(Saves { inputs: Bits::of(&inputs), outputs: Bits::of(&[Attention::OUTPUT, Attention::LSE]) })
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let learns = |&i: &usize| cx.wants(Self::ARGS + i) && self.program.derivative(Self::arg(i)).is_some();
        let learned: SmallVec<[usize; 4]> = (0..self.args()).filter(learns).collect();
        let mut ins: SmallVec<[T; 8]> =
            smallvec![cx.grad()?, cx.output(Attention::OUTPUT)?, cx.output(Attention::LSE)?];
        for i in 0..Self::ARGS + self.args() {
            ins.push(cx.input(i)?);
        }
        let op = ScoredAttentionGrad { of: self.clone(), learned };
        cx.give_all(0, op.into(), &ins.iter().collect::<SmallVec<[&T; 8]>>())
    }
}

/// The gradients of [`ScoredAttention`]. Inputs are the upstream gradient, `o`, `lse`, and the inputs of the forward
/// operation. Outputs are the gradients of `q`, `k` and `v`, stored as those of [`AttentionGrad`], and of the arguments
/// up to the last learned one. Gradients of arguments that are not learned are zeros.
#[derive(Clone, Debug)]
pub struct ScoredAttentionGrad {
    /// The forward operation.
    pub of: ScoredAttention,
    /// The arguments whose gradients are wanted, in order.
    pub learned: SmallVec<[usize; 4]>,
}

impl ScoredAttentionGrad {
    /// Position of the first argument among the inputs.
    pub const ARGS: usize = AttentionGrad::VALUES + 1;

    /// The number of arguments that outputs are due for.
    pub fn given(&self) -> usize {
        self.learned.last().map_or(0, |last| last + 1)
    }

    /// The program of gradients: of the score, and of the learned arguments. Its last input is the gradient of the
    /// score that the forward program gives.
    pub fn program(&self) -> Program {
        let wrt: SmallVec<[usize; 8]> =
            std::iter::once(0).chain(self.learned.iter().map(|&i| ScoredAttention::arg(i))).collect();
        self.of.program.differentiate(&wrt)
    }

    /// The call of the examples from `start` on.
    pub(crate) fn after_examples(&self, start: usize) -> Self {
        let [batch, head, query, key] = self.of.first;
        let of = ScoredAttention { first: [batch + start, head, query, key], ..self.of.clone() };
        ScoredAttentionGrad { of, learned: self.learned.clone() }
    }

    /// The gradients by parts of a causal call; those of keys, values and arguments are sums over parts.
    fn by_parts<T: Apply>(&self, ins: &[&T], parts: &[(Range<usize>, usize)]) -> Result<Outs<T>> {
        let operands = &ins[AttentionGrad::QUERIES..];
        let mut of_queries = Vec::with_capacity(parts.len());
        let mut sums: Outs<T> = Outs::new();
        for (queries, end) in parts {
            let of_queries_alone = ins[..AttentionGrad::QUERIES].iter().map(|x| along(*x, 2, queries));
            let mut given = of_queries_alone.collect::<Result<Vec<T>>>()?;
            given.extend(cut(operands, queries, *end)?);
            let op = ScoredAttentionGrad { of: self.of.part(queries), learned: self.learned.clone() };
            let mut outs = T::apply(op.into(), &given.iter().collect::<Vec<_>>())?.into_iter();
            of_queries.extend(outs.next());
            for (i, part) in outs.enumerate() {
                if i >= ScoredAttention::ARGS - 1 && !self.learned.contains(&(i + 1 - ScoredAttention::ARGS)) {
                    // Zeros of an argument that learns nothing, perhaps of a dtype without sums.
                    if sums.len() == i {
                        let Spec { shape, dtype } = operands[1 + i].spec();
                        sums.push(T::constant(Tensor::zeros(part.runtime(), shape, dtype)?));
                    }
                    continue;
                }
                // Back to the place in the whole operand.
                let whole = operands[1 + i].spec().shape;
                let (here, of_args) = (part.spec().shape, i + 1 >= ScoredAttention::ARGS);
                let is_cut_along = |axis: usize, back: usize| here[axis] != whole[axis] && axis + back == whole.rank();
                let place = |axis: usize| {
                    let before = if of_args && is_cut_along(axis, 2) { queries.start } else { 0 };
                    (before, whole[axis] - before - here[axis])
                };
                let pads: Vec<_> = (0..whole.rank()).map(place).collect();
                let part = part.pad(&pads, 0.0)?;
                match sums.get_mut(i) {
                    Some(sum) => *sum = sum.add(&part)?,
                    None => sums.push(part),
                }
            }
        }
        let of_queries = cat(&of_queries.iter().collect::<Vec<_>>(), 2)?;
        Ok(std::iter::once(of_queries).chain(sums).collect())
    }
}

impl Fused for ScoredAttentionGrad {
    fn name(&self) -> &'static str {
        "scored_attention_grad"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        let n = Self::ARGS + self.of.args();
        n..=n
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        check_forward(self.name(), ins, &self.of.infer(&ins[AttentionGrad::QUERIES..])?)?;
        Ok(ins[AttentionGrad::QUERIES..Self::ARGS + self.given()].iter().copied().collect())
    }

    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        let operands = &ins[AttentionGrad::QUERIES..];
        let [g, q, k, v] =
            [AttentionGrad::GRAD, AttentionGrad::QUERIES, AttentionGrad::KEYS, AttentionGrad::VALUES].map(|i| ins[i]);
        let sizes = HeadSizes::of(q.spec().shape, k.spec().shape);
        let parts = self.of.parts(sizes.t, sizes.s);
        if parts.len() > 1 {
            return self.by_parts(ins, &parts);
        }
        if self.learned.is_empty() && self.of.adds() {
            let added = self.of.added(operands)?;
            let given: SmallVec<[&T; 7]> = ins[..Self::ARGS].iter().copied().chain([&added]).collect();
            return T::apply(AttentionGrad(self.of.masked()).into(), &given);
        }
        let (raw, positions, scores) = self.of.scores(operands)?;
        let p = T::apply1(Softmax { log: false }, &[&scores])?;
        let g = sizes.grouped(g)?;
        let dp = sizes.ungrouped(&T::apply1(Matmul, &[&g, &v.t()?])?)?;
        let ds = p.mul(&dp.sub(&p.mul(&dp)?.sum_keepdim(&[-1])?)?)?;
        let mut all = positions;
        all.push(ds);
        let mut slopes = run(&self.program(), &[&raw], &all)?.into_iter();
        // A slope of a hidden score may be infinite.
        let mut slope_of_seen = || {
            let slope = slopes.next().ok_or_else(|| Error::internal(self.name(), "a gradient has no program"))?;
            self.of.attention.hide(&slope.broadcast_to(raw.spec().shape)?, 0.0)
        };
        let ds = slope_of_seen()?;
        let (p, ds) = (sizes.grouped(&p)?, sizes.grouped(&ds.mul(self.of.attention.scale)?)?);
        let dq = sizes.ungrouped(&T::apply1(Matmul, &[&ds, k])?)?;
        let mut outs: Outs<T> = smallvec![dq, ds.t()?.matmul(&sizes.grouped(q)?)?, p.t()?.matmul(&g)?];
        for i in 0..self.given() {
            let Spec { shape, dtype } = operands[ScoredAttention::ARGS + i].spec();
            outs.push(match self.learned.contains(&i) {
                true => T::apply1(Reduce::sum_to(shape), &[&slope_of_seen()?])?,
                false => T::constant(Tensor::zeros(q.runtime(), shape, dtype)?),
            });
        }
        Ok(outs)
    }

    fn output_order_of(&self, k: usize) -> Option<usize> {
        (k < ScoredAttention::ARGS).then_some(AttentionGrad::QUERIES + k)
    }

    fn saves(&self, _: Bits) -> Option<Saves> {
        None
    }

    fn gradient<T: Apply>(&self, _: &mut dyn Backprop<T>) -> Result<()> {
        Ok(())
    }
}
