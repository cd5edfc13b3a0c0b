//! Fused kernels against their decompositions, in sizes that are odd, large and empty, for dense and strided inputs.

use numcore::{
    DType, Result, Runtime, Tensor,
    fused::{
        Attention, AttentionGrad, Conv, ConvKind, CrossEntropy, CrossEntropyGrad, FusedOp, Linear4bit,
        LinearCrossEntropy, LinearCrossEntropyGrad, LinearGrad, MaxPool, MaxPoolGrad, NestedScales, Norm, NormGrad,
        NormKind, Softmax, SoftmaxGrad,
    },
    ops::{Apply, Bits, Op, PointwiseOps, ViewOps},
    rng::Philox,
};

use super::{
    close::near,
    dtypes::{computes, lacks},
    report::{Section, Verdict},
};
use crate::golden::Placement;

pub(crate) fn kernels<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("fused kernels");
    let types = [(DType::F32, 2e-5), (DType::F64, 1e-12)];
    for (dtype, tolerance) in types {
        if !computes(rt, dtype) {
            section.skip(lacks(dtype));
            continue;
        }
        let mut bench = Bench { rt, dtype, tolerance, section: &mut section };
        bench.softmax();
        bench.cross_entropy();
        bench.linear_cross_entropy();
        bench.linear_grad();
        bench.norms();
        bench.attention();
        bench.scored_attention();
        bench.infinite_scores();
        bench.conv();
        bench.pool();
        bench.linear4bit();
    }
    section
}

pub(super) struct Bench<'a, R: Runtime> {
    pub(super) rt: &'a R,
    pub(super) dtype: DType,
    pub(super) tolerance: f64,
    pub(super) section: &'a mut Section,
}

