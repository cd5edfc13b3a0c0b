//! Recurrent layers, step by step.

use autograd::Var;
use numcore::{
    Result, Runtime, Tensor,
    ops::{MatmulOps, PointwiseOps, ViewOps, stack},
};

use super::{
    super::call::{NodeCall, NodeOutputs, array, bad},
    OperatorRow, row,
};

/// One step of a layer: the gates' inputs, the state and the cell to the new state and cell.
type RecurrentStep<R> = fn(&RecurrentDirection<'_, R>, &Var<R>, &Var<R>, &Var<R>) -> Result<(Var<R>, Var<R>)>;

pub(super) fn find<R: Runtime>(op: &str) -> Option<OperatorRow<R>> {
    const RNN: &[&str] = &["activations", "direction", "hidden_size", "layout"];
    const GRU: &[&str] = &["activations", "direction", "hidden_size", "layout", "linear_before_reset"];
    const LSTM: &[&str] = &["activations", "direction", "hidden_size", "input_forget", "layout"];
    match op {
        "RNN" => row(RNN, |c| layer(c, rnn, &["Tanh"])),
        "GRU" => row(GRU, |c| layer(c, gru, &["Sigmoid", "Tanh"])),
        "LSTM" => row(LSTM, |c| layer(c, lstm, &["Sigmoid", "Tanh", "Tanh"])),
        _ => None,
    }
}

/// The weights of one direction.
struct RecurrentDirection<'a, R: Runtime> {
    /// Recurrent weights, transposed, `[H, G·H]`.
    recurrent: Var<R>,
    /// The bias of the recurrent part, `[G·H]`, if there is one.
    bias: Option<Var<R>>,
    peepholes: Option<Var<R>>,
    hidden: usize,
    call: &'a NodeCall<'a, R>,
}

/// `x: [T, B, I]`, or `[B, T, I]` with `layout` 1; outputs of each step `[T, D, B, H]`, and the last ones.
fn layer<R: Runtime>(c: &NodeCall<'_, R>, step: RecurrentStep<R>, activations: &[&str]) -> NodeOutputs<R> {
    if c.texts("activations").is_some_and(|given| given.iter().zip(activations.iter().cycle()).any(|(a, b)| a != b)) {
        return Err(bad("has other activations than the usual ones, which are not supported"));
    }
    if c.flag("input_forget") {
        return Err(bad("couples the input and forget gates, which is not supported"));
    }
    let batch_first = c.flag("layout");
    let x = if batch_first { c.x(0)?.transpose(0, 1)? } else { c.x(0)?.clone() };
    let [steps, batch, _] = array("the input's shape", &x.dims())?;
    let [directions, rows, _] = array("the weight's shape", &c.x(1)?.dims())?;
    let [_, _, hidden] = array("the recurrent weight's shape", &c.x(2)?.dims())?;
    if let Some(lens) = c.host(4)?.filter(|lens| lens.iter().any(|&len| len != steps as i64)) {
        return Err(bad(format!("has sequences of lengths {lens:?} in {steps} steps, and all must be of one length")));
    }
    let (mut outputs, mut last, mut cells) = (Vec::new(), Vec::new(), Vec::new());
    for d in 0..directions {
        let backward = c.text("direction", "forward") == "reverse" || d == 1;
        let start = |i: usize| match c.opt(i)? {
            None => Ok(Var::new(Tensor::zeros(c.device(), [batch, hidden], x.dtype())?)),
            Some(x) => x.select(if batch_first { 1 } else { 0 }, d),
        };
        let bias = c.opt(3)?.map(|bias| bias.select(0, d)).transpose()?;
        let half = |k: usize| bias.as_ref().map(|bias| bias.narrow(0, k * rows, rows)).transpose();
        let own = RecurrentDirection {
            recurrent: c.x(2)?.select(0, d)?.t()?,
            bias: half(1)?,
            peepholes: c.opt(7)?.map(|p| p.select(0, d)).transpose()?,
            hidden,
            call: c,
        };
        let of_x = added(x.matmul(&c.x(1)?.select(0, d)?.t()?)?, half(0)?.as_ref())?;
        let (mut h, mut cell) = (start(5)?, start(6)?);
        let mut made = vec![h.clone(); steps];
        for i in 0..steps {
            let t = if backward { steps - 1 - i } else { i };
            (h, cell) = step(&own, &of_x.select(0, t)?, &h, &cell)?;
            made[t] = h.clone();
        }
        outputs.push(stack(&made.iter().collect::<Vec<_>>(), 0)?);
        last.push(h);
        cells.push(cell);
    }
    let together = |xs: &[Var<R>], axis: isize| stack(&xs.iter().collect::<Vec<_>>(), axis);
    let at = if batch_first { 1 } else { 0 };
    let y = together(&outputs, 1)?;
    let y = if batch_first { y.permute(&[2, 0, 1, 3])? } else { y };
    Ok(vec![y, together(&last, at)?, together(&cells, at)?])
}

