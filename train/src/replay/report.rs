//! The results of a replayed step.

use std::fmt;

use numcore::{DType, Result, Runtime, Shape, Tensor};

/// A step of a run that was [taken again](crate::StepReplay).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReplayedStep {
    /// The number of the step.
    pub step: u64,
    /// The step of the checkpoint that the replay began with; none if it began from scratch.
    pub from: Option<u64>,
    /// The ranks, in order.
    pub ranks: Vec<ReplayedRank>,
}

/// A rank's part of a replayed step.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReplayedRank {
    /// The rank.
    pub rank: usize,
    /// Op calls on variables, and in backward the gradients that gradient rules gave, in their order.
    pub calls: Vec<ReplayedCall>,
    /// The loss of the step.
    pub loss: Option<f64>,
    /// The norm of the gradients, if the step computes it.
    pub grad_norm: Option<f64>,
    /// The names of this rank's parameters that have values which are not finite after the step.
    pub not_finite: Vec<String>,
    /// The error of the step on this rank.
    pub error: Option<String>,
}

/// An op call in a replayed step, or a gradient.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReplayedCall {
    /// The name of the op; in backward, that of the op whose gradient rule gave the gradient.
    pub op: &'static str,
    /// The input of the op that the gradient is of; none in forward.
    pub gradient_of: Option<usize>,
    /// The line of the program that called the op.
    pub at: String,
    /// The names of the parameters among the op's inputs.
    pub parameters: Vec<String>,
    /// The inputs; in backward, the gradients of the op's outputs.
    pub inputs: Vec<ReplayedValue>,
    /// The outputs; in backward, the gradient.
    pub outputs: Vec<ReplayedValue>,
}

/// An operand of a call in a replayed step.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReplayedValue {
    /// The dtype.
    pub dtype: DType,
    /// The shape.
    pub shape: Shape,
    /// The number of NaN.
    pub nan: usize,
    /// The number of infinite values.
    pub infinite: usize,
    /// The index of the first NaN, or else of the first infinite value.
    pub first: Option<Vec<usize>>,
    /// The least, the mean and the greatest of the finite values, if there are any.
    pub range: Option<[f64; 3]>,
    /// The values, in row-major order, where they were [asked for](crate::StepReplay::values_of).
    pub values: Option<Vec<f64>>,
}

impl ReplayedStep {
    /// The call in which NaN begins: a rank's place in `ranks`, and the number of the call. It is the rank's first call
    /// that has any, and its inputs have none. Of several ranks, the earliest call counts, then the lowest rank.
    pub fn first_nan(&self) -> Option<(usize, usize)> {
        let first = |(rank, of): (usize, &ReplayedRank)| {
            let call = of.calls.iter().position(ReplayedCall::has_nan)?;
            of.calls[call].begins_nan().then_some((call, rank))
        };
        self.ranks.iter().enumerate().filter_map(first).min().map(|(call, rank)| (rank, call))
    }

    /// The operands of a call of one rank, and those of the same call on all others, as text. Calls are the same if op,
    /// line and the number of such calls before are. Ranks of a pipeline make other calls too.
    pub fn show_call(&self, rank: usize, number: usize) -> impl fmt::Display {
        fmt::from_fn(move |f| {
            let Some(place) = self.place_of(rank, number) else {
                return writeln!(f, "rank {rank}: call {number} was not made");
            };
            for ReplayedRank { rank, calls, .. } in &self.ranks {
                let Some(number) = place.within(calls) else {
                    writeln!(f, "rank {rank}: this call was not made")?;
                    continue;
                };
                let call = &calls[number];
                writeln!(f, "rank {rank}: {}", call.title(number))?;
                let named = |names: &'static str, of| std::iter::repeat(names).zip(of);
                for (name, value) in named("in ", &call.inputs).chain(named("out", &call.outputs)) {
                    writeln!(f, "    {name} {value}")?;
                }
            }
            Ok(())
        })
    }

    /// The place of a rank's call among those of its line.
    pub(crate) fn place_of(&self, rank: usize, number: usize) -> Option<CallPlace> {
        let calls = &self.ranks.get(rank)?.calls;
        let call = calls.get(number)?;
        let first = CallPlace { op: call.op, gradient_of: call.gradient_of, at: call.at.clone(), before: 0 };
        let before = calls[..number].iter().filter(|call| first.is_of(call)).count();
        Some(CallPlace { before, ..first })
    }

    /// The calls of a rank as a table, one in a line.
    pub fn show_rank(&self, rank: usize) -> impl fmt::Display {
        fmt::from_fn(move |f| {
            let Some(of) = self.ranks.get(rank) else { return writeln!(f, "there is no rank {rank}") };
            for (number, call) in of.calls.iter().enumerate() {
                let outputs: Vec<String> = call.outputs.iter().map(ToString::to_string).collect();
                writeln!(f, "{} → {}", call.title(number), outputs.join(", "))?;
            }
            Ok(())
        })
    }
}

/// A call as other ranks have it too: its op and line, and the number of such calls before it.
#[derive(Clone, Debug)]
pub(crate) struct CallPlace {
    op: &'static str,
    gradient_of: Option<usize>,
    at: String,
    before: usize,
}

impl CallPlace {
    fn is_of(&self, call: &ReplayedCall) -> bool {
        (self.op, self.gradient_of, &self.at) == (call.op, call.gradient_of, &call.at)
    }

