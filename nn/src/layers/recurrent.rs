//! Recurrent layers, batch first.
//!
//! The inputs of all time steps are multiplied in one matmul. A time step multiplies only the state, followed by one
//! pointwise program.

use std::{marker::PhantomData, sync::LazyLock};

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Tensor, Within,
    ops::{Apply, MatmulOps, PointwiseOps, ViewOps, cat, stack},
    pointwise::Program,
};

use super::{Dropout, optional};
use crate::{Forward, Init, Initializer, Module, Param, Visitor, parallel::ContextSlot};

/// The computation of a recurrent layer in one time step.
pub trait RecurrentCell: Send + Sync + 'static {
    /// The number of gates: weights are `[GATES · H, ..]`.
    const GATES: usize;
    /// The number of values carried between time steps; the first is the output.
    const STATES: usize;
    /// Computes the next state, each value `[B, H]`. `input` is the gates' projection of the layer's input,
    /// `[B, GATES · H]`.
    fn step<R: Runtime>(input: &Var<R>, weights: &Recurrence<R>, state: &[Var<R>]) -> Result<Vec<Var<R>>>;
}

/// The recurrent weights, by which a cell multiplies its state.
pub struct Recurrence<R: Runtime> {
    /// The recurrent weight, `[GATES · H, H]`.
    weight: Var<R>,
    /// The recurrent bias of all gates, PyTorch's `bias_hh`: `[GATES · H]`.
    bias: Option<Var<R>>,
}

impl<R: Runtime> Recurrence<R> {
    /// Computes `U h + b` of every gate, `[B, GATES · H]`, for `h: [B, H]`.
    #[track_caller]
    pub fn product(&self, h: &Var<R>) -> Result<Var<R>> {
        h.linear(&self.weight, self.bias.as_ref())
    }

    /// Computes `U h + b` of a range of gates, `[B, len · H]`.
    #[track_caller]
    pub fn product_of(&self, gates: std::ops::Range<usize>, h: &Var<R>) -> Result<Var<R>> {
        let width = h.spec().shape[1];
        let rows = |x: &Var<R>| x.narrow(0, gates.start * width, gates.len() * width);
        h.linear(&rows(&self.weight)?, self.bias.as_ref().map(rows).transpose()?.as_ref())
    }
}

/// The Elman cell `h' = tanh(W x + a + U h + b)` with biases `a`, `b` (Elman 1990), as PyTorch's `RNN` with `tanh`. A
/// type parameter of [`Recurrent`], not a layer.
#[derive(Debug)]
pub struct RnnCell;

/// Long short-term memory (Hochreiter & Schmidhuber 1997); gates i, f, g, o; state h, c.
#[derive(Debug)]
pub struct LstmCell;

/// Gated recurrent unit (Cho et al. 2014) as in PyTorch and cuDNN: `n = tanh(W x + r ∘ (U h + b))`; gates r, z, n.
#[derive(Debug)]
pub struct GruCell;

/// The gated recurrent unit as first described, with the reset gate applied before the matmul:
/// `n = tanh(W x + U (r ∘ h) + b)`; gates r, z, n. The same as ONNX's `GRU` with `linear_before_reset = 0`, and Keras'
/// with `reset_after=False`.
#[derive(Debug)]
pub struct GruResetFirstCell;

/// Elman recurrent layers, batch first.
pub type Rnn<R> = Recurrent<R, RnnCell>;
/// Long short-term memory layers, batch first.
pub type Lstm<R> = Recurrent<R, LstmCell>;
/// Gated recurrent unit layers, batch first.
pub type Gru<R> = Recurrent<R, GruCell>;
/// Gated recurrent units whose reset gate is applied before the matmul.
pub type GruResetFirst<R> = Recurrent<R, GruResetFirstCell>;

impl RecurrentCell for RnnCell {
    const GATES: usize = 1;
    const STATES: usize = 1;

    #[track_caller]
    fn step<R: Runtime>(input: &Var<R>, weights: &Recurrence<R>, state: &[Var<R>]) -> Result<Vec<Var<R>>> {
        static STEP: LazyLock<Program> = LazyLock::new(|| Program::new("rnn", |[x, u], []| [(x + u).tanh()]));
        Ok(vec![input.apply_program(&STEP, &[&weights.product(&state[0])?], &[])?])
    }
}

impl RecurrentCell for LstmCell {
    const GATES: usize = 4;
    const STATES: usize = 2;