impl<R: Runtime> Bench<'_, R> {
    pub(super) fn real(&self, shape: &[usize], seed: u64) -> Tensor<R> {
        let mut rng = Philox::new(seed, 1);
        // Shapes and types of this file are sound; a runtime that cannot make them fails its first check.
        Tensor::from_f64_fn(self.rt, shape, self.dtype, || 2.0 * rng.normal()).expect("a tensor of random numbers")
    }

    /// A few small integers, many of them equal.
    fn whole(&self, shape: &[usize], seed: u64) -> Tensor<R> {
        let mut rng = Philox::new(seed, 3);
        let number = || rng.below(4) as f64 - 2.0;
        Tensor::from_f64_fn(self.rt, shape, self.dtype, number).expect("a tensor of whole numbers")
    }

    fn index(&self, n: usize, below: usize, ignored: bool) -> Tensor<R> {
        let mut rng = Philox::new(n as u64, 2);
        let ids = (0..n).map(|i| if ignored && i % 3 == 1 { -100 } else { rng.below(below.max(1) as u64) as i64 });
        Tensor::from_vec(self.rt, ids.collect()).expect("a tensor of positions")
    }

    /// Compares every output of the op, computed by the runtime's choice, with that of the decomposition, for every
    /// layout of the inputs.
    pub(super) fn compare(&mut self, what: &str, op: impl Into<Op>, ins: &[&Tensor<R>]) -> Vec<Tensor<R>> {
        let op = op.into();
        let Op::Fused(fused) = &op else { return Vec::new() };
        let want = match fused.decompose(ins) {
            Ok(want) => want.into_vec(),
            Err(e) => {
                self.section.check(what, || Err(e));
                return Vec::new();
            }
        };
        for placement in Placement::ALL {
            let name = format!("{what} {} {placement:?}", self.dtype);
            let (fused, want, tolerance) = (fused.clone(), &want, self.tolerance);
            self.section.check(name, || compare(fused, ins, want, placement, tolerance));
        }
        want
    }

    fn softmax(&mut self) {
        let shapes: [&[usize]; 8] = [&[1, 1], &[3, 7], &[5, 64], &[2, 3, 129], &[1, 4097], &[700, 3], &[0, 4], &[33]];
        for shape in shapes {
            let (x, g) = (self.real(shape, 1), self.real(shape, 2));
            for log in [false, true] {
                let y = self.compare(&format!("softmax {shape:?} log {log}"), Softmax { log }, &[&x]);
                if let [y] = &y[..] {
                    self.compare(&format!("softmax_grad {shape:?} log {log}"), SoftmaxGrad { log }, &[y, &g]);
                }
            }
        }
    }

    fn cross_entropy(&mut self) {
        for (n, c) in [(1, 1), (5, 3), (64, 65), (3, 1000), (257, 17), (0, 4)] {
            let (x, g, w) = (self.real(&[n, c], 3), self.real(&[n], 4), self.real(&[c], 5));
            let w = w.abs().unwrap_or(w);
            for (weighted, smoothing, ignored) in
                [(false, 0.0, false), (false, 0.0, true), (false, 0.1, true), (true, 0.0, false), (true, 0.2, true)]
            {
                let op = CrossEntropy { ignore_index: -100, label_smoothing: smoothing, weighted };
                let y = self.index(n, c, ignored);
                let what = format!("[{n}, {c}] weighted {weighted} smoothing {smoothing} ignoring {ignored}");
                let mut ins = vec![&x, &y];
                ins.extend(weighted.then_some(&w));
                let outs = self.compare(&format!("cross_entropy {what}"), op.clone(), &ins);
                let [_, top, log_sum] = &outs[..] else { continue };
                let mut ins = vec![&x, &y, top, log_sum, &g];
                ins.extend(weighted.then_some(&w));
                self.compare(&format!("cross_entropy_grad {what}"), CrossEntropyGrad(op), &ins);
            }
        }
    }

    fn linear_cross_entropy(&mut self) {
        for ([n, c, v], chunk) in
            [([1, 1, 1], 1), ([5, 3, 7], 2), ([70, 17, 33], 64), ([64, 8, 131], 16), ([3, 5, 9], 8), ([0, 4, 5], 2)]
        {
            let (x, w, b) = (self.real(&[n, c], 31), self.real(&[v, c], 32), self.real(&[v], 33));
            for (bias, label_smoothing, ignored, summed) in [
                (false, 0.0, false, true),
                (true, 0.0, true, true),
                (true, 0.1, true, false),
                (false, 0.1, false, false),
            ] {
                let gradients = if summed { Bits(if bias { 7 } else { 3 }) } else { Bits::NONE };
                let op = LinearCrossEntropy {
                    ignore_index: -100,
                    label_smoothing,
                    bias,
                    summed,
                    chunk: Some(chunk),
                    gradients,
                };
                let (y, g) = (self.index(n, v, ignored), self.real(&[n], 34));
                let what = format!("{n}x{c} to {v} by {chunk} bias {bias} smoothing {label_smoothing} sum {summed}");
                let mut ins = vec![&x, &w];
                ins.extend(bias.then_some(&b));
                ins.push(&y);
                self.compare(&format!("linear_cross_entropy {what}"), op.clone(), &ins);
                ins.push(&g);
                for gradients in [Bits(1), Bits(2), Bits(if bias { 7 } else { 3 })] {
                    let op = LinearCrossEntropyGrad(LinearCrossEntropy { gradients, summed: false, ..op.clone() });
                    self.compare(&format!("linear_cross_entropy_grad {what} {gradients:?}"), op, &ins);
                }
            }
        }
    }

    fn linear_grad(&mut self) {
        for [m, k, n] in [[1, 1, 1], [5, 3, 7], [70, 17, 33], [257, 64, 48], [0, 4, 5], [3, 0, 5]] {
            let (x, g) = (self.real(&[m, k], 35), self.real(&[m, n], 36));
            self.compare(&format!("linear_grad {m}x{k} to {n}"), LinearGrad, &[&x, &g]);
        }
    }

    fn norms(&mut self) {
        let shapes: [&[usize]; 6] = [&[1, 1], &[3, 5], &[2, 7, 64], &[257, 31], &[1, 3000], &[0, 8]];
        for shape in shapes {
            let width = shape[shape.len() - 1];
            let (x, g) = (self.real(shape, 6), self.real(shape, 7));
            let (w, b) = (self.real(&[width], 8), self.real(&[width], 9));
            for (kind, weight, bias) in [
                (NormKind::Layer, true, true),
                (NormKind::Layer, true, false),
                (NormKind::Layer, false, false),
                (NormKind::Rms, true, false),
                (NormKind::Rms, false, false),
            ] {
                let op = Norm { kind, eps: 1e-3, weight, bias };
                let what = format!("{shape:?} {kind:?} weight {weight} bias {bias}");
                let mut ins = vec![&x];
                ins.extend(weight.then_some(&w));
                ins.extend(bias.then_some(&b));
                let outs = self.compare(&format!("norm {what}"), op.clone(), &ins);
                if outs.len() < 2 {
                    continue;
                }
                let mut ins = vec![&x, &g, &outs[1]];
                ins.extend(outs.get(2));
                ins.extend(weight.then_some(&w));
                self.compare(&format!("norm_grad {what}"), NormGrad(op), &ins);
            }
        }
    }

    fn attention(&mut self) {
        // Batch, query heads, key heads, queries, keys, depth, depth of values.
        let sizes = [
            [1, 1, 1, 1, 1, 1, 1],
            [2, 3, 3, 5, 5, 4, 4],
            [1, 4, 2, 33, 33, 16, 16],
            [1, 6, 2, 7, 19, 8, 5],
            [1, 2, 1, 19, 7, 8, 8],
            [1, 1, 1, 300, 300, 32, 32],
            [1, 2, 2, 65, 129, 64, 64],
            [2, 2, 2, 0, 4, 8, 8],
        ];
        for [b, h, k, t, s, d, e] in sizes {
            let (q, key, v) =
                (self.real(&[b, h, t, d], 10), self.real(&[b, k, s, d], 11), self.real(&[b, k, s, e], 12));
            let (mask, g) = (self.real(&[b, 1, t, s], 13), self.real(&[b, h, t, e], 14));
            let plain = Attention::new(1.0 / (d as f64).sqrt());
            let kinds = [(false, false), (true, false), (false, true), (true, true)];
            let plain = kinds.map(|(causal, masked)| Attention { causal, masked, ..plain.clone() });
            let [window, lower_right] =
                [[Some(20), Some(3)], [Some(40), None]].map(|w| Attention { window: w, ..plain[0].clone() });
            let options = [
                Attention { softcap: Some(1.5), ..window.clone() },
                Attention { causal: true, lower_right: true, ..lower_right },
                Attention { lower_right: true, masked: true, softcap: Some(0.7), ..window },
                Attention { causal: true, lower_right: true, softcap: Some(3.0), ..plain[0].clone() },
            ];
            for op in plain.into_iter().chain(options) {
                let what = format!("B{b} H{h} K{k} T{t} S{s} D{d} E{e} {op:?}");
                let masked = op.masked;
                let mut ins = vec![&q, &key, &v];
                ins.extend(masked.then_some(&mask));
                let outs = self.compare(&format!("attention {what}"), op.clone(), &ins);
                let [o, lse] = &outs[..] else { continue };
                let mut ins = vec![&g, o, lse, &q, &key, &v];
                ins.extend(masked.then_some(&mask));
                self.compare(&format!("attention_grad {what}"), AttentionGrad(op.clone()), &ins);
                if !op.lower_right {
                    self.part_of_keys(&what, op, &ins);
                }
            }
        }
        self.nothing_to_attend_to();
    }

    /// Checks partial gradients of attention over all keys: those that come from the first half of the keys.
    fn part_of_keys(&mut self, what: &str, op: Attention, ins: &[&Tensor<R>]) {
        let half = |i: usize, x: &Tensor<R>| match i {
            AttentionGrad::KEYS | AttentionGrad::VALUES => x.narrow(2, 0, x.dims()[2] / 2),
            AttentionGrad::MASK => x.narrow(3, 0, x.dims()[3] / 2),
            _ => Ok(x.clone()),
        };
        let halves = ins.iter().enumerate().map(|(i, x)| half(i, x)).collect::<Result<Vec<_>>>();
        let Ok(halves) = halves else { return };
        let op = AttentionGrad(Attention { partial: true, ..op });
        self.compare(&format!("attention_grad of half the keys {what}"), op, &halves.iter().collect::<Vec<_>>());
    }

    /// Checks that rows whose every key is masked give zeros, and no NaN backward.
    fn nothing_to_attend_to(&mut self) {
        let q = self.real(&[1, 1, 3, 4], 15);
        let (rt, dtype) = (self.rt, self.dtype);
        self.section.check(format!("attention with nothing to attend to {dtype}"), || {
            let rows = Tensor::from_slice(rt, [3, 1], &[0f32, f32::NEG_INFINITY, 0.0])?.to_dtype(dtype)?;
            let mask = rows.broadcast_to([3, 3])?;
            let op = Attention { causal: true, masked: true, ..Attention::new(0.5) };
            let outs = Tensor::apply(op.clone().into(), &[&q, &q, &q, &mask])?;
            let row = outs[0].select(2, 1)?.to_f64s()?;
            let grads = Tensor::apply(AttentionGrad(op).into(), &[&q, &outs[0], &outs[1], &q, &q, &q, &mask])?;
            let finite =
                grads.iter().map(|g| g.to_f64s()).collect::<Result<Vec<_>>>()?.concat().iter().all(|v| v.is_finite());
            Ok(Verdict::when(row == [0.0; 4] && finite, || format!("{row:?}, finite gradients {finite}")))
        });
    }

    fn pool(&mut self) {
        // x, kernel, stride, padding.
        type Size = ([usize; 4], [usize; 2], [usize; 2], [usize; 2]);
        let sizes: [Size; 7] = [
            ([1, 1, 1, 1], [1, 1], [1, 1], [0, 0]),
            ([2, 3, 24, 24], [2, 2], [2, 2], [0, 0]),
            ([2, 3, 9, 7], [3, 2], [1, 1], [1, 1]),
            ([1, 2, 11, 40], [3, 3], [2, 2], [1, 1]),
            ([1, 2, 10, 12], [2, 4], [3, 1], [1, 2]),
            ([3, 1, 5, 6], [5, 6], [1, 1], [0, 0]),
            ([0, 2, 4, 4], [2, 2], [2, 2], [0, 0]),
        ];
        for (i, (xs, kernel, stride, padding)) in sizes.into_iter().enumerate() {
            // Every second input has ties, of which the first must win.
            let x = if i % 2 == 0 { self.real(&xs, 19) } else { self.whole(&xs, 19) };
            let op = MaxPool { kernel, stride, padding };
            let what = format!("{xs:?} kernel {kernel:?} stride {stride:?} padding {padding:?}");
            let outs = self.compare(&format!("max_pool2d {what}"), op.clone(), &[&x]);
            let [y] = &outs[..] else { continue };
            let g = self.real(y.dims(), 20);
            self.compare(&format!("max_pool2d_grad {what}"), MaxPoolGrad(op), &[&x, &g]);
        }
    }

    fn linear4bit(&mut self) {
        // The matrix, elements of a block, rows of the input.
        let sizes: [([usize; 2], usize, &[usize]); 6] = [
            ([1, 1], 4, &[1]),
            ([7, 33], 32, &[5]),
            ([40, 64], 64, &[2, 3]),
            ([3, 5], 3, &[]),
            ([130, 17], 16, &[1]),
            ([4, 8], 32, &[0]),
        ];
        for (shape, block, rows) in sizes {
            for (transposed, nested) in [(false, false), (true, false), (false, true), (true, true)] {
                let nested = nested.then_some(NestedScales { block: 5, offset: 0.25 });
                let op = Linear4bit { shape, block, nested, transposed };
                let x = self.real(&[rows, &shape[usize::from(!transposed)..][..1]].concat(), 21);
                let what = format!("linear4bit {shape:?} block {block} rows {rows:?} {op:?}");
                match self.stored(&op) {
                    Ok(stored) => {
                        let ins: Vec<&Tensor<R>> = [&x].into_iter().chain(&stored).collect();
                        self.compare(&what, op, &ins);
                    }
                    Err(e) => self.section.check(what, || Err(e)),
                }
            }
        }
    }

    /// The operands after the input of a product with a four-bit matrix.
    fn stored(&self, op: &Linear4bit) -> Result<Vec<Tensor<R>>> {
        let mut rng = Philox::new(22, 1);
        let elements = op.shape[0] * op.shape[1];
        let blocks = elements.div_ceil(op.block);
        let mut bytes = |n: usize| {
            let bytes: Vec<u8> = (0..n).map(|_| rng.below(256) as u8).collect();
            Tensor::from_vec(self.rt, bytes)
        };
        let packed = bytes(elements.div_ceil(2))?;
        let mut rng = Philox::new(23, 1);
        let mut floats = |n: usize| Tensor::from_vec(self.rt, (0..n).map(|_| rng.normal() as f32).collect());
        let mut stored = vec![packed, floats(16)?];
        match op.nested {
            None => stored.push(floats(blocks)?),
            Some(nested) => {
                stored.extend([bytes(blocks)?, floats(blocks.div_ceil(nested.block))?, floats(256)?]);
            }
        }
        Ok(stored)
    }

    fn conv(&mut self) {
        // x, w, stride, padding, dilation, groups.
        type Size = ([usize; 4], [usize; 4], [usize; 2], [usize; 2], [usize; 2], usize);
        let sizes: [Size; 10] = [
            ([1, 1, 1, 1], [1, 1, 1, 1], [1, 1], [0, 0], [1, 1], 1),
            ([2, 3, 9, 7], [5, 3, 3, 3], [1, 1], [1, 1], [1, 1], 1),
            ([1, 4, 11, 13], [6, 2, 3, 2], [2, 3], [1, 0], [1, 2], 2),
            ([3, 8, 16, 16], [8, 1, 3, 3], [1, 1], [1, 1], [1, 1], 8),
            ([1, 16, 14, 14], [32, 16, 1, 1], [1, 1], [0, 0], [1, 1], 1),
            ([1, 2, 5, 40], [3, 2, 1, 7], [1, 2], [0, 3], [1, 3], 1),
            ([2, 3, 32, 32], [16, 3, 5, 5], [2, 2], [2, 2], [1, 1], 1),
            ([9, 8, 10, 11], [12, 4, 3, 2], [1, 1], [2, 1], [2, 1], 2),
            ([2, 4, 5, 6], [4, 4, 1, 2], [1, 1], [2, 3], [1, 1], 1),
            ([0, 2, 5, 5], [3, 2, 3, 3], [1, 1], [1, 1], [1, 1], 1),
        ];
        for (xs, ws, stride, padding, dilation, groups) in sizes {
            let (x, w) = (self.real(&xs, 16), self.real(&ws, 17));
            let op = Conv { kind: ConvKind::Forward, stride, padding, dilation, groups, bias: false };
            let what =
                format!("{xs:?} {ws:?} stride {stride:?} padding {padding:?} dilation {dilation:?} groups {groups}");
            let outs = self.compare(&format!("conv {what}"), op.clone(), &[&x, &w]);
            let [y] = &outs[..] else { continue };
            let g = self.real(y.dims(), 18);
            let (bias, biased) = (self.real(&[ws[0], 1, 1], 19), Conv { bias: true, ..op.clone() });
            self.compare(&format!("conv with bias {what}"), biased, &[&x, &w, &bias]);
            self.compare(&format!("conv input {what}"), op.with(ConvKind::Input([xs[2], xs[3]])), &[&g, &w]);
            self.compare(&format!("conv weight {what}"), op.with(ConvKind::Weight([ws[2], ws[3]])), &[&x, &g]);
        }
    }
}

fn compare<R: Runtime>(
    op: FusedOp,
    ins: &[&Tensor<R>],
    want: &[Tensor<R>],
    placement: Placement,
    tolerance: f64,
) -> Result<Verdict> {
    let placed = ins.iter().map(|t| placement.of(t)).collect::<Result<Vec<_>>>()?;
    let got = Tensor::apply(op.into(), &placed.iter().collect::<Vec<_>>())?;
    let mut verdict = Verdict::when(got.len() == want.len(), || format!("{} outputs", got.len()));
    for (k, (g, w)) in got.iter().zip(want).enumerate() {
        let what = format!("output {k}");
        let same = Verdict::when(g.spec() == w.spec(), || format!("{what} is {:?}, expected {:?}", g.spec(), w.spec()));
        verdict = verdict.and(same).and(near(&what, &g.to_f64s()?, &w.to_f64s()?, tolerance));
    }
    Ok(verdict)
}
