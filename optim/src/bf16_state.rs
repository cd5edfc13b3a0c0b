//! State of 16 bits for every elementwise rule, rounded at random.

use numcore::{DType, Result, Scalar, pointwise::Program};

use crate::{Config, Elementwise, HyperParam, Scalars, StateSpec, StepContext, UpdateForm};

/// A rule whose states are bfloat16: half the memory of `f32`. Updates compute in the dtype of the rule.
///
/// States are rounded stochastically: to either neighbor, by chance in proportion to the distance from the other. So a
/// running mean that moves by less than half a step of bfloat16 moves on average. Rounding to the nearest would stop a
/// mean with `β = 0.999` at a change of 0.2 to 0.4 percent.
///
/// States whose errors updates amplify keep their dtype: the average of schedule-free rules, and the two means that
/// centered RMSprop subtracts.
///
/// The chance of an element is a hash of its own bits and its count of updates. So an update has the same bits on any
/// cut over ranks, in any order of parameters, and after resuming.
///
/// ```
/// # use autograd::Leaf;
/// # use numcore::{DType, NullRuntime, Tensor};
/// # use optim::{AdamWConfig, Bf16State, FlatOptimizer};
/// # fn main() -> numcore::Result<()> {
/// # let rt = NullRuntime::new();
/// # let weight = Leaf::new("weight", Tensor::zeros(&rt, [4, 3], DType::F32)?)?;
/// let optimizer = FlatOptimizer::over(Bf16State(AdamWConfig { lr: 3e-4, ..Default::default() }), [weight])?;
/// # Ok(())
/// # }
/// ```
///
/// Zamirai, Zhang, Aberger and De Sa, *Revisiting BFloat16 Training*, 2020.
#[doc(alias("stochastic rounding", "16-bit optimizer state"))]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bf16State<C>(pub C);

impl<C: Config> Config for Bf16State<C> {
    const NAME: &'static str = C::NAME;

    fn lr(&self) -> f64 {
        self.0.lr()
    }

    fn set_lr(&mut self, lr: f64) {
        self.0.set_lr(lr);
    }

    fn settings(&mut self) -> Vec<HyperParam<'_>> {
        self.0.settings()
    }
}

impl<C: Elementwise> Elementwise for Bf16State<C> {
    fn states(&self) -> Vec<StateSpec> {
        let half = |state: StateSpec| if state.exact { state } else { state.of_dtype(DType::BF16) };
        self.0.states().into_iter().map(half).collect()
    }

    fn program(&self, form: UpdateForm) -> Program {
        self.0.program(UpdateForm { bf16_states: self.mask(), ..form })
    }

    fn scalars(&self, now: StepContext) -> Scalars {
        let mut scalars = self.0.scalars(now);
        scalars.extend((self.mask() != 0).then(|| Scalar::F64(seed(now.step))));
        scalars
    }

    fn consistent(&self) -> Result<()> {
        self.0.consistent()
    }
}

impl<C: Elementwise> Bf16State<C> {
    /// The states that are bfloat16, a bit for each.
    fn mask(&self) -> u8 {
        let states = self.0.states();
        states.iter().enumerate().filter(|(_, state)| !state.exact).fold(0, |mask, (k, _)| mask | 1 << k)
    }
}

/// The seed of an update, which is exact in `f32` with a number below 2⁸ added.
fn seed(step: u64) -> f64 {
    (step % (1 << 16) * 256) as f64
}