    #[track_caller]
    fn step<R: Runtime>(input: &Var<R>, weights: &Recurrence<R>, state: &[Var<R>]) -> Result<Vec<Var<R>>> {
        static STEP: LazyLock<Program> = LazyLock::new(|| {
            Program::new("lstm", |[i, f, g, o, c], []| {
                let c = f.sigmoid() * c + i.sigmoid() * g.tanh();
                [o.sigmoid() * c.tanh(), c]
            })
        });
        let gates = input.add(&weights.product(&state[0])?)?.chunk(1, Self::GATES)?;
        let [i, rest @ ..] = &gates[..] else { return Ok(Vec::new()) };
        let others: Vec<&Var<R>> = rest.iter().chain(&state[1..]).collect();
        Ok(i.apply_program_all(&STEP, &others, &[])?.into_vec())
    }
}

impl RecurrentCell for GruCell {
    const GATES: usize = 3;
    const STATES: usize = 1;

    #[track_caller]
    fn step<R: Runtime>(input: &Var<R>, weights: &Recurrence<R>, state: &[Var<R>]) -> Result<Vec<Var<R>>> {
        static STEP: LazyLock<Program> = LazyLock::new(|| {
            Program::new("gru", |[xr, xz, xn, ur, uz, un, h], []| {
                let (r, z) = ((xr + ur).sigmoid(), (xz + uz).sigmoid());
                let n = (xn + r * un).tanh();
                [n + z * (h - n)]
            })
        });
        let (x, u) = (input.chunk(1, Self::GATES)?, weights.product(&state[0])?.chunk(1, Self::GATES)?);
        let others: Vec<&Var<R>> = x[1..].iter().chain(&u).chain(state).collect();
        Ok(vec![x[0].apply_program(&STEP, &others, &[])?])
    }
}

impl RecurrentCell for GruResetFirstCell {
    const GATES: usize = 3;
    const STATES: usize = 1;

    #[track_caller]
    fn step<R: Runtime>(input: &Var<R>, weights: &Recurrence<R>, state: &[Var<R>]) -> Result<Vec<Var<R>>> {
        static RESET: LazyLock<Program> =
            LazyLock::new(|| Program::new("gru", |[xr, ur, h], []| [(xr + ur).sigmoid() * h]));
        static STEP: LazyLock<Program> = LazyLock::new(|| {
            Program::new("gru", |[xz, xn, uz, un, h], []| {
                let (z, n) = ((xz + uz).sigmoid(), (xn + un).tanh());
                [n + z * (h - n)]
            })
        });
        let [h] = state else { return Ok(Vec::new()) };
        let (x, u) = (input.chunk(1, Self::GATES)?, weights.product_of(0..2, h)?.chunk(1, 2)?);
        let reset = x[0].apply_program(&RESET, &[&u[0], h], &[])?;
        let new = weights.product_of(2..3, &reset)?;
        Ok(vec![x[1].apply_program(&STEP, &[&x[2], &u[1], &new, h], &[])?])
    }
}

/// The sizes and options of a recurrent layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecurrentConfig {
    /// Channels of the input.
    pub inputs: usize,
    /// Channels of the state.
    pub hidden: usize,
    /// The number of stacked layers.
    pub layers: usize,
    /// True if each layer also reads the sequence backwards; its output is then the concatenation of both directions.
    pub bidirectional: bool,
    /// True if layers only read backwards; not together with `bidirectional`.
    pub reverse: bool,
    /// The dropout probability between layers.
    pub dropout: f64,
    /// True if the layers have biases.
    pub bias: bool,
}

impl RecurrentConfig {
    /// The configuration of one layer with biases, reading forwards.
    pub fn new(inputs: usize, hidden: usize) -> Self {
        RecurrentConfig { inputs, hidden, layers: 1, bidirectional: false, reverse: false, dropout: 0.0, bias: true }
    }
}

/// The outputs of a recurrent layer.
pub struct RecurrentOutput<R: Runtime> {
    /// The last layer's h at every time step, `[B, T, H]` (`[B, T, 2H]` if bidirectional).
    pub output: Var<R>,
    /// The state after the last time step, each `[layers · directions, B, H]`: h, and c of an [`Lstm`].
    pub state: Vec<Var<R>>,
}

/// Layers of recurrent cells over `x: [B, T, I]`. Parameters have PyTorch's names: `weight_ih_l0`, `weight_hh_l0`,
/// `bias_ih_l0`, `bias_hh_l0`, with the suffix `_reverse` for backward passes over the sequence.
pub struct Recurrent<R: Runtime, C: RecurrentCell> {
    /// The passes, by layer, then direction.
    passes: Vec<RecurrentPass<R>>,
    dropout: Dropout,
    config: RecurrentConfig,
    cell: PhantomData<C>,
}

