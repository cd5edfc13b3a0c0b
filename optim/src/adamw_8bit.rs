//! AdamW whose moments are kept in 8 bits, block by block.

use std::sync::LazyLock;

use numcore::{
    DType, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{IndexOps, JoinOps, PointwiseOps, ReduceOps, SearchOps, ViewOps},
    pointwise::Program,
};

use crate::{FlatOptimizer, StateSpec, StepContext, UpdateMemory, UpdateRule};

config! {
    /// Hyper-parameters of [`AdamW8bit`], which are those of [`AdamW`](crate::AdamW).
    AdamW8bitConfig = "8-bit AdamW" {
        /// The learning rate `γ`.
        lr: f64 = 1e-3, NonNegative;
        /// The decay rates `β₁`, `β₂` of the running means.
        betas: [f64; 2] = [0.9, 0.999], Unit;
        /// The constant `ε` added to the root of the second moment.
        eps: f64 = 1e-8, NonNegative;
        /// The decoupled weight decay `λ`: parameters shrink by `λ` times the step size.
        weight_decay: f64 = 1e-2, NonNegative;
        /// True to maximize the objective instead of minimizing it.
        maximize: bool = false, Any;
    }
}

/// AdamW with moments of 8 bits, as bitsandbytes keeps them: 2 bytes of state for each element instead of 8.
///
/// A moment is cut into blocks of 256 elements, from the parameter's start. A block has its largest magnitude, and of
/// each element the index of the nearest value of a [dynamic map](dynamic_map) times that magnitude. A parameter of
/// fewer than 4096 elements has moments in the dtype of updates. Where parameters are cut over ranks, one rank updates
/// the whole of each, so no cut changes a block.
///
/// Dettmers, Lewis, Shleifer and Zettlemoyer, *8-bit Optimizers via Block-wise Quantization*, 2022.
#[doc(alias("bitsandbytes"))]
#[doc(alias("Adam8bit"))]
pub type AdamW8bit<R> = FlatOptimizer<R, AdamW8bitConfig>;

/// The number of elements of a block.
const BLOCK: usize = 256;
/// The number of elements from which moments have 8 bits.
const LARGE: usize = 4096;

const CODES: fn(&Shape) -> Shape = |s| if s.numel() < LARGE { Shape::from([0]) } else { blocks(s) };
const LARGEST: fn(&Shape) -> Shape = |s| if s.numel() < LARGE { Shape::from([0]) } else { blocks(s).with(1, 1) };
const SMALL: fn(&Shape) -> Shape = |s| if s.numel() < LARGE { *s } else { Shape::from([0]) };

/// The shape of a parameter's elements in blocks, the last of which is padded.
fn blocks(shape: &Shape) -> Shape {
    Shape::from([shape.numel().div_ceil(BLOCK), BLOCK])
}

/// The 256 values in `[−1, 1]` of bitsandbytes' dynamic map, ascending: `signed` for the first moment, else for the
/// second, in `[0, 1]`. Seven decades up to 1 have twice as many values each as the decade below, evenly spaced, and
/// 0 and 1 are exact.
pub fn dynamic_map(signed: bool) -> Vec<f32> {
    let mut map = vec![0.0, 1.0];
    for decade in 0..7 {
        let count = 1 << (decade + usize::from(!signed));
        let step = (1.0 - 0.1f32) / count as f32;
        let bound = |k: usize| match k * 2 <= count {
            true => (k as f32).mul_add(step, 0.1f32),
            false => (-((count - k) as f32)).mul_add(step, 1.0f32),
        };
        let scale = 10f64.powi(decade as i32 - 6) as f32;
        let means = (0..count).map(|k| (bound(k) + bound(k + 1)) / 2.0 * scale);
        means.for_each(|x| map.extend([x, -x].into_iter().take(1 + usize::from(signed))));
    }
    map.sort_by(f32::total_cmp);
    map
}

/// The values of each map, of the second moment and of the first, and the middles between them.
static MAPS: LazyLock<[[Vec<f32>; 2]; 2]> = LazyLock::new(|| {
    [false, true].map(|signed| {
        let map = dynamic_map(signed);
        let middles = map.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect();
        [map, middles]
    })
});
static FIRST: LazyLock<Program> = LazyLock::new(|| {
    Program::new("adamw_8bit_first", |[value, most, g], [keep, take]| [value * most * keep + g * take])
});
static SECOND: LazyLock<Program> = LazyLock::new(|| {
    Program::new("adamw_8bit_second", |[value, most, g], [keep, take]| [value * most * keep + g * g * take])
});
static RELATIVE: LazyLock<Program> =
    LazyLock::new(|| Program::new("adamw_8bit_relative", |[x, most], []| [most.gt(0.0).select(x / most, 0.0)]));
static DIRECTION: LazyLock<Program> =
    LazyLock::new(|| Program::new("adamw_8bit_direction", |[m, v], [unbias, eps]| [m / (v.sqrt() * unbias + eps)]));
