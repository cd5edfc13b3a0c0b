//! Programs of scores in the attention of a finished model.

use std::sync::Arc;

use autograd::Var;
use numcore::{
    DType, Error, Result, Runtime, Within,
    fused::{AttentionProgram, ScorePosition, SdpaOptions},
    ops::{Apply, ViewOps},
};

use super::{Cuts, RowCut, TensorStyle, attention_slots, segments::masked};
use crate::{Module, Param, Visitor};

/// A program of scores for a layer of attention, with learned arguments: parameters of the layer's own, under `scores`.
/// The program gets the layer's scores after its soft cap and its scale, which a scale of the program replaces. It
/// hides keys besides those that the layer hides. [`set_scores`] gives the layers of a model their programs.
///
/// Positions are those of tokens in their texts: after a cache of keys, beside padding, and in packed documents. Where
/// heads or sequences are cut over ranks, heads and positions are those of all ranks.
#[derive(Clone, Debug)]
pub struct AttentionScores<R: Runtime> {
    program: AttentionProgram,
    args: Vec<(Box<str>, Param<R>)>,
}

/// The tokens that a layer attends to, and the heads of this rank.
#[derive(Debug)]
pub struct AttendedTokens<'a, R: Runtime> {
    /// The document of each token of the whole sequence, `[B, T]` (`i64`): a token sees only its own document.
    pub segments: Option<&'a Var<R>>,
    /// The positions of queries and of keys that programs of scores see: `[B, T]` and `[B, S]` (`i64`), where `B` may
    /// be 1. They are of whole sequences, where these are cut over ranks. If `None`, keys are numbered from 0.
    pub positions: Option<[&'a Var<R>; 2]>,
    /// The first head of this rank, where heads are cut over ranks.
    pub first_head: Option<usize>,
}

impl<R: Runtime> Default for AttendedTokens<'_, R> {
    fn default() -> Self {
        AttendedTokens { segments: None, positions: None, first_head: None }
    }
}

/// Gives layers of attention their programs of scores. `of` is asked for each layer by its name, and gives `None` if
/// the layer stays as it is. Returns the number of programs. Optimizers and trainers that exist already do not see the
/// new parameters.
///
/// ```
/// # use nn::{Gpt, GptConfig, Init, Initializer, ModuleExt, parallel::{AttentionScores, set_scores}};
/// # use numcore::{NullRuntime, fused::AttentionProgram};
/// let init = Init::new(&NullRuntime::new(), 0);
/// let model = Gpt::new(&init, GptConfig { layers: 2, heads: 4, width: 8, ..Default::default() })?;
/// // ALiBi with learned slopes, on top of causal attention.
/// let alibi = AttentionProgram::over(1)
///     .score(|score, at, args| score + args[0] * (at.key - at.query).cast_like(score));
/// set_scores(&model, |_| {
///     let slopes = init.param([4, 1, 1], Initializer::Constant(0.1))?;
///     Ok(Some(AttentionScores::by(alibi.clone()).learned("slopes", slopes)))
/// })?;
/// assert!(model.named_parameters().iter().any(|(name, _)| name == "blocks.1.scores.slopes"));
/// # Ok::<(), numcore::Error>(())
/// ```
///
/// # Errors
/// Errors of `of`, with the name of the layer; and an error if `of` gives none. The model is then unchanged.
#[track_caller]
pub fn set_scores<R: Runtime>(
    model: &(impl Module<R> + ?Sized),
    mut of: impl FnMut(&str) -> Result<Option<AttentionScores<R>>>,
) -> Result<usize> {
    let mut found = Vec::new();
    for (name, slot) in attention_slots(model) {
        found.extend(of(&name).within(&name).at_caller()?.map(|scores| (slot, scores)));
    }
    if found.is_empty() {
        let why = "no layer of the model was given a program: its attention goes through no `ContextSlot::attends`, or \
                   all names were refused";
        return Err(Error::config("set_scores", "model", why)).at_caller();
    }
    Ok(found.into_iter().map(|(slot, scores)| slot.set_scores(Some(Arc::new(scores)))).count())
}

/// The position of the first query among the keys, if queries are the last tokens.
pub(crate) fn first_query<R: Runtime>(q: &Var<R>, k: &Var<R>) -> Result<usize> {
    let (queries, keys) = (q.dims()[2], k.dims()[2]);
    keys.checked_sub(queries).ok_or_else(|| {
        let why =
            format!("{queries} queries are the last of {keys} keys: a program of scores needs a key for each query");
        Error::shape("AttentionScores", &[q.spec().shape, k.spec().shape], why)
    })
}

impl<R: Runtime> AttentionScores<R> {
    /// Scores by a program whose arguments are added by [`learned`](AttentionScores::learned), in their order.
    pub fn by(program: AttentionProgram) -> Self {
        AttentionScores { program, args: Vec::new() }
    }

