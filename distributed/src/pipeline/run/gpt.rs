//! A [`Gpt`] cut into stages.

use autograd::{Var, is_grad_enabled};
use nn::{
    Block, Dropout, Embedding, Forward, Gpt, GptConfig, GptEmbedding, GptHead, GptProjection, Init, LayerNorm, Linear,
    Module, Param, Visitor,
    parallel::{ContextSlot, TensorStyle, VocabularyLoss},
};
use numcore::{Error, Result, Runtime, Within};

use super::{Stage, Tie};

/// A part of a [`Gpt`]: tokens `[B, T]` (`i64`) into the first, `[B, T, C]` between stages, logits `[B, T, V]` out of the last. Names
/// of parameters are those of the whole model, so its [`tensor_plan`](Gpt::tensor_plan) cuts the stages too; with sequence parallelism,
/// and where sequences are cut over ranks, a rank has, and sends on, its part of `[B, T, C]` along `T`.
pub struct GptStage<R: Runtime> {
    embed: Option<EmbedStage<R>>,
    first: usize,
    blocks: Vec<Block<R>>,
    head: Option<HeadStage<R>>,
}

struct EmbedStage<R: Runtime> {
    wte: Embedding<R>,
    wpe: Embedding<R>,
    dropout: Dropout,
    context: ContextSlot<R>,
}

struct HeadStage<R: Runtime> {
    lnf: LayerNorm<R>,
    projection: Projection<R>,
    /// Whether all logits go to the loss, or those of the rows of the vocabulary that are here.
    gathers: bool,
    /// The ranks that sequences are cut over: the loss takes its targets by it.
    context: ContextSlot<R>,
}

enum Projection<R: Runtime> {
    Linear(Linear<R>),
    /// The token table, or a copy of it.
    Table(Embedding<R>),
}

impl<R: Runtime> GptStage<R> {
    /// The model that [`Gpt::new`] makes of the same arguments, cut into stages with as equal numbers of blocks as can be. The
    /// embeddings belong to the first, the head to the last; a tied head is a copy of the token table there, under the same name:
    /// train it with [`GptStage::ties`].
    pub fn cut(init: &Init<R>, config: GptConfig, stages: usize) -> Result<Vec<Self>> {
        if stages == 0 {
            return Err(Error::argument("GptStage::cut", "a model cannot be cut into no stages"));
        }
        let Gpt { wte, wpe, blocks, lnf, head, .. } = Gpt::new(init, config)?;
        let projection = match head {
            Some(head) => Projection::Linear(head),
            None if stages == 1 => Projection::Table(Embedding::of(wte.weight.clone())),
            None => Projection::Table(Embedding::of(wte.weight.duplicate()?)),
        };
        let dropout = Dropout::new(config.dropout)?;
        let (count, mut blocks) = (blocks.len(), blocks.into_iter());
        let mut cut: Vec<Self> = (0..stages)
            .map(|stage| {
                let (first, end) = (stage * count / stages, (stage + 1) * count / stages);
                GptStage { embed: None, first, blocks: blocks.by_ref().take(end - first).collect(), head: None }
            })
            .collect();
        cut[0].embed = Some(EmbedStage { wte, wpe, dropout, context: ContextSlot::cuts() });
        cut[stages - 1].head = Some(HeadStage { lnf, projection, gathers: true, context: ContextSlot::cuts() });
        Ok(cut)
    }

    /// The loss of predicting targets (`i64`, `[B, T]`), for the [loss](super::PipelineModel::loss) of these stages, which are all there are:
    /// [`Gpt::next_token_loss`] in stages. Where a plan cuts the vocabulary, the last stage leaves logits cut from now on in runs that train,
    /// `[B, T, V/t]`: no rank has those of all of it, and the loss is that of all of them. Evaluations give out `[B, T, V]`.
    ///
    /// # Errors
    /// If the last of them is not the last of the model.
    pub fn next_token_loss(stages: &mut [Self], loss: VocabularyLoss) -> Result<GptStageLoss<R>> {
        let Some(head) = stages.last_mut().and_then(|last| last.head.as_mut()) else {
            let why = "needs all stages of the model; the last one given has no head";
            return Err(Error::argument("GptStage::next_token_loss", why));
        };
        head.gathers = false;
        Ok(GptStageLoss { weight: head.end().projection.weight().clone(), loss, context: head.context.clone() })
    }

