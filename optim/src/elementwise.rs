//! Elementwise optimizers: the update formula is one pointwise program, run over a flat buffer in one launch.

use numcore::{
    DType, Error, Result, Runtime, Scalar,
    pointwise::{Expr, Program},
};
use smallvec::SmallVec;

use crate::{Config, StateSpec, StepContext, UpdateMemory, UpdateRule, stochastic_rounding::round_stochastic};

/// The run-time scalars of an update.
pub type Scalars = SmallVec<[Scalar; 8]>;

/// Collects the run-time scalars of an update, in the order in which its program takes them.
pub fn scalars<const N: usize>(numbers: [f64; N]) -> Scalars {
    numbers.into_iter().map(Scalar::F64).collect()
}

/// The operands of an update's program. The formula is the same for all forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpdateForm {
    /// The parameters' dtype if it is f16 or bf16. The update then acts on an `f32` master copy, and the same launch
    /// writes the rounded parameter.
    pub half: Option<DType>,
    /// True if the gradient is multiplied by a factor on the device (clipping, loss scaling).
    pub scaled: bool,
    /// True if the gradient is negated, so that the update ascends.
    pub maximize: bool,
    /// The states that are bfloat16 and rounded stochastically, a bit for each: [`Bf16State`](crate::Bf16State).
    pub bf16_states: u8,
}

impl UpdateForm {
    /// The six forms of plain rules: `f32` or `f64`, f16 and bf16 parameters, each without and with a factor.
    pub const ALL: [UpdateForm; 6] = {
        const fn of(half: Option<DType>, scaled: bool) -> UpdateForm {
            UpdateForm { half, scaled, maximize: false, bf16_states: 0 }
        }
        let (f16, bf16) = (Some(DType::F16), Some(DType::BF16));
        [of(None, false), of(None, true), of(f16, false), of(f16, true), of(bf16, false), of(bf16, true)]
    };

    /// Sets whether the gradient is negated.
    pub fn maximizing(self, maximize: bool) -> UpdateForm {
        UpdateForm { maximize, ..self }
    }

    /// Builds the program of a formula. The formula maps the parameter, its gradient, `S` states and `N` run-time
    /// scalars to the new parameter and states.
    ///
    /// Outputs are `[parameter, states.., master?]`; inputs are the outputs' old values, then `[gradient, factor?]`.
    pub fn program<const S: usize, const N: usize>(
        self,
        name: &'static str,
        formula: impl for<'b> FnOnce(Expr<'b>, Expr<'b>, [Expr<'b>; S], [Expr<'b>; N]) -> (Expr<'b>, [Expr<'b>; S]),
    ) -> Program {
        let master = 1 + S;
        let grad = master + usize::from(self.half.is_some());
        Program::build(name, grad + 1 + usize::from(self.scaled), N + usize::from(self.bf16_states != 0), |_, x, s| {
            let (param, mut g) = match self.half {
                Some(_) => (x[master], x[grad].cast(DType::F32)),
                None => (x[0], x[grad]),
            };
            if self.scaled {
                g = g * x[grad + 1].cast_like(g);
            }
            if self.maximize {
                g = -g;
            }
            let is_bf16 = |state: usize| self.bf16_states >> state & 1 == 1;
            let states = std::array::from_fn(|i| if is_bf16(i) { x[1 + i].cast_like(param) } else { x[1 + i] });
            let (param, states) = formula(param, g, states, std::array::from_fn(|i| s[i]));
            let mut outs = vec![self.half.map_or(param, |d| param.cast(d))];
            let kept = |(k, state)| if is_bf16(k) { round_stochastic(state, s[N], k) } else { state };
            outs.extend(states.into_iter().enumerate().map(kept));
            outs.extend(self.half.map(|_| param));
            outs
        })
    }
}

/// An optimizer that updates each element from the same element of parameter, gradient and state alone.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an elementwise rule",
    note = "a rule that looks at whole matrices or at norms (Muon, LAMB, Adafactor) needs whole parameters"
)]
pub trait Elementwise: Config {
    /// The tensors kept for each parameter, of its shape.
    fn states(&self) -> Vec<StateSpec>;
    /// Builds the program of the formula with [`UpdateForm::program`].
    fn program(&self, form: UpdateForm) -> Program;
    /// The run-time scalars of the update, combined on the host in `f64` where possible. A program computes in the
    /// parameters' dtype, in which `1 − β` would lose digits.
    fn scalars(&self, now: StepContext) -> Scalars;
    /// Checks hyper-parameters that constrain each other.
    fn consistent(&self) -> Result<()> {
        Ok(())
    }
}

/// The two programs of an elementwise update: without and with a factor on the gradient.
#[derive(Clone, Debug)]
pub struct Programs {
    plain: Program,
    scaled: Program,
}

impl Programs {
    /// Returns the program with or without a factor.
    pub fn get(&self, scaled: bool) -> &Program {
        if scaled { &self.scaled } else { &self.plain }
    }
}

impl<E: Elementwise> UpdateRule for E {
    type Kernel = Programs;

    const PER_PARAMETER: bool = false;

    fn tensors(&self) -> Vec<StateSpec> {
        self.states()
    }

    fn kernel(&self, half: Option<DType>) -> Result<Programs> {
        let program = |scaled| self.program(UpdateForm { half, scaled, ..UpdateForm::ALL[0] });
        let programs = Programs { plain: program(false), scaled: program(true) };
        let states = programs.plain.outputs().len() - 1 - usize::from(half.is_some());
        let numbers = self.scalars(StepContext { lr: 0.0, step: 1 }).len();
        if (states, programs.plain.scalars()) != (self.states().len(), numbers) {
            let why = format!(
                "its program updates {states} states by {} numbers, it declares {} and {numbers}",
                programs.plain.scalars(),
                self.states().len()
            );
            return Err(Error::config(E::NAME, "states", why));
        }
        Ok(programs)
    }

    fn validate(&self) -> Result<()> {
        self.consistent()
    }

    fn launch_scalars(&self, now: StepContext) -> Option<Scalars> {
        Some(self.scalars(now))
    }

    fn update<R: Runtime>(&self, kernel: &Programs, now: StepContext, memory: &mut UpdateMemory<'_, R>) -> Result<()> {
        memory.launch(kernel.get(memory.is_scaled()), &self.scalars(now))
    }
}

/// The programs of the elementwise optimizers with their default hyper-parameters, and of SGD with momentum, in all
/// forms of [`UpdateForm::ALL`]. For runtimes that compile programs ahead of time.
pub fn programs() -> Vec<Program> {
    fn of<E: Elementwise>() -> impl Iterator<Item = Program> {
        let rule = E::default();
        UpdateForm::ALL.into_iter().map(move |form| rule.program(form))
    }
    use crate::*;
    let adam = of::<AdamConfig>().chain(of::<AdamWConfig>()).chain(of::<AdamaxConfig>());
    let adam = adam.chain(of::<NAdamConfig>()).chain(of::<RAdamConfig>());
    let others = of::<AdagradConfig>()
        .chain(of::<RmsPropConfig>())
        .chain(of::<AdadeltaConfig>())
        .chain(of::<LionConfig>())
        .chain(of::<AdanConfig>())
        .chain(of::<ScheduleFreeAdamWConfig>())
        .chain(of::<ScheduleFreeSgdConfig>());
    let momentum = SgdConfig { momentum: 0.9, ..Default::default() };
    let sgd = of::<SgdConfig>().chain(UpdateForm::ALL.into_iter().map(move |form| momentum.program(form)));
    sgd.chain(adam).chain(others).collect()
}
