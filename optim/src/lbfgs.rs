//! L-BFGS: steps along directions from the last changes of parameters and gradients.

use std::sync::LazyLock;

use numcore::{
    DType, Error, Result, Runtime, Tensor,
    ops::{PointwiseOps, cat},
    pointwise::Program,
};

use crate::{
    FlatOptimizer, HyperNumbers, HyperValue, StateSpec, StepContext, Totals, UpdateMemory, UpdateRule,
    line_search::LineSearch, norms::sum_of,
};

config! {
    /// Hyper-parameters of [`Lbfgs`], with PyTorch's names where it has them.
    LbfgsConfig = "L-BFGS" {
        /// The first length that is tried along a direction, or the length without a line search.
        lr: f64 = 1.0, NonNegative;
        /// The norm of the gradient at which parameters no longer change.
        tolerance_grad: f64 = 1e-7, NonNegative;
        /// The slope of the loss at which parameters no longer change, and the change at which a search ends.
        tolerance_change: f64 = 1e-9, NonNegative;
        /// The number of changes `h` that are kept, at most 100.
        history_size: u32 = 10, AtLeastOne;
        /// True to search each direction for a length that meets the strong Wolfe conditions.
        strong_wolfe: bool = true, Any;
        /// The search along the present direction.
        search: LineSearch = LineSearch::default(), Adapted;
        /// The number of kept changes.
        kept: u32 = 0, Adapted;
        /// The number of the change that is replaced next.
        next: u32 = 0, Adapted;
        /// True once there is a direction.
        started: bool = false, Adapted;
        /// Numbers that follow from the rest.
        derived: LbfgsNumbers = LbfgsNumbers::default(), Any;
    }
}

/// L-BFGS, for a loss without noise: of the same examples in each step, without dropout.
///
/// Each step computes the loss and its gradient once, at the point where the parameters are. Then it moves: along a new
/// direction if the point is accepted, else to another length along the present one. So a step is an evaluation of
/// PyTorch's closure, and the loop has the part of `max_iter` and `max_eval`. All groups have the same options. Every
/// parameter needs a gradient in every step, without clipping.
///
/// A direction is `−Hg`, with `H` from the last `h` changes of parameters and gradients by the two-loop recursion. Its
/// products follow from one matrix of inner products. The first length is `lr`, that of the first step
/// `lr min(1, 1/‖g‖₁)`.
///
/// ```
/// # use autograd::Leaf;
/// # use numcore::{NullRuntime, Tensor, ops::{PointwiseOps, ReduceOps}};
/// # use optim::{Lbfgs, LbfgsConfig, Optimizer};
/// # fn main() -> numcore::Result<()> {
/// # let rt = NullRuntime::new();
/// let x = Leaf::new("x", Tensor::from_slice(&rt, [2], &[4.0f32, 3.0])?)?;
/// let mut lbfgs = Lbfgs::over(LbfgsConfig::default(), [&x])?;
/// for _ in 0..20 {
///     lbfgs.backward(&x.var().square()?.sum_all()?)?;
///     lbfgs.step()?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// Liu and Nocedal, *On the Limited Memory BFGS Method for Large Scale Optimization*, 1989. Chen et al., *Large-scale
/// L-BFGS using MapReduce*, 2014.
#[doc(alias("LBFGS"))]
pub type Lbfgs<R> = FlatOptimizer<R, LbfgsConfig>;

/// Numbers of [`Lbfgs`] that follow from its state: inner products of the kept changes, and the update of this step. No
/// checkpoint has them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LbfgsNumbers {
    /// Inner products of the kept changes of parameters, then of gradients; none if they must be computed.
    products: Vec<Vec<f64>>,
    /// The coefficients of kept changes and gradient in the new direction; none if the present one is kept.
    direction: Vec<f64>,
    /// The number of the change that is added, and its length along the direction before.
    added: Option<(usize, f64)>,
    /// The length by which parameters move along the direction.
    step: f64,
}

impl HyperValue for LbfgsNumbers {
    fn numbers(&self) -> HyperNumbers {
        HyperNumbers::new()
    }

    fn assign(&mut self, numbers: &[f64]) -> bool {
        *self = LbfgsNumbers::default();
        numbers.is_empty()
    }
}

