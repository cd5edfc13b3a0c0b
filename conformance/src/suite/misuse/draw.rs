//! Random operands, and memory whose surroundings are known.

use numcore::{
    DType, Flat, FlatLayout, MemoryCategory, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{PointwiseOps, Spec, ViewOps},
    rng::Philox,
};

/// A source of random choices, and the types that the runtime stores; equal seeds make equal choices.
pub(super) struct Draw(Philox, Vec<DType>);

impl Draw {
    pub(super) fn new(rt: &impl Runtime, seed: u64, kind: u32) -> Self {
        Draw(Philox::new(seed, kind), rt.capabilities().storage.to_vec())
    }

    /// A random integer below `n`.
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0.below(n as u64) as usize
    }

    /// True in one of `n` cases.
    pub(super) fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// Picks one of these values at random.
    pub(super) fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())].clone()
    }

    /// A random size of an axis: 0, 1, or a small number.
    pub(super) fn size(&mut self) -> usize {
        self.pick(&[0, 1, 2, 3, 4, 6, 17])
    }

    /// An integer on which arithmetic of sizes may overflow; a third of them are small.
    pub(super) fn number(&mut self) -> usize {
        let (max, high) = (usize::MAX, 1 << (usize::BITS - 1));
        match self.once_in(3) {
            true => self.below(5),
            false => self.pick(&[0, 1, 2, 3, max, max - 1, high, high - 1, high + 1, max / 3, 1 << 52, 1 << 61]),
        }
    }

    pub(super) fn shape(&mut self) -> Shape {
        let dims: Vec<usize> = (0..self.below(5)).map(|_| self.size()).collect();
        // At most four sizes of at most 17.
        Shape::new(&dims).unwrap_or(Shape::SCALAR)
    }

    pub(super) fn dtype(&mut self) -> DType {
        let at = self.below(self.1.len());
        self.1[at]
    }

    pub(super) fn spec(&mut self) -> Spec {
        let shape = self.shape();
        Spec::new(shape, self.dtype())
    }

    /// A spec with another size, type or rank, or the same spec.
    pub(super) fn changed(&mut self, spec: Spec) -> Spec {
        let dims = spec.shape.dims();
        match self.below(5) {
            0 => Spec { dtype: self.dtype(), ..spec },
            1 => self.spec(),
            2 if !dims.is_empty() => Spec { shape: spec.shape.with(self.below(dims.len()), self.size()), ..spec },
            3 if !dims.is_empty() => Spec { shape: spec.shape.remove(self.below(dims.len())), ..spec },
            4 => Spec { shape: spec.shape.insert(0, self.size()).unwrap_or(spec.shape), ..spec },
            _ => spec,
        }
    }

    /// Changes operand specs: in half of all cases one or two are changed, removed, added or exchanged.
    pub(super) fn misfit(&mut self, specs: &mut Vec<Spec>) {
        for _ in 0..self.pick(&[0, 0, 1, 2]) {
            match self.below(6) {
                0 => drop(specs.pop()),
                1 => {
                    let more = self.spec();
                    specs.push(more);
                }
                2 if specs.len() > 1 => {
                    let (a, b) = (self.below(specs.len()), self.below(specs.len()));
                    specs.swap(a, b);
                }
                _ if !specs.is_empty() => {
                    let i = self.below(specs.len());
                    specs[i] = self.changed(specs[i]);
                }
                _ => {}
            }
        }
    }

    /// A tensor of small integers in memory that is NaN around it (or 77, in types without NaN). It is contiguous,
    /// strided, reversed, transposed, or repeated along an axis.
    pub(super) fn tensor<R: Runtime>(&mut self, rt: &R, spec: Spec) -> Result<Tensor<R>> {
        let rank = spec.shape.rank();
        let axis = if rank == 0 { 0 } else { self.below(rank) };
        match self.below(5) {
            1 if rank > 0 => {
                let wide = spec.shape.with(axis, 2 * spec.shape[axis] + 1);
                self.surrounded(rt, Spec { shape: wide, ..spec })?.slice(axis as isize, 1, spec.shape[axis], 2)
            }
            2 if rank > 0 => self.surrounded(rt, spec)?.flip(&[axis as isize]),
            3 if rank > 1 => {
                let mut order: Vec<isize> = (0..rank as isize).collect();
                order.swap(axis, 0);
                let stored: Vec<usize> = order.iter().map(|&a| spec.shape[a as usize]).collect();
                self.surrounded(rt, Spec::new(Shape::new(&stored)?, spec.dtype))?.permute(&order)
            }
            4 if rank > 0 => {
                self.surrounded(rt, Spec { shape: spec.shape.with(axis, 1), ..spec })?.broadcast_to(spec.shape)
            }
            _ => self.surrounded(rt, spec),
        }
    }

    fn surrounded<R: Runtime>(&mut self, rt: &R, spec: Spec) -> Result<Tensor<R>> {
        const AROUND: usize = 40;
        let n = spec.shape.numel();
        let around = if spec.dtype.is_float() { f64::NAN } else { 77.0 };
        let mut at = 0;
        let next = || {
            at += 1;
            if (AROUND + 1..=AROUND + n).contains(&at) { self.below(3) as f64 } else { around }
        };
        let all = Tensor::from_f64_fn(rt, [n + 2 * AROUND], DType::F32, next)?;
        host_cast(rt, &all, spec.dtype)?.narrow(0, AROUND, n)?.reshape(spec.shape)
    }
}

/// A cast on the host, for runtimes without arithmetic in `f64`.
fn host_cast<R: Runtime>(rt: &R, x: &Tensor<R>, dtype: DType) -> Result<Tensor<R>> {
    let values = x.to_f64s()?;
    match dtype {
        DType::I64 => Tensor::from_vec(rt, values.iter().map(|v| *v as i64).collect()),
        DType::F64 => Tensor::from_vec(rt, values),
        _ => Tensor::from_vec(rt, values.iter().map(|v| *v as f32).collect())?.to_dtype(dtype),
    }
}

/// Memory to write, with guard ranges before and after it that must not change.
pub(super) struct Guarded<R: Runtime>(Flat<R>);

impl<R: Runtime> Guarded<R> {
    /// Creates memory in which every byte is 1.
    pub(super) fn new(rt: &R, spec: Spec) -> Result<Self> {
        let guard = || Shape::from([70]);
        let ranges = [("before", guard()), ("memory", spec.shape), ("after", guard())];
        let layout = FlatLayout::new(spec.dtype, ranges.map(|(name, shape)| (name.to_string(), shape)));
        let bytes = vec![1; layout.numel() * spec.dtype.size()];
        Ok(Guarded(Flat::from_bytes(rt, MemoryCategory::Gradients, layout, &bytes)?))
    }

    /// The memory between the guards.
    pub(super) fn lend(&mut self) -> Result<TensorMut<R>> {
        self.0.lend(1)
    }

    /// The written values, after a call that got the memory or dropped it; an error if a guard changed.
    pub(super) fn value(&mut self, memory: Option<TensorMut<R>>) -> Result<Option<Vec<f64>>> {
        let back = memory.map(|m| self.0.restore(m)).transpose()?;
        self.0.reclaim();
        for guard in [0, 2] {
            if self.0.tensor(guard)?.to_bytes()?.iter().any(|b| *b != 1) {
                return Err(numcore::Error::argument("misuse", "memory beside the output was written"));
            }
        }
        back.map(|()| self.0.tensor(1)?.to_f64s()).transpose()
    }
}
