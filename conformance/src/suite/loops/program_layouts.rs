//! Random programs, compared exactly with their evaluation on the host. Operands have any layout; outputs are fresh,
//! written in place, or added to.
//!
//! Values stay small integers, so that every type computes them exactly and an FMA gives no other result.

use numcore::{
    DType, Result, Runtime, Scalar, Tensor, TensorMut,
    ops::{Op, Pointwise, PointwiseOps, update},
    pointwise::{Expr, Number, Program},
    rng::Philox,
};

use super::{
    known::{InMemory, Known, NUMBERS, close, draw},
    outputs::own,
};
use crate::suite::{
    dtypes::computed,
    report::{Section, Verdict},
};

const SEEDS: u64 = 40;

pub(crate) fn program_layouts<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("program layouts");
    let s = &mut section;
    let types = computed(rt, s, "programs", NUMBERS);
    let kinds: [(&str, RandomCheck<R>); 3] =
        [("fresh outputs", fresh), ("outputs in place", in_place), ("outputs that are added to", added)];
    for (what, check) in kinds {
        for &dtype in &types {
            s.check(format!("{what} of {dtype}"), || {
                Verdict::all((0..SEEDS).map(|seed| check(&mut Random::new(rt, &types, dtype, seed))))
            });
        }
    }
    section
}

/// A check of one random program.
type RandomCheck<R> = fn(&mut Random<R>) -> Result<Verdict>;

/// The random choices of a check.
struct Random<'a, R: Runtime> {
    rt: &'a R,
    rng: Philox,
    /// The types through which values pass.
    types: &'a [DType],
    dtype: DType,
    shape: &'static [usize],
}

impl<'a, R: Runtime> Random<'a, R> {
    fn new(rt: &'a R, types: &'a [DType], dtype: DType, seed: u64) -> Self {
        let mut rng = Philox::new(seed, dtype as u32);
        let shapes: [&[usize]; 6] = [&[5], &[700], &[2, 600], &[100, 7], &[33, 35], &[2, 3, 4, 5]];
        Random { rt, shape: shapes[rng.below(6) as usize], rng, types, dtype }
    }

    fn below(&mut self, n: usize) -> usize {
        self.rng.below(n as u64) as usize
    }

    /// A program over values of one type, with detours through others.
    fn program(&mut self, inputs: usize, outputs: usize) -> Program {
        let (dtype, types, rng) = (self.dtype, self.types, &mut self.rng);
        let mut below = |n: usize| rng.below(n as u64) as usize;
        let least = if matches!(dtype, DType::U8 | DType::U32) { 0 } else { -7 };
        Program::build("random", inputs, 1, |b, x, s| {
            let mut values: Vec<Expr<'_>> = x.to_vec();
            for _ in 0..3 + below(12) {
                let [p, q, r] = [0; 3].map(|_| values[below(values.len())]);
                let condition = match below(4) {
                    0 => p.lt(q),
                    1 => p.eq(q) | q.le(r),
                    2 => !p.le(q),
                    _ => p.ne(q) & r.lt(q),
                };
                let new = match below(12) {
                    0 => p + q,
                    1 => p - q,
                    2 => p * q + r,
                    3 => p - q * r,
                    4 => q * r - p,
                    5 => p.max(q),
                    6 => p.min(q) + b.int(1),
                    7 => condition.select(p, q),
                    8 => condition.cast(dtype),
                    9 => p.cast(types[below(types.len())]).cast(dtype) * s[0],
                    10 => p + (b.index() % b.int(5)).cast(dtype),
                    _ => (p * p + s[0]).abs(),
                };
                values.push(new.min(b.int(7)).max(b.int(least)));
            }
            (0..outputs).map(|_| values[values.len() - 1 - below(values.len() / 2)]).collect()
        })
    }

    /// An operand of small integers, in memory in one of several layouts.
    fn operand(&mut self, dense: bool) -> Result<Known<R>> {
        let (seed, unsigned) = (self.rng.next_u64(), matches!(self.dtype, DType::U8 | DType::U32));
        let way = if dense { InMemory::Dense } else { InMemory::ALL[self.below(InMemory::ALL.len())] };
        let small = |x: f64| (if unsigned { x.abs() } else { x } % 5.0).trunc();
        let values = |n: usize| draw(DType::F64, n, seed).into_iter().map(small).collect();
        Known::of(self.rt, self.dtype, self.shape, way, values)
    }