/// The names of the states that keep changes of parameters and of gradients.
static NAMES: LazyLock<[Vec<&'static str>; 2]> =
    LazyLock::new(|| ["s", "y"].map(|of| (0..MOST_KEPT).map(|k| &*format!("{of}{k}").leak()).collect()));
const MOST_KEPT: usize = 100;
/// The least curvature of a change that is kept.
const LEAST_CURVATURE: f64 = 1e-10;

static DOT: LazyLock<Program> = LazyLock::new(|| Program::new("lbfgs_dot", |[a, b], []| [a * b]));
static SIZE: LazyLock<Program> = LazyLock::new(|| Program::new("lbfgs_size", |[g], []| [g.abs()]));
static ADD: LazyLock<Program> = LazyLock::new(|| Program::new("lbfgs_add", |[a, b], [by]| [a + b * by]));

impl LbfgsConfig {
    fn history(&self) -> usize {
        self.history_size as usize
    }

    /// The pairs of vectors whose inner products are computed: of `2m` kept changes, the new two, and the gradient.
    fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let kept = 2 * self.kept as usize;
        let first = if self.derived.products.len() == kept { kept } else { 0 };
        (first..kept + 3).flat_map(|j| (0..=j).map(move |i| (i, j)))
    }

    /// Adds the last change to the kept ones if the loss curves up along it. Returns the inner products of the kept
    /// changes and the gradient.
    fn keep(&mut self, all: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let (m, h) = (self.kept as usize, self.history());
        let (s, y, g) = (2 * m, 2 * m + 1, 2 * m + 2);
        let mut changes: Vec<[usize; 2]> = (0..m).map(|k| [k, m + k]).collect();
        if self.started && all[s][y] > LEAST_CURVATURE {
            let slot = if m < h { m } else { self.next as usize };
            changes.resize(m.max(slot + 1), [s, y]);
            changes[slot] = [s, y];
            self.derived.added = Some((slot, self.search.length));
            (self.kept, self.next) = (changes.len() as u32, ((slot + 1) % h) as u32);
        }
        let of = |which: usize| changes.iter().map(move |change| change[which]);
        let order: Vec<usize> = of(0).chain(of(1)).chain([g]).collect();
        order.iter().map(|&i| order.iter().map(|&j| all[i][j]).collect()).collect()
    }

    /// The coefficients of the direction, by the two-loop recursion over inner products of changes and gradient.
    fn direction(&self, products: &[Vec<f64>]) -> Vec<f64> {
        let (m, h) = (self.kept as usize, self.history());
        let oldest = if m == h { self.next as usize } else { 0 };
        let ages = (0..m).map(|k| (oldest + k) % m);
        let dot = |i: usize, with: &[f64]| products[i].iter().zip(with).map(|(x, c)| x * c).sum::<f64>();
        let (mut direction, mut weights) = (vec![0.0; 2 * m + 1], vec![0.0; m]);
        direction[2 * m] = -1.0;
        for k in ages.clone().rev() {
            weights[k] = dot(k, &direction) / products[k][m + k];
            direction[m + k] -= weights[k];
        }
        if let Some(newest) = ages.clone().next_back() {
            let scale = products[newest][m + newest] / products[m + newest][m + newest];
            direction.iter_mut().for_each(|c| *c *= scale);
        }
        for k in ages {
            direction[k] += weights[k] - dot(m + k, &direction) / products[k][m + k];
        }
        direction
    }
}

impl UpdateRule for LbfgsConfig {
    type Kernel = ();

    fn tensors(&self) -> Vec<StateSpec> {
        let changes = NAMES.iter().flat_map(|names| names.iter().take(self.history()).copied());
        changes.chain(["direction", "gradient"]).map(StateSpec::zeros).collect()
    }

    fn kernel(&self, _: Option<DType>) -> Result<()> {
        Ok(())
    }

    fn needs_whole(&self) -> bool {
        false
    }

    fn validate(&self) -> Result<()> {
        if self.history() <= MOST_KEPT && self.kept <= self.history_size && self.next < self.history_size {
            return Ok(());
        }
        let why = format!("is {}: keep at most {MOST_KEPT} changes, as many as the state has", self.history_size);
        Err(Error::config("L-BFGS", "history_size", why))
    }

