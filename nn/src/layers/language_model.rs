//! Language models as lists of parts; consecutive parts form a pipeline stage.

use std::sync::Arc;

use autograd::{Var, is_grad_enabled};
use numcore::{Error, Result, Runtime, Within, fused::NnOps, ops::PointwiseOps};

use super::{Dropout, Embedding, Linear, Numbered, optional};
use crate::{
    Forward, Module, ModuleExt, Param, Visitor,
    parallel::{ContextSlot, CutLayer, Placed, TensorStyle, VocabularyLoss},
};

/// A decoder-only language model as the list of its parts: embeddings, blocks `B`, and a norm `N` with the projection
/// to logits. A stage made by [`split`](LanguageModel::split) is also such a list. It has consecutive blocks under
/// their numbers, the embeddings if it is first, and the head if it is last. Parameters keep their names in the full
/// model, so plans and checkpoints of the full model also fit its stages.
#[derive(Debug)]
pub struct LanguageModel<R: Runtime, B, N> {
    /// The embeddings, which come first; absent from later stages.
    pub embedding: Option<TokenEmbedding<R>>,
    /// The blocks, in order.
    pub blocks: Numbered<B>,
    /// The norm and the projection to logits, which come last; absent from earlier stages.
    pub head: Option<LanguageHead<R, N>>,
    /// The slot of context parallelism. Custom losses select this rank's targets by [`take`](ContextSlot::take).
    pub context: ContextSlot<R>,
    names: &'static LanguageModelNames,
    /// True if logits that are cut along the vocabulary stay cut while gradients are recorded.
    leaves_cut: bool,
    /// The soft cap `c` of logits, which become `c · tanh(logit / c)`.
    softcap: Option<f64>,
}

/// The names of a language model's parts.
#[derive(Debug)]
pub struct LanguageModelNames {
    /// The token embedding.
    pub tokens: &'static str,
    /// The position embedding.
    pub positions: &'static str,
    /// The list of blocks.
    pub blocks: &'static str,
    /// The norm before the logits.
    pub norm: &'static str,
    /// The projection to logits.
    pub head: &'static str,
}

/// The embeddings of a [`LanguageModel`].
#[derive(Debug)]
pub struct TokenEmbedding<R: Runtime> {
    /// The token embedding, `[V, C]`.
    pub tokens: Embedding<R>,
    /// The position embedding, `[T, C]`, where positions are learned.
    pub positions: Option<Embedding<R>>,
    /// The dropout of their sum.
    pub dropout: Dropout,
}

/// The norm and the projection at the end of a [`LanguageModel`].
#[derive(Debug)]
pub struct LanguageHead<R: Runtime, N> {
    /// The norm before the logits.
    pub norm: N,
    /// The projection to logits.
    pub projection: LanguageProjection<R>,
}

/// The projection of a [`LanguageModel`] to logits.
#[derive(Debug)]
pub enum LanguageProjection<R: Runtime> {
    /// A separate linear layer.
    Linear(Linear<R>),
    /// The token embedding; a copy, in a stage that does not have it.
    Tied(Embedding<R>),
}

impl<R: Runtime> LanguageProjection<R> {
    /// The weight of the projection, `[V, C]`.
    pub fn weight(&self) -> &Param<R> {
        match self {
            LanguageProjection::Linear(head) => &head.weight,
            LanguageProjection::Tied(table) => &table.weight,
        }
    }

    /// The weight and the bias, if they alone make the logits: without an adapter, and not cut over ranks.
    fn plain(&self) -> Option<(Var<R>, Option<Var<R>>)> {
        let (adapter, bias) = match self {
            LanguageProjection::Linear(head) => (head.adapter.get(), optional(&head.bias)),
            LanguageProjection::Tied(_) => (None, None),
        };
        (adapter.is_none() && self.weight().placed().is_none()).then(|| (self.weight().var(), bias))
    }
}

/// The placement of a projection, if it is cut along the vocabulary.
fn cut_of<R: Runtime>(weight: &Param<R>) -> Option<Arc<Placed<R>>> {
    weight.placed().filter(|placed| placed.style() == TensorStyle::Vocabulary)
}

impl<R: Runtime, B: Module<R>, N: Forward<R>> LanguageModel<R, B, N> {
    /// Makes a model of these parts. Without a head, the token embedding makes the logits.
    pub fn of(
        names: &'static LanguageModelNames,
        embedding: TokenEmbedding<R>,
        blocks: Vec<B>,
        norm: N,
        head: Option<Linear<R>>,
    ) -> Self {
        let tied = || LanguageProjection::Tied(Embedding::of(embedding.tokens.weight.clone()));
        let projection = head.map_or_else(tied, LanguageProjection::Linear);
        let model = LanguageModel {
            embedding: Some(embedding),
            blocks: Numbered::new(0, blocks),
            head: Some(LanguageHead { norm, projection }),
            context: ContextSlot::cuts(),
            names,
            leaves_cut: false,
            softcap: None,
        };
        // Errors name parameters from the first pass on.
        model.named_parameters();
        model
    }

