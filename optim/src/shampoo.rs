//! Shampoo: gradients of matrices, preconditioned on both sides.

use std::sync::LazyLock;

use autograd::Var;
use linalg::eigh;
use numcore::{
    DType, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{MatmulOps, PointwiseOps, ViewOps},
    pointwise::Program,
};

use crate::{FlatOptimizer, StateSpec, StepContext, UpdateMemory, UpdateRule, sides::Side};

config! {
    /// Hyper-parameters of [`Shampoo`].
    ShampooConfig = "Shampoo" {
        /// The learning rate `γ`.
        lr: f64 = 1e-1, NonNegative;
        /// The fraction `μ` of the momentum that is kept.
        momentum: f64 = 0.0, Unit;
        /// The constant `ε` added to the eigenvalues of the Gram matrices.
        eps: f64 = 1e-4, Positive;
        /// The decoupled weight decay `λ`: parameters shrink by `λ` times the step size.
        weight_decay: f64 = 0.0, NonNegative;
        /// The number of steps from one computation of the roots to the next.
        precondition_frequency: u32 = 1, AtLeastOne;
        /// True to maximize the objective instead of minimizing it.
        maximize: bool = false, Any;
    }
}

/// Shampoo. For a matrix, `L ← L + g gᵀ`, `R ← R + gᵀ g`, and
/// `u ← μu + (L + ε)^(−¼) g (R + ε)^(−¼)`, `θ ← (1 − γλ)θ − γu`.
///
/// The roots are computed by eigenvalues, on the host ([`linalg`]). A side of more than 10 000 has none: it is not
/// preconditioned, and the root of the other side is as it would be. Parameters that are no matrices are preconditioned
/// by each element, as Adagrad does: `s ← s + g²`, `u ← μu + (s + ε)^(−½) g`.
///
/// Gupta, Koren and Singer, *Shampoo: Preconditioned Stochastic Tensor Optimization*, 2018.
pub type Shampoo<R> = FlatOptimizer<R, ShampooConfig>;

/// The number of the state with a side's Gram matrix, and that with its root.
const STATES: [[usize; 2]; 2] = [[1, 3], [2, 4]];
/// The number of the momentum, if there is one.
const MOMENTUM_BUFFER: usize = 5;

static ADD: LazyLock<Program> = LazyLock::new(|| Program::new("add_into", |[v, x], []| [v + x]));
static ADD_SQUARE: LazyLock<Program> = LazyLock::new(|| {
    Program::new("shampoo_squares", |[v, _, g], [eps]| {
        let v = v + g * g;
        [v, g * (v + eps).rsqrt()]
    })
});
static ROOT: LazyLock<Program> =
    LazyLock::new(|| Program::new("shampoo_root", |[w], [eps]| [(w.max(0.0) + eps).rsqrt().sqrt()]));
static MOMENTUM: LazyLock<Program> =
    LazyLock::new(|| Program::new("shampoo_momentum", |[m, u], [keep]| [m * keep + u]));
static STEP: LazyLock<Program> =
    LazyLock::new(|| Program::new("shampoo_step", |[p, u], [shrink, lr]| [p * shrink - u * lr]));

impl ShampooConfig {
    /// The power −¼ of a Gram matrix, whose smallest eigenvalue is taken as `ε`.
    fn root<R: Runtime>(&self, gram: Tensor<R>) -> Result<Tensor<R>> {
        let (values, vectors) = eigh(&Var::new(gram))?;
        let roots = values.value()?.apply_program(&ROOT, &[], &[self.eps.into()])?;
        let vectors = vectors.value()?;
        vectors.mul(&roots)?.matmul(&vectors.t()?)
    }

    fn of_matrix<R: Runtime>(&self, g: Tensor<R>, step: u64, memory: &mut UpdateMemory<'_, R>) -> Result<Tensor<R>> {
        let mut u = g.clone();
        for side in Side::of(g.shape()) {
            let [gram, root] = STATES[side.axis()];
            memory.update_states(gram..gram + 1, None, &ADD, &[&side.gram(&g)?], &[])?;
            if (step - 1).is_multiple_of(self.precondition_frequency.into()) {
                memory.set_state(root, &self.root(memory.state(gram)?)?)?;
            }
            u = side.project(&memory.state(root)?, &u)?;
        }
        Ok(u)
    }
}

impl UpdateRule for ShampooConfig {
    type Kernel = ();

    fn tensors(&self) -> Vec<StateSpec> {
        let mut states = vec![
            StateSpec::shaped("sum", |s| if s.rank() == 2 { Shape::from([0]) } else { *s }),
            StateSpec::shaped("row_gram", |s| Side::Rows.square(s)),
            StateSpec::shaped("column_gram", |s| Side::Columns.square(s)),
            StateSpec::shaped("row_root", |s| Side::Rows.square(s)),
            StateSpec::shaped("column_root", |s| Side::Columns.square(s)),
        ];
        states.extend((self.momentum > 0.0).then(|| StateSpec::zeros("momentum_buffer")));
        states
    }

    fn kernel(&self, _: Option<DType>) -> Result<()> {
        Ok(())
    }

    fn update<R: Runtime>(&self, (): &(), now: StepContext, memory: &mut UpdateMemory<'_, R>) -> Result<()> {
        let g = memory.gradient()?;
        let g = if self.maximize { g.neg()? } else { g };
        let u = if g.shape().rank() == 2 {
            self.of_matrix(g, now.step, memory)?
        } else {
            let mut u = TensorMut::alloc(&memory.runtime(), memory.shape(), memory.working())?;
            memory.update_states(0..1, Some(&mut u), &ADD_SQUARE, &[&g], &[self.eps.into()])?;
            u.freeze()?
        };
        let u = if self.momentum > 0.0 {
            let buffer = MOMENTUM_BUFFER..MOMENTUM_BUFFER + 1;
            memory.update_states(buffer, None, &MOMENTUM, &[&u], &[self.momentum.into()])?;
            memory.state(MOMENTUM_BUFFER)?
        } else {
            u
        };
        let numbers = [1.0 - now.lr * self.weight_decay, now.lr].map(Into::into);
        memory.update_weight(&STEP, &[&u], &numbers)
    }
}
