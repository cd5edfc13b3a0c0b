//! The ends of a [`Gpt`](super::Gpt), borrowed from whoever has the layers: the model, or a stage of a pipeline that has one of them alone.

use std::sync::Arc;

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Within,
    fused::NnOps,
    ops::{Apply, PointwiseOps, ViewOps},
};

use super::{Dropout, Embedding, LayerNorm, Linear, optional};
use crate::{
    Forward, Param,
    parallel::{ContextSlot, Exchange, Placed, TensorStyle, VocabularyLoss},
};

/// The layers before the blocks of a [`Gpt`](super::Gpt).
#[derive(Debug)]
pub struct GptEmbedding<'a, R: Runtime> {
    /// The token embedding.
    pub wte: &'a Embedding<R>,
    /// The position embedding.
    pub wpe: &'a Embedding<R>,
    /// The dropout of their sum.
    pub dropout: &'a Dropout,
    /// The ranks that sequences are cut over.
    pub context: &'a ContextSlot<R>,
}

impl<R: Runtime> GptEmbedding<'_, R> {
    /// The input of the first block, `[B, T, C]`, for tokens `[B, T]`: of this rank's part of the sequence where that is cut.
    #[track_caller]
    pub fn forward(&self, tokens: &Var<R>) -> Result<Var<R>> {
        let (shape, context) = (tokens.spec().shape, self.wpe.weight.shape()[0]);
        let &[_, t] = &shape[..] else {
            return Err(Error::shape("gpt", &[shape], "tokens must be [B, T]"));
        };
        if t > context {
            return Err(Error::shape("gpt", &[shape], format!("{t} tokens are longer than the context of {context}")));
        }
        let part = self.context.part(t)?;
        // On every rank in this order: tokens are compared, one table is read, then the other.
        let x = self.wte.forward(&self.context.take_tokens(tokens)?).within("wte")?;
        // Positions are rows of the table: views of it, not a gather, which are read when they are added; where ranges are joined, when they are.
        let x = x.add(&part.take(&self.wpe.weight.var().narrow(0, 0, t)?, 0)?)?;
        let x = self.dropout.forward_part(&x, Some(&part).filter(|part| !part.is_whole()))?;
        self.wte.weight.placed().map_or(Ok(x.clone()), |placed| placed.enter_sequence(&x))
    }
}

/// The layers after the blocks of a [`Gpt`](super::Gpt).
#[derive(Debug)]
pub struct GptHead<'a, R: Runtime> {
    /// The norm before the logits.
    pub lnf: &'a LayerNorm<R>,
    /// What makes the logits.
    pub projection: GptProjection<'a, R>,
}

/// The projection of a [`Gpt`](super::Gpt) to logits.
#[derive(Debug)]
pub enum GptProjection<'a, R: Runtime> {
    /// A layer of its own.
    Head(&'a Linear<R>),
    /// The token table, or a copy of it.
    Table(&'a Embedding<R>),
}

impl<R: Runtime> GptProjection<'_, R> {
    /// The weight.
    pub fn weight(&self) -> &Param<R> {
        match self {
            GptProjection::Head(head) => &head.weight,
            GptProjection::Table(table) => &table.weight,
        }
    }

    /// Weight and bias, where nothing but they make the logits: no adapter, and no other ranks.
    fn plain(&self) -> Option<(Var<R>, Option<Var<R>>)> {
        let (adapter, bias) = match self {
            GptProjection::Head(head) => (head.adapter.get(), optional(&head.bias)),
            GptProjection::Table(_) => (None, None),
        };
        (adapter.is_none() && self.weight().placed().is_none()).then(|| (self.weight().var(), bias))
    }

    /// How the projection is cut, if it is cut along the vocabulary.
    pub fn cut(&self) -> Option<Arc<Placed<R>>> {
        self.weight().placed().filter(|placed| placed.style() == TensorStyle::Vocabulary)
    }
}

impl<R: Runtime> GptHead<'_, R> {
    /// The logits for the output of the last block: all of them, on every rank, where the projection is cut along the vocabulary.
    #[track_caller]
    pub fn logits(&self, x: &Var<R>) -> Result<Var<R>> {
        let here = self.logits_here(x)?;
        match self.projection.cut() {
            None => Ok(here),
            Some(placed) => placed.exchange(Exchange::Gather(here.dims().len() - 1), &here),
        }
    }

    /// The loss of predicting `targets` (`i64`, `[B, T]`) from the output of the last block. Where the projection is whole, a plain layer, and
    /// the loss has no z-loss, its logits are in memory a few rows at a time
    /// ([`linear_cross_entropy`](numcore::fused::NnOps::linear_cross_entropy)). Where sequences are cut over ranks, targets are those of whole
    /// sequences, and the loss is by this rank's part of them ([`ContextSlot::loss`]).
    #[track_caller]
    pub fn loss(
        &self,
        x: &Var<R>,
        targets: &Var<R>,
        loss: &VocabularyLoss,
        context: &ContextSlot<R>,
    ) -> Result<Var<R>> {
        let Some((weight, bias)) = self.projection.plain().filter(|_| loss.z_loss == 0.0) else {
            let (here, placed) = (self.logits_here(x)?, self.projection.cut());
            return context.loss(targets, loss, |targets, loss| loss.of(&here, targets, placed.as_deref()));
        };
        let x = self.lnf.forward(x).within("lnf")?;
        context.loss(targets, loss, |targets, loss| {
            x.linear_cross_entropy_with(&weight, bias.as_ref(), targets, loss.cross_entropy)
        })
    }

    /// The logits of the rows of the vocabulary that are here.
    #[track_caller]
    pub fn logits_here(&self, x: &Var<R>) -> Result<Var<R>> {
        let x = self.lnf.forward(x).within("lnf")?;
        // What is not cut computes with all of the sequence, on every rank alike.
        let whole = self.projection.weight().placed().filter(|_| self.projection.cut().is_none());
        let x = whole.map_or(Ok(x.clone()), |placed| placed.leave_sequence(&x))?;
        match &self.projection {
            GptProjection::Head(head) => head.project_here(&x).within("head"),
            GptProjection::Table(table) => table.project_here(&x).within("wte"),
        }
    }
}