    /// Sets the soft cap `c` of logits, which become `c · tanh(logit / c)` (Gemma 2); none at first.
    pub fn with_logit_softcap(self, softcap: Option<f64>) -> Self {
        LanguageModel { softcap, ..self }
    }

    /// Tells whether this has all parts: it is a full model and not a stage.
    pub fn is_whole(&self) -> bool {
        self.embedding.is_some() && self.head.is_some()
    }

    /// Splits this model into stages with numbers of blocks as equal as possible. The embeddings belong to the first,
    /// norm and projection to the last. A projection that is tied to the token embedding becomes a
    /// [copy](Param::duplicate) of it there, under the same name; a pipeline trains both as one.
    ///
    /// # Errors
    /// An error if `stages` is 0.
    #[track_caller]
    pub fn split(self, stages: usize) -> Result<Vec<Self>> {
        let LanguageModel { mut embedding, blocks, mut head, context, names, leaves_cut, softcap } = self;
        if stages == 0 {
            return Err(Error::range("LanguageModel::split", "number of stages", stages, "at least 1")).at_caller();
        }
        if let (Some(_), Some(LanguageHead { projection: LanguageProjection::Tied(table), .. }), true) =
            (&embedding, &mut head, stages > 1)
        {
            *table = Embedding::of(table.weight.duplicate()?);
        }
        let count = blocks.len();
        let stage = |(k, blocks)| LanguageModel {
            embedding: embedding.take(),
            blocks,
            head: if k + 1 == stages { head.take() } else { None },
            context: context.clone(),
            names,
            leaves_cut,
            softcap,
        };
        Ok(blocks.split((1..stages).map(|k| k * count / stages)).into_iter().enumerate().map(stage).collect())
    }

    /// Splits this model into [stages](LanguageModel::split), and returns the next-token loss of the last stage's
    /// logits. Where a plan cuts the vocabulary, the last stage leaves logits cut while it trains, `[B, T, V/t]`. No
    /// rank has all logits then, but the loss is that of all of them. Evaluations return `[B, T, V]`.
    ///
    /// # Errors
    /// An error if `stages` is 0, or this is a stage without the end of the model.
    #[track_caller]
    pub fn split_with_loss(self, stages: usize, loss: VocabularyLoss) -> Result<(Vec<Self>, NextTokenLoss<R>)> {
        let all = LanguageModel { leaves_cut: true, ..self }.split(stages)?;
        // A tied projection is a copy in the last stage.
        let loss = all[stages - 1].logits_loss(loss)?;
        Ok((all, loss))
    }

    /// The loss of logits made by [`project`](LanguageModel::project) or [`project_here`](LanguageModel::project_here).
    ///
    /// # Errors
    /// An error in a stage without the end of the model.
    #[track_caller]
    pub fn logits_loss(&self, loss: VocabularyLoss) -> Result<NextTokenLoss<R>> {
        let weight = self.end()?.projection.weight().clone();
        Ok(NextTokenLoss { weight, loss, context: self.context.clone() })
    }

    /// The embeddings.
    ///
    /// # Errors
    /// An error in a stage without them.
    pub fn start(&self) -> Result<&TokenEmbedding<R>> {
        let why = "this stage has no embeddings: it takes the output of the stage before";
        self.embedding.as_ref().ok_or_else(|| Error::state("language model", why))
    }

    /// The norm and the projection.
    ///
    /// # Errors
    /// An error in a stage without them.
    pub fn end(&self) -> Result<&LanguageHead<R, N>> {
        let why = "this stage has no projection to logits: the last has";
        self.head.as_ref().ok_or_else(|| Error::state("language model", why))
    }

    /// Applies the blocks of this stage one after another, and returns the output of the last.
    pub fn through_blocks(
        &self,
        x: Var<R>,
        mut apply: impl FnMut(usize, &B, Var<R>) -> Result<Var<R>>,
    ) -> Result<Var<R>> {
        let block =
            |x: Var<R>, (k, (number, block))| apply(k, block, x).within(format_args!("{}.{number}", self.names.blocks));
        self.blocks.numbered().enumerate().try_fold(x, block)
    }

    /// Turns the output of the last block into the input of the next stage; into logits in the last stage.
    #[track_caller]
    pub fn handed_on(&self, x: Var<R>) -> Result<Var<R>> {
        if self.head.is_some() { self.stage_logits(&self.normalized(&x)?) } else { Ok(x) }
    }

    /// The logits of normalized values that a last stage returns: those of the whole vocabulary, unless it was made by
    /// [`split_with_loss`](LanguageModel::split_with_loss) and trains.
    #[track_caller]
    pub fn stage_logits(&self, x: &Var<R>) -> Result<Var<R>> {
        if self.leaves_cut && is_grad_enabled() { self.project_here(x) } else { self.project(x) }
    }

    /// The logits of the output of the last block. Where the projection is cut along the vocabulary, every rank gets
    /// all of them.
    #[track_caller]
    pub fn logits(&self, x: &Var<R>) -> Result<Var<R>> {
        self.project(&self.normalized(x)?)
    }

    /// Normalizes the output of the last block, for the projection to logits.
    #[track_caller]
    pub fn normalized(&self, x: &Var<R>) -> Result<Var<R>> {
        self.end()?.norm.forward(x).within(self.names.norm)
    }