/// One direction of one layer.
struct RecurrentPass<R: Runtime> {
    suffix: String,
    reverse: bool,
    weight_ih: Param<R>,
    weight_hh: Param<R>,
    bias_ih: Option<Param<R>>,
    bias_hh: Option<Param<R>>,
}

impl<R: Runtime, C: RecurrentCell> Recurrent<R, C> {
    /// Layers in which every parameter is uniform in `±1/√hidden`.
    #[track_caller]
    pub fn new(init: &Init<R>, config: RecurrentConfig) -> Result<Self> {
        if config.reverse && config.bidirectional {
            let why = "`bidirectional` reads backwards too; leave `reverse` out";
            return Err(Error::config("recurrent", "reverse", why)).at_caller();
        }
        let directions = config.directions();
        let reverse = |n: usize| config.reverse || n % directions == 1;
        let passes =
            (0..config.layers * directions).map(|n| RecurrentPass::new::<C>(init, &config, n / directions, reverse(n)));
        let passes = passes.collect::<Result<Vec<_>>>()?;
        if passes.is_empty() {
            return Err(Error::config("recurrent", "layers", "needs at least one layer")).at_caller();
        }
        Ok(Recurrent { passes, dropout: Dropout::new(config.dropout)?, config, cell: PhantomData })
    }

    /// Reads `x: [B, T, I]` from `state` (zeros if `None`), each `[layers · directions, B, H]`.
    #[track_caller]
    pub fn run(&self, x: &Var<R>, state: Option<&[Var<R>]>) -> Result<RecurrentOutput<R>> {
        self.run_masked(x, &[], state)
    }

    /// Reads sequences of their own lengths, the first `lengths[b]` steps of `x[b]`, as PyTorch does with a packed
    /// sequence. Outputs after a sequence's end are 0, the state is that of its last step, and backward passes begin
    /// there. Values of `x` after the end have no effect.
    ///
    /// # Errors
    /// An error unless there is a length for each sequence, in `0..=T`.
    #[doc(alias("pack_padded_sequence", "PackedSequence"))]
    #[track_caller]
    pub fn run_lengths(&self, x: &Var<R>, lengths: &[usize], state: Option<&[Var<R>]>) -> Result<RecurrentOutput<R>> {
        self.check(x, state).at_caller()?;
        let shape = x.spec().shape;
        if lengths.len() != shape[0] || lengths.iter().any(|&len| len > shape[1]) {
            let why = format!("needs a length in 0..={} for each sequence; got {lengths:?}", shape[1]);
            return Err(Error::shape("recurrent", &[shape], why)).at_caller();
        }
        let steps = (0..shape[1]).map(|t| {
            let on: Vec<bool> = lengths.iter().map(|&len| t < len).collect();
            let all = on.iter().all(|&on| on);
            if all {
                Ok(None)
            } else {
                Tensor::from_slice(x.runtime(), [shape[0], 1], &on).map(|on| Some(Var::new(on)))
            }
        });
        let steps = steps.collect::<Result<Vec<_>>>()?;
        let within: Vec<bool> = lengths.iter().flat_map(|&len| (0..shape[1]).map(move |t| t < len)).collect();
        let within = Var::new(Tensor::from_slice(x.runtime(), [shape[0], shape[1], 1], &within)?);
        self.run_masked(&x.where_cond(&within, 0.0)?, &steps, state)
    }

    /// Reads `x`; at step `t`, sequences that `here[t]: [B, 1]` leaves out keep their state, and have an output of 0.
    #[track_caller]
    fn run_masked(&self, x: &Var<R>, here: &[Option<Var<R>>], state: Option<&[Var<R>]>) -> Result<RecurrentOutput<R>> {
        self.check(x, state).at_caller()?;
        let directions = self.config.directions();
        let mut below = x.clone();
        let mut finals: Vec<Vec<Var<R>>> = vec![Vec::new(); C::STATES];
        for (layer, passes) in self.passes.chunks(directions).enumerate() {
            if layer > 0 {
                below = self.dropout.forward(&below)?;
            }
            let mut outputs = Vec::with_capacity(directions);
            for (direction, pass) in passes.iter().enumerate() {
                let start = self.start(x, state, layer * directions + direction)?;
                let (output, end) = pass.run::<C>(&below, here, start)?;
                outputs.push(output);
                finals.iter_mut().zip(end).for_each(|(all, s)| all.push(s));
            }
            below = if let [only] = &outputs[..] { only.clone() } else { cat(&refs(&outputs), -1)? };
        }
        let state = finals.iter().map(|s| stack(&refs(s), 0)).collect::<Result<_>>()?;
        Ok(RecurrentOutput { output: below, state })
    }