fn added<R: Runtime>(x: Var<R>, bias: Option<&Var<R>>) -> Result<Var<R>> {
    bias.map_or(Ok(x.clone()), |bias| x.add(bias))
}

impl<R: Runtime> RecurrentDirection<'_, R> {
    fn of_state(&self, h: &Var<R>) -> Result<Var<R>> {
        added(h.matmul(&self.recurrent)?, self.bias.as_ref())
    }

    fn gate(&self, x: &Var<R>, i: usize) -> Result<Var<R>> {
        x.narrow(-1, i * self.hidden, self.hidden)
    }

    /// Adds a peephole's view of the cell: 0 to 2 are of the input, the output and the forget gate.
    fn peeped(&self, gate: Var<R>, i: usize, cell: &Var<R>) -> Result<Var<R>> {
        match &self.peepholes {
            Some(peepholes) => gate.add(&self.gate(peepholes, i)?.mul(cell)?),
            None => Ok(gate),
        }
    }
}

fn rnn<R: Runtime>(
    layer: &RecurrentDirection<'_, R>,
    x: &Var<R>,
    h: &Var<R>,
    cell: &Var<R>,
) -> Result<(Var<R>, Var<R>)> {
    Ok((x.add(&layer.of_state(h)?)?.tanh()?, cell.clone()))
}

fn gru<R: Runtime>(
    layer: &RecurrentDirection<'_, R>,
    x: &Var<R>,
    h: &Var<R>,
    cell: &Var<R>,
) -> Result<(Var<R>, Var<R>)> {
    let of_h = layer.of_state(h)?;
    let z = layer.gate(x, 0)?.add(&layer.gate(&of_h, 0)?)?.sigmoid()?;
    let reset = layer.gate(x, 1)?.add(&layer.gate(&of_h, 1)?)?.sigmoid()?;
    let inner = if layer.call.flag("linear_before_reset") {
        reset.mul(&layer.gate(&of_h, 2)?)?
    } else {
        layer.gate(&layer.of_state(&reset.mul(h)?)?, 2)?
    };
    let new = layer.gate(x, 2)?.add(&inner)?.tanh()?;
    Ok((new.lerp(h, &z)?, cell.clone()))
}

fn lstm<R: Runtime>(
    layer: &RecurrentDirection<'_, R>,
    x: &Var<R>,
    h: &Var<R>,
    cell: &Var<R>,
) -> Result<(Var<R>, Var<R>)> {
    let all = x.add(&layer.of_state(h)?)?;
    let input = layer.peeped(layer.gate(&all, 0)?, 0, cell)?.sigmoid()?;
    let forget = layer.peeped(layer.gate(&all, 2)?, 2, cell)?.sigmoid()?;
    let new = forget.mul(cell)?.add(&input.mul(&layer.gate(&all, 3)?.tanh()?)?)?;
    let output = layer.peeped(layer.gate(&all, 1)?, 1, &new)?.sigmoid()?;
    Ok((output.mul(&new.tanh()?)?, new))
}