    /// The logits of normalized values, of the whole vocabulary.
    #[track_caller]
    pub fn project(&self, x: &Var<R>) -> Result<Var<R>> {
        let here = self.projected(x)?;
        cut_of(self.end()?.projection.weight()).map_or(Ok(here.clone()), |placed| placed.all_logits(&here))
    }

    /// The logits of normalized values, of this rank's rows of the vocabulary.
    #[track_caller]
    pub fn project_here(&self, x: &Var<R>) -> Result<Var<R>> {
        // Of one row a rank has all logits, or none: their number does not tell which they are.
        let one = self.end()?.projection.weight().logical_shape()[0] == 1;
        if one { self.project(x) } else { self.projected(x) }
    }

    #[track_caller]
    fn projected(&self, x: &Var<R>) -> Result<Var<R>> {
        let projection = &self.end()?.projection;
        // An uncut projection computes with the whole sequence, on every rank alike.
        let whole = projection.weight().placed().filter(|placed| placed.style() != TensorStyle::Vocabulary);
        let x = whole.map_or(Ok(x.clone()), |placed| placed.leave_sequence(x))?;
        let logits = match projection {
            LanguageProjection::Linear(head) => head.project_here(&x).within(self.names.head),
            LanguageProjection::Tied(table) => table.project_here(&x).within(self.names.tokens),
        }?;
        match self.softcap {
            None => Ok(logits),
            Some(cap) => logits.div(cap)?.tanh()?.mul(cap),
        }
    }

    /// The loss of predicting `targets` (`i64`, `[B, T]`) from the output of the last block. Few rows of logits are in
    /// memory at a time ([`linear_cross_entropy`](numcore::fused::NnOps::linear_cross_entropy)). All are if the
    /// projection is sharded or has an adapter, or there is a soft cap or a z-loss. Where sequences are cut over ranks,
    /// targets are those of whole sequences. The loss then uses this rank's part of them ([`ContextSlot::loss`]).
    #[track_caller]
    pub fn next_token_loss_of(&self, x: &Var<R>, targets: &Var<R>, loss: &VocabularyLoss) -> Result<Var<R>> {
        self.loss_of_normalized(&self.normalized(x)?, targets, loss)
    }

    /// The loss of [`next_token_loss_of`](LanguageModel::next_token_loss_of), from values that are
    /// [`normalized`](LanguageModel::normalized).
    #[track_caller]
    pub fn loss_of_normalized(&self, x: &Var<R>, targets: &Var<R>, loss: &VocabularyLoss) -> Result<Var<R>> {
        let Some((weight, bias)) =
            self.end()?.projection.plain().filter(|_| loss.z_loss == 0.0 && self.softcap.is_none())
        else {
            return self.logits_loss(*loss)?.of(&self.project_here(x)?, targets);
        };
        self.context.loss(targets, loss, |targets, loss| {
            x.linear_cross_entropy_with(&weight, bias.as_ref(), targets, loss.cross_entropy)
        })
    }
}

/// The loss of the logits of a [`LanguageModel`]: of all logits, or of this rank's rows of the vocabulary.
#[derive(Clone, Debug)]
pub struct NextTokenLoss<R: Runtime> {
    /// The weight of the projection to logits.
    weight: Param<R>,
    loss: VocabularyLoss,
    context: ContextSlot<R>,
}

impl<R: Runtime> NextTokenLoss<R> {
    /// The loss of predicting `targets` (`i64`, `[B, T]`) by these logits. Where sequences are cut over ranks, targets
    /// are those of whole sequences, and the loss uses this rank's part of them ([`ContextSlot::loss`]).
    #[track_caller]
    pub fn of(&self, logits: &Var<R>, targets: &Var<R>) -> Result<Var<R>> {
        // Logits of the whole vocabulary are the same on every rank.
        let all = |placed: &Arc<Placed<R>>| logits.dims().last() == Some(&placed.placement().logical()[0]);
        let placed = cut_of(&self.weight).filter(|placed| !all(placed));
        self.context.loss(targets, &self.loss, |targets, loss| loss.of(logits, targets, placed.as_deref()))
    }
}

impl<R: Runtime, B: Module<R>, N: Module<R>> Module<R> for LanguageModel<R, B, N> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        let names = self.names;
        visitor.enter(name);
        if let Some(TokenEmbedding { tokens, positions, dropout }) = &self.embedding {
            tokens.visit(names.tokens, visitor);
            positions.visit(names.positions, visitor);
            Module::<R>::visit(dropout, "dropout", visitor);
        }
        self.blocks.visit(names.blocks, visitor);
        if let Some(LanguageHead { norm, projection }) = &self.head {
            norm.visit(names.norm, visitor);
            match projection {
                LanguageProjection::Linear(head) => head.visit(names.head, visitor),
                // The tied weight is visited as the embedding's.
                LanguageProjection::Tied(_) if self.embedding.is_some() => {}
                LanguageProjection::Tied(table) => table.visit(names.tokens, visitor),
            }
        }
        visitor.context(&self.context);
        visitor.leave();
    }
}