    /// What is tied in a model of this kind.
    pub fn ties(config: &GptConfig) -> Vec<Tie> {
        if config.tied_head { vec![Tie::new(["wte.weight"])] } else { Vec::new() }
    }
}

/// The loss of the logits that the last [`GptStage`] makes, all of them or those of the rows of the vocabulary that are here.
#[derive(Clone, Debug)]
pub struct GptStageLoss<R: Runtime> {
    /// The weight of the projection to logits.
    weight: Param<R>,
    loss: VocabularyLoss,
    context: ContextSlot<R>,
}

impl<R: Runtime> GptStageLoss<R> {
    /// The loss of a micro-batch's logits with its targets. Where sequences are cut over ranks, targets are those of whole sequences, and the
    /// loss is by this rank's part of them ([`ContextSlot::loss`]).
    pub fn of(&self, logits: &Var<R>, targets: &Var<R>) -> Result<Var<R>> {
        let cut = self.weight.placed().filter(|placed| placed.style() == TensorStyle::Vocabulary);
        // Those of all of the vocabulary are the same on every rank.
        let placed = cut.filter(|placed| logits.dims().last() != Some(&placed.placement().logical()[0]));
        self.context.loss(targets, &self.loss, |targets, loss| loss.of(logits, targets, placed.as_deref()))
    }
}

impl<R: Runtime> EmbedStage<R> {
    fn forward(&self, tokens: &Var<R>) -> Result<Var<R>> {
        let EmbedStage { wte, wpe, dropout, context } = self;
        GptEmbedding { wte, wpe, dropout, context }.forward(tokens)
    }
}

impl<R: Runtime> HeadStage<R> {
    fn end(&self) -> GptHead<'_, R> {
        let projection = match &self.projection {
            Projection::Linear(head) => GptProjection::Head(head),
            Projection::Table(table) => GptProjection::Table(table),
        };
        GptHead { lnf: &self.lnf, projection }
    }

    /// Logits: in an evaluation, whose outputs they are, all of them.
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        if self.gathers || !is_grad_enabled() { self.end().logits(x) } else { self.end().logits_here(x) }
    }
}

impl<R: Runtime> Stage<R> for GptStage<R> {
    fn forward(&self, inputs: &[Var<R>]) -> Result<Vec<Var<R>>> {
        let [x] = inputs else {
            return Err(Error::argument("gpt stage", format!("takes one value, got {}", inputs.len())));
        };
        let x = self.embed.as_ref().map_or_else(|| Ok(x.clone()), |embed| embed.forward(x))?;
        let block = |x: Var<R>, (k, block): (usize, &Block<R>)| {
            block.forward(&x).within(format_args!("blocks.{}", self.first + k))
        };
        let x = self.blocks.iter().enumerate().try_fold(x, block)?;
        Ok(vec![self.head.as_ref().map_or_else(|| Ok(x.clone()), |head| head.forward(&x))?])
    }
}

impl<R: Runtime> Module<R> for GptStage<R> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        visitor.enter(name);
        if let Some(EmbedStage { wte, wpe, dropout, context }) = &self.embed {
            visitor.context(context);
            wte.visit("wte", visitor);
            wpe.visit("wpe", visitor);
            Module::<R>::visit(dropout, "dropout", visitor);
        }
        visitor.enter("blocks");
        self.blocks.iter().enumerate().for_each(|(k, block)| block.visit(&(self.first + k).to_string(), visitor));
        visitor.leave();
        if let Some(HeadStage { lnf, projection, context, .. }) = &self.head {
            visitor.context(context);
            lnf.visit("lnf", visitor);
            match projection {
                Projection::Linear(head) => head.visit("head", visitor),
                Projection::Table(table) => table.visit("wte", visitor),
            }
        }
        visitor.leave();
    }
}