/// The program of small parameters: inputs `[m, v, (u), g]`, outputs `[m, v, u]`.
static UNQUANTIZED: LazyLock<Program> = LazyLock::new(|| {
    Program::new("adamw_8bit_small", |[m, v, _, g], [keep1, take1, keep2, take2, unbias, eps]| {
        let (m, v) = (m * keep1 + g * take1, v * keep2 + g * g * take2);
        [m, v, m / (v.sqrt() * unbias + eps)]
    })
});
static STEP: LazyLock<Program> =
    LazyLock::new(|| Program::new("adamw_8bit_step", |[p, u], [shrink, lr]| [p * shrink - u * lr]));

/// A moment of a large parameter: its map, and the numbers of the states of its codes and largest magnitudes.
struct QuantizedMoment<R: Runtime> {
    map: Tensor<R>,
    middles: Tensor<R>,
    codes: usize,
}

impl<R: Runtime> QuantizedMoment<R> {
    fn new(memory: &UpdateMemory<'_, R>, signed: bool, codes: usize) -> Result<Self> {
        let [map, middles] = &MAPS[usize::from(signed)];
        let (rt, dtype) = (memory.runtime(), memory.working());
        let upload = |values: &[f32]| Tensor::from_slice(&rt, [values.len()], values)?.to_dtype(dtype);
        Ok(QuantizedMoment { map: upload(map)?, middles: upload(middles)?, codes })
    }

    /// Updates the moment by `program` from the gradient `g: [B, 256]`, and returns it before it is rounded to 8 bits.
    fn update(
        &self,
        memory: &mut UpdateMemory<'_, R>,
        g: &Tensor<R>,
        program: &Program,
        keep: f64,
    ) -> Result<Tensor<R>> {
        let (shape, k) = (*g.shape(), self.codes);
        let codes = memory.state(k)?.to_dtype(DType::I64)?.reshape([shape.numel()])?;
        let values = self.map.index_select(0, &codes)?.reshape(shape)?;
        let numbers = [keep.into(), (1.0 - keep).into()];
        let moment = values.apply_program(program, &[&memory.state(k + 1)?, g], &numbers)?;
        drop((codes, values));
        let most = moment.abs()?.amax_keepdim(&[1])?;
        let relative = moment.apply_program(&RELATIVE, &[&most], &[])?;
        let codes = relative.bucketize(&self.middles, false)?.to_dtype(DType::U8)?;
        memory.set_state(k, &codes)?;
        memory.set_state(k + 1, &most)?;
        Ok(moment)
    }
}

impl UpdateRule for AdamW8bitConfig {
    type Kernel = ();

    fn tensors(&self) -> Vec<StateSpec> {
        vec![
            StateSpec::shaped("exp_avg", SMALL),
            StateSpec::shaped("exp_avg_sq", SMALL),
            StateSpec::shaped("exp_avg_codes", CODES).of_dtype(DType::U8),
            StateSpec::shaped("exp_avg_absmax", LARGEST),
            StateSpec::shaped("exp_avg_sq_codes", CODES).of_dtype(DType::U8),
            StateSpec::shaped("exp_avg_sq_absmax", LARGEST),
        ]
    }

    fn kernel(&self, _: Option<DType>) -> Result<()> {
        Ok(())
    }

    fn update<R: Runtime>(&self, (): &(), now: StepContext, memory: &mut UpdateMemory<'_, R>) -> Result<()> {
        let ([b1, b2], t, shape) = (self.betas, now.step as f64, memory.shape());
        let unbias = 1.0 / (1.0 - b2.powf(t)).sqrt();
        let g = memory.gradient()?;
        let g = if self.maximize { g.neg()? } else { g };
        let u = if shape.numel() < LARGE {
            let mut u = TensorMut::alloc(&memory.runtime(), shape, memory.working())?;
            let numbers = [b1, 1.0 - b1, b2, 1.0 - b2, unbias, self.eps].map(Into::into);
            memory.update_states(0..2, Some(&mut u), &UNQUANTIZED, &[&g], &numbers)?;
            u.freeze()?
        } else {
            let (whole, n) = (blocks(&shape), shape.numel());
            let g = g.reshape([n])?.pad(&[(0, whole.numel() - n)], 0.0)?.reshape(whole)?;
            let m = QuantizedMoment::new(memory, true, 2)?.update(memory, &g, &FIRST, b1)?;
            let v = QuantizedMoment::new(memory, false, 4)?.update(memory, &g, &SECOND, b2)?;
            let u = m.apply_program(&DIRECTION, &[&v], &[unbias.into(), self.eps.into()])?;
            u.reshape([whole.numel()])?.narrow(0, 0, n)?.reshape(shape)?
        };
        let (shrink, lr) = (1.0 - now.lr * self.weight_decay, now.lr / (1.0 - b1.powf(t)));
        memory.update_weight(&STEP, &[&u], &[shrink.into(), lr.into()])
    }
}
