//! A [`Gpt`] cut into stages.

use autograd::Var;
use nn::{Block, Dropout, Embedding, Forward, Gpt, GptConfig, Init, LayerNorm, Linear, Module, Param, Visitor};
use numcore::{
    Error, Result, Runtime,
    ops::{Apply, IndexOps, MatmulOps, PointwiseOps, ViewOps},
};

use super::{Stage, Tie};

/// A part of a [`Gpt`]: tokens `[B, T]` (`i64`) into the first, `[B, T, C]` between stages, logits `[B, T, V]` out of the last. Names
/// of parameters are those of the whole model.
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
}

struct HeadStage<R: Runtime> {
    lnf: LayerNorm<R>,
    logits: Logits<R>,
}

enum Logits<R: Runtime> {
    Own(Linear<R>),
    /// The token table, or a copy of it.
    Table(Param<R>),
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
        let table = || if stages == 1 { Ok(wte.weight.clone()) } else { Param::new(wte.weight.value()?) };
        let logits = head.map_or_else(|| table().map(Logits::Table), |head| Ok(Logits::Own(head)))?;
        let (count, mut blocks) = (blocks.len(), blocks.into_iter());
        let mut cut: Vec<Self> = (0..stages)
            .map(|stage| {
                let (first, end) = (stage * count / stages, (stage + 1) * count / stages);
                GptStage { embed: None, first, blocks: blocks.by_ref().take(end - first).collect(), head: None }
            })
            .collect();
        cut[0].embed = Some(EmbedStage { wte, wpe, dropout: Dropout::new(config.dropout)? });
        cut[stages - 1].head = Some(HeadStage { lnf, logits });
        Ok(cut)
    }

    /// What is tied in a model of this kind.
    pub fn ties(config: &GptConfig) -> Vec<Tie> {
        if config.tied_head { vec![Tie::new(["wte.weight"])] } else { Vec::new() }
    }
}

impl<R: Runtime> EmbedStage<R> {
    fn forward(&self, tokens: &Var<R>) -> Result<Var<R>> {
        let shape = tokens.spec().shape;
        let &[_, t] = &shape[..] else {
            return Err(Error::shape("gpt stage", &[shape], "tokens must be [B, T]"));
        };
        let positions = self.wpe.weight.var().narrow(0, 0, t)?;
        self.dropout.forward(&self.wte.weight.var().embedding(tokens)?.add(&positions)?)
    }
}

impl<R: Runtime> HeadStage<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let x = self.lnf.forward(x)?;
        match &self.logits {
            Logits::Own(head) => head.forward(&x),
            Logits::Table(table) => x.linear(&table.var(), None),
        }
    }
}

impl<R: Runtime> Stage<R> for GptStage<R> {
    fn forward(&self, inputs: &[Var<R>]) -> Result<Vec<Var<R>>> {
        let [x] = inputs else {
            return Err(Error::argument("gpt stage", format!("takes one value, got {}", inputs.len())));
        };
        let x = self.embed.as_ref().map_or_else(|| Ok(x.clone()), |embed| embed.forward(x))?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        Ok(vec![self.head.as_ref().map_or_else(|| Ok(x.clone()), |head| head.forward(&x))?])
    }
}

impl<R: Runtime> Module<R> for GptStage<R> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        visitor.enter(name);
        if let Some(EmbedStage { wte, wpe, dropout }) = &self.embed {
            wte.visit("wte", visitor);
            wpe.visit("wpe", visitor);
            Module::<R>::visit(dropout, "dropout", visitor);
        }
        visitor.enter("blocks");
        self.blocks.iter().enumerate().for_each(|(k, block)| block.visit(&(self.first + k).to_string(), visitor));
        visitor.leave();
        if let Some(HeadStage { lnf, logits }) = &self.head {
            lnf.visit("lnf", visitor);
            match logits {
                Logits::Own(head) => head.visit("head", visitor),
                Logits::Table(table) => table.visit("wte.weight", visitor),
            }
        }
        visitor.leave();
    }
}