    /// The outputs of a program at every position, before they are stored.
    fn evaluate(&self, program: &Program, inputs: &[Known<R>]) -> Result<Vec<Vec<Number>>> {
        let typed = program.resolve(&vec![self.dtype; inputs.len()], &[])?;
        let number = |x: f64| if self.dtype.is_float() { Number::Float(x) } else { Number::Int(x as i64) };
        let at = |i: usize| {
            let values: Vec<Number> = inputs.iter().map(|x| number(x.values[i])).collect();
            program.eval(&typed, &values, &[TWO], i as u64)
        };
        let all: Vec<Vec<Number>> = (0..inputs[0].values.len()).map(at).collect();
        Ok((0..program.outputs().len()).map(|o| all.iter().map(|v| v[o]).collect()).collect())
    }

    /// Checks that the outputs equal the expected ones, to the last bit.
    fn compare(&self, program: &Program, got: &[Tensor<R>], want: &[Vec<Number>]) -> Result<Verdict> {
        Verdict::all(got.iter().zip(want).enumerate().map(|(k, (got, want))| {
            let want: Vec<f64> = want.iter().map(|v| v.to_f64()).collect();
            close(&format!("output {k}, {:?}, of {:?}", self.shape, program.insts()), got, &want, 0.0)
        }))
    }
}

/// The scalar of every program.
const TWO: Scalar = Scalar::I64(2);

fn tensors<R: Runtime>(known: &[Known<R>]) -> Vec<&Tensor<R>> {
    known.iter().map(|k| &k.tensor).collect()
}

fn fresh<R: Runtime>(random: &mut Random<'_, R>) -> Result<Verdict> {
    let (inputs, outputs) = (1 + random.below(3), 1 + random.below(3));
    let program = random.program(inputs, outputs);
    let ins = (0..inputs).map(|_| random.operand(false)).collect::<Result<Vec<_>>>()?;
    let got = ins[0].tensor.apply_program_all(&program, &tensors(&ins[1..]), &[TWO])?;
    random.compare(&program, &got, &random.evaluate(&program, &ins)?)
}

fn in_place<R: Runtime>(random: &mut Random<'_, R>) -> Result<Verdict> {
    let (written, others) = (1 + random.below(3), random.below(3));
    let program = random.program(written + others, written);
    let ins = (0..written + others).map(|i| random.operand(i < written)).collect::<Result<Vec<_>>>()?;
    let mut outs = ins[..written].iter().map(own).collect::<Result<Vec<_>>>()?;
    update(&program, &tensors(&ins[written..]), &[TWO], &mut outs.iter_mut().collect::<Vec<_>>())?;
    let got = outs.into_iter().map(TensorMut::freeze).collect::<Result<Vec<_>>>()?;
    random.compare(&program, &got, &random.evaluate(&program, &ins)?)
}

fn added<R: Runtime>(random: &mut Random<'_, R>) -> Result<Verdict> {
    let program = random.program(2, 1);
    let ins = [random.operand(false)?, random.operand(false)?];
    let old = random.operand(false)?;
    let mut out = TensorMut::alloc(random.rt, *old.tensor.shape(), random.dtype)?;
    out.accumulate(&Op::identity(), &[&old.tensor])?;
    out.accumulate(&Op::from(Pointwise::new(&program, &[TWO])), &tensors(&ins))?;
    let new = random.evaluate(&program, &ins)?.remove(0);
    let sum = |(old, new): (&f64, &Number)| match *new {
        Number::Float(x) => Number::Float(old + x).cast(random.dtype),
        x => Number::Int(*old as i64 + x.to_i64()).cast(random.dtype),
    };
    let want = vec![old.values.iter().zip(&new).map(sum).collect::<Vec<_>>()];
    random.compare(&program, &[out.freeze()?], &want)
}