    /// The number of the call among those of a rank.
    fn within(&self, calls: &[ReplayedCall]) -> Option<usize> {
        (0..calls.len()).filter(|&k| self.is_of(&calls[k])).nth(self.before)
    }

    /// Tells whether a call that follows these is the one.
    pub(crate) fn is_next(&self, calls: &[ReplayedCall], call: &ReplayedCall) -> bool {
        self.is_of(call) && calls.iter().filter(|call| self.is_of(call)).count() == self.before
    }
}

impl ReplayedCall {
    /// Tells whether an output has NaN and no input does.
    pub fn begins_nan(&self) -> bool {
        let has = |values: &[ReplayedValue]| values.iter().any(|value| value.nan > 0);
        has(&self.outputs) && !has(&self.inputs)
    }

    fn has_nan(&self) -> bool {
        self.inputs.iter().chain(&self.outputs).any(|value| value.nan > 0)
    }

    fn title(&self, number: usize) -> String {
        let gradient = self.gradient_of.map_or(String::new(), |i| format!(", gradient of input {i}"));
        let parameters = self.parameters.iter().map(|name| format!(" `{name}`")).collect::<Vec<_>>().join(",");
        format!("call {number}, {}{gradient}{parameters} at {}", self.op, self.at)
    }
}

impl ReplayedValue {
    pub(crate) fn of<R: Runtime>(tensor: &Tensor<R>, keep: bool) -> Result<Self> {
        let values = tensor.to_f64s()?;
        let (mut nan, mut infinite, mut first) = (0, 0, (None, None));
        let (mut sum, mut least, mut greatest) = (0.0, f64::INFINITY, f64::NEG_INFINITY);
        for (i, &value) in values.iter().enumerate() {
            if value.is_finite() {
                (sum, least, greatest) = (sum + value, value.min(least), value.max(greatest));
                continue;
            }
            let (count, first) = if value.is_nan() { (&mut nan, &mut first.0) } else { (&mut infinite, &mut first.1) };
            *count += 1;
            first.get_or_insert(i);
        }
        let finite = values.len() - nan - infinite;
        let index = |flat: usize| {
            let strides = tensor.shape().dims().iter().rev().scan(1, |stride, dim| {
                let own = *stride;
                *stride *= dim;
                Some((own, *dim))
            });
            let mut at: Vec<usize> = strides.map(|(stride, dim)| flat / stride % dim).collect();
            at.reverse();
            at
        };
        Ok(ReplayedValue {
            dtype: tensor.dtype(),
            shape: *tensor.shape(),
            nan,
            infinite,
            first: first.0.or(first.1).map(index),
            range: (finite > 0).then(|| [least, sum / finite as f64, greatest]),
            values: keep.then_some(values),
        })
    }
}

/// The ranks, and the operands of the call in which NaN begins.
impl fmt::Display for ReplayedStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from = self.from.map_or("from scratch".into(), |step| format!("from the checkpoint of step {step}"));
        writeln!(f, "step {} on {} ranks, {from}", self.step, self.ranks.len())?;
        for ReplayedRank { rank, calls, loss, grad_norm, not_finite, error } in &self.ranks {
            write!(f, "rank {rank}: {} calls", calls.len())?;
            if let Some(loss) = loss {
                write!(f, ", loss {loss}")?;
            }
            if let Some(norm) = grad_norm {
                write!(f, ", gradient norm {norm}")?;
            }
            if !not_finite.is_empty() {
                write!(f, ", not finite after the step: {}", not_finite.join(", "))?;
            }
            match error {
                Some(error) => writeln!(f, "; it failed: {error}")?,
                None => writeln!(f)?,
            }
        }
        match self.first_nan() {
            Some((rank, call)) => {
                writeln!(f, "NaN begins on rank {} in call {call}:", self.ranks[rank].rank)?;
                self.show_call(rank, call).fmt(f)
            }
            None => match self.ranks.iter().find_map(|of| Some((of, of.calls.iter().position(ReplayedCall::has_nan)?)))
            {
                Some((of, call)) => {
                    writeln!(f, "no call begins a NaN; on rank {} it comes in by an input of call {call}:", of.rank)?;
                    self.show_call(of.rank, call).fmt(f)
                }
                None => writeln!(f, "no call on variables, and no gradient, has a NaN"),
            },
        }
    }
}

/// A number with five digits or so, however large or small.
fn short(value: f64) -> String {
    if value == 0.0 || (1e-3..1e6).contains(&value.abs()) { format!("{value:.4}") } else { format!("{value:.4e}") }
}

impl fmt::Display for ReplayedValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.dtype, self.shape)?;
        if let Some([least, mean, greatest]) = self.range {
            write!(f, " from {} to {}, mean {}", short(least), short(greatest), short(mean))?;
        }
        if self.nan > 0 {
            write!(f, ", {} NaN", self.nan)?;
        }
        if self.infinite > 0 {
            write!(f, ", {} infinite", self.infinite)?;
        }
        if let Some(first) = &self.first {
            write!(f, ", first at {first:?}")?;
        }
        if let Some(values) = &self.values {
            write!(f, ": {:?}", &values[..values.len().min(16)])?;
            if values.len() > 16 {
                write!(f, " …")?;
            }
        }
        Ok(())
    }
}
