//! Costs of an optimizer, as measured.

use autograd::Var;
use numcore::{DType, Error, NullRuntime, Result, Runtime, Tensor};
use optim::{FlatGradients, IntoOptimizer};

/// The costs of an optimizer for one trained element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerCosts {
    /// Bytes of state. A master copy of a half-precision parameter counts.
    pub state: f64,
    /// Bytes that an update reads and writes.
    pub update: f64,
}

impl OptimizerCosts {
    /// Measures an optimizer on one large parameter of `dtype`, which is exact for elementwise rules. With
    /// `main_gradients`, gradients of half-precision parameters are in `f32`.
    pub fn measure(
        optimizer: impl IntoOptimizer<NullRuntime>,
        dtype: DType,
        main_gradients: bool,
    ) -> Result<OptimizerCosts> {
        const ELEMENTS: usize = 1 << 20;
        let rt = NullRuntime::new();
        let parameter = Var::leaf("parameter", Tensor::zeros(&rt, [ELEMENTS], dtype)?)?;
        let leaf = parameter.as_leaf().ok_or_else(|| Error::internal("OptimizerCosts", "a leaf is none"))?.clone();
        let live = || rt.memory().total.live as f64;
        let before = live();
        let mut optimizer = optimizer.into_source().optimizer(vec![leaf.clone()])?;
        let mut update = || -> Result<f64> {
            let mut gradients = match main_gradients && dtype.is_half() {
                true => FlatGradients::in_f32(&optimizer.params())?,
                false => FlatGradients::new(&optimizer.params())?,
            };
            gradients.set(&leaf, &Tensor::zeros(&rt, [ELEMENTS], dtype)?)?;
            let work = rt.work();
            optimizer.step_from(&gradients)?;
            Ok(rt.work().since(work).bytes as f64)
        };
        // State is made in the first.
        update()?;
        let moved = update()?;
        Ok(OptimizerCosts { state: (live() - before) / ELEMENTS as f64, update: moved / ELEMENTS as f64 })
    }
}