    /// Adds an argument, a parameter with this name. It broadcasts to the scores `[B, H, T, S]`. One of each head,
    /// `[H, 1, 1]`, is cut where a plan cuts the layer's heads. One that all heads share is not, but each rank has a
    /// part of its gradient. In a plan of your own, name both by `column`.
    pub fn learned(mut self, name: &str, parameter: Param<R>) -> Self {
        let cuts = match *parameter.logical_shape() {
            [heads, _, _] if heads > 1 => Cuts::Bias(RowCut::of_heads(heads)),
            _ => Cuts::Shared,
        };
        self.args.push((name.into(), parameter.with_cuts(cuts)));
        self
    }

    /// The program with whole arguments of its own, gathered from all ranks that have parts of them
    /// ([`Param::gathered`]).
    ///
    /// # Errors
    /// Errors of [`Param::gathered`].
    pub fn gathered(&self) -> Result<Self> {
        let mut whole = Self::by(self.program.clone());
        for (name, parameter) in &self.args {
            whole = whole.learned(name, Param::new(parameter.gathered()?)?);
        }
        Ok(whole)
    }

    /// The program of attention with these options and this one, with all arguments.
    pub(super) fn with_options(
        &self,
        [q, k]: [&Var<R>; 2],
        options: SdpaOptions<'_, Var<R>>,
        tokens: &AttendedTokens<'_, R>,
    ) -> Result<(AttentionProgram, Vec<Var<R>>)> {
        // An added mask may hide keys: it is added last.
        let added = options.mask.filter(|mask| mask.dtype() != DType::Bool);
        let first = if options.lower_right { first_query(q, k)? } else { 0 };
        let options = SdpaOptions { mask: options.mask.filter(|_| added.is_none()), ..options };
        let (own, args) = masked(&options, tokens.segments)?;
        let own = own.shifted(0, 0, first, 0);
        let (program, mut args) = self.after(&own, &args.iter().collect::<Vec<_>>(), tokens, first > 0)?;
        let Some(added) = added else { return Ok((program, args)) };
        args.push(added.clone());
        let last = AttentionProgram::over(1).score(|score, _, args| score + args[0].cast_like(score));
        Ok((last.after(&program, 0, |at, _| at), args))
    }

    /// The program of a layer's own program and this one, with all arguments: `args` are those of the layer.
    pub(super) fn after(
        &self,
        own: &AttentionProgram,
        args: &[&Var<R>],
        tokens: &AttendedTokens<'_, R>,
        offset: bool,
    ) -> Result<(AttentionProgram, Vec<Var<R>>)> {
        let offset = offset || tokens.positions.is_some();
        let mut all: Vec<Var<R>> = args.iter().map(|arg| (*arg).clone()).collect();
        for (name, parameter) in &self.args {
            all.push(argument(parameter, tokens, offset).within(name).within("scores")?);
        }
        let Some([queries, keys]) = tokens.positions else {
            let program = self.program.after(own, 0, |at, _| at);
            return Ok((program.shifted(0, tokens.first_head.unwrap_or(0), 0, 0), all));
        };
        all.extend([queries.unsqueeze(1)?.unsqueeze(-1)?, keys.unsqueeze(1)?.unsqueeze(1)?]);
        let program = self.program.after(own, 2, |at, args| ScorePosition { query: args[0], key: args[1], ..at });
        Ok((program.shifted(0, tokens.first_head.unwrap_or(0), 0, 0), all))
    }
}

impl<R: Runtime> Module<R> for AttentionScores<R> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        visitor.enter(name);
        self.args.iter().for_each(|(name, parameter)| visitor.parameter(name, parameter));
        visitor.leave();
    }
}

/// An argument of this rank's heads.
fn argument<R: Runtime>(parameter: &Param<R>, tokens: &AttendedTokens<'_, R>, offset: bool) -> Result<Var<R>> {
    let (shape, placed) = (parameter.spec().shape, parameter.placed());
    let is_column = placed.is_some_and(|placed| placed.style() == TensorStyle::Column && placed.group().size() > 1);
    if is_column != tokens.first_head.is_some() {
        let [are, do_this] = if is_column {
            ["whole", "leave it out of the plan"]
        } else {
            ["cut over ranks", "name it by `column` in the plan"]
        };
        let why = format!("is an argument of scores, and the layer's heads are {are}: {do_this}");
        return Err(Error::config("attention", "TensorPlan", why));
    }
    if offset && shape.iter().rev().take(2).any(|&size| size > 1) {
        let why = "an argument of each query or key fits whole sequences alone, not tokens after a cache, with \
                   positions of their own";
        return Err(Error::shape("attention", &[shape], why));
    }
    Ok(parameter.var())
}
