//! SOAP: Adam in the eigenbasis of Shampoo's preconditioners.

use std::sync::LazyLock;

use autograd::Var;
use linalg::{eigh, qr};
use numcore::{
    DType, Result, Runtime, Tensor, TensorMut,
    ops::{IndexOps, MatmulOps, PointwiseOps, ReduceOps, SortOps, ViewOps},
    pointwise::Program,
};

use crate::{FlatOptimizer, StateSpec, StepContext, UpdateMemory, UpdateRule, memory::LERP, sides::Side};

config! {
    /// Hyper-parameters of [`Soap`], with the names and defaults of its authors' code.
    SoapConfig = "SOAP" {
        /// The learning rate `γ`.
        lr: f64 = 3e-3, NonNegative;
        /// The decay rates `β₁`, `β₂` of the running means; `β₂` is that of the Gram matrices too.
        betas: [f64; 2] = [0.95, 0.95], Unit;
        /// The constant `ε` added to the root of the second moment.
        eps: f64 = 1e-8, NonNegative;
        /// The decoupled weight decay `λ`: parameters shrink by `λ` times the step size.
        weight_decay: f64 = 1e-2, NonNegative;
        /// The number of steps from one change of the bases to the next.
        precondition_frequency: u32 = 10, AtLeastOne;
        /// True to maximize the objective instead of minimizing it.
        maximize: bool = false, Any;
    }
}

/// SOAP. For a matrix, with the eigenvectors `Q` and `P` of running means of the Gram matrices `g gᵀ` and `gᵀ g`:
///
/// `m ← β₁m + (1 − β₁)g`, `v ← β₂v + (1 − β₂)(Qᵀ g P)²`, and with Adam's corrections of bias
/// `θ ← (1 − γλ)(θ − γ Q (Qᵀ m P / (√v + ε)) Pᵀ)`.
///
/// The first gradient only sets the bases, and changes no parameter. Later a basis is changed by one power iteration
/// and a QR factorization, on the host ([`linalg`]). A side of more than 10 000 has no basis. Parameters that are no
/// matrices have none: for them, it is Adam. Where Gram matrices have equal eigenvalues, as those of the first
/// gradients, bases follow from rounding. The weights of two cuts of a model over ranks then differ by more than that.
///
/// Vyas et al., *SOAP: Improving and Stabilizing Shampoo using Adam*, 2024.
pub type Soap<R> = FlatOptimizer<R, SoapConfig>;

/// The number of the state with a side's Gram matrix, and that with its basis.
const STATES: [[usize; 2]; 2] = [[2, 4], [3, 5]];

/// The program of the direction: inputs `[v, (u), m, g]` in the bases, outputs `[v, u]`.
static DIRECTION: LazyLock<Program> = LazyLock::new(|| {
    Program::new("soap_direction", |[v, _, m, g], [take, eps]| {
        let v = v + (g * g - v) * take;
        [v, m / (v.sqrt() + eps)]
    })
});
static STEP: LazyLock<Program> =
    LazyLock::new(|| Program::new("soap_step", |[p, u], [lr, shrink]| [(p - u * lr) * shrink]));

/// A matrix in the bases of its sides, or back from them.
fn turned<R: Runtime>(memory: &UpdateMemory<'_, R>, x: Tensor<R>, back: bool) -> Result<Tensor<R>> {
    Side::of(&memory.shape()).try_fold(x, |x, side| {
        let basis = memory.state(STATES[side.axis()][1])?;
        side.project(&if back { basis.t()? } else { basis }, &x)
    })
}

/// Eigenvectors of a Gram matrix in columns, those of the largest eigenvalues first.
fn eigenvectors<R: Runtime>(gram: Tensor<R>) -> Result<Tensor<R>> {
    eigh(&Var::new(gram))?.1.value()?.flip(&[-1])
}

/// Changes the basis of a side by one power iteration, ordered by what it estimates the eigenvalues to be. Second
/// moments are put in that order.
fn iterate<R: Runtime>(memory: &mut UpdateMemory<'_, R>, side: Side) -> Result<Tensor<R>> {
    let [gram, basis] = STATES[side.axis()].map(|k| memory.state(k));
    let basis = basis?;
    let ahead = gram?.matmul(&basis)?;
    let order = basis.mul(&ahead)?.sum(&[0])?.argsort(0, true)?;
    let v = memory.state(1)?.index_select(side.axis() as isize, &order)?;
    memory.set_state(1, &v)?;
    qr(&Var::new(ahead.index_select(1, &order)?))?.0.value()
}

impl UpdateRule for SoapConfig {
    type Kernel = ();

    fn tensors(&self) -> Vec<StateSpec> {
        vec![
            StateSpec::zeros("exp_avg"),
            StateSpec::zeros("exp_avg_sq"),
            StateSpec::shaped("row_gram", |s| Side::Rows.square(s)),
            StateSpec::shaped("column_gram", |s| Side::Columns.square(s)),
            StateSpec::shaped("row_basis", |s| Side::Rows.square(s)),
            StateSpec::shaped("column_basis", |s| Side::Columns.square(s)),
        ]
    }

    fn kernel(&self, _: Option<DType>) -> Result<()> {
        Ok(())
    }

    fn update<R: Runtime>(&self, (): &(), now: StepContext, memory: &mut UpdateMemory<'_, R>) -> Result<()> {
        let ([b1, b2], before) = (self.betas, now.step - 1);
        let g = memory.gradient()?;
        let g = if self.maximize { g.neg()? } else { g };
        if before > 0 {
            memory.update_states(0..1, None, &LERP, &[&g], &[(1.0 - b1).into()])?;
            let [m, g] = [memory.state(0)?, g.clone()].map(|x| turned(memory, x, false));
            let mut u = TensorMut::alloc(&memory.runtime(), memory.shape(), memory.working())?;
            let numbers = [1.0 - b2, self.eps].map(Into::into);
            memory.update_states(1..2, Some(&mut u), &DIRECTION, &[&m?, &g?], &numbers)?;
            let u = turned(memory, u.freeze()?, true)?;
            let [c1, c2] = self.betas.map(|b| 1.0 - b.powf(before as f64));
            let shrink = 1.0 - now.lr * self.weight_decay;
            memory.update_weight(&STEP, &[&u], &[(now.lr * c2.sqrt() / c1).into(), shrink.into()])?;
        }
        for side in Side::of(&memory.shape()) {
            let [gram, basis] = STATES[side.axis()];
            memory.update_states(gram..gram + 1, None, &LERP, &[&side.gram(&g)?], &[(1.0 - b2).into()])?;
            if before.is_multiple_of(self.precondition_frequency.into()) {
                let new = if before == 0 { eigenvectors(memory.state(gram)?)? } else { iterate(memory, side)? };
                memory.set_state(basis, &new)?;
            }
        }
        Ok(())
    }
}