    /// Products of all pairs of vectors, and the size of the gradient.
    fn sum_count(&self) -> usize {
        let vectors = 2 * self.history() + 3;
        vectors * (vectors + 1) / 2 + 1
    }

    fn sums<R: Runtime>(&self, (): &(), _: StepContext, memory: &mut UpdateMemory<'_, R>) -> Result<Tensor<R>> {
        let (m, h, g) = (self.kept as usize, self.history(), memory.gradient()?);
        let mut vectors = (0..m).chain(h..h + m).map(|k| memory.state(k)).collect::<Result<Vec<_>>>()?;
        vectors.push(memory.state(2 * h)?.mul(self.search.length)?);
        vectors.extend([g.sub(&memory.state(2 * h + 1)?)?, g.clone()]);
        let products = self.pairs().map(|(i, j)| sum_of(&DOT, &[&vectors[i], &vectors[j]], &[]));
        let all = std::iter::once(sum_of(&SIZE, &[&g], &[])).chain(products).collect::<Result<Vec<_>>>()?;
        cat(&all.iter().collect::<Vec<_>>(), 0)
    }

    fn adapt(&mut self, totals: &Totals<'_>) -> Result<()> {
        let why = "needs the loss of the gradients: give it to `backward`, or train by a training step";
        let loss = totals.loss.ok_or_else(|| Error::usage("L-BFGS", why))?;
        let (m, lr, length, pairs) = (self.kept as usize, totals.lr, self.search.length, self.pairs());
        let mut all = std::mem::take(&mut self.derived).products;
        resize(&mut all, 2 * m + 3);
        let (size, sums) = totals.sums.split_first().unwrap_or((&0.0, &[]));
        for ((i, j), &product) in pairs.zip(sums) {
            (all[i][j], all[j][i]) = (product, product);
        }
        let along = &all[2 * m];
        let (slope, norm) = (along[2 * m + 2] / length, along[2 * m].sqrt() / length);
        if self.started && !self.search.judge(loss, slope, norm, self.tolerance_change) {
            self.derived.step = self.search.length - length;
        } else {
            all = self.keep(&all);
            self.derived.direction = self.direction(&all);
            let of_gradient = &all[all.len() - 1];
            let slope: f64 = of_gradient.iter().zip(&self.derived.direction).map(|(x, c)| x * c).sum();
            let moves = slope <= -self.tolerance_change && of_gradient[all.len() - 1].sqrt() > self.tolerance_grad;
            let first = if self.started { lr } else { lr * (1.0 / size).min(1.0) };
            let length = if moves { first } else { 0.0 };
            self.search.begin(loss, slope, length, self.strong_wolfe && length > 0.0);
            (self.derived.step, self.started) = (length, true);
        }
        resize(&mut all, 2 * self.kept as usize);
        self.derived.products = all;
        Ok(())
    }

    fn update<R: Runtime>(&self, (): &(), _: StepContext, memory: &mut UpdateMemory<'_, R>) -> Result<()> {
        let (m, h, LbfgsNumbers { direction, added, step, .. }) = (self.kept as usize, self.history(), &self.derived);
        if let Some(&of_gradient) = direction.last() {
            let g = memory.gradient()?;
            if let Some((slot, length)) = *added {
                memory.set_state(slot, &memory.state(2 * h)?.mul(length)?)?;
                memory.set_state(h + slot, &g.sub(&memory.state(2 * h + 1)?)?)?;
            }
            memory.set_state(2 * h + 1, &g)?;
            let mut new = g.mul(of_gradient)?;
            for (k, &c) in (0..m).chain(h..h + m).zip(direction) {
                new = new.apply_program(&ADD, &[&memory.state(k)?], &[c.into()])?;
            }
            memory.set_state(2 * h, &new)?;
        }
        let direction = memory.state(2 * h)?;
        memory.update_weight(&ADD, &[&direction], &[(*step).into()])
    }
}

/// Makes a matrix of `n` rows and columns, with zeros where it had none.
fn resize(matrix: &mut Vec<Vec<f64>>, n: usize) {
    matrix.resize(n, Vec::new());
    matrix.iter_mut().for_each(|row| row.resize(n, 0.0));
}