    #[track_caller]
    fn start(&self, x: &Var<R>, state: Option<&[Var<R>]>, pass: usize) -> Result<Vec<Var<R>>> {
        match state {
            Some(state) => state.iter().map(|s| s.select(0, pass)).collect(),
            None => {
                let zeros = Tensor::zeros(x.runtime(), [x.spec().shape[0], self.config.hidden], x.dtype())?;
                Ok(vec![Var::new(zeros); C::STATES])
            }
        }
    }

    #[track_caller]
    fn check(&self, x: &Var<R>, state: Option<&[Var<R>]>) -> Result<()> {
        let shape = x.spec().shape;
        if shape.rank() != 3 || shape[1] == 0 || shape[2] != self.config.inputs {
            let why = format!("the input must be [B, T, {}] with at least one step", self.config.inputs);
            return Err(Error::shape("recurrent", &[shape], why));
        }
        let needed = [self.passes.len(), shape[0], self.config.hidden];
        let fits = |s: &[Var<R>]| s.len() == C::STATES && s.iter().all(|v| v.spec().shape[..] == needed);
        if state.is_some_and(|s| !fits(s)) {
            let why = format!("the state must be {} of {needed:?}", C::STATES);
            let shapes: Vec<_> = state.iter().flat_map(|s| s.iter()).map(|v| v.spec().shape).collect();
            return Err(Error::shape("recurrent", &shapes, why));
        }
        Ok(())
    }
}

impl RecurrentConfig {
    fn directions(&self) -> usize {
        1 + usize::from(self.bidirectional)
    }
}

impl<R: Runtime> RecurrentPass<R> {
    fn new<C: RecurrentCell>(init: &Init<R>, config: &RecurrentConfig, layer: usize, reverse: bool) -> Result<Self> {
        let RecurrentConfig { inputs, hidden, bias, .. } = *config;
        let (rows, how) = (C::GATES * hidden, Initializer::by_fan(hidden));
        let columns = if layer == 0 { inputs } else { hidden * config.directions() };
        let optional_bias = || bias.then(|| init.bias([rows], how)).transpose();
        Ok(RecurrentPass {
            suffix: format!("_l{layer}{}", if reverse { "_reverse" } else { "" }),
            reverse,
            weight_ih: init.weight([rows, columns], how)?,
            weight_hh: init.weight([rows, hidden], how)?,
            bias_ih: optional_bias()?,
            bias_hh: optional_bias()?,
        })
    }

    /// Returns h of every step, `[B, T, H]`, and the last state.
    #[track_caller]
    fn run<C: RecurrentCell>(
        &self,
        x: &Var<R>,
        here: &[Option<Var<R>>],
        mut state: Vec<Var<R>>,
    ) -> Result<(Var<R>, Vec<Var<R>>)> {
        let inputs = x.linear(&self.weight_ih.var(), optional(&self.bias_ih).as_ref())?;
        let weights = Recurrence { weight: self.weight_hh.var(), bias: optional(&self.bias_hh) };
        let steps = x.spec().shape[1];
        let mut outputs = Vec::with_capacity(steps);
        for i in 0..steps {
            let t = if self.reverse { steps - 1 - i } else { i };
            let next = C::step(&inputs.select(1, t)?, &weights, &state)?;
            match here.get(t).and_then(Option::as_ref) {
                None => {
                    outputs.push(next[0].clone());
                    state = next;
                }
                Some(here) => {
                    outputs.push(next[0].where_cond(here, 0.0)?);
                    let kept = next.iter().zip(&state).map(|(next, before)| next.where_cond(here, before));
                    state = kept.collect::<Result<_>>()?;
                }
            }
        }
        if self.reverse {
            outputs.reverse();
        }
        Ok((stack(&refs(&outputs), 1)?, state))
    }
}

fn refs<T>(values: &[T]) -> Vec<&T> {
    values.iter().collect()
}

impl<R: Runtime, C: RecurrentCell> Module<R> for Recurrent<R, C> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        visitor.enter(name);
        for pass in &self.passes {
            let name = |what: &str| format!("{what}{}", pass.suffix);
            pass.weight_ih.visit(&name("weight_ih"), visitor);
            pass.weight_hh.visit(&name("weight_hh"), visitor);
            pass.bias_ih.visit(&name("bias_ih"), visitor);
            pass.bias_hh.visit(&name("bias_hh"), visitor);
        }
        Module::<R>::visit(&self.dropout, "dropout", visitor);
        visitor.context(&ContextSlot::refuses());
        visitor.leave();
    }
}

/// The output of every time step, from a state of zeros.
impl<R: Runtime, C: RecurrentCell> Forward<R> for Recurrent<R, C> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        Ok(self.run(x, None)?.output)
    }
}
